"""Metadata commands of one worker: committed in a thread, those that wait together with one sync."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from danube.cluster.control.cluster_log import ClusterLog
from danube.cluster.log.local_log import LocalLog
from danube.core.metadata.commands import Command, Outcome
from danube.errors import Damage, DanubeError, NotFound, Overloaded

PROPOSALS_WAITING_MAX = 10_000

Then = Callable[[Outcome], None]


class Proposals:
    """One thread with a metadata log of its own; outcomes are returned on the loop.

    The loop's own :class:`LocalLog` reads these commands like those of any other worker.
    """

    def __init__(self, directory: Path, controller_address: str, call_on_loop: Callable[..., object]) -> None:
        self._directory = directory
        self._controller_address = controller_address
        self._call_on_loop = call_on_loop
        self._waiting: deque[tuple[Command, Then]] = deque()
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="danube-metadata", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Commit waiting commands and end the thread."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        self._thread.join(timeout=5)

    def submit(self, command: Command, then: Then) -> None:
        """Propose a command; ``then`` gets its outcome on the loop.  Raises Overloaded when too many wait."""
        if len(self._waiting) >= PROPOSALS_WAITING_MAX:
            raise Overloaded("too many metadata changes wait", hint="send them more slowly")
        with self._changed:
            self._waiting.append((command, then))
            self._changed.notify()

    def _run(self) -> None:
        with open_metadata(self._directory, self._controller_address, create=False) as log:
            while True:
                with self._changed:
                    while not self._waiting and not self._stopped:
                        self._changed.wait()
                    if not self._waiting:
                        return
                    taken = list(self._waiting)
                    self._waiting.clear()
                outcomes = self._commit(log, [command for command, _ in taken])
                self._call_on_loop(_hand_out, [then for _, then in taken], outcomes)

    def _commit(self, log: LocalLog, commands: list[Command]) -> list[Outcome]:
        try:
            outcomes = log.propose_many(commands)
            log.refresh()  # its changes are for the loop's reader, not for this one
            return outcomes
        except DanubeError as error:
            return [error] * len(commands)


def open_metadata(directory: Path, controller_address: str, *, create: bool) -> LocalLog:
    """The metadata of a single host, or of a cluster where there is a controller."""
    if controller_address:
        return ClusterLog(directory, controller_address)
    try:
        return LocalLog(directory, create=create)
    except NotFound:
        path = directory / "metadata.log"
        raise Damage(
            f"{path} is missing",
            why=f"{directory.parent / 'partitions'} holds partitions, so there was one: it says which topics"
            " they are of",
            hint="restore it from a backup; where an object store holds a copy, `danube storage restore`"
            " fills an empty data directory",
            file=str(path), position=0,
        ) from None  # fmt: skip


def _hand_out(thens: list[Then], outcomes: list[Outcome]) -> None:
    for then, outcome in zip(thens, outcomes, strict=True):
        then(outcome)
