"""The broker of this host that a command means, by ``--data-dir`` and ``--config``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from danube.cli.terminal.arguments import Decorator
from danube.cli.terminal.output import show
from danube.cli.terminal.services import Services

if TYPE_CHECKING:
    from danube.cli.broker.running import RunningBroker
    from danube.config.loading import BrokerConfig

Answered = TypeVar("Answered")

config_file_option = click.option(
    "--config",
    "file",
    type=click.Path(path_type=Path),
    envvar="DANUBE_CONFIG",
    help="Configuration file (YAML); also DANUBE_CONFIG.",
)


def data_dir_option(text: str) -> Decorator:
    return click.option("--data-dir", type=click.Path(path_type=Path), help=text)


def store_flags(url: str, endpoint: str | None) -> dict[str, object]:
    """The settings that a store's address and its endpoint stand for."""
    mode = "shared_fs" if url.startswith("file:") else "object_store"
    return {"storage.url": url, "storage.mode": mode, "storage.endpoint": endpoint}


class Here:
    """A data directory of this host and its configuration; ``output`` is the form that is wanted."""

    def __init__(self, services: Services, data_dir: Path | None, file: Path | None, output: str) -> None:
        self.services = services
        self.output = output
        self.data_dir_given = data_dir is not None
        self._data_dir = data_dir
        self._file = file

    def load(self, flags: Mapping[str, object]) -> BrokerConfig:
        """Read the configuration, with more flags beside ``--data-dir``."""
        from danube.config.loading import load

        return load(self._file, self.services.environ, {**flags, "data_dir": self._data_dir}).config

    @cached_property
    def config(self) -> BrokerConfig:
        return self.load({})

    @property
    def data_dir(self) -> Path:
        return self.config.data_dir

    @cached_property
    def running(self) -> RunningBroker:
        """The broker that runs on the data directory; NotFound when there is none."""
        from danube.cli.broker.running import require_running

        return require_running(self.data_dir)

    def ask(self, ask: Callable[[Any], Answered]) -> Answered:
        """Ask the broker: by its Unix socket if it has one, else by TLS if its port wants that."""
        from danube.errors import NotSupported

        url = self.running.url
        try:
            with self.services.connect(url) as client:
                return ask(client)
        except NotSupported:
            with self.services.connect(url.replace("danube://", "danube+tls://")) as client:
                return ask(client)


def pass_here(work: Callable[..., Any]) -> Callable[..., Any]:
    """Make a command of a function that gets a Here for ``--data-dir``, ``--config`` and ``--output``.

    What it returns is shown; an int is the exit code and None shows nothing.
    """

    def run(
        services: Services, /, file: Path | None, data_dir: Path | None = None, output: str = "", **given: Any
    ) -> int | None:
        found = work(Here(services, data_dir, file, output), **given)
        if isinstance(found, int):
            return found
        if found is not None:
            show(found, output)
        return None

    return click.pass_obj(update_wrapper(run, work))
