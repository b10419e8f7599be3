"""Questions about staged objects at the partition's owner: passed on, asked again, answered, given up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube.broker.tiers import worker_tiers as tier_staged
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import InvalidArgument, OwnerMoved, Unavailable, WrongState
from danube.host import clock
from tests.answers import fitting
from tests.unit.broker_parts import TOPIC, Bench, RecordingSession
from tests.unit.tier_parts import TieredBench


class Asking(TieredBench):
    """A partition with a tier, and a client that asks."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.session = RecordingSession()
        self.open_producer(self.session)
        self.session.take()
        self.correlation = 0

    def install(self, **args: Any) -> None:
        given = {"topic_id": self.hosted.topic_id, "objects": b"objects", **args}
        self.correlation = self.ask(self.session, Kind.ADMIN, wire.Admin("install_staged", TOPIC, given))

    def questions(self) -> list[dict[str, Any]]:
        return [frame for frame in self.mover.said if frame["kind"] == "staged"]

    def judge(self, answers: list[Any], number: int = 1, error: str = "", code: int = 0) -> None:
        frame = {"kind": "judged", "id": number, "answers": msgspec.msgpack.encode(answers), "error": error}
        self.tiers.on_frame({**frame, "code": code} if code else frame)


@pytest.fixture
def bench(tmp_path: Path) -> Asking:
    return Asking(tmp_path)


def test_the_owner_passes_a_question_on_and_the_answer_back(bench: Asking) -> None:
    bench.install()
    assert bench.session.take() == []
    (question,) = bench.questions()
    assert question["epoch"] == bench.hosted.core.epoch and question["objects"] == b"objects"
    assert (question["topic_id"], question["partition"]) == (bench.hosted.topic_id, 0)
    bench.judge([["installed", ""], ["refused", "because"]])
    answer = bench.session.only(Kind.RESULT)
    found = fitting("install_staged", wire.decode_result(answer.body))
    assert found == [["installed", ""], ["refused", "because"]]
    bench.judge([["installed", ""]])
    assert bench.session.take() == [], "an answer that nobody waits for"


def test_the_error_of_the_mover_reaches_the_client(bench: Asking) -> None:
    bench.install()
    bench.judge([], error="the partition has another owner", code=OwnerMoved.code)
    error = bench.session.only(Kind.ERROR).error
    assert isinstance(error, OwnerMoved) and "another owner" in str(error)


def test_a_question_is_asked_again_on_a_new_connection(bench: Asking) -> None:
    bench.install()
    bench.hosted.core.epoch += 1  # its log was opened anew meanwhile
    bench.tiers.on_connected()
    first, again = bench.questions()
    assert again == {**first, "epoch": first["epoch"] + 1}
    bench.judge([["waiting", ""]])
    bench.judge([["installed", ""]])
    assert wire.decode_result(bench.session.only(Kind.RESULT).body) == [["waiting", ""]]


def test_a_question_that_nobody_answers_is_given_up(bench: Asking, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.tiers.link = None
    bench.install()
    assert bench.session.take() == []
    late_ns = clock.monotonic_ns() + tier_staged.PATIENCE_NS
    bench.tiers.staged.tick(late_ns - 5_000_000_000)
    assert bench.session.take() == []
    bench.tiers.staged.tick(late_ns)
    assert isinstance(bench.session.only(Kind.ERROR).error, Unavailable)
    monkeypatch.setattr(tier_staged, "ASKED_MAX", 1)
    bench.install()
    bench.install()
    error = bench.session.only(Kind.ERROR).error
    assert "too many questions" in str(error) and error.retryable


def test_what_cannot_be_asked_is_refused_at_once(bench: Asking, tmp_path: Path) -> None:
    bench.install(topic_id=bench.hosted.topic_id + 1)
    error = bench.session.only(Kind.ERROR).error
    assert isinstance(error, WrongState) and "made again" in str(error)
    for args in ({"topic_id": "1"}, {"topic_id": None}, {"objects": None}, {"objects": "text"}):
        bench.install(**args)
        assert isinstance(bench.session.only(Kind.ERROR).error, InvalidArgument)
    assert bench.questions() == []
    local, session = Bench(tmp_path / "local"), RecordingSession()
    local.open_producer(session)
    session.take()
    local.ask(session, Kind.ADMIN, wire.Admin("install_staged", TOPIC, {"topic_id": 1, "objects": b""}))
    error = session.only(Kind.ERROR).error
    assert isinstance(error, WrongState) and "no object store" in str(error)


def test_a_client_that_has_gone_is_no_trouble(bench: Asking) -> None:
    bench.install()
    bench.shard.drop_session(bench.session)
    bench.judge([["installed", ""]])
    assert bench.session.take() == []
