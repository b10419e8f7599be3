"""Arrow rows into a real broker, without Spark: where they go, that each is stored once, what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

import danube.sync
from danube.client.blocking.client import Client
from danube.client.blocking.numbered import NumberedProducer
from danube.core.batch.checksum import key_hash
from danube.core.batch.row_mark import RowMark
from danube.errors import Conflict, InvalidArgument, OperationTimeout, RecordTooLarge
from danube.spark.sink import passed_over
from danube.spark.sink.passed_over import stored_rows
from danube.spark.sink.publishing import ROWS_TOGETHER, Progress, Publisher, PublishOptions
from tests.broker_process import BrokerProcess

pa = pytest.importorskip("pyarrow")
MAPPING = pa.map_(pa.string(), pa.string())


@pytest.fixture
def client(process: BrokerProcess) -> Iterator[Client]:
    with danube.sync.connect(process.address) as connected:
        yield connected


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return f"/default/{request.node.name.replace('[', '-').replace(']', '')}"


def rows(**columns: Any) -> Any:
    given = {name: one if isinstance(one, pa.Array) else pa.array(one) for name, one in columns.items()}
    return pa.RecordBatch.from_pydict(given)


def publish(
    client: Client, batches: list[Any], name: str = "job", round_number: int = 0, ends: bool = True,
    repeated: bool = False, **options: Any,
) -> Progress:  # fmt: skip
    """One attempt; without ``ends`` it does not say that it was the whole."""
    publisher = Publisher(
        client, PublishOptions(broker="", **options), name, round_number, ends=ends, repeated=repeated
    )
    try:
        for batch in batches:
            publisher.publish(batch)
        return publisher.finish()
    finally:
        publisher.close()


def read(client: Client, topic: str) -> list[Any]:
    """Every record of a topic, by partition and offset."""
    expected = sum(part["log_end"] for part in client.admin.describe_topic(topic).partitions)
    found: list[Any] = []
    with client.consumer(topic, "check", "exclusive", start="earliest") as consumer:
        while len(found) < expected:
            found.append(consumer.receive(timeout=10))
    client.admin.delete_subscription(topic, "check")
    return sorted(found, key=lambda message: (message.partition, message.offset))


def test_a_record_has_what_its_row_has(client: Client, topic: str) -> None:
    moment = datetime(2026, 11, 21, 8, 0, 0, 123456, UTC)
    batch = rows(
        payload=pa.array([b"one", b"two"], pa.binary()),
        key=pa.array([b"k", None], pa.binary()),
        attributes=pa.array([[("a", "1"), ("b", "ü")], None], MAPPING),
        publish_time=pa.array([moment, moment], pa.timestamp("us", "UTC")),
        schema_id=pa.array([7, 7], pa.int64()),
        schema_version=pa.array([2, 2], pa.int32()),
    )
    publish(client, [batch], topic=topic)
    one, two = read(client, topic)
    assert (one.payload, one.key, one.attributes) == (b"one", "k", {"a": "1", "b": "ü"})
    assert (two.payload, two.key, two.attributes) == (b"two", None, {})
    assert one.publish_time == two.publish_time == moment
    assert (one.schema_id, one.schema_version) == (7, 2)
    assert one.producer_name == "job"


def test_text_is_a_payload_and_a_key(client: Client, topic: str) -> None:
    publish(client, [rows(payload=["ä", "b"], key=["x", "ü"])], topic=topic)
    assert [(each.payload, each.key) for each in read(client, topic)] == [("ä".encode(), "x"), (b"b", "ü")]


def test_the_key_decides_and_its_order_is_kept(client: Client, topic: str) -> None:
    keys = [f"k{number % 23}" for number in range(5000)]
    batches = [
        rows(payload=[f"{n}" for n in range(first, first + 700)], key=keys[first : first + 700])
        for first in range(0, 4900, 700)
    ]
    publish(client, batches, topic=topic, partitions=4)
    by_key: dict[str, list[int]] = {}
    for message in read(client, topic):
        assert message.partition == key_hash(message.key_bytes) % 4
        by_key.setdefault(message.key, []).append(int(message.payload))
    assert len(by_key) == 23 and sum(map(len, by_key.values())) == 4900
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def test_rows_without_a_key_go_round_by_blocks(client: Client, topic: str) -> None:
    batches = [rows(payload=[f"{n}" for n in range(first, first + 5000)]) for first in range(0, 20_000, 5000)]
    publish(client, batches, topic=topic, partitions=3)
    for message in read(client, topic):
        assert message.partition == int(message.payload) // ROWS_TOGETHER % 3


def test_a_column_says_the_partition(client: Client, topic: str) -> None:
    batch = rows(payload=["a", "b", "c"], partition=pa.array([2, 0, None], pa.int32()), key=[None, "x", "x"])
    publish(client, [batch], topic=topic, partitions=3)
    placed = {message.payload: message.partition for message in read(client, topic)}
    assert placed == {b"a": 2, b"b": 0, b"c": key_hash(b"x") % 3}


def test_a_column_says_the_topic(client: Client, topic: str) -> None:
    names = [f"{topic}-{number % 2}" for number in range(10)]
    publish(client, [rows(payload=[str(n) for n in range(10)], topic=names)])
    for number in range(2):
        assert [int(m.payload) for m in read(client, f"{topic}-{number}")] == list(range(number, 10, 2))


def test_an_option_beats_the_column(client: Client, topic: str) -> None:
    publish(client, [rows(payload=["a"], topic=["/default/never"])], topic=topic)
    assert len(read(client, topic)) == 1


def test_the_same_rows_again_are_passed_over(client: Client, topic: str) -> None:
    """However they are cut into batches the second time."""
    keys = [f"k{number % 7}" if number % 3 else None for number in range(9000)]
    numbers = [str(number) for number in range(9000)]

    def cut(size: int) -> list[Any]:
        return [
            rows(payload=numbers[a : a + size], key=pa.array(keys[a : a + size], pa.string()))
            for a in range(0, 9000, size)
        ]

    first = publish(client, cut(1000)[:6], topic=topic, partitions=3, ends=False)
    assert (first.rows, first.passed_over) == (6000, 0)
    again = publish(client, cut(1700), topic=topic, partitions=3)
    assert (again.rows, again.passed_over) == (9000, 6000)
    last = publish(client, cut(9000), topic=topic, partitions=3)
    assert (last.rows, last.passed_over) == (9000, 9000)
    stored = sorted(int(message.payload) for message in read(client, topic))
    assert stored == list(range(9000))


def test_other_rows_under_the_same_name_are_refused_before_any_is_stored(client: Client, topic: str) -> None:
    """As a task gets them where its job is cut into other tasks."""
    publish(client, [rows(payload=[str(number) for number in range(500)])], topic=topic, ends=False)
    with pytest.raises(Conflict, match=r"rows 0 to 500 of job are not those"):
        publish(client, [rows(payload=[str(number) for number in range(1, 900)])], topic=topic)
    keyed = rows(payload=[str(number) for number in range(900)], key=["k"] * 900)
    with pytest.raises(Conflict) as caught:
        publish(client, [keyed], topic=topic)
    assert "another jobId" in caught.value.hint and len(read(client, topic)) == 500
    again = publish(client, [rows(payload=[str(number) for number in range(600)])], topic=topic)
    assert (again.rows, again.passed_over) == (600, 500)


def test_fewer_rows_than_are_stored_are_refused(client: Client, topic: str) -> None:
    all_rows = rows(payload=[str(number) for number in range(500)], partition=[0, 1] * 250)
    publish(client, [all_rows], topic=topic, partitions=3)
    with pytest.raises(Conflict, match="holds 250 rows of job, which has only 200 now"):
        publish(client, [all_rows.slice(0, 400)], topic=topic, partitions=3)
    with pytest.raises(Conflict, match="holds 250 rows of job, which has only 0 now"):
        only = rows(payload=[str(number) for number in range(0, 500, 2)], partition=[0] * 250)
        publish(client, [only], topic=topic, partitions=3)
    assert len(read(client, topic)) == 500


def test_rows_that_cannot_be_read_back_are_passed_over_as_they_come(client: Client, topic: str) -> None:
    """A topic that keeps no log has nothing to compare with."""
    first = rows(payload=["a", "b"])
    publish(client, [first], topic=topic, reliable=False)
    again = publish(client, [first], topic=topic, reliable=False)
    assert again.passed_over == 2


@pytest.mark.parametrize("column", ["payload", "key", "attributes"])
def test_one_other_row_is_found_however_many_there_are(client: Client, topic: str, column: str) -> None:
    """The first row differs, and hundreds of batches follow it."""
    count = 20_000
    values: dict[str, list[Any]] = {
        "payload": [str(number) for number in range(count)],
        "key": [f"k{number}" for number in range(count)],
        "attributes": [{"n": str(number)} for number in range(count)],
    }

    def shaped(upto: int) -> Any:
        types = {"attributes": MAPPING}
        return rows(**{name: pa.array(one[:upto], types.get(name)) for name, one in values.items()})

    publish(client, [shaped(10_000)], topic=topic, batch_bytes=512, ends=False)
    values[column][0] = {"n": "other"} if column == "attributes" else "other"
    with pytest.raises(Conflict, match="rows 0 to 10000 of job are not those"):
        publish(client, [shaped(count)], topic=topic)
    (part,) = client.admin.describe_topic(topic).partitions
    assert part["log_end"] == 10_000, "nothing was sent behind them"


def test_a_task_that_was_done_has_no_more_rows(client: Client, topic: str) -> None:
    """As where a job is cut into fewer tasks, whose rows begin alike."""
    publish(client, [rows(payload=["a", "b"])], topic=topic)
    with pytest.raises(Conflict, match="job was done with the 2 rows"):
        publish(client, [rows(payload=["a", "b", "c"])], topic=topic)
    assert publish(client, [rows(payload=["a", "b"])], topic=topic).passed_over == 2
    assert len(read(client, topic)) == 2


def test_rows_that_go_to_other_partitions_are_others(client: Client, topic: str) -> None:
    """Nothing is passed over, and nothing is sent, since the last batch waits for the look."""
    publish(client, [rows(payload=["a", "b"], partition=[0, 0])], topic=topic, partitions=2)
    with pytest.raises(Conflict, match="holds 2 rows of job, which has only 0 now"):
        publish(client, [rows(payload=["c", "d"], partition=[1, 1])], topic=topic, repeated=True)
    assert len(read(client, topic)) == 2


def test_the_newest_batch_that_is_there_is_compared(client: Client, topic: str) -> None:
    publish(client, [rows(payload=["a", "b"]), rows(payload=["c"])], topic=topic)
    with NumberedProducer(client, topic, "job") as producer:
        partition, known = producer.stored_batches(0)
    assert known == ((0, 0, 2), (2, 2, 1))
    newest, first = (stored_rows(client, partition, batches) for batches in (known, known[:1]))
    assert newest is not None and (newest.end, newest.last) == (3, True)
    assert first is not None and (first.end, first.last) == (2, False) and first.digest != newest.digest
    assert stored_rows(client, partition, [(0, 500_000, 10)]) is None
    assert stored_rows(client, partition, []) is None


def test_a_broker_of_before_has_its_batches_read(
    client: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = [rows(payload=["a", "b"]), rows(payload=["c"])]
    publish(client, batches, topic=topic)
    with NumberedProducer(client, topic, "job") as producer:
        partition, known = producer.stored_batches(0)
    marked = stored_rows(client, partition, known)

    def unknown(*_: Any, **__: Any) -> Any:
        raise InvalidArgument("operation 'row_mark' is not known")

    monkeypatch.setattr(passed_over, "asked", unknown)
    assert marked is not None and stored_rows(client, partition, known) == marked
    assert stored_rows(client, partition, [(0, 500_000, 10)]) is None
    assert publish(client, batches, topic=topic).passed_over == 3


def test_rows_that_are_never_acknowledged_end_the_wait(
    client: Client, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = [{"mark": "", "waiting": True}] * 2 + [{"mark": RowMark("ab", True).text, "waiting": False}]
    monkeypatch.setattr(passed_over, "asked", lambda *_, **__: told.pop(0) if len(told) > 1 else told[0])
    found = stored_rows(client, topic, [(0, 0, 2)])
    assert found is not None and (found.end, found.digest, found.last) == (2, "ab", True)
    told[:] = [{"mark": "", "waiting": True}]
    monkeypatch.setattr(passed_over, "_STORED_S", 0.05)
    with pytest.raises(OperationTimeout, match="at offset 0 are not acknowledged"):
        stored_rows(client, topic, [(0, 0, 2)])


def test_another_round_is_other_work(client: Client, topic: str) -> None:
    batch = rows(payload=["a", "b"])
    for number in (0, 1, 1, 2):
        publish(client, [batch], round_number=number, topic=topic)
    assert len(read(client, topic)) == 6


def test_schema_versions_do_not_share_a_batch(client: Client, topic: str) -> None:
    versions = [1, 1, 2, 2, 2, 1]
    batch = rows(
        payload=[str(n) for n in range(6)],
        schema_id=pa.array([9] * 6, pa.int64()),
        schema_version=pa.array(versions, pa.int32()),
    )
    done = publish(client, [batch], topic=topic)
    assert done.batches == 3
    assert [message.schema_version for message in read(client, topic)] == versions


def test_batches_have_the_size_that_was_asked_for(client: Client, topic: str) -> None:
    batch = rows(
        payload=pa.array([bytes(1000)] * 1000),
        attributes=pa.array([[("a", "x" * 1000)]] * 1000, MAPPING),
    )
    done = publish(client, [batch.slice(10)], topic=topic, batch_bytes=100_000)
    assert done.batches == 990 // 49 + 1
    assert done.payload_bytes == 990_000
    assert len(read(client, topic)) == 990


@pytest.mark.parametrize(
    ("batch", "what"),
    [
        (lambda: rows(payload=["a", None]), "payload of row 1 is null"),
        (lambda: rows(key=["a"]), "no column payload"),
        (lambda: rows(payload=["a"], topic=pa.array([None], pa.string())), "topic of row 0 is null"),
        (lambda: rows(payload=["a"]), "no column topic"),
    ],
)
def test_rows_that_are_no_records(client: Client, batch: Any, what: str) -> None:
    with pytest.raises(InvalidArgument, match=what):
        publish(client, [batch()])


def test_times_are_all_there_or_none(client: Client, topic: str) -> None:
    kind = pa.timestamp("us", "UTC")
    with pytest.raises(InvalidArgument, match="publish_time is null in some rows"):
        publish(client, [rows(payload=["a", "b"], publish_time=pa.array([1, None], kind))], topic=topic)
    publish(client, [rows(payload=["a"], publish_time=pa.array([None], kind))], topic=topic)
    assert read(client, topic)[0].publish_time.year >= 2026


@pytest.mark.parametrize("partition", [5, -1])
def test_a_partition_that_does_not_exist(client: Client, topic: str, partition: int) -> None:
    with pytest.raises(InvalidArgument, match=f"partition {partition} of"):
        publish(client, [rows(payload=["a"], partition=pa.array([partition], pa.int32()))], topic=topic)


def test_a_failure_is_raised_by_the_task(client: Client, topic: str) -> None:
    client.admin.create_topic(topic, max_record_bytes=1024)
    with pytest.raises(RecordTooLarge):
        publish(client, [rows(payload=["a", "b" * 3000])], topic=topic)
    assert publish(client, [rows(payload=["a", "b" * 1000])], topic=topic).passed_over == 0


def test_nothing_is_no_work(client: Client) -> None:
    assert publish(client, [rows(payload=pa.array([], pa.binary()))]) == Progress()
