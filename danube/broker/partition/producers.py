"""Open producer handles of a partition, and publishes that wait for their answer."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from danube.errors import ProducerBusy

if TYPE_CHECKING:
    from danube.broker.api import Session


class Opened(NamedTuple):
    """An open handle: the producer's name, whether it is exclusive, and whether it is a broker's own."""

    name: str
    exclusive: bool
    internal: bool


class Producers:
    """Open producer handles of one partition; opening or closing one does not visit the others."""

    __slots__ = ("_exclusive", "_internal", "_links", "_names")

    def __init__(self) -> None:
        self._links: dict[tuple[Session, int], Opened] = {}
        self._names: dict[str, int] = {}  # number of open handles of clients by producer name
        self._internal: dict[str, int] = {}  # the same of brokers, which no limit counts
        self._exclusive: dict[str, int] = {}  # number of exclusive handles by producer name

    def __len__(self) -> int:
        return len(self._links)

    @property
    def name_count(self) -> int:
        """How many producers of clients have handles open here."""
        return len(self._names)

    def has(self, name: str) -> bool:
        return name in self._names

    def names(self) -> list[str]:
        """In alphabetical order."""
        return sorted(self._names | self._internal)

    def check(self, partition: str, name: str, exclusive: bool) -> None:
        """Raise ProducerBusy if an exclusive producer would share the partition with another name."""
        for open_names, why in (
            (self._exclusive, "it is exclusive"),
            (self._names | self._internal if exclusive else (), "exclusive access was asked for"),
        ):
            other = next((one for one in open_names if one != name), None)
            if other is not None:
                raise ProducerBusy(
                    f"{partition} has producer {other!r}",
                    why=why,
                    hint="close the other producer, or use shared access",
                )

    def add(
        self, session: Session, handle: int, name: str, exclusive: bool, *, internal: bool = False
    ) -> None:
        """Register a checked link under a handle that is not in use."""
        link = self._links[session, handle] = Opened(name, exclusive, internal)
        for counts in self._counts_of(link):
            counts[link.name] = counts.get(link.name, 0) + 1

    def drop(self, session: Session, handle: int) -> None:
        """Remove the link of a closed handle; without a link, do nothing."""
        link = self._links.pop((session, handle), None)
        if link is None:
            return
        for counts in self._counts_of(link):
            counts[link.name] -= 1
            if not counts[link.name]:
                del counts[link.name]

    def _counts_of(self, link: Opened) -> tuple[dict[str, int], ...]:
        names = self._internal if link.internal else self._names
        return (names, self._exclusive) if link.exclusive else (names,)

    def clear(self) -> list[tuple[Session, int]]:
        """Remove all handles; return them with their sessions."""
        closed = list(self._links)
        for known in (self._links, self._names, self._internal, self._exclusive):
            known.clear()
        return closed


class Waiting(NamedTuple):
    """A publish whose answer waits until the high watermark reaches ``end_offset``."""

    end_offset: int
    session: Session
    correlation: int
    handle: int
    base_offset: int
    epoch: int
    record_count: int
    flags: int
