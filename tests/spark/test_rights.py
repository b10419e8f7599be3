"""Jobs whose principal has one built-in role: consumer reads, producer writes, and neither needs more."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from danube import sync
from danube.client.blocking.client import Client
from danube.core.protocol.native import Kind, Subscribe
from danube.errors import Conflict, NotAllowed
from danube.spark.history import tail as tail_module
from danube.spark.history.decode import Decoder, Losses
from danube.spark.history.options import ReadOptions, read_options
from danube.spark.history.plan import Split
from danube.spark.history.reading import read_split
from danube.spark.history.selecting import Catalogue, tail_runs
from danube.spark.history.tail import Tail
from danube.spark.sink.publishing import Progress, Publisher, PublishOptions
from tests.broker_process import Brokers
from tests.e2e.authority_site import Site, token

pa = pytest.importorskip("pyarrow")

TOPIC = "/team/orders"
RECORDS = 10


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A namespace whose subscriptions are named after who consumes; accounts are named after their role."""
    brokers = Brokers(tmp_path_factory.mktemp("rights"))
    made = Site(brokers.make, workers=1)  # a right that was given is known at once
    made.namespace("team")
    made.admin.admin.set_namespace_policy("team", subscription_auth="prefix")
    for role in ("consumer", "producer", "viewer"):
        made.bind(role, role, "namespace", "team")
    with made.admin.producer(TOPIC, partitions=2) as producer:
        producer.send_many([b"%d" % number for number in range(RECORDS)])
    made.bind("bystander", "consumer", "topic", "/team/other")
    yield made
    made.close()
    brokers.kill()


@pytest.fixture
def role(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let jobs of this process be the service account of that name."""
    return lambda name: monkeypatch.setenv("DANUBE_TOKEN", token(name))


@pytest.fixture
def topic(site: Site, request: pytest.FixtureRequest) -> str:
    """A topic of the test's own, with one partition."""
    name = f"/team/{request.node.name}"
    site.admin.admin.create_topic(name)
    return name


def options(site: Site, topic: str = TOPIC, **given: str) -> ReadOptions:
    return read_options({"topic": topic, "broker": site.process.address, **given}, streaming=False)


def bounds(asked: ReadOptions) -> list[tuple[int, int]]:
    """Start and end of each partition."""
    catalogue = Catalogue(asked)
    try:
        known = catalogue.partitions(unsynced=True)
        start = catalogue.resolve(asked.starting, known, ending=False)
        end = catalogue.resolve(asked.ending, known, ending=True)
        return [(start[part.key], end[part.key]) for part in known]
    finally:
        catalogue.close()


def payloads(asked: ReadOptions) -> list[bytes]:
    """What a read with these options gives."""
    catalogue = Catalogue(asked)
    try:
        known = catalogue.partitions(unsynced=True)
        runs = [run for part in known for run in tail_runs(part, 0, part.end, [])]
    finally:
        catalogue.close()
    found = read_split(Split(tuple(runs)), (), Decoder(("payload",)), Losses(allowed=False), asked.broker)
    return sorted(payload for batch in found for payload in batch.column(0).to_pylist())


# -- reading ------------------------------------------------------------------------------------------


def test_a_consumer_reads_and_leaves_nothing_behind(site: Site, role: Any) -> None:
    role("consumer")
    assert payloads(options(site)) == [b"%d" % number for number in range(RECORDS)]
    assert sum(end for _, end in bounds(options(site, startingTimestamp="0"))) == RECORDS
    assert site.admin.admin.list_subscriptions(TOPIC) == []


def test_a_consumer_is_told_how_far_its_own_read_is(site: Site, role: Any, topic: str) -> None:
    """By this a read ends where the last offsets have no record, and counts what was lost."""
    with site.admin.producer(topic) as producer:
        for _ in range(2):
            producer.send_many([b"x"] * 4)
    role("consumer")
    tail = Tail(site.process.address)
    try:
        batches = tail._batches(topic, 0, 8, None)
        next(batches)
        (own,) = site.admin.admin.list_subscriptions(topic)
        assert own.subscription.startswith("consumer-danube-spark-")
        told = Tail._state(tail._live(), topic, own.subscription)
        assert told["subscription"] == own.subscription and told["damaged"] == told["expired"] == 0
        batches.close()
        assert site.admin.admin.list_subscriptions(topic) == []
    finally:
        tail.close()


def test_progress_that_may_not_be_told_is_an_error(site: Site, role: Any) -> None:
    """Else lost records would go uncounted."""
    role("viewer")
    with sync.connect(site.process.address) as client, pytest.raises(NotAllowed):
        Tail._state(client, f"{TOPIC}-part-0", "viewer-danube-spark-1")


def test_a_viewer_sees_the_ends_and_reads_nothing(site: Site, role: Any) -> None:
    role("viewer")
    assert sum(end for _, end in bounds(options(site))) == RECORDS
    with pytest.raises(NotAllowed, match="no permission Consume"):
        payloads(options(site))


def test_who_may_neither_read_nor_write_is_told_no_end(site: Site, role: Any) -> None:
    role("bystander")
    with sync.connect(site.process.address) as client:
        with pytest.raises(NotAllowed):
            client.admin.topic_ends(TOPIC)
        with pytest.raises(NotAllowed, match="no permission Consume"):
            tail_module.asked(client, "partition_ends", f"{TOPIC}-part-0", 10)


def test_another_s_temporary_subscription_is_protected_by_its_name(site: Site, role: Any) -> None:
    role("consumer")
    with sync.connect(site.process.address) as client:
        request = Subscribe(f"{TOPIC}-part-0", "producer-danube-spark-1", "c", temporary=True)
        with client._connection.lock:
            reply = client._session.request(Kind.SUBSCRIBE, request, repeatable=False, handle=7)
        with pytest.raises(NotAllowed, match="subscription_auth: prefix"):
            client._connection.wait(reply)


# -- writing ------------------------------------------------------------------------------------------


def publish(client: Client, topic: str, *values: str, repeated: bool = False) -> Progress:
    publisher = Publisher(client, PublishOptions(broker="", topic=topic), "job", repeated=repeated)
    try:
        publisher.publish(pa.RecordBatch.from_pydict({"payload": list(values)}))
        return publisher.finish()
    finally:
        publisher.close()


def test_a_producer_stores_rows_once_and_compares_those_that_are_there(
    site: Site, role: Any, topic: str
) -> None:
    role("producer")
    with sync.connect(site.process.address) as client:
        assert publish(client, topic, "a", "b").passed_over == 0
        assert publish(client, topic, "a", "b", repeated=True).passed_over == 2
        with pytest.raises(Conflict, match="are not those that"):
            publish(client, topic, "a", "c")
        with pytest.raises(Conflict, match="was done with the 2 rows"):
            publish(client, topic, "a", "b", "c")
        assert [part["log_end"] for part in client.admin.topic_ends(topic)] == [2]
        with pytest.raises(NotAllowed):
            client.admin.describe_topic(topic)


def test_a_producer_reads_nothing(site: Site, role: Any) -> None:
    role("producer")
    with pytest.raises(NotAllowed, match="no permission Consume"):
        payloads(options(site))
