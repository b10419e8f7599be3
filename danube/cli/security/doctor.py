"""``danube doctor``: the rows of the checklist of security that can be seen at a running broker."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, NamedTuple

import click

from danube.cli.broker.here import Here, config_file_option, data_dir_option, pass_here
from danube.cli.terminal.output import line, output_option, show
from danube.host.local_socket import loopback

if TYPE_CHECKING:
    from danube.cli.security.looking import Port, Seen
    from danube.config.loading import BrokerConfig

EXIT_FINDINGS: Final = 10
COLUMNS: Final = ("row", "check", "verdict", "why")
_HANDSHAKE_MS_MAX: Final = 10_000
_NAMED_MAX: Final = 3
BUILT_IN: Final = "built in"


class Patient(NamedTuple):
    """Facts of a broker that were seen; ``configured`` is as `danube start` would read it now."""

    configured: BrokerConfig
    ports: list[Port]
    processes: list[Seen]
    open_paths: list[str]
    reloads: bool

    @property
    def outside(self) -> list[Port]:
        """Ports that others than this host reach."""
        return [port for port in self.ports if not loopback(port.host)]

    @property
    def asks(self) -> bool:
        seen = [port.asks for port in self.ports if port.asks is not None]
        return all(seen) if seen else self.configured.asks_clients


# A check gives why it fails, "" where all is well, None where it does not apply, or BUILT_IN.
Check = Callable[[Patient], str | None]


def _not_open(patient: Patient) -> str | None:
    names = [port.name for port in patient.outside if not port.tls]
    if names:
        return f"others reach {', '.join(names)} without TLS"
    if patient.outside and not patient.asks:
        return "others reach it, and it asks nobody who they are"
    return ""


def _first_token(patient: Patient) -> str | None:
    token = patient.configured.data_dir / "security" / "admin.token"
    return f"the first token is still there; delete {token}" if token.exists() else ""


def _strong_tls(patient: Patient) -> str | None:
    if not any(port.tls for port in patient.ports):
        return None
    return "; ".join(f"{port.name} takes {port.weak}" for port in patient.ports if port.weak)


def _mutual(patient: Patient) -> str | None:
    if not patient.outside:
        return None
    configured = patient.configured
    if configured.auth.asks or configured.tls.client_certificates == "required":
        return ""
    return "tls.client_certificates is not required, and auth.mode asks for nothing else"


def _all_tls(patient: Patient) -> str | None:
    if not patient.asks:
        return None
    plain = [port.name for port in patient.ports if not port.tls and not loopback(port.host)]
    return f"{', '.join(plain)} speaks without TLS" if plain else ""


def _reloads(patient: Patient) -> str | None:
    if not any(port.tls for port in patient.ports):
        return None
    return "" if patient.reloads else "it does not load changed certificates"


def _no_secrets_told(patient: Patient) -> str | None:
    dumping = [str(one.pid) for one in patient.processes if one.dumps_core]
    if dumping:
        return (
            f"a crash of process {', '.join(dumping[:_NAMED_MAX])} writes its memory to a file: ulimit -c 0"
        )
    return ""


def _files(patient: Patient) -> str | None:
    found = patient.open_paths
    more = f", and {len(found) - _NAMED_MAX} more" if len(found) > _NAMED_MAX else ""
    return "; ".join(found[:_NAMED_MAX]) + more


def _privileges(patient: Patient) -> str | None:
    if any(one.user == 0 for one in patient.processes):
        return "it runs as root; give it a user of its own"
    if any(one.capabilities for one in patient.processes):
        return "it has capabilities, and needs none"
    return (
        "" if all(one.confined for one in patient.processes) else "it may get privileges: NoNewPrivileges=yes"
    )


def _connections(patient: Patient) -> str | None:
    if not patient.outside:
        return None
    limits = patient.configured.limits
    names = ("connections_per_address", "connections_per_principal", "connection_rate")
    unset = [f"limits.{name}" for name in names if not getattr(limits, name)]
    return f"no limit: {', '.join(unset)}" if unset else ""


def _deadlines(patient: Patient) -> str | None:
    given = patient.configured.limits.handshake_timeout_ms
    return (
        "" if given <= _HANDSHAKE_MS_MAX else f"limits.handshake_timeout is {given / 1000:g} s; 10 s at most"
    )


def _audited(patient: Patient) -> str | None:
    if not patient.asks:
        return None
    return "" if patient.configured.audit.mode != "off" else "audit.mode is off"


CHECKS: Final[tuple[tuple[str, str, Check], ...]] = (
    ("S1", "only this host reaches what asks for nothing", _not_open),
    ("S17", "the first token is gone", _first_token),
    ("S18", "TLS 1.2 and 1.3 with good ciphers alone", _strong_tls),
    ("S19", "clients that others reach it from show who they are", _mutual),
    ("S20", "it checks the names of servers", lambda _: BUILT_IN),
    ("S21", "no plain port where clients are asked", _all_tls),
    ("S22", "changed certificates are loaded", _reloads),
    ("S23", "its memory is written to no file", _no_secrets_told),
    ("S24", "its files are its user's alone", _files),
    ("S25", "neither root, nor capabilities, nor ways to them", _privileges),
    ("S29-S31", "bounds of records, frames and attributes", lambda _: BUILT_IN),
    ("S32", "connections of an address and a principal are bounded", _connections),
    ("S33", "handshakes end in time", _deadlines),
    ("S34-S41", "bounds of streams, buffers and schemas", lambda _: BUILT_IN),
    ("S42-S43", "pages of lists, series of metrics", lambda _: BUILT_IN),
    ("S49", "who asked for what is written down", _audited),
)


def examined(patient: Patient, checks: Iterable[tuple[str, str, Check]] = CHECKS) -> list[dict[str, str]]:
    """A line for each check, with its verdict: pass, fail, built in, or - where it does not apply."""
    found = []
    for row, says, check in checks:
        why = check(patient)
        verdict = {None: "-", "": "pass", BUILT_IN: BUILT_IN}.get(why, "fail")
        told = (why or "") if verdict == "fail" else ""
        found.append({"row": row, "check": says, "verdict": verdict, "why": told})
    return found


@click.command(short_help="Check how well a running broker of this host is secured.")
@data_dir_option("Data directory of the broker; default as for start.")
@config_file_option
@output_option("table", "json")
@pass_here
def doctor(here: Here) -> int:
    """Look at the ports, processes and files of a broker that runs here; exit code 10 if a check fails.

    Ports, processes and files are looked at as they are; the rest is read from the configuration, as
    `danube start` would read it now: give the same --config.
    """
    from danube.cli.security.looking import looked_at, open_to_others, processes_below

    running, data_dir = here.running, here.data_dir
    processes = processes_below(running.pid)
    owner = processes[0].user if processes else data_dir.stat().st_uid
    open_paths = list(open_to_others(data_dir, owner))
    patient = Patient(here.config, looked_at(running.addresses), processes, open_paths, running.reloads)
    found = examined(patient)
    show(found, here.output, COLUMNS)
    failed = sum(one["verdict"] == "fail" for one in found)
    if here.output != "json":
        line(f"{failed} of {len(found)} checks failed")
    return EXIT_FINDINGS if failed else 0
