"""``danube stop`` and ``danube status``: the broker of a data directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from danube.cli.addressing import Address, address_option
from danube.cli.config import config_file_option
from danube.cli.output import output_option, plain, show
from danube.cli.services import Services

STOP_TIMEOUT_S = 12.0

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
    """Tell the broker to finish what it accepted and stop; wait until it has."""
    from danube.cli.running import read_status, stop_and_wait
    from danube.errors import NotFound

    place = _data_dir(services, data_dir, file)
    running = read_status(place)
    if running is None:
        raise NotFound(
            f"no broker runs on {place}",
            why="there is nothing to stop",
            hint="give the --data-dir that it was started with",
        )
    seconds = stop_and_wait(running, timeout)
    show({"stopped": True, "pid": running.pid, "seconds": round(seconds, 3)}, output)


@click.command(short_help="Show whether a broker runs and how it does.")
@_data_dir_option
@config_file_option
@address_option(default=None)
@output_option()
@click.pass_obj
def status(
    services: Services, /, data_dir: Path | None, file: Path | None, service_addr: Address | None, output: str
) -> None:
    """Show the broker of a data directory, or with -s the one at an address; exit code 6 if there is none."""
    from danube.cli.running import read_status
    from danube.errors import ConnectionFailed

    if service_addr is not None and data_dir is None:
        show({"address": service_addr.url, **_ask(services, service_addr.url)}, output)
        return
    place = _data_dir(services, data_dir, file)
    running = read_status(place)
    if running is None:
        raise ConnectionFailed(
            f"no broker runs on {place}",
            why="it was not started, or it stopped",
            hint="start one with `danube start`, or give the --data-dir or -s of the one you mean",
        )
    local = {"running": True, **plain(running), "data_dir": str(place)}
    show({**local, **_ask(services, running.url)}, output)


def _ask(services: Services, url: str) -> dict[str, Any]:
    with services.connect(url) as client:
        answer = plain(client.admin.status())
    return answer if isinstance(answer, dict) else {"broker": answer}


def _data_dir(services: Services, data_dir: Path | None, file: Path | None) -> Path:
    from danube.config import load

    return load(file, services.environ, {"data_dir": data_dir}).config.data_dir
