"""History that lies in an object store, on disk and with the broker at once: each record comes once."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("pyarrow")

import danube.sync
from danube.errors import Damage, NotFound, StoreUnavailable
from danube.spark.history.decode import COLUMNS, Decoder, Losses
from danube.spark.history.options import read_options
from danube.spark.history.places import DataDirectory, StorePlace, open_place
from danube.spark.history.plan import pieces_of, plan_splits
from danube.spark.history.reading import read_split
from danube.spark.history.selecting import Catalogue
from tests.broker_process import BrokerProcess, wait_until
from tests.s3_server import S3Server
from tests.spark.history import TOPIC, Journal, digest_of_batches, digest_of_frame, publish
from tests.spark.test_read_local import offsets_of

pytestmark = pytest.mark.e2e

TIERED = {
    "DANUBE_STORAGE__LOCAL_RETENTION_TIME": "1ms",
    "DANUBE_STORAGE__CACHE_SIZE": "32MiB",
}


class Tiered(NamedTuple):
    """A running broker with a store: ``storage`` and ``options`` are those of a reader."""

    broker: BrokerProcess
    journal: Journal
    storage: str
    options: dict[str, str]

    def described(self) -> dict[str, Any]:
        with danube.sync.connect(self.broker.address) as client:
            return dict(client.admin.describe_topic(TOPIC).partitions[0])

    def catalogued(self) -> bool:
        """Whether the store knows the topic."""
        catalogue = Catalogue(
            read_options({"topic": "/*/*", "storage": self.storage, **self.options}, streaming=False)
        )
        try:
            return bool(catalogue.topics())
        except NotFound:
            return False
        finally:
            catalogue.close()


@pytest.fixture(scope="module", params=["s3", "directory"])
def tiered(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiered]:
    """Records in the store alone, then records on this host alone, by a broker that was killed twice."""
    folder = tmp_path_factory.mktemp("tiered")
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("s3_server")
        bucket = server.make_bucket()
        environment, storage = server.environ(bucket, "deep/er"), f"s3://{bucket}/deep/er"
        options = {
            "s3.endpoint": server.endpoint,
            "s3.accessKey": server.access_key,
            "s3.secret_key": server.secret_key,
        }
        arguments: list[str] = []
    else:
        store = folder / "store"
        store.mkdir()
        environment, storage, options = {}, f"file://{store}", {}
        arguments = ["--storage", storage]
    running = BrokerProcess(folder / "data", environment=TIERED | environment, arguments=arguments)
    made = Tiered(running, Journal(), storage, options)
    try:
        running.start()
        with danube.sync.connect(running.address) as client:
            client.admin.create_topic(TOPIC)
        for seed in range(2):
            kill_while_sending(made, seed)
            seal(running)
            count = len(made.journal.records)
            wait_until(lambda: made.described()["local_start"] >= count, 60, "everything evicted")  # noqa: B023
        publish(running, made.journal, random.Random(7), rounds=6)
        wait_until(made.catalogued, 60, "a copy of the metadata in the store")
        yield made
    finally:
        running.kill()


def seal(broker: BrokerProcess) -> None:
    """By hand, for what a broker seals by age may have left the host before a test looks."""
    with danube.sync.connect(broker.address) as client:
        client.admin.seal(TOPIC)


def kill_while_sending(tiered: Tiered, seed: int) -> None:
    sender = threading.Thread(
        target=publish, args=(tiered.broker, tiered.journal, random.Random(seed)), kwargs={"rounds": 8}
    )
    sender.start()
    sender.join(0.3)
    tiered.broker.kill()
    tiered.broker.start()
    sender.join(60)
    assert not sender.is_alive()


def read_all(topic: str = TOPIC, losses: Losses | None = None, **given: str) -> list[Any]:
    options = read_options({"topic": topic, **given}, streaming=False)
    catalogue = Catalogue(options)
    try:
        known = catalogue.partitions(unsynced=True)
        planned = []
        for part in known:
            selection = part.selection(part.start, part.stored_end)
            planned.append((selection, pieces_of(selection)[0]))
        decoder = Decoder(COLUMNS.names)
        return [
            batch
            for split in plan_splits(planned, split_bytes=50_000)
            for batch in read_split(split, catalogue.places, decoder, losses or Losses())
        ]
    finally:
        catalogue.close()


def test_places_complete_each_other(tiered: Tiered) -> None:
    data = str(tiered.broker.data_dir)
    from_store = read_all(storage=tiered.storage, **tiered.options)
    uploaded = tiered.described()["uploaded_end"]
    assert offsets_of(from_store) == list(range(len(offsets_of(from_store)))) and uploaded > 0
    local = offsets_of(read_all(storage=data))
    assert local and local[0] > 0, "what was uploaded has left this host"
    for storage in (f"{data},{tiered.storage}", f"{tiered.storage},{data}"):
        batches = read_all(storage=storage, **tiered.options)
        assert digest_of_batches(batches) == tiered.journal.digest()


def test_what_kind_of_place_a_name_is(tiered: Tiered) -> None:
    data = str(tiered.broker.data_dir)
    assert isinstance(open_place(data), DataDirectory)
    assert isinstance(open_place(f"file://{data}"), DataDirectory)
    place = open_place(tiered.storage)
    assert isinstance(place, StorePlace) and repr(place) == f"StorePlace({tiered.storage!r})"
    with pytest.raises(NotFound, match="there is no directory"):
        open_place("/no/such/place")


def test_a_damaged_object_is_an_error_or_counted(
    broker: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    store.mkdir()
    running = broker(environment=TIERED, arguments=["--storage", f"file://{store}"])
    journal = Journal()
    with danube.sync.connect(running.address) as client:
        client.admin.create_topic(TOPIC)
    publish(running, journal, random.Random(3), rounds=20)
    seal(running)
    tiered = Tiered(running, journal, f"file://{store}", {})
    count = len(journal.records)
    wait_until(lambda: tiered.described()["uploaded_end"] >= count, 40, "everything uploaded")
    running.stop()
    path = max(store.rglob("*.seg"), key=lambda found: found.stat().st_size)
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(Damage, match=r"\.seg is damaged at byte \d+"):
        read_all(storage=tiered.storage)
    losses = Losses(allowed=True)
    found = offsets_of(read_all(storage=tiered.storage, losses=losses))
    assert found == sorted(set(found))
    assert 0 < losses.record_count == count - len(found)
    path.unlink()
    losses = Losses(allowed=True)
    found = offsets_of(read_all(storage=tiered.storage, losses=losses))
    assert 0 < losses.record_count == count - len(found)


def test_a_store_that_does_not_answer_is_told() -> None:
    storage = {"s3.endpoint": "http://127.0.0.1:9", "s3.accessKey": "a", "s3.secretKey": "hidden-secret"}
    options = read_options({"topic": TOPIC, "storage": "s3://bucket/x", **storage}, streaming=False)
    assert "hidden-secret" not in repr(options)
    with pytest.raises(StoreUnavailable) as failure:
        Catalogue(options).topics()
    assert "hidden-secret" not in str(failure.value)


def test_spark_reads_objects_files_and_the_tail_as_one_topic(
    spark: Any, tiered: Tiered, checkpoint: str
) -> None:
    pytest.importorskip("pyspark")
    from tests.spark.test_read_spark import streamed

    storage = f"{tiered.broker.data_dir},{tiered.storage}"
    reader = spark.read.format("danube").option("storage", storage).option("topic", TOPIC)
    frame = reader.options(**tiered.options).option("broker", tiered.broker.address).load()
    assert frame.count() == len(tiered.journal.records)
    assert digest_of_frame(frame) == tiered.journal.digest()
    more = {**tiered.options, "broker": tiered.broker.address, "maxRecordsPerTrigger": 900}
    rows, _ = streamed(spark, storage, checkpoint, "tiered", **more)
    publish(tiered.broker, tiered.journal, random.Random(8), rounds=3)
    rest, _ = streamed(spark, storage, checkpoint, "tiered again", **more)
    from tests.spark.history import digest

    assert digest([*rows, *rest]) == tiered.journal.digest()
