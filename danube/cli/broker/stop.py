"""``danube stop``, ``reload`` and ``status``: the broker of a data directory."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from danube.cli.broker.config import config_file_option
from danube.cli.terminal.addressing import Address, address_option, explaining
from danube.cli.terminal.output import output_option, plain, show
from danube.cli.terminal.services import Services

STOP_TIMEOUT_S = 12.0
Answered = TypeVar("Answered")

_data_dir_option = click.option(
    "--data-dir", type=click.Path(path_type=Path), help="The broker's data directory; default as for start."
)


@click.command(short_help="Stop the broker of a data directory.")
@_data_dir_option
@config_file_option
@click.option("--timeout", default=STOP_TIMEOUT_S, show_default=True, help="Seconds to wait for the end.")
@output_option()
@click.pass_obj
def stop(
    services: Services, /, data_dir: Path | None, file: Path | None, timeout: float, output: str
) -> None:
    """Let the broker finish accepted work and stop; wait until it has stopped."""
    from danube.cli.broker.running import require_running, stop_and_wait

    place = data_dir_of(services, data_dir, file)
    running = require_running(place)
    seconds = stop_and_wait(running, place, timeout)
    show({"stopped": True, "pid": running.pid, "seconds": round(seconds, 3)}, output)


@click.command(name="reload", short_help="Let a broker load its certificates and keys again.")
@_data_dir_option
@config_file_option
@output_option()
@click.pass_obj
def reload_certificates(services: Services, /, data_dir: Path | None, file: Path | None, output: str) -> None:
    """Let the broker load its certificates, authorities and keys again, within a second.

    That includes the list of the keys that check and sign tokens (auth.jwt) in its configuration file; all
    other settings hold from the next start.  Files that cannot be used change nothing; the broker's log names
    them, and the metric danube_tls_reload_failed, or danube_auth_keys_reload_failed, is 1.
    """
    from danube.cli.broker.running import reload, require_running

    place = data_dir_of(services, data_dir, file)
    running = require_running(place)
    reload(running, place)
    show({"told": True, "pid": running.pid}, output)


@click.command(short_help="Show whether a broker runs, and its state.")
@_data_dir_option
@config_file_option
@address_option(default=None)
@output_option()
@click.pass_obj
def status(
    services: Services, /, data_dir: Path | None, file: Path | None, service_addr: Address | None, output: str
) -> None:
    """Show the broker of a data directory, or with -s the one at an address; exit code 3 if there is none."""
    from danube.cli.broker.running import require_running

    if service_addr is not None and data_dir is None:
        with explaining(service_addr):
            show({"address": service_addr.url, **_ask(services, service_addr.url)}, output)
        return
    place = data_dir_of(services, data_dir, file)
    running = require_running(place)
    local = plain(running)
    del local["identity"]  # for `danube stop` alone
    answer = ask_here(running.url, lambda url: _ask(services, url)) if running.ready else {}
    counters = {one["worker"]: one for one in answer.pop("workers", [])}
    workers = [one | counters.get(one["worker"], {}) for one in local.pop("workers")]
    show({**answer, **local, "data_dir": str(place), "workers": workers}, output)


def ask_here(url: str, ask: Callable[[str], Answered]) -> Answered:
    """Ask the broker of this host: by its Unix socket if it has one, else by TLS if its port wants that."""
    from danube.errors import NotSupported

    try:
        return ask(url)
    except NotSupported:
        return ask(url.replace("danube://", "danube+tls://"))


def _ask(services: Services, url: str) -> dict[str, Any]:
    with services.connect(url) as client:
        answer = plain(client.admin.status())
    return answer if isinstance(answer, dict) else {"broker": answer}


def data_dir_of(services: Services, data_dir: Path | None, file: Path | None) -> Path:
    from danube.config.loading import load

    return load(file, services.environ, {"data_dir": data_dir}).config.data_dir
