"""``danube load``: load tests with Locust, which take over this process once everything is checked."""

from __future__ import annotations

import secrets
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from danube.cli.terminal import arguments
from danube.cli.terminal.addressing import Address, address_option, explaining, topic_name
from danube.cli.terminal.output import note
from danube.cli.terminal.own_process import own_command
from danube.cli.terminal.services import Services
from danube.errors import ConfigInvalid, Conflict, InvalidArgument
from danube.load.plan import OPTIONS, Plan, words_of

if TYPE_CHECKING:
    from danube.load.plan import Option

PRODUCERS_DEFAULT = 4  # of each protocol, where --users is not given
SPAWN_RATE_DEFAULT = 10.0
JUDGE_TIMEOUT_S = 3.0
START_TIMEOUT_S = 300  # until every process of --processes is there
LOOPBACK = "127.0.0.1"


def _plan_option(option: Option) -> arguments.Decorator:
    shown = f"{option.help}  [{option.default}]" if option.default else option.help
    return click.option(f"--{option.name}", option.field, metavar=option.metavar, help=shown)


@click.command()
@address_option()
@click.option("-t", "--topic", type=topic_name, metavar="TOPIC", help="Use this topic and keep it.")
@click.option("-u", "--users", type=click.IntRange(min=1), help="Users in all: the consumers, and producers.")
@click.option(
    "-r", "--spawn-rate", type=click.FloatRange(0.01, 1000), default=SPAWN_RATE_DEFAULT, show_default=True,
    help="Users that begin each second.",
)  # fmt: skip
@click.option("--run-time", type=arguments.duration_ms, metavar="DURATION", help="[until Ctrl-C]")
@click.option("--headless/--web", default=True, show_default=True, help="Run at once, or open Locust's page.")
@click.option("--web-host", default=LOOPBACK, show_default=True, help="Where the page listens.")
@click.option("--web-port", type=click.IntRange(1, 65_535), default=8089, show_default=True)
@arguments.together(*map(_plan_option, OPTIONS))
@click.option("--csv", metavar="PREFIX", help="Write PREFIX_stats.csv, _stats_history.csv and _failures.csv.")
@click.option("--html", metavar="FILE", help="Write Locust's report with its charts.")
@click.option("--json", metavar="FILE", help="Write the result as JSON.")
@click.option("--out", metavar="DIR", help="Write all three there: load_*.csv, load.html, load.json.")
@click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--processes", type=click.IntRange(1, 256), default=1, show_default=True, help="On this host.")
@click.option("--master", "judging", is_flag=True, help="Wait for load processes on other hosts and judge.")
@click.option(
    "--expect-workers", type=click.IntRange(min=1), help="With --master: begin when this many have connected."
)
@click.option("--master-bind-host", "bind_host", default="*", show_default=True, help="With --master.")
@click.option("--worker", "working", is_flag=True, help="Run as a load process of a master.")
@click.option("--master-host", "judge_host", default=LOOPBACK, show_default=True, help="With --worker.")
@click.option("--master-port", "judge_port", type=click.IntRange(1, 65_535), default=5557, show_default=True)
@click.option("-v", "--verbose", is_flag=True, help="Locust's own log and tables, too.")
@click.pass_obj
def load(
    services: Services,
    /,
    service_addr: Address,
    topic: str | None,
    users: int | None,
    spawn_rate: float,
    run_time: int | None,
    headless: bool,
    web_host: str,
    web_port: int,
    verbose: bool,
    **options: Any,
) -> None:
    """Publish and consume on a schedule, with Locust, and account for every record.

    Users are consumers of every subscription type and producers.  Latency counts from when a record was due.
    At the end producers halt and consumers drain.  Then all acknowledged records must have arrived, in order
    if the subscription promises it.  Exit code 0: they have; 10: records were lost or reordered, or requests
    failed.

    \b
    danube load --users 20 --run-time 1m --out results
    danube load --protocol both --rate 200 --sizes 100,1KiB,64KiB --processes 2 --run-time 5m
    danube load --web

    Locust comes with `pip install 'danube-broker[load]'`.
    """
    _check_locust()
    _check_roles(options)
    words = ["--loglevel", "INFO" if verbose else "WARNING"]
    if not (verbose or services.shows_progress()):
        words.append("--only-summary")
    if options["working"]:
        _look_for_judge(options["judge_host"], options["judge_port"])
        words += _worker_words(options)
    else:
        values = {one.field: options[one.field] or "" for one in OPTIONS}
        values |= {"broker": service_addr.url, "topic": topic or ""}
        plan = Plan.parse(values)
        number = users or plan.users_min + (PRODUCERS_DEFAULT - 1) * len(plan.protocols)
        plan.check_users(number)
        reports = _reports(options)
        _check_broker(services, plan, service_addr)
        if not headless:
            _check_free(web_host, web_port, "--web-port")
        if options["judging"]:
            _check_free(options["bind_host"], options["judge_port"], "--master-port")
        words += [f"--users={number}", f"--spawn-rate={spawn_rate:g}"]
        words += [f"--run-time={max(1, round(run_time / 1000))}"] if run_time else []
        words += ["--headless"] if headless else [f"--web-host={web_host}", f"--web-port={web_port}"]
        words += _process_words(options)
        words += [*words_of(values), *reports, f"--report-form={options['output']}"]
    sys.stdout.flush()
    sys.stderr.flush()
    services.execute(own_command("danube.load", *words))


