"""Lists come in pages: every one, by one mechanism, as long as it may be and whoever asks."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from danube.broker.audit import pages as audit_pages
from danube.broker.partition.hosted import HostedTier
from danube.broker.shard.admin import OWNER_OPERATIONS, SEGMENTS_LISTED_MAX
from danube.core.metadata.commands import Binding, CreateNamespace, PutBinding, TopicRecord
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.core.security.arguments import Page
from danube.core.security.authority import Authority
from danube.core.security.operations import ADMIN_ROWS, Effect, Row
from danube.core.security.principals import Identity, Principal
from danube.errors import DanubeError, InvalidArgument, NotFound
from danube.limits import PAGE_BYTES, PAGE_ENTRIES_MAX, TOPICS_MAX
from tests.answers import fitting
from tests.unit.broker_parts import RecordingSession, RoutedBench

TOPIC = "/default/set"
NAMESPACES = 40
ADA = Identity(Principal("user", "ada"), "token")
# Lists inside the answer about one thing, by what bounds them.
BOUNDED = {
    "topic.partitions": "PARTITIONS_MAX",
    "describe_partition.producers": "PRODUCERS_PER_PARTITION_MAX",
    "describe_partition.subscriptions": "SUBSCRIPTIONS_PER_PARTITION_MAX",
    "describe_partition.lost_subscriptions": "SUBSCRIPTIONS_PER_PARTITION_MAX",
    "describe_partition.holes": "what is damaged or lost",
    "describe_partition.histories": "clusters that the partition was in",
    "describe_partition.unreadable": "what is damaged or lost",
    "describe_partition.damaged": "what is damaged or lost",
    "partition_ends.holes": "what is damaged or lost",
    "partition_ends.histories": "clusters that the partition was in",
    "describe_subscription.blocked_offsets": "the first of them",
    "describe_subscription.withheld_ranges": "the first of them",
    "describe_subscription.consumer_names": "CONSUMER_NAMES_LISTED_MAX",
    "schema.get.tags": "SCHEMA_TAGS_MAX",
    "schema.check.violations": "VIOLATIONS_SHOWN_MAX",
    "schema.diff.backward": "VIOLATIONS_SHOWN_MAX",
    "schema.diff.forward": "VIOLATIONS_SHOWN_MAX",
    "balance.brokers": "BROKERS_MAX",
    "member_status.reached": "RAFT_MEMBERS_MAX",
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "namespace_policy": {"namespace": "default"},
    "topic": {"topic": TOPIC},
    "subscription_settings": {"topic": TOPIC, "subscription": "s"},
    "describe_subscription": {"subscription": "s"},
    "subscription_progress": {"subscription": "s"},
    "row_mark": {"offset": 0},
    "offset_at": {"kind": "earliest"},
    "schema.get": {"subject": "one"},
    "schema.versions": {"subject": "one"},
    "schema.check": {"subject": "one", "schema_type": "string"},
    "schema.diff": {"subject": "one", "old": 1, "new": 1},
    "schema.topic": {"topic": TOPIC},
    "can": {"permission": "Produce", "resource_name": TOPIC},
}


class Lists(RoutedBench):
    """A broker with a topic, a subscription and a schema, and one who asks."""

    def __init__(self, root: Path, **options: Any) -> None:
        super().__init__(root, **options)
        self.session = RecordingSession(7)
        self.proposals.create(TOPIC)

    def ask(self, op: str, partition: str = "", **args: Any) -> Any:  # type: ignore[override]
        return wire.decode_result(self.asked(op, partition, **args))

    def asked(self, op: str, partition: str = "", **args: Any) -> Any:
        """The bytes of the answer."""
        self.request(self.session, Kind.ADMIN, wire.Admin(op, partition, args))
        self.examiner.step()
        self.proposals.step()
        [frame] = self.session.take()
        if frame.kind == Kind.ERROR:
            raise frame.error
        return frame.body


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Lists]:
    made = Lists(tmp_path)
    made.router.operations.status = lambda: {"broker_id": "1"}
    made.router.operations.audit_lines = lambda asked, answer: answer(
        audit_pages.page(tmp_path / "audit", asked)
    )
    made.request(made.session, Kind.SUBSCRIBE, wire.Subscribe(TOPIC, "s", "c"), 2)
    made.syncer.step()
    made.session.take()
    made.ask("schema.register", subject="one", schema_type="string")
    yield made
    made.shard.close()


@pytest.mark.parametrize(
    "row", [row for row in ADMIN_ROWS if row.effect is Effect.READ], ids=lambda row: row.name
)
def test_a_read_that_answers_a_list_has_pages(bench: Lists, row: Row) -> None:
    args = ARGUMENTS.get(row.name, {})
    partition = TOPIC if row.name in OWNER_OPERATIONS else ""
    whole = bench.ask(row.name, partition, **args)
    if row.name != "status":  # this bench has none of its own
        fitting(row.name, whole)
    assert issubclass(row.args, Page) == (isinstance(whole, list) or row.name == "storage_status")
    if row.name == "storage_status":
        assert [one["topic"] for one in whole["topics"]] == [TOPIC]
        assert bench.ask(row.name, limit=1) == whole and "after" not in whole
    elif isinstance(whole, list):
        assert bench.ask(row.name, partition, limit=1_000, **args) == {"entries": whole, "after": None}
        beyond = bench.ask(row.name, partition, limit=1, prefix="~", **args)
        assert beyond == {"entries": [], "after": None}
    elif isinstance(whole, dict):
        lists = {f"{row.name}.{name}" for name, value in whole.items() if isinstance(value, list)}
        assert lists <= BOUNDED.keys(), "give the operation pages, or tell what bounds the list"


def test_a_namespace_bounds_a_list_of_topics(bench: Lists) -> None:
    for namespace in ("a", "a-b", "b"):
        bench.proposals.apply(CreateNamespace(namespace=namespace))
        for name in ("x", "y"):
            bench.proposals.create(f"/{namespace}/{name}")

    def names(**args: Any) -> list[str]:
        return [one["topic"] for one in bench.ask("list_topics", limit=10, **args)["entries"]]

    assert names() == ["/a-b/x", "/a-b/y", "/a/x", "/a/y", "/b/x", "/b/y", TOPIC]
    assert names(namespace="a") == ["/a/x", "/a/y"]
    assert names(namespace="a", after="/a/x") == ["/a/y"] == names(namespace="a", prefix="/a/y")
    assert names(namespace="a", prefix="/a") == names(namespace="a", prefix="/") == names(namespace="a")
    assert names(namespace="a", prefix="/b") == [] == names(namespace="a", after="/b/x")
    with pytest.raises(NotFound):
        names(namespace="none")
    bench.ask("delete_topic", topic="/a/x")
    bench.proposals.create("/a/w")
    assert names(namespace="a") == ["/a/w", "/a/y"], "made and deleted after the first list"


# -- as many topics as there may be -------------------------------------------------------------------


def full(bench: Lists) -> Metadata:
    """As many topics as a broker may have, put into the state as a snapshot is."""
    state = bench.proposals.state
    for number in range(NAMESPACES):
        bench.proposals.apply(CreateNamespace(namespace=f"ns{number}"))
    policy = TopicPolicy()
    for number in range(TOPICS_MAX - state.topic_count):
        name = f"/ns{number % NAMESPACES}/a-topic-with-a-name-of-some-length-{number * 7919 % TOPICS_MAX:06}"
        state._install(TopicRecord(name, state.next_topic_id, 0, policy, 1))
        state.next_topic_id += 1
    return state


def pages(bench: Lists, **args: Any) -> Iterator[tuple[list[str], int, float]]:
    """Names, bytes and processor seconds of each page."""
    after: str | None = ""
    while after is not None:
        begun = time.process_time()
        body = bench.asked("list_topics", after=after, limit=PAGE_ENTRIES_MAX, **args)
        spent = time.process_time() - begun
        answer = wire.decode_result(body)
        yield [one["topic"] for one in answer["entries"]], len(body), spent
        after = answer["after"]


def test_as_many_topics_as_there_may_be_are_listed(bench: Lists) -> None:
    state = full(bench)
    assert state.topic_count == TOPICS_MAX
    names: list[str] = []
    spent: list[float] = []
    for page, size, seconds in pages(bench):
        assert len(page) <= PAGE_ENTRIES_MAX and size <= PAGE_BYTES
        names += page
        spent.append(seconds)
    assert len(names) == TOPICS_MAX and names == sorted(set(names))
    assert len(spent) == TOPICS_MAX // PAGE_ENTRIES_MAX
    assert sorted(spent)[len(spent) // 2] < 0.5, "a page does not look at all topics"


def test_who_sees_few_topics_does_not_look_at_the_others(tmp_path: Path) -> None:
    machines: list[Metadata] = []
    bench = Lists(tmp_path, authority=Authority(lambda: machines[0].access))
    machines.append(bench.proposals.state)
    state = full(bench)
    bench.session.identity = ADA
    seen = sorted(record.topic for record in state.topics("ns7"))
    last = max(record.topic for record in state.topics("ns9"))
    for name, scope, resource in (("a", "namespace", "ns7"), ("b", "topic", last), ("c", "topic", seen[0])):
        binding = Binding(name, "user", "ada", ("viewer",), scope, resource)
        bench.proposals.apply(PutBinding(binding=binding))
    bench.ask("list_topics", limit=1)  # sorts the names
    looked_at: list[str] = []
    topic = Metadata.topic

    def counted(state: Metadata, name: str) -> TopicRecord:
        looked_at.append(name)
        return topic(state, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Metadata, "topic", counted)
        found = [name for page, _, _ in pages(bench) for name in page]
    assert found == [*seen, last]
    assert len(looked_at) <= len(found) + len(found) // PAGE_ENTRIES_MAX + 1
    with pytest.raises(DanubeError, match="Lookup"):
        bench.ask("list_topics", limit=1, namespace="ns8")
    bench.shard.close()


def test_what_sees_topics_and_what_lists_them_agree() -> None:
    state = Metadata()
    authority = Authority(lambda: state.access)
    assert authority.topic_spans(ADA) == []
    for number, (scope, resource, role) in enumerate(
        [("namespace", "a", "viewer"), ("topic", "/a/x", "viewer"), ("topic", "/b/x", "producer"),
         ("topic", "subject", "viewer"), ("namespace", "none", "unknown"), ("topic", "/c/x", "unknown")]
    ):  # fmt: skip
        binding = Binding(f"b{number}", "user", "ada", (role,), scope, resource)
        state.apply(state.version + 1, PutBinding(binding=binding))
    spans, sees = authority.topic_spans(ADA), authority.sees_topic(ADA)
    assert spans == sorted(spans)
    for name in ("/a/x", "/a/y", "/a-b/x", "/b/x", "/b/xy", "/b/w", "/c/x", "/none/x"):
        assert sum(low <= name < high for low, high in spans) == sees(name), name


# -- segments -----------------------------------------------------------------------------------------


def test_segments_have_pages_in_the_order_of_their_records(
    bench: Lists, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"start_offset": 10 * number} for number in range(SEGMENTS_LISTED_MAX + 5)]

    class Tier(HostedTier):
        def __init__(self) -> None:
            pass

        def segments(self, after_offset: int) -> Iterator[dict[str, Any]]:
            return iter(rows[after_offset // 10 :])

    monkeypatch.setattr(bench.shard.partitions[TOPIC], "tier", Tier())
    assert bench.ask("list_segments", TOPIC, after_offset=25) == rows[2 : 2 + SEGMENTS_LISTED_MAX]
    found: list[Any] = []
    after: str | None = ""
    while after is not None:
        page = bench.ask("list_segments", TOPIC, after_offset=25, after=after, limit=700)
        assert len(page["entries"]) <= 700
        found += page["entries"]
        after = page["after"]
    assert found == rows[2:]
    with pytest.raises(InvalidArgument, match="not the `after` of a page"):
        bench.ask("list_segments", TOPIC, after="x")
