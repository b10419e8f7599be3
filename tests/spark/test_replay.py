"""A replay stores every record once: ranges, targets, rates, reruns, kills half-way.  No Spark here."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import danube.host.clock
import danube.sync
from danube.client.blocking.client import Client
from danube.core.batch.checksum import content_hash
from danube.errors import (
    Conflict,
    ConnectionFailed,
    Damage,
    DanubeError,
    InvalidArgument,
    InvalidName,
    OffsetOutOfRange,
    PolicyMismatch,
    TopicNotFound,
)
from danube.spark.failures import error_from_spark
from danube.spark.jobs.replay import replay
from danube.spark.jobs.replay import target as replay_target
from danube.spark.jobs.replay.state import ReplayState, load_state, save_state
from danube.spark.jobs.replay.target import LaneRange, Target, Throttle, file_name, producer_name, write_lane
from danube.spark.sink.publishing import PublishOptions
from tests.broker_process import BrokerProcess, wait_until
from tests.spark.drivers import DRIVER_S, kill_tree, start_driver, wait_for_driver

pytest.importorskip("pyarrow")
import pyarrow.parquet

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

SOURCE = "/default/source"
COUNT = 30_000
PARTITIONS = 3
Sent = dict[int, list[tuple[Any, ...]]]


@pytest.fixture(scope="module")
def process(process: BrokerProcess) -> BrokerProcess:
    """A broker with one topic of keyed records, written by two producers."""
    with danube.sync.connect(process.address) as client:
        for name, first in (("one", 0), ("two", COUNT // 2)):
            fill(client, SOURCE, range(first, first + COUNT // 2), name)
    return process


@pytest.fixture(scope="module")
def sent(process: BrokerProcess) -> Sent:
    """What the topic holds before anything is replayed."""
    with danube.sync.connect(process.address) as client:
        return contents(client, SOURCE)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """Another cluster; who kills it starts it again."""
    with BrokerProcess(tmp_path_factory.mktemp("other") / "data") as broker:
        yield broker


@pytest.fixture
def client(process: BrokerProcess) -> Iterator[Client]:
    with danube.sync.connect(process.address) as connected:
        yield connected


@pytest.fixture
def topic(request: pytest.FixtureRequest) -> str:
    return "/default/" + re.sub("[^a-z_0-9-]", "-", request.node.name, flags=re.IGNORECASE)


@pytest.fixture
def given(process: BrokerProcess, topic: str, tmp_path: Path) -> dict[str, str]:
    """The options of a replay of everything into ``topic``."""
    return {
        "storage": str(process.data_dir),
        "topic": SOURCE,
        "to": process.address,
        "toTopic": topic,
        "state": str(tmp_path / "state.json"),
        "processes": "1",
    }


def fill(client: Client, topic: str, numbers: range, name: str, partitions: int = PARTITIONS) -> None:
    with client.producer(topic, name=name, partitions=partitions, batch_bytes=8192) as producer:
        producer.send_many(
            [b"%08d" % number for number in numbers],
            [f"k{number % 97}" if number % 5 else None for number in numbers],
            [{"number": str(number), "odd": str(number % 2)} for number in numbers],
        )


def ends(client: Client, topic: str) -> list[int]:
    return [int(part["log_end"]) for part in client.admin.describe_topic(topic).partitions]


def contents(client: Client, topic: str) -> dict[int, list[tuple[Any, ...]]]:
    """Payload, key, attributes and publish time of every record, in order, by partition."""
    expected = sum(ends(client, topic))
    found: list[Any] = []
    with client.consumer(topic, f"check-{expected}", "exclusive", start="earliest") as consumer:
        while len(found) < expected:
            found.append(consumer.receive(timeout=10))
    by_partition: dict[int, list[tuple[Any, ...]]] = {}
    for one in sorted(found, key=lambda message: (message.partition, message.offset)):
        record = (one.payload, one.key, one.attributes, one.publish_time_us)
        by_partition.setdefault(one.partition, []).append(record)
    return by_partition


def digest(by_partition: dict[int, list[tuple[Any, ...]]]) -> str:
    return content_hash(repr(sorted(by_partition.items())).encode()).hex()


# -- what is stored -----------------------------------------------------------------------------------


def test_a_copy_is_the_same_to_the_hash(
    client: Client, given: dict[str, str], topic: str, sent: Sent
) -> None:
    report = replay.run(given)
    assert report.counts["records"] == report.counts["offered"] == COUNT
    assert report.counts["passed_over"] == 0 and report.exit_code == 0
    assert ends(client, topic) == ends(client, SOURCE)
    assert digest(contents(client, topic)) == digest(sent)
    again = replay.run(given)
    assert again.counts["passed_over"] == COUNT and again.counts["payload_bytes"] == 0
    assert ends(client, topic) == ends(client, SOURCE)


def test_the_order_of_a_key_is_kept_in_other_partitions(
    client: Client, given: dict[str, str], topic: str, sent: Sent
) -> None:
    client.admin.create_topic(topic, partitions=5)
    replay.run(given)
    replay.run(given)
    found = contents(client, topic)
    assert sum(map(len, found.values())) == COUNT
    assert sorted(record for part in found.values() for record in part) == sorted(
        record for part in sent.values() for record in part
    )
    by_key: dict[str, list[int]] = {}
    for part, records in found.items():
        for payload, key, _, _ in records:
            if key is not None:
                by_key.setdefault(f"{key} in {part}", []).append(int(payload))
    assert len(by_key) == 97
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def test_into_another_cluster(given: dict[str, str], topic: str, other: BrokerProcess, sent: Sent) -> None:
    replay.run({**given, "to": other.address, "durability": "fsync", "compression": "lz4"})
    with danube.sync.connect(other.address) as there:
        assert there.admin.topic(topic).durability == "fsync"
        assert digest(contents(there, topic)) == digest(sent)


def test_a_range_of_offsets(client: Client, given: dict[str, str], topic: str, sent: Sent) -> None:
    first, last = {"0": 100, "1": -2, "2": 50}, {"0": 300, "1": 10, "2": -1}
    given |= {"startingOffsets": json.dumps({SOURCE: first}), "endingOffsets": json.dumps({SOURCE: last})}
    replay.run(given)
    found = contents(client, topic)
    assert found == {0: sent[0][100:300], 1: sent[1][:10], 2: sent[2][50:]}


def test_a_range_of_time(client: Client, process: BrokerProcess, given: dict[str, str], topic: str) -> None:
    source = f"{topic}-source"
    fill(client, source, range(1000), "one", partitions=1)
    with client.consumer(source, "look", "exclusive", start=999) as consumer:
        between_us = consumer.receive(timeout=10).publish_time_us + 500_000
    wait_until(lambda: danube.host.clock.wall_us() > between_us + 500_000, 10, "a second passes")
    fill(client, source, range(1000, 1500), "two", partitions=1)
    moment = danube_time(between_us)
    replay.run({**given, "topic": source, "startingTimestamp": moment})
    assert [int(record[0]) for record in contents(client, topic)[0]] == list(range(1000, 1500))
    replay.run(
        {
            **given,
            "topic": source,
            "endingTimestamp": moment,
            "toTopic": topic + "-2",
            "state": given["state"] + "2",
        }
    )
    assert [int(record[0]) for record in contents(client, topic + "-2")[0]] == list(range(1000))


def danube_time(moment_us: int) -> str:
    from datetime import UTC, datetime

    return datetime.fromtimestamp(moment_us / 1e6, UTC).isoformat()


def test_the_tail_of_a_live_broker(
    client: Client, process: BrokerProcess, given: dict[str, str], topic: str, sent: Sent
) -> None:
    del given["storage"]
    replay.run({**given, "broker": process.address})
    assert digest(contents(client, topic)) == digest(sent)


def test_times_and_schemas_may_stay_behind(client: Client, given: dict[str, str], topic: str) -> None:
    before = danube.host.clock.wall_us()
    replay.run({**given, "publishTime": "now", "schemas": "drop"})
    assert all(record[3] >= before for part in contents(client, topic).values() for record in part)


@pytest.mark.parametrize("file_format", ["parquet", "arrow"])
def test_into_files(
    client: Client, given: dict[str, str], tmp_path: Path, file_format: str, sent: Sent
) -> None:
    del given["to"], given["toTopic"]
    given |= {"toDirectory": str(tmp_path / "out"), "format": file_format}
    report = replay.run(given)
    assert report.counts["records"] == COUNT
    names = sorted(os.listdir(tmp_path / "out"))
    assert len(names) == PARTITIONS and all(name.endswith(file_format) for name in names)
    for partition, name in enumerate(names):
        path = tmp_path / "out" / name
        table = (
            pyarrow.parquet.read_table(path)
            if file_format == "parquet"
            else pyarrow.ipc.open_file(path).read_all()
        )
        assert table.column("payload").to_pylist() == [record[0] for record in sent[partition]]
        assert table.column("offset").to_pylist() == list(range(len(sent[partition])))
    stamps = [os.stat(tmp_path / "out" / name).st_mtime_ns for name in names]
    (tmp_path / "out" / f".{names[0]}.left").write_bytes(b"by a run that was killed")
    (tmp_path / "out" / names[1]).unlink()
    again = replay.run(given)
    assert again.counts["records"] == COUNT
    assert again.counts["passed_over"] == COUNT - len(sent[1])
    assert sorted(name for name in os.listdir(tmp_path / "out") if not name.startswith(".")) == names
    assert [os.stat(tmp_path / "out" / name).st_mtime_ns for name in names][::2] == stamps[::2]


def test_a_dry_run_changes_nothing(client: Client, given: dict[str, str], topic: str, tmp_path: Path) -> None:
    report = replay.run({**given, "dryRun": "true", "report": str(tmp_path / "report.json")})
    assert report.counts["records"] == COUNT
    assert json.loads((tmp_path / "report.json").read_text())["facts"]["dry_run"] is True
    assert not Path(given["state"]).exists()
    with pytest.raises(TopicNotFound):
        client.admin.topic(topic)


# -- again, after something happened --------------------------------------------------------------------


@pytest.mark.parametrize("kept", [True, False])
def test_a_driver_that_was_killed(
    client: Client, given: dict[str, str], topic: str, tmp_path: Path, kept: bool, sent: Sent
) -> None:
    """Twice half-way by SIGKILL; the state it left is used, or lost."""
    client.admin.create_topic(topic, partitions=PARTITIONS)
    slow = {**given, "maxRecordsPerSecond": "6000", "batchBytes": "1KiB", "processes": "2"}
    output = tmp_path / "output"
    for share in (COUNT // 5, COUNT // 2):
        stop_at = max(share, sum(ends(client, topic)) + 1)  # the first kill may have come late
        driver = start_replay(slow, output)
        try:
            wait_for_driver(
                driver,
                lambda stop_at=stop_at: sum(ends(client, topic)) >= stop_at,
                "the replay publishes",
                output,
            )
        finally:
            kill_tree(driver)
        if not kept:
            Path(given["state"]).unlink()
    assert 0 < sum(ends(client, topic)) < COUNT
    report = replay.run(given)
    assert COUNT // 2 <= report.counts["passed_over"] < COUNT
    assert ends(client, topic) == ends(client, SOURCE)
    assert digest(contents(client, topic)) == digest(sent)


def start_replay(given: dict[str, str], output: Path) -> subprocess.Popen[bytes]:
    words = ["--local"]
    for name, value in given.items():
        words += ["--" + "".join(f"-{one.lower()}" if one.isupper() else one for one in name), value]
    return start_driver("danube.spark.jobs.replay.replay", words, output)


def test_a_target_that_was_killed(
    given: dict[str, str], topic: str, other: BrokerProcess, tmp_path: Path, sent: Sent
) -> None:
    output = tmp_path / "output"
    with danube.sync.connect(other.address) as there:
        there.admin.create_topic(topic, partitions=PARTITIONS, durability="fsync")
        driver = start_replay({**given, "to": other.address, "maxRecordsPerSecond": "10000"}, output)
        wait_for_driver(driver, lambda: sum(ends(there, topic)) > COUNT // 4, "the replay publishes", output)
    other.kill()
    other.start()
    assert driver.wait(DRIVER_S) == 0, output.read_text()[-4000:]
    with danube.sync.connect(other.address) as there:
        assert digest(contents(there, topic)) == digest(sent)


def test_a_lane_that_begins_while_its_target_restarts_waits_for_it(other: BrokerProcess, topic: str) -> None:
    with danube.sync.connect(other.address) as there:
        there.admin.create_topic(topic)
    target = Target(job="j", publish=PublishOptions(broker=other.address, topic=topic))
    other.kill()
    with pytest.raises(ConnectionFailed):
        replay_target._reached(danube.sync.connect(other.address), wait_s=0.0)
    with ThreadPoolExecutor() as pool:
        lane = pool.submit(write_lane, [], LaneRange(0, SOURCE, 1, 0, 0, 0), target)
        other.start()
        assert lane.result(60).rows == 0


def test_what_came_since_is_left_for_another_job(client: Client, given: dict[str, str], topic: str) -> None:
    source = f"{topic}-source"
    fill(client, source, range(1000), "one")
    given["topic"] = source
    replay.run(given)
    fill(client, source, range(1000, 1200), "two")
    assert replay.run(given).counts["passed_over"] == 1000
    assert sum(ends(client, topic)) == 1000
    Path(given["state"]).unlink()
    assert replay.run(given).counts["records"] == 1200
    assert digest(contents(client, topic)) == digest(contents(client, source))


def test_another_job_is_other_work(client: Client, given: dict[str, str], topic: str) -> None:
    replay.run({**given, "job": "one"})
    with pytest.raises(Conflict, match="belongs to another replay"):
        replay.run({**given, "job": "two"})
    with pytest.raises(Conflict, match="belongs to another replay"):
        replay.run({**given, "job": "one", "publishTime": "now"})
    replay.run({**given, "job": "two", "state": given["state"] + "-2"})
    assert sum(ends(client, topic)) == 2 * COUNT


def test_a_target_that_got_more_partitions(client: Client, given: dict[str, str], topic: str) -> None:
    replay.run(given)
    client._connection.run(_ask(client, "add_partitions", topic=topic, partitions=PARTITIONS + 1))
    with pytest.raises(Conflict, match="has 4 partitions, it had 3"):
        replay.run(given)


def _ask(client: Client, op: str, **arguments: Any) -> Any:
    return (yield client._session.admin(op, **arguments))


def test_records_that_are_gone(client: Client, given: dict[str, str], topic: str) -> None:
    """A state that names records which the source has not: nothing is published."""
    read = replay.read_replay_options(given)
    lanes = [LaneRange(0, SOURCE, client.admin.topic(SOURCE).topic_id, 0, 0, 10**9)]
    save_state(Path(given["state"]), ReplayState(1, read.target.job, read.work, lanes, PARTITIONS, True))
    with pytest.raises(OffsetOutOfRange, match=r"offset 1000000000 .* ends at"):
        replay.run(given)
    lanes[0] = LaneRange(0, SOURCE, 99, 0, 0, 10)
    save_state(Path(given["state"]), ReplayState(1, read.target.job, read.work, lanes, PARTITIONS, True))
    with pytest.raises(Damage, match="the topic was deleted"):
        replay.run(given)
    with pytest.raises(TopicNotFound):
        client.admin.topic(topic)


# -- rates ----------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now_ns = 1_000_000_000

    def sleep(self, seconds: float) -> None:
        assert 0 <= seconds <= 1
        self.now_ns += int(seconds * 1e9)


@pytest.mark.parametrize(("octets", "records"), [(1000, 0), (0, 100), (1000, 100), (4000, 100)])
def test_a_rate_is_kept(octets: int, records: int) -> None:
    clock = Clock()
    throttle = Throttle(octets, records, lambda: clock.now_ns, clock.sleep)
    start_ns = clock.now_ns
    for _ in range(100):
        throttle.spend(10, 100)
    seconds = (clock.now_ns - start_ns) / 1e9
    expected = max(10_000 / octets if octets else 0, 1000 / records if records else 0)
    assert expected - 0.01 <= seconds <= expected + 0.1


def test_no_rate_is_no_wait() -> None:
    throttle = Throttle(sleep=lambda _: pytest.fail("waited"))
    throttle.spend(10**9, 10**12)


def test_a_rate_is_for_all_lanes(given: dict[str, str]) -> None:
    report = replay.run({**given, "maxRecordsPerSecond": "10000", "processes": "1"})
    assert report.seconds >= 1.5


# -- what is refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "kind", "what"),
    [
        ({"toTopc": "x"}, InvalidArgument, "did you mean toTopic"),
        ({"to": ""}, InvalidArgument, "where the records go is not known"),
        ({"toDirectory": "/tmp/x"}, InvalidArgument, "both a topic and a directory"),
        ({"toTopic": "nowhere"}, InvalidName, "nowhere"),
        ({"topic": "/default/a,/default/b"}, InvalidArgument, "one topic"),
        ({"topic": "/default/*"}, InvalidArgument, "one topic"),
        ({"where": "offset > 3"}, InvalidArgument, "evaluated by Spark"),
        ({"job": "a/b"}, InvalidArgument, "job 'a/b' is not valid"),
        ({"partitioning": "some"}, InvalidArgument, "partitioning"),
        ({"durability": "most"}, InvalidArgument, "most"),
        ({"batchBytes": "1"}, InvalidArgument, "batchBytes"),
        ({"startingOffsets": "soon"}, InvalidArgument, "startingOffsets"),
        ({"topic": "/default/missing"}, TopicNotFound, "missing"),
    ],
)
def test_what_cannot_be_meant(
    given: dict[str, str], change: dict[str, str], kind: type[DanubeError], what: str
) -> None:
    with pytest.raises(kind, match=what):
        replay.run({**given, **change})


def test_a_topic_is_not_replayed_into_itself(process: BrokerProcess, given: dict[str, str]) -> None:
    with pytest.raises(InvalidArgument, match="into itself"):
        replay.run({**given, "broker": process.address, "toTopic": SOURCE})


def test_partitions_that_cannot_be_kept(client: Client, given: dict[str, str], topic: str) -> None:
    client.admin.create_topic(topic, partitions=2)
    with pytest.raises(PolicyMismatch, match="it has 2 and the source has 3"):
        replay.run({**given, "partitioning": "keep"})


def test_the_command_line_tells_by_its_exit_code(
    given: dict[str, str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ["--local", "--storage", given["storage"], "--topic", SOURCE, "--state", given["state"]]
    words += ["--to", given["to"], "--to-topic", given["toTopic"], "--report", str(tmp_path / "report.json")]
    assert replay.main(words) == 0
    assert f"replayed {COUNT} of {COUNT} records" in capfd.readouterr().err
    assert len(json.loads((tmp_path / "report.json").read_text())["facts"]["lanes"]) == PARTITIONS
    assert replay.main([*words, "--topic", "/default/nothing", "--state", given["state"] + "-2"]) == 3
    assert "there is no topic /default/nothing" in capfd.readouterr().err
    assert replay.main([*words, "--to-topic", "bad name"]) == 2
    with pytest.raises(SystemExit) as left:
        replay.main([*words, "--unknown", "1"])
    assert left.value.code == 2


# -- small things -------------------------------------------------------------------------------------------


def test_a_state_comes_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "state.json"
    assert load_state(path, "j", "w") is None
    state = ReplayState(1, "j", "w", [LaneRange(0, SOURCE, 7, 0, 5, 9)], 3, True)
    save_state(path, state)
    assert load_state(path, "j", "w") == state
    for job, work in (("k", "w"), ("j", "v")):
        with pytest.raises(Conflict):
            load_state(path, job, work)
    path.write_bytes(b"{}")
    with pytest.raises(Damage, match="no state of a replay"):
        load_state(path, "j", "w")


def test_names_follow_from_the_work() -> None:
    lane = LaneRange(1, SOURCE, 0x2A, 1, 500, 900)
    assert producer_name("job", lane) == "replay/job/2a-1@500"
    assert file_name(lane, "arrow") == "default-source-1-00000000000000000500-00000000000000000900.arrow"


def test_a_lane_without_rows_makes_no_file(tmp_path: Path) -> None:
    lane = LaneRange(0, SOURCE, 1, 0, 0, 0)
    report = write_lane([], lane, Target(job="j", directory=str(tmp_path)))
    assert report.rows == 0 and os.listdir(tmp_path) == []


def test_an_error_of_a_task_is_the_error_again() -> None:
    kind = type("PythonException", (Exception,), {"__module__": "pyspark.errors"})
    text = "[X] Job aborted\nTraceback ...\ndanube.errors.TopicNotFound: there is no topic /a/b\n\n\tat org.x"
    known = error_from_spark(kind(text))
    assert isinstance(known, TopicNotFound) and known.what == "there is no topic /a/b"
    assert error_from_spark(kind("java.lang.Error: x")) is None
    assert error_from_spark(kind("danube.errors.NoSuchThing: x")) is None
    assert error_from_spark(ValueError("danube.errors.TopicNotFound: x")) is None
