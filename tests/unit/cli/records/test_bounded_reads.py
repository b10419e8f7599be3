"""Reads that end: of what is not for them too; and readers that are no consumers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import danube
import danube.sync
from danube.cli.main import root
from danube.cli.records import receiving
from danube.cli.records.receiving import Receiver, Wish, _watch
from danube.cli.terminal.services import Services
from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.subscription import Mode, Subscription
from danube.core.partition.policy import READER
from danube.core.protocol.native import Kind
from danube.errors import OperationTimeout, StorageFailed
from danube.spark.history.tail import Tail
from tests.fakes.broker import FakeBroker

SECOND = 1_000_000_000


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as running:
        yield running


class Admin:
    """Tells of a partition: two records are at the consumer, and two will never come."""

    def __init__(self, left_from: list[int]) -> None:
        self.asked = 0
        self.left_from = left_from
        self.admin = self
        self.waits_for = None  # nothing of the store

    async def subscription_progress(self, topic: str, subscription: str) -> Any:
        self.asked += 1
        left_from = self.left_from[min(self.asked, len(self.left_from)) - 1]
        return [{"ack_floor": 0, "left_from": left_from}]


@pytest.mark.parametrize("left_from", [[4], [2, 4]])
def test_a_read_to_the_end_leaves_when_nothing_is_left_for_it(left_from: list[int]) -> None:
    wish: Any = Wish(
        service_addr=None, topic="t", consumer="c", subscription="s", temporary=False, mode="shared",
        start=None, filters=(), count=None, until_end=True, timeout_ms=None, acknowledge=False,
    )  # fmt: skip

    class Printer:
        def print(self, message: Any) -> None:
            pass

    async def main() -> int:
        receiver, admin = Receiver(wish, Printer(), {0: 4}), Admin(left_from)  # type: ignore[arg-type]
        work: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        await asyncio.wait_for(_watch(admin, admin, wish, receiver, work), 20)
        assert receiver.done()
        return admin.asked

    assert asyncio.run(main()) == len(left_from), "told once, and nothing came after that"


def test_a_reader_that_is_no_consumer_loses_nothing_to_time() -> None:
    reading = Subscription(
        "r", Mode.EXCLUSIVE, CursorState.at(Mode.EXCLUSIVE, 0), max_unacked=9, failure=READER
    )
    reading.join(1, "r", now_ns=0)
    reading.credit(1, 9)
    reading.grant(9, 0)
    reading.tick(6 * 86_400 * SECOND)
    assert reading.in_flight_count == 9 and READER.poison == "block"


def test_the_floor_passes_last_offsets_that_have_no_record() -> None:
    """Spark's reads end by it."""
    reading = Subscription(
        "r", Mode.EXCLUSIVE, CursorState.at(Mode.EXCLUSIVE, 0), max_unacked=9, failure=READER
    )
    reading.join(1, "r", now_ns=0)
    reading.credit(1, 9)
    reading.grant(2, 0)
    reading.skip_damaged(2, 5, why="compacted")
    assert reading.statistics()["ack_floor"] == 0, "two records are at the reader"
    reading.ack(1, np.array([[0, 2]], np.uint64), 0)
    told = reading.statistics()
    assert (told["ack_floor"], told["compacted"], told["damaged"], told["expired"]) == (5, 3, 0, 0)


def test_spark_reads_with_a_policy_of_its_own(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    with danube.sync.connect(broker.url) as client, client.producer("/default/t") as producer:
        producer.send_many([b"a", b"b"])
    policies = policies_of(broker, monkeypatch)
    tail = Tail(broker.url)
    try:
        assert sum(len(content) for content, _ in tail.read("/default/t", 0, 2)) > 0
    finally:
        tail.close()
    assert policies == [READER]


def policies_of(broker: FakeBroker, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    policies: list[Any] = []
    subscribe = broker._subscribe

    def noted(*arguments: Any) -> Any:
        policies.append(arguments[-1].failure)
        return subscribe(*arguments)

    monkeypatch.setattr(broker, "_subscribe", noted)
    return policies


def test_the_command_tells_why_a_partition_cannot_be_opened(
    broker: FakeBroker,
) -> None:
    with danube.sync.connect(broker.url) as client, client.producer("/default/t") as producer:
        producer.send(b"x")
    services = Services(connect_async=lambda url: danube.connect(url, timeout=3.0))
    _unopened(broker, services)


def _unopened(broker: FakeBroker, services: Services, *more: str) -> None:
    broker.refuse(Kind.SUBSCRIBE, *[StorageFailed("the log cannot be opened", why="bad disk")] * 1_000)
    words = ["consume", "t", "-s", broker.url, "--from", "earliest", "--until-end", *more]
    ended = CliRunner().invoke(root, words, obj=services, prog_name="danube")
    assert ended.exit_code == OperationTimeout.exit_code, ended.output
    assert "why: the log cannot be opened: bad disk" in ended.stderr


@pytest.mark.parametrize(("given", "waited_s"), [("100ms", 0.5), ("3s", 3.0), ("40s", None)])
def test_an_opening_waits_no_longer_than_for_records(
    broker: FakeBroker, monkeypatch: pytest.MonkeyPatch, given: str, waited_s: float | None
) -> None:
    """Or as long as a busy broker may need."""
    monkeypatch.setattr(receiving, "OPENING_S", 0.5)
    with danube.sync.connect(broker.url) as client, client.producer("/default/t") as producer:
        producer.send(b"x")
    asked: list[float | None] = []

    def connect(url: str, **options: float) -> Any:
        asked.append(options.get("timeout"))
        return danube.connect(url, timeout=options.get("timeout", 1.0))

    _unopened(broker, Services(connect_async=connect), "--timeout", given)
    assert asked == [waited_s]
