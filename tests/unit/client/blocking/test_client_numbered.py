"""Producers whose application numbers the records: every number once, over processes, kills and restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

import danube.sync
from danube.client.blocking.numbered import NumberedProducer
from danube.client.machine.numbered import ROUNDS, NumberedPartition, epoch_of_round, round_name
from danube.client.machine.reply import Reply
from danube.client.machine.requests import Timer
from danube.core.partition.dedup import EPOCH_AHEAD_MAX, producer_id_of
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import (
    DanubeError,
    Fenced,
    InvalidArgument,
    PolicyMismatch,
    RecordTooLarge,
    SequenceGap,
    StorageFailed,
)
from tests.broker_process import BrokerProcess

TOPIC = "/default/numbered"


@pytest.fixture
def process(broker: Callable[..., BrokerProcess]) -> BrokerProcess:
    return broker()


@pytest.fixture
def client(process: BrokerProcess) -> Iterator[danube.sync.Client]:
    with danube.sync.connect(process.address) as connected:
        yield connected


def payloads(start: int, stop: int) -> list[bytes]:
    return [b"%06d" % number for number in range(start, stop)]


def read(client: danube.sync.Client, topic: str = TOPIC) -> list[bytes]:
    ends = sum(part["log_end"] for part in client.admin.describe_topic(topic).partitions)
    found: list[bytes] = []
    with client.consumer(topic, f"check-{ends}", "exclusive", start="earliest") as consumer:
        while len(found) < ends:
            message = consumer.receive(timeout=10)
            found.append(message.payload)
    return found


def test_epochs_say_the_round_and_rise() -> None:
    now = 1_790_000_000
    for number in (0, 1, ROUNDS - 1, ROUNDS, 3 * ROUNDS + 7):
        epoch = epoch_of_round(number, 0, now)
        assert epoch % ROUNDS == number % ROUNDS
        assert now < epoch <= now + ROUNDS < now + EPOCH_AHEAD_MAX
        assert epoch < epoch_of_round(number + 1, epoch, now)
        assert epoch < epoch_of_round(number, epoch, now)


def test_a_name_is_good_for_so_many_rounds() -> None:
    assert round_name("a", ROUNDS - 1) == "a"
    assert round_name("a", ROUNDS) == "a/1"
    assert round_name("a", 5 * ROUNDS + 3) == "a/5"


def test_work_is_taken_up_where_it_was_left(client: danube.sync.Client, process: BrokerProcess) -> None:
    with NumberedProducer(client, TOPIC, "job") as producer:
        assert producer.partition_count == 1
        assert producer.stored(0) == 0
        producer.send(0, 0, payloads(0, 500))
        producer.send(0, 500, payloads(500, 700))
        producer.flush()
    with danube.sync.connect(process.address) as other, NumberedProducer(other, TOPIC, "job") as again:
        assert again.stored(0) == 700
        again.send(0, 700, payloads(700, 1000))
        again.flush()
    assert read(client) == payloads(0, 1000)


def test_what_is_stored_is_known_after_the_broker_was_killed(broker: Callable[..., BrokerProcess]) -> None:
    process = broker()
    with danube.sync.connect(process.address) as client:
        with NumberedProducer(client, TOPIC, "job", 3, durability="fsync") as producer:
            producer.send(0, 0, payloads(0, 300))
            producer.flush()
            process.kill()
            process.start()
            producer.send(0, 300, payloads(300, 400))
            producer.flush()
        with NumberedProducer(client, TOPIC, "job", 3) as again:
            assert again.stored(0) == 400
            again.flush()
        assert read(client) == payloads(0, 400)


def test_a_round_follows_another_and_an_earlier_one_is_fenced(client: danube.sync.Client) -> None:
    for number in range(4):
        with NumberedProducer(client, TOPIC, "stream", number) as producer:
            assert producer.stored(0) == 0
            producer.send(0, 0, payloads(number * 10, number * 10 + 10))
            producer.flush()
    with NumberedProducer(client, TOPIC, "stream", 2) as late, pytest.raises(Fenced, match="later round"):
        late.stored(0)
    with NumberedProducer(client, TOPIC, "stream", 3) as same:
        assert same.stored(0) == 10
    assert read(client) == payloads(0, 40)


def test_one_that_works_still_is_fenced_by_the_next_round(client: danube.sync.Client) -> None:
    with (
        NumberedProducer(client, TOPIC, "stream", 0) as late,
        NumberedProducer(client, TOPIC, "stream", 1) as on,
    ):
        assert late.stored(0) == 0
        on.send(0, 0, payloads(0, 1))
        on.flush()
        late.send(0, 0, payloads(0, 5))
        with pytest.raises(Fenced):
            late.flush()
        with pytest.raises(Fenced):
            late.send(0, 5, payloads(5, 6))
    assert read(client) == payloads(0, 1)


def test_two_that_do_the_same_work_store_it_once(client: danube.sync.Client, process: BrokerProcess) -> None:
    times = list(range(1, 101))
    with danube.sync.connect(process.address) as other:
        first, second = NumberedProducer(client, TOPIC, "job"), NumberedProducer(other, TOPIC, "job")
        with first, second:
            assert (first.stored(0), second.stored(0)) == (0, 0)
            for producer in (first, second):
                producer.send(0, 0, payloads(0, 100), publish_times=times)
                producer.flush()
            assert (first.duplicates, second.duplicates) == (0, 1)
    assert read(client) == payloads(0, 100)


def test_partitions_are_counted_apart(client: danube.sync.Client) -> None:
    with NumberedProducer(client, TOPIC, "job", partitions=3) as producer:
        producer.send(2, 0, payloads(0, 7))
        producer.send(0, 0, payloads(7, 9))
        producer.flush()
    with NumberedProducer(client, TOPIC, "job") as again:
        assert [again.stored(index) for index in range(again.partition_count)] == [2, 0, 7]


def test_more_than_may_be_in_flight(client: danube.sync.Client) -> None:
    with NumberedProducer(client, TOPIC, "job", max_in_flight_bytes=10_000) as producer:
        for start in range(0, 20_000, 500):
            producer.send(0, start, payloads(start, start + 500))
        producer.flush()
    assert read(client) == payloads(0, 20_000)


def test_numbers_follow_each_other(client: danube.sync.Client) -> None:
    with NumberedProducer(client, TOPIC, "job") as producer:
        producer.send(0, 0, payloads(0, 2))
        with pytest.raises(InvalidArgument, match="record 7 cannot follow"):
            producer.send(0, 7, payloads(0, 2))
        with pytest.raises(InvalidArgument, match="does not exist"):
            producer.send(1, 0, payloads(0, 2))


def test_a_refused_batch_ends_it_and_the_next_goes_on(client: danube.sync.Client) -> None:
    client.admin.create_topic(TOPIC, max_record_bytes=1024)
    with NumberedProducer(client, TOPIC, "job") as producer:
        producer.send(0, 0, payloads(0, 3))
        producer.send(0, 3, [b"x" * 2000])
        with pytest.raises(RecordTooLarge):
            producer.flush()
    with NumberedProducer(client, TOPIC, "job") as again:
        assert again.stored(0) == 3


def test_options_are_checked(client: danube.sync.Client) -> None:
    client.admin.create_topic(TOPIC)
    with pytest.raises(InvalidArgument, match="round -1"):
        NumberedProducer(client, TOPIC, "job", -1)
    with pytest.raises(PolicyMismatch):
        NumberedProducer(client, TOPIC, "job", reliable=not client.admin.topic(TOPIC).reliable).open()


def test_a_broker_that_forgot_what_it_acknowledged(broker: Callable[..., BrokerProcess]) -> None:
    process = broker()
    with danube.sync.connect(process.address) as client:
        with NumberedProducer(client, TOPIC, "job", reliable=False) as producer:
            producer.send(0, 0, payloads(0, 300))
            producer.flush()
            process.kill()
            process.start()
            producer.send(0, 300, payloads(300, 400))
            with pytest.raises(SequenceGap, match="holds fewer records"):
                producer.flush()
        with NumberedProducer(client, TOPIC, "job", reliable=False) as again:
            assert again.stored(0) == 0


class Line:
    """What a partition's producer asks of its session, answered by the test."""

    def __init__(self) -> None:
        self.ready = True
        self.asked: list[tuple[int, Reply]] = []
        self.timers = 0

    def request(self, kind: int, body: wire.OpenProducer, *, handle: int) -> Reply:
        assert kind == Kind.OPEN_PRODUCER and body.producer_id == producer_id_of(body.name)
        reply = Reply()
        self.asked.append((body.epoch, reply))
        return reply

    def answer(self, error: DanubeError | None, next_sequence: int = 0) -> int:
        """Answer the last request; its epoch."""
        epoch, reply = self.asked[-1]
        if error is not None:
            reply.fail(error)
        else:
            reply.resolve(wire.ProducerOpened(1, epoch, next_sequence, "written", 1024))
        return epoch

    def new_handle(self, _: object) -> int:
        return len(self.asked) + 1

    def call_at(self, _: int, __: object) -> Timer:
        self.timers += 1
        return Timer(lambda: None)

    def nothing(self, *_: object) -> int:
        return 0

    @property
    def brokers(self) -> Line:
        return self

    def after(self, session: object, _: object) -> object:
        return session

    register = unregister = drop_handle = send = pause_before_ns = now_ns = nothing


