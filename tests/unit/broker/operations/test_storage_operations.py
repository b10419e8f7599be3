"""``storage_status`` over the owners of all partitions, whatever they answer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from danube.client.machine.admin import AdminPlans
from danube.client.machine.session import Session
from danube.core.protocol import native as wire
from danube.core.protocol.native import Admin, Kind
from danube.errors import Overloaded, StorageFailed, TopicNotFound
from tests.unit.broker_parts import RecordingSession, RoutedBench

STORE = {"name": "s3://bucket", "answers": False, "error": "refused"}


def ask(bench: RoutedBench, owners: Any, **args: Any) -> Any:
    bench.router.operations.ask_owner = owners
    session = RecordingSession()
    bench.request(session, Kind.ADMIN, Admin("storage_status", "", args))
    (frame,) = session.take()
    return frame.error if frame.kind == Kind.ERROR else wire.decode_result(frame.body)


def answers(*values: dict[str, Any]) -> Any:
    waiting = list(values)
    return lambda name, op, args, answer: answer(waiting.pop(0))


def test_sums_by_topic_and_the_first_error(tmp_path: Path) -> None:
    bench = RoutedBench(tmp_path)
    bench.proposals.create("/default/parted", partitions=3)
    bench.proposals.create("/default/memory", reliable=False, durability="memory")
    bench.router.operations.store = lambda: STORE
    tiered = {
        "known": True, "local_bytes": 10, "uploaded_bytes": 7, "objects": 2, "pending_bytes": 3,
        "pending_seconds": 1.5, "upload_error": "", "read_error": "",
    }  # fmt: skip
    found = ask(
        bench,
        answers(
            tiered,
            {**tiered, "known": False, "pending_seconds": 9.0, "upload_error": "bucket is gone"},
            StorageFailed("no disk"),
        ),
    )
    (row,) = found["topics"]
    assert row == {
        "topic": "/default/parted", "partitions": 3, "local_bytes": 20, "uploaded_bytes": 14, "objects": 4,
        "pending_bytes": 6, "pending_seconds": 9.0, "unconfirmed": 1, "errors": 2, "error": "bucket is gone",
    }  # fmt: skip
    assert found["tiered"] and found["pending_bytes"] == 6 and found["errors"] == 2
    assert found["store"] == STORE and found["unconfirmed"] == 1


def test_local_storage_says_so_and_an_unknown_topic_is_refused(tmp_path: Path) -> None:
    bench = RoutedBench(tmp_path)
    assert ask(bench, answers()) == {
        "tiered": False, "store": None, "pending_bytes": 0, "pending_seconds": 0.0, "unconfirmed": 0,
        "errors": 0, "topics": [],
    }  # fmt: skip
    bench.proposals.create("/default/one")
    found = ask(bench, answers({"local_bytes": 5, "tiered": False}), topic="/default/one")
    assert not found["tiered"] and found["topics"][0]["local_bytes"] == 5
    assert isinstance(ask(bench, answers(), topic="/default/none"), TopicNotFound)


def test_owners_are_asked_some_at_a_time_and_a_full_ring_is_an_error_of_its_partition(tmp_path: Path) -> None:
    bench = RoutedBench(tmp_path)
    bench.proposals.create("/default/parted", partitions=200)
    open_answers: list[Any] = []

    def owners(name: str, op: str, args: Any, answer: Any) -> None:
        if name.endswith("-7"):
            raise Overloaded("ring is full")
        open_answers.append(answer)

    bench.router.operations.ask_owner = owners
    session = RecordingSession()
    bench.request(session, Kind.ADMIN, Admin("storage_status", "", {}))
    most = 0
    while open_answers:
        most = max(most, len(open_answers))
        open_answers.pop(0)({"known": True, "local_bytes": 1})
    found = wire.decode_result(session.only(Kind.RESULT).body)
    assert most <= 64 and found["topics"][0]["partitions"] == 200
    assert found["errors"] == sum(
        name.endswith("-7") for name in bench.proposals.state.topic("/default/parted").physical_names
    )


def test_topics_come_in_pages_and_the_client_adds_them_up(tmp_path: Path) -> None:
    bench = RoutedBench(tmp_path)
    for name in ("c", "a", "b"):
        bench.proposals.create(f"/default/{name}")
    one = {"known": True, "pending_bytes": 5, "pending_seconds": 2.0}
    first = ask(bench, answers(one, one), limit=2)
    assert [row["topic"] for row in first["topics"]] == ["/default/a", "/default/b"]
    last = ask(bench, answers(one | {"pending_seconds": 3.0}), limit=2, after=first["after"])
    assert "after" not in last
    asked: list[Any] = []
    plan = AdminPlans(
        cast(Session, SimpleNamespace(admin=lambda op, **args: asked.append(args)))
    ).storage_status("")
    next(plan)
    plan.send(first)
    with pytest.raises(StopIteration) as stop:
        plan.send(last)
    found = stop.value.value
    assert [row["topic"] for row in found["topics"]] == ["/default/a", "/default/b", "/default/c"]
    assert (found["pending_bytes"], found["pending_seconds"]) == (15, 3.0) and "after" not in found
    assert [args.get("after") for args in asked] == [None, "/default/b"]