def _check_locust() -> None:
    if find_spec("locust") is None:
        raise ConfigInvalid(
            "danube load needs Locust", why="it is not installed", hint="pip install 'danube-broker[load]'"
        )


def _check_roles(options: dict[str, Any]) -> None:
    if options["judging"] and options["working"]:
        raise click.UsageError("Give --master or --worker, not both.")
    if options["judging"] and options["processes"] > 1:
        raise click.UsageError("--processes is a master with its workers on this host; leave --master out.")
    if options["expect_workers"] and not options["judging"]:
        raise click.UsageError("--expect-workers goes with --master.")


def _worker_words(options: dict[str, Any]) -> list[str]:
    words = ["--worker", f"--master-host={options['judge_host']}", f"--master-port={options['judge_port']}"]
    return words + ([f"--processes={options['processes']}"] if options["processes"] > 1 else [])


def _process_words(options: dict[str, Any]) -> list[str]:
    """One process, several on this host, or a master that waits for others."""
    if options["judging"]:
        return [
            "--master",
            f"--master-bind-host={options['bind_host']}",
            f"--master-bind-port={options['judge_port']}",
            f"--expect-workers={options['expect_workers'] or 1}",
        ]
    if options["processes"] == 1:
        return []
    port = _free_port()  # so that two runs on a host do not meet
    return [
        f"--processes={options['processes']}",
        f"--master-bind-host={LOOPBACK}",
        f"--master-bind-port={port}",
        f"--master-port={port}",
        f"--expect-workers-max-wait={START_TIMEOUT_S}",
    ]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def _check_free(host: str, port: int, flag: str) -> None:
    """Locust would only find out when it has started."""
    try:
        socket.create_server(("" if host == "*" else host, port)).close()
    except OSError as error:
        raise Conflict(
            f"cannot listen on {host}:{port}",
            why=error.strerror or str(error),
            hint=f"give another {flag}, or end what listens there",
        ) from None


def _look_for_judge(host: str, port: int) -> None:
    """A worker may be started first, so this is only a remark."""
    try:
        socket.create_connection((host, port), JUDGE_TIMEOUT_S).close()
    except OSError as error:
        reason = error.strerror or str(error)
        note(f"note: no master answers at {host}:{port} yet ({reason}); waiting up to 5 minutes for it")


def _check_broker(services: Services, plan: Plan, address: Address) -> None:
    """Check the broker first, so that a run that cannot begin fails at once with our error."""
    from danube.load.topic import check, check_port

    with explaining(address), services.connect(plan.broker) as client:
        check(client, plan)
    if "grpc" in plan.protocols:
        check_port(plan.grpc_broker)


def _reports(options: dict[str, Any]) -> list[str]:
    """Return the flags for the results' files; check now that each can be written."""
    places = {name: options[name] for name in ("csv", "html", "json") if options[name]}
    if options["out"]:
        folder = Path(options["out"])
        places = {
            "csv": str(folder / "load"), "html": str(folder / "load.html"), "json": str(folder / "load.json")
        } | places  # fmt: skip
    for place in places.values():
        _check_writable(Path(place).absolute())
    return [f"--report-{name}={Path(place).absolute()}" for name, place in places.items()]


def _check_writable(path: Path) -> None:
    probe = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "it is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise InvalidArgument(
            f"results cannot be written to {path}",
            why=error.strerror or str(error),
            hint="choose another place",
        ) from None