def opening(round_number: int) -> tuple[Line, NumberedPartition]:
    line = Line()
    partition = NumberedPartition(line, "job", "/default/p", 0, 10**9, round_number)  # type: ignore[arg-type]
    partition.start()
    assert line.asked[0][0] == 1
    return line, partition


def test_a_name_that_the_partition_may_have_forgotten() -> None:
    """Unknown, and below what was forgotten: a higher epoch of the same round is tried."""
    line, partition = opening(5)
    line.answer(SequenceGap("the partition no longer knows this producer"))
    first = line.answer(SequenceGap("the partition no longer knows this producer"))
    second = line.answer(None)
    assert first % ROUNDS == second % ROUNDS == 5 and second == first + ROUNDS
    assert partition.opened.settled and partition.stored == 0 and partition.epoch == second


def test_one_that_was_opened_meanwhile_for_the_same_round() -> None:
    line, partition = opening(5)
    line.answer(None)
    chosen = line.asked[-1][0]
    line.answer(Fenced("newer", epoch=chosen + ROUNDS))
    assert line.answer(None, next_sequence=7) == chosen + ROUNDS
    assert partition.stored == partition.next_sequence == 7


def test_an_opening_that_is_refused() -> None:
    line, partition = opening(0)
    line.answer(StorageFailed("not now"))
    assert line.timers == 1 and not partition.opened.settled
    line, partition = opening(0)
    line.answer(None)
    line.answer(InvalidArgument("producer epoch was never given out"))
    assert isinstance(partition.opened.error, InvalidArgument)
