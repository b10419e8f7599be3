"""Services of a command from outside click: the client, the broker, the terminal.  Tests put theirs here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from danube.config.loading import BrokerConfig, Started


def _connect_sync(address: str, **options: Any) -> Any:
    from danube import sync

    return sync.connect(address, **options)


def _connect_async(address: str, **options: Any) -> Any:
    import danube

    return danube.connect(address, **options)


def _start_broker(
    config: BrokerConfig, announce: Callable[[str | Started], None], again: Callable[[], BrokerConfig]
) -> int:
    from danube import app

    return app.start(config, announce, again)


def _execute(words: list[str]) -> None:
    from danube.cli.terminal.own_process import own_environment

    os.execve(words[0], words, own_environment(os.environ))  # noqa: S606 - our own interpreter and module, no shell


def _terminal() -> bool:
    return sys.stdin is not None and sys.stdin.isatty()


def _progress_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


StartBroker = Callable[["BrokerConfig", Callable[["str | Started"], None], Callable[[], "BrokerConfig"]], int]


@dataclass(frozen=True, slots=True)
class Services:
    """Doors to the rest of the program; each default imports what it needs when it is called."""

    connect: Callable[..., Any] = _connect_sync
    connect_async: Callable[..., Any] = _connect_async
    start_broker: StartBroker = _start_broker
    execute: Callable[[list[str]], None] = _execute  # become another program
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    can_ask: Callable[[], bool] = _terminal
    shows_progress: Callable[[], bool] = _progress_terminal
