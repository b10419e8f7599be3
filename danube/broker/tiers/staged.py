"""Questions about staged objects, on their way from a client through the partition's owner to the mover.

The owner only passes them on: with the epoch that it has, again on a new connection to the mover, and not for
ever.  Asking twice changes nothing, so a question whose answer was lost is asked again by the client.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from danube.errors import Overloaded, Unavailable, WrongState, error_for_code
from danube.host import clock

if TYPE_CHECKING:
    from danube.broker.partition.hosted import HostedPartition

ASKED_MAX: Final = 64
PATIENCE_NS: Final = 10_000_000_000

Answer = Callable[[Any], None]
"""Takes a list of [word, why], or the DanubeError that stands for it."""


class _Asked(NamedTuple):
    hosted: HostedPartition
    objects: bytes
    answer: Answer
    deadline_ns: int


class StagedQuestions:
    """What a worker has asked and not heard of; ``send(kind, **fields)`` reaches the mover, or nobody."""

    def __init__(self, send: Callable[..., None]) -> None:
        self._send = send
        self._asked: dict[int, _Asked] = {}
        self._number = 0

    def ask(self, hosted: HostedPartition, topic_id: int, objects: bytes, answer: Answer) -> None:
        """Ask what becomes of ``objects``; raises WrongState or Overloaded where that cannot be asked."""
        if topic_id != hosted.topic_id:
            raise WrongState(
                f"{hosted.record.topic} is another topic than the objects are of",
                why="it was deleted and made again",
                hint="they are swept away after a while",
            )
        if len(self._asked) >= ASKED_MAX:
            raise Overloaded("too many questions about staged objects are open", limit=ASKED_MAX)
        self._number += 1
        asked = _Asked(hosted, objects, answer, clock.monotonic_ns() + PATIENCE_NS)
        self._asked[self._number] = asked
        self._say(self._number, asked)

    def _say(self, number: int, asked: _Asked) -> None:
        hosted = asked.hosted
        self._send(
            "staged", id=number, topic_id=hosted.topic_id, partition=hosted.index,
            epoch=hosted.core.epoch, objects=asked.objects,
        )  # fmt: skip

    def say_again(self) -> None:
        """A new connection to the mover."""
        for number, asked in self._asked.items():
            self._say(number, asked)

    def answered(self, frame: Mapping[str, Any]) -> None:
        """A ``judged`` frame."""
        asked = self._asked.pop(frame["id"], None)
        if asked is None:
            return
        if frame["error"]:
            asked.answer(error_for_code(frame.get("code", Unavailable.code), frame["error"]))
        else:
            asked.answer(msgspec.msgpack.decode(frame["answers"]))

    def tick(self, now_ns: int) -> None:
        """Give up what has waited long enough."""
        late = [number for number, asked in self._asked.items() if asked.deadline_ns <= now_ns]
        for number in late:
            error = Unavailable("the mover does not answer", why="it is starting, or busy", hint="ask again")
            self._asked.pop(number).answer(error)
