"""Calls that are taken many at a time: the same is told of each stream, and sent, as frame by frame."""

from __future__ import annotations

import random
from typing import Any

import pytest

from danube.core import kernels
from danube.core.http2 import connection as http2_connection
from danube.core.http2 import frames
from danube.core.http2.connection import TOGETHER_MIN, ServerConnection, Stream
from danube.core.http2.headers import OK_TRAILERS, response_block
from danube.core.protocol.grpc import frame_message
from tests.model.http2_traffic import SETTINGS, Run
from tests.unit.http2_parts import parsed

pytestmark = pytest.mark.usefixtures("with_kernels")
GREETING = frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0) + frames.window_frame(0, 1 << 20)
HEAD = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", "/danube/A"),
    ("content-type", "application/grpc"),
    ("te", "trailers"),
]
BLOCK = response_block(HEAD)
OTHER = response_block([*HEAD, ("x-other", "1")])
BODY = frame_message(b"hello")


def heads(stream_id: int, block: bytes = BLOCK, flags: int = frames.END_HEADERS) -> bytes:
    return frames.frame(frames.HEADERS, flags, stream_id, block)


def body(stream_id: int, data: bytes = BODY, flags: int = frames.END_STREAM) -> bytes:
    return frames.frame(frames.DATA, flags, stream_id, data)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes were taken together, each time that it was tried."""
    found: list[int] = []
    take = ServerConnection._take_together

    def noted(self: ServerConnection, buffer: memoryview, start: int, end: int) -> int:
        position = take(self, buffer, start, end)
        found.append(position - start)
        return position

    monkeypatch.setattr(ServerConnection, "_take_together", noted)
    return found


class Refusing(Run):
    """A door that ends every third call before its body has come, and gives its window back."""

    def request(self, stream: Stream, ended: bool) -> None:
        super().request(stream, ended)
        if stream.stream_id % 3 == 0 and not ended:
            self.machine.send_headers(stream, OK_TRAILERS, end_stream=True)


def told(pieces: list[bytes], kind: type[Run] = Run) -> tuple[dict[int, list[Any]], bytes, str, bytes]:
    """Of each stream, in order; what is sent; the fault; what is left over."""
    run = kind()
    for piece in (GREETING, *pieces):
        run.feed(piece)
    run.check(10**7)
    of_stream: dict[int, list[Any]] = {}
    for event in run.events:
        of_stream.setdefault(event[1], []).append(event)
    return of_stream, bytes(run.sent), run.machine.failed, run.rest


def agreed(pieces: list[bytes], kind: type[Run] = Run) -> tuple[dict[int, list[Any]], bytes, str, bytes]:
    kernels.load()
    together = told(pieces, kind)
    kernels.unload()
    assert together == told(pieces, kind)
    return together


def refused(pieces: list[bytes]) -> tuple[dict[int, list[Any]], str]:
    """Refusals come before the answers of other streams; of each stream the same is told and sent."""
    found = []
    for load in (kernels.load, kernels.unload):
        load()
        of_stream, sent, failed, rest = told(pieces, Refusing)
        frames_sent = parsed(sent)
        window = sum(int.from_bytes(one.payload) for one in frames_sent if one.kind == "WINDOW_UPDATE")
        others = [one for one in frames_sent if one.kind != "WINDOW_UPDATE"]
        found.append((of_stream, sorted(others, key=lambda one: one.stream_id), window, failed, rest))
    together, apart = found
    if not apart[3]:
        assert together == apart
    assert together[3] == apart[3]
    return together[0], together[3]


def calls(first: int, count: int, data: bytes = BODY, block: bytes = BLOCK) -> bytes:
    ids = range(first, first + 2 * count, 2)
    return b"".join(heads(one, block) + body(one, data) for one in ids)


MANY = 2 * TOGETHER_MIN
FIRST = calls(1, MANY)
NEXT = 1 + 2 * MANY
IDS = range(NEXT, NEXT + 2 * MANY, 2)
LENGTH = response_block([*HEAD, ("content-length", str(len(BODY)))])
WRONG_LENGTH = response_block([*HEAD, ("content-length", str(len(BODY) + 1))])

ALIKE = {
    "pairs": calls(NEXT, MANY),
    "heads first": b"".join(map(heads, IDS)) + b"".join(map(body, IDS)),
    "empty messages": calls(NEXT, MANY, frame_message(b"")),
    "sizes that differ": b"".join(heads(one) + body(one, frame_message(bytes(one))) for one in IDS),
}
UNLIKE = {
    "another head": calls(NEXT, 3) + calls(NEXT + 6, 3, block=OTHER),
    "a head that is not known": calls(NEXT, MANY, block=OTHER),
    "a body in two frames": calls(NEXT, 3) + heads(NEXT + 6)
    + body(NEXT + 6, BODY[:7], 0) + body(NEXT + 6, BODY[7:]),
    "an end of its own": calls(NEXT, 3) + heads(NEXT + 6) + body(NEXT + 6, BODY, 0) + body(NEXT + 6, b""),
    "padding": calls(NEXT, 3) + heads(NEXT + 6)
    + body(NEXT + 6, b"\2" + BODY + b"\0\0", 9) + calls(NEXT + 8, 3),
    "a compressed message": calls(NEXT, MANY, b"\1" + BODY[1:]),
    "two messages": calls(NEXT, MANY, BODY + BODY),
    "less than a message": calls(NEXT, MANY, BODY[:-1]),
    "no message": calls(NEXT, MANY, b"\0\0"),
    "no body": b"".join(heads(one, flags=5) for one in IDS),
    "ids that are left out": b"".join(heads(one) + body(one) for one in IDS[::2]),
    "an even id": calls(NEXT, 2) + heads(NEXT + 5) + body(NEXT + 5),
    "an id again": calls(NEXT, 3) + calls(NEXT, 1),
    "bodies that go down": b"".join(map(heads, IDS)) + b"".join(map(body, reversed(IDS))),
    "a body that comes twice": calls(NEXT, 3) + body(NEXT + 4) + calls(NEXT + 6, 1),
    "a body before its head": body(NEXT) + heads(NEXT),
    "a reset": calls(NEXT, 2) + heads(NEXT + 4) + frames.reset_frame(NEXT + 4, 8) + body(NEXT + 4),
    "a reset of what is answered": calls(NEXT, 2) + frames.reset_frame(NEXT, 8) + calls(NEXT + 4, 2),
    "a ping between": calls(NEXT, 2) + frames.ping_frame(b"12345678", answer=False) + calls(NEXT + 4, 2),
    "a window between": calls(NEXT, 2) + frames.window_frame(0, 5) + calls(NEXT + 4, 2),
    "a frame of no kind": calls(NEXT, 2) + frames.frame(99, 0, NEXT, b"?") + calls(NEXT + 4, 2),
    "a frame that is cut off": calls(NEXT, 3)[:-3],
    "a frame header that is cut off": calls(NEXT, 3) + heads(NEXT + 6)[:5],
    "a frame that is too large": calls(NEXT, 3) + heads(NEXT + 6) + body(NEXT + 6, bytes(17_000)),
    "a reserved bit": calls(NEXT, 2) + b"".join(
        one[:5] + bytes([one[5] | 128]) + one[6:] for one in (heads(NEXT + 4), body(NEXT + 4))
    ),
    "settings": calls(NEXT, 2) + frames.frame(frames.SETTINGS, 0, 0) + calls(NEXT + 4, 3),
    "a lone CONTINUATION": calls(NEXT, 2) + frames.frame(frames.CONTINUATION, 4, NEXT, b""),
    "more streams than are allowed": b"".join(
        heads(one) for one in range(NEXT, NEXT + 2 * SETTINGS.max_concurrent_streams + 20, 2)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ALIKE)
def test_calls_that_are_alike_are_taken_together(name: str, taken: list[int]) -> None:
    of_stream, _, failed, rest = agreed([FIRST, ALIKE[name], calls(10_001, 1)])
    assert taken[0] > 0 and not failed and not rest
    assert len(of_stream[NEXT]) >= 2


def test_more_than_there_is_room_for_is_taken_in_parts(
    taken: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http2_connection, "_TOGETHER_MAX", 5)
    agreed([FIRST, calls(NEXT, MANY), calls(NEXT + 2 * MANY, 5)])
    assert taken == [len(calls(NEXT, 5)), len(calls(NEXT, 5))]


@pytest.mark.parametrize("name", UNLIKE)
def test_what_is_not_alike_is_judged_frame_by_frame(name: str, taken: list[int]) -> None:
    agreed([FIRST, UNLIKE[name]])
    assert taken, "it was tried"
    agreed([FIRST + UNLIKE[name]])
    refused([FIRST, UNLIKE[name]])


@pytest.mark.parametrize(("block", "alike"), [(LENGTH, True), (WRONG_LENGTH, False)])
def test_a_content_length_holds(block: bytes, alike: bool, taken: list[int]) -> None:
    agreed([calls(1, MANY, block=block), calls(NEXT, MANY, block=block)])
    assert (taken[0] > 0) == alike
    taken.clear()
    agreed(
        [calls(1, MANY, block=block), b"".join(heads(one, block) for one in IDS), b"".join(map(body, IDS))]
    )
    assert taken[0] > 0, "heads alone are alike, whatever comes behind them"


def test_calls_that_the_door_refuses_at_once_are_over(taken: list[int]) -> None:
    of_stream, failed = refused([FIRST, *(calls(NEXT + 2 * MANY * part, MANY) for part in range(3))])
    assert taken[0] > 0 and not failed
    assert {len(of_stream[one]) for one in IDS} == {1, 2}
    _, failed = refused([FIRST, *(calls(NEXT + 2 * MANY * part, MANY) for part in range(300))])
    assert failed.startswith("ENHANCE_YOUR_CALM")


def test_what_stands_between_calls_costs_a_few_tries(taken: list[int]) -> None:
    update = frames.window_frame(0, 1)
    agreed([FIRST, update + calls(NEXT, MANY) + update + calls(NEXT + 2 * MANY, 4)])
    assert taken == [0, len(calls(NEXT, MANY)), len(calls(NEXT + 2 * MANY, 4))]
    taken.clear()
    agreed([FIRST, update * 50 + calls(NEXT, MANY)])
    assert taken == [0, 0, 0]


def test_windows_hold_for_many_as_for_one(taken: list[int]) -> None:
    large = frame_message(bytes(15_000))
    size = SETTINGS.connection_window_bytes // len(large) + 2
    _, _, failed, _ = agreed([FIRST, b"".join(heads(one) for one in range(NEXT, NEXT + 2 * size, 2))])
    assert not failed
    agreed([FIRST, calls(NEXT, size, large)])


def test_random_traffic_is_told_the_same(source: random.Random, taken: list[int]) -> None:
    for _ in range(150):
        pieces, next_id = [FIRST], NEXT
        for _ in range(source.randrange(1, 6)):
            count = source.randrange(1, 12)
            ids = range(next_id, next_id + 2 * count, 2)
            bodies = [body(one, frame_message(source.randbytes(source.choice([0, 5, 900])))) for one in ids]
            opened = [heads(one, source.choice([BLOCK] * 9 + [OTHER])) for one in ids]
            if source.random() < 0.5:
                parts = [part for pair in zip(opened, bodies, strict=True) for part in pair]
            else:
                parts = opened + bodies
            if source.random() < 0.4:
                place = source.randrange(len(parts))
                parts[place : place + source.choice([0, 1])] = [source.choice([*parts, *UNLIKE.values()])]
            pieces.append(b"".join(parts))
            next_id += 2 * count
        data = b"".join(pieces[1:])
        cut = source.randrange(len(data) + 1)
        agreed([FIRST, data[:cut], data[cut:]])
    assert sum(size > 0 for size in taken) > 100
