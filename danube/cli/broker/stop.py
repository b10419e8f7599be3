"""``danube stop``, ``reload`` and ``status``: the broker of a data directory."""

from __future__ import annotations

from typing import Any

import click

from danube.cli.broker.here import Here, config_file_option, data_dir_option, pass_here
from danube.cli.terminal.addressing import Address, address_option, explaining
from danube.cli.terminal.output import output_option, plain

STOP_TIMEOUT_S = 12.0
_data_dir_option = data_dir_option("The broker's data directory; default as for start.")


@click.command(short_help="Stop the broker of a data directory.")
@_data_dir_option
@config_file_option
@click.option("--timeout", default=STOP_TIMEOUT_S, show_default=True, help="Seconds to wait for the end.")
@output_option()
@pass_here
def stop(here: Here, timeout: float) -> Any:
    """Let the broker finish accepted work and stop; wait until it has stopped."""
    from danube.cli.broker.running import stop_and_wait

    seconds = stop_and_wait(here.running, here.data_dir, timeout)
    return {"stopped": True, "pid": here.running.pid, "seconds": round(seconds, 3)}


@click.command(name="reload", short_help="Let a broker load its certificates and keys again.")
@_data_dir_option
@config_file_option
@output_option()
@pass_here
def reload_certificates(here: Here) -> Any:
    """Let the broker load its certificates, authorities and keys again, within a second.

    That includes the list of the keys that check and sign tokens (auth.jwt) in its configuration file; all
    other settings hold from the next start.  Files that cannot be used change nothing; the broker's log names
    them, and the metric danube_tls_reload_failed, or danube_auth_keys_reload_failed, is 1.
    """
    from danube.cli.broker.running import reload

    reload(here.running, here.data_dir)
    return {"told": True, "pid": here.running.pid}


@click.command(short_help="Show whether a broker runs, and its state.")
@_data_dir_option
@config_file_option
@address_option(default=None)
@output_option()
@pass_here
def status(here: Here, service_addr: Address | None) -> Any:
    """Show the broker of a data directory, or with -s the one at an address; exit code 3 if there is none."""
    if service_addr is not None and not here.data_dir_given:
        with explaining(service_addr), here.services.connect(service_addr.url) as client:
            return {"address": service_addr.url, **_told(client)}
    local = plain(here.running)
    del local["identity"]  # for `danube stop` alone
    answer = here.ask(_told) if here.running.ready else {}
    counters = {one["worker"]: one for one in answer.pop("workers", [])}
    workers = [one | counters.get(one["worker"], {}) for one in local.pop("workers")]
    return {**answer, **local, "data_dir": str(here.data_dir), "workers": workers}


def _told(client: Any) -> dict[str, Any]:
    answer = plain(client.admin.status())
    return answer if isinstance(answer, dict) else {"broker": answer}
