"""Operations that any worker answers on topics, settings and roles, and what they leave at the owner."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from danube.broker.operations.arguments import listed
from danube.broker.partition import consumers
from danube.broker.routing import questions as questions_module
from danube.broker.routing.questions import Questions
from danube.core.metadata.commands import KnowConsumer, KnownConsumer, TopicUpdated
from danube.core.partition.policy import FailurePolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.core.security.arguments import Page
from danube.errors import (
    CallerError,
    Conflict,
    DanubeError,
    InvalidArgument,
    InvalidName,
    LimitExceeded,
    NotFound,
    Overloaded,
    OwnerMoved,
    PolicyMismatch,
    StorageFailed,
    SubscriptionNotFound,
    TopicNotFound,
    WrongState,
)
from danube.limits import ANSWER_BYTES_MAX, PAGE_BYTES
from danube.server.services.calls import whole_list
from tests.answers import fitting
from tests.unit.broker_parts import QUICK, RecordingSession, RoutedBench, expected, frames_in, numbered

TOPIC = "/default/set"
DROP = {"poison": "drop", "max_redelivery_count": 0, "base_redelivery_delay_ms": 0}


class Asked(RoutedBench):
    """A broker with topic TOPIC and a client; what is committed reaches the shard as in a worker."""

    def __init__(self, root: Path, workers: int = 1, **options: Any) -> None:
        super().__init__(root, workers, **options)
        self.session, self.client = RecordingSession(7), RecordingSession(8)
        self.proposals.create(TOPIC)

    def _changed_metadata(self) -> None:
        super()._changed_metadata()
        for record in self.proposals.state.topics():
            self.shard.update_policy(record)

    def ask(self, op: str, partition: str = "", **args: Any) -> Any:  # type: ignore[override]
        """The value, all steps done; raises what came instead."""
        self.request(self.session, Kind.ADMIN, wire.Admin(op, partition, args))
        self.syncer.step()
        self.proposals.step()
        [frame] = self.session.take()
        if frame.kind == Kind.ERROR:
            raise frame.error
        return fitting(op, wire.decode_result(frame.body))

    def refused(self, op: str, partition: str = "", **args: Any) -> type[DanubeError]:
        with pytest.raises(DanubeError) as refused:
            self.ask(op, partition, **args)
        return type(refused.value)

    def join(self, name: str = "s", handle: int = 2, topic: str = TOPIC, **fields: Any) -> None:
        body = {"consumer": f"c{handle}", "credit_records": 1000, "credit_bytes": 1 << 20, **fields}
        self.request(self.client, Kind.SUBSCRIBE, wire.Subscribe(topic, name, **body), handle)
        self.syncer.step()
        [frame] = self.client.take()
        assert frame.kind == Kind.SUBSCRIBED, frame.error

    def fill(self, count: int) -> None:
        if 1 not in self.client.producers:
            self.request(self.client, Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "p"), 1)
        self.publish(self.client, numbered(count))
        self.turn()
        self.client.take()

    def core(self, name: str = "s") -> Any:
        return self.shard.partitions[TOPIC].subscription(name).core

    def settle(self, *acks: tuple[int, int], name: str = "s", nacks: Any = ()) -> Any:
        octets = np.array(acks, "<u8").tobytes()
        return self.ask("settle", TOPIC, subscription=name, acks=octets, nacks=nacks)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Asked]:
    made = Asked(tmp_path)
    yield made
    made.shard.close()


# -- namespaces and topics ----------------------------------------------------------------------------


def test_namespaces_are_made_listed_and_deleted(bench: Asked) -> None:
    assert bench.ask("create_namespace", namespace="team") is None
    assert bench.ask("namespaces") == ["default", "system", "team"]
    assert bench.refused("create_namespace", namespace="team") is Conflict
    assert bench.ask("create_namespace", namespace="team", ensure=True) is None
    assert bench.ask("delete_namespace", namespace="team") is None
    assert bench.refused("delete_namespace", namespace="team") is NotFound
    assert bench.refused("delete_namespace", namespace="default") is InvalidArgument
    assert bench.refused("create_namespace", namespace="a b") is InvalidName
    assert bench.refused("create_namespace", namespace=7) is InvalidArgument


def test_partitions_are_added(bench: Asked) -> None:
    bench.ask("create_topic", topic="/default/many", partitions=2)
    entry = bench.ask("add_partitions", topic="/default/many", partitions=3)
    assert entry["partitions"] == [f"/default/many-part-{number}" for number in range(3)]
    assert bench.ask("add_partitions", topic="/default/many", partitions=1)["partition_count"] == 3
    assert bench.refused("add_partitions", topic=TOPIC, partitions=2) is WrongState
    assert bench.refused("add_partitions", topic="/default/none", partitions=2) is TopicNotFound
    assert bench.refused("add_partitions", topic="/default/many", partitions="2") is InvalidArgument


# -- roles and bindings -------------------------------------------------------------------------------


def test_roles_and_bindings_are_kept(bench: Asked) -> None:
    assert bench.ask("put_role", name="writer", permissions=["Produce", "Lookup"]) is None
    stored = {"name": "writer", "permissions": ["Produce", "Lookup"], "system": False}
    assert [role for role in bench.ask("roles") if not role["system"]] == [stored]
    assert "viewer" in [role["name"] for role in bench.ask("roles") if role["system"]]
    put = {
        "id": "b", "principal_type": "user", "principal_name": "anna", "role_names": ["writer"],
        "scope": "namespace", "resource_name": "/default",
    }  # fmt: skip
    assert bench.ask("put_binding", **put) is None
    stored = {**put, "resource_name": "default"}
    assert bench.ask("bindings") == [stored] == bench.ask("bindings", scope="namespace", resource="default")
    assert bench.ask("bindings", scope="topic") == []
    assert bench.ask("delete_binding", scope="namespace", resource_name="default", id="b") is None
    assert bench.refused("delete_binding", scope="namespace", resource_name="default", id="b") is NotFound
    assert bench.ask("delete_role", name="writer") is None
    assert bench.refused("delete_role", name="writer") is NotFound
    assert bench.refused("put_role", name="r", permissions=["Fly"]) is InvalidArgument
    assert bench.refused("put_role", name="r", permissions="Produce") is InvalidArgument
    assert bench.refused("put_binding", **{**put, "scope": "moon"}) is InvalidArgument
    assert bench.refused("put_binding", **{**put, "principal_type": "usr"}) is InvalidArgument
    bench.ask("put_role", name="root", permissions=[], system=True)
    assert bench.refused("delete_role", name="root") is WrongState


# -- settings of subscriptions ------------------------------------------------------------------------


def test_settings_wait_for_their_subscription(bench: Asked) -> None:
    empty = {"failure": None, "max_unacked": 0, "mode": None}
    assert bench.ask("subscription_settings", topic=TOPIC, subscription="s") == empty
    assert bench.ask("set_subscription_settings", topic=TOPIC, subscription="s", failure=DROP) is None
    bench.ask("set_subscription_settings", topic=TOPIC, subscription="s", max_unacked=2)
    found = bench.ask("subscription_settings", topic=TOPIC, subscription="s")
    assert found["max_unacked"] == 2 and found["failure"]["poison"] == "drop" and found["mode"] is None
    assert found["failure"]["ack_timeout_ms"] == 30_000, "what was not said is the default"
    bench.fill(5)
    bench.join(start="earliest", max_unacked=100, failure=QUICK)
    assert bench.core().failure.poison == "drop" and bench.core().max_unacked == 2
    bench.turn()
    assert bench.client.records() == expected(0, 2)


def test_settings_that_others_stored_a_moment_ago_are_read_first(bench: Asked) -> None:
    bench.join("other")
    bench.shard.partitions[TOPIC].metadata.read = lambda: bench.ask(  # type: ignore[union-attr, method-assign]
        "set_subscription_settings", topic=TOPIC, subscription="s", max_unacked=3
    )
    bench.join("s", 3)
    assert bench.core().max_unacked == 3


def test_a_topic_that_is_found_deleted_makes_no_subscription(bench: Asked) -> None:
    bench.join("other")
    hosted = bench.shard.partitions[TOPIC]
    hosted.metadata.read = lambda: bench.shard.delete_topic(hosted.record)  # type: ignore[union-attr, method-assign]
    other = RecordingSession(9)
    bench.request(other, Kind.SUBSCRIBE, wire.Subscribe(TOPIC, "s", "c"), 2)
    assert isinstance(other.only(Kind.ERROR).error, TopicNotFound)
    assert "s" not in hosted.subscriptions


def test_settings_reach_a_live_subscription_and_go_back(bench: Asked) -> None:
    bench.fill(6)
    bench.join(start="earliest", credit_records=2)
    bench.turn()
    assert bench.client.records() == expected(0, 2)
    bench.ask("set_subscription_settings", topic=TOPIC, subscription="s", max_unacked=1, failure=DROP)
    assert bench.core().max_unacked == 1
    assert bench.route(bench.client, wire.credit_frame(2, 10, 0))
    bench.turn()
    assert bench.client.records() == [], "two are unacked and one may be"
    bench.settle((0, 2))
    bench.turn()
    assert bench.client.records() == expected(2, 3)
    bench.settle(nacks=[(2, -1, "bad")])
    bench.turn()
    assert bench.client.records() == expected(3, 4), "dropped, as the new policy says"
    bench.core().check()
    bench.ask("set_subscription_settings", topic=TOPIC, subscription="s", max_unacked=0, failure=None)
    assert bench.core().failure == FailurePolicy() and bench.core().max_unacked > 1
    bench.turn()
    assert bench.client.records() == expected(4, 6)


def test_subscriptions_follow_the_topic_in_what_they_have_not_of_their_own(tmp_path: Path) -> None:
    """Live ones, and the same ones after a start."""
    bench = Asked(tmp_path)
    bench.fill(1)
    bench.join("s")
    bench.join("own", 3, failure=QUICK, max_unacked=7)
    bench.join("set", 4)
    bench.ask("set_subscription_settings", topic=TOPIC, subscription="set", max_unacked=5, failure=DROP)
    bench.ask("set_subscription_settings", topic=TOPIC, subscription="s", failure=DROP)
    bench.ask("set_subscription_settings", topic=TOPIC, subscription="s", failure=None)
    policy = {"max_unacked": 9, "failure": {"poison": "drop", "max_redelivery_count": 2}}
    bench.ask("update_topic", topic=TOPIC, policy=policy)

    def followed(one: Asked) -> dict[str, tuple[int, int]]:
        cores = {name: one.core(name) for name in ("s", "own", "set")}
        return {name: (core.max_unacked, core.failure.max_redelivery_count) for name, core in cores.items()}

    expected_now = {"s": (9, 2), "own": (7, QUICK.max_redelivery_count), "set": (5, 0)}
    assert followed(bench) == expected_now
    bench.shard.close()
    again = Asked(tmp_path)
    again.proposals.state = bench.proposals.state
    assert again.ask("describe_partition", TOPIC)["subscriptions"] == ["own", "s", "set"]
    assert followed(again) == expected_now
    again.shard.close()


def test_settings_and_policies_survive_opening_the_partition_again(tmp_path: Path) -> None:
    bench = Asked(tmp_path)
    bench.fill(1)
    bench.join("s")
    bench.join("t", 3)
    bench.join("u", 4, failure=QUICK)
    bench.ask("set_subscription_settings", topic=TOPIC, subscription="s", max_unacked=5, failure=DROP)
    bench.ask("set_failure_policy", TOPIC, subscription="t", failure={"poison": "drop"})
    bench.shard.close()
    again = Asked(tmp_path)
    again.proposals.state = bench.proposals.state
    assert again.ask("describe_partition", TOPIC)["subscriptions"] == ["s", "t", "u"]
    assert again.core("s").max_unacked == 5 and again.core("s").failure.max_redelivery_count == 0
    assert again.core("t").failure.poison == "drop" and again.core("u").failure == QUICK
    again.shard.close()


@pytest.mark.parametrize(
    "fields, error",
    [
        ({"subscription": ""}, InvalidName),
        ({"subscription": 5}, InvalidArgument),
        ({"topic": "/default/none"}, TopicNotFound),
        ({"topic": "none"}, InvalidName),
        ({"topic": "/default/lossy", "max_unacked": 5}, PolicyMismatch),
        ({"max_unacked": -1}, InvalidArgument),
        ({"max_unacked": 4_194_305}, InvalidArgument),
        ({"max_unacked": "5"}, InvalidArgument),
        ({"failure": "drop"}, InvalidArgument),
        ({"failure": {"poison": "eat"}}, InvalidArgument),
        ({"failure": {"poison": "dead_letter"}}, InvalidArgument),
        ({"failure": {"poison": "dead_letter", "dead_letter_topic": "no slash"}}, InvalidName),
        ({"failure": {"ack_timeout_ms": 0}}, InvalidArgument),
        ({"failure": {"max_redelivery_count": -1}}, InvalidArgument),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    bench: Asked, fields: dict[str, Any], error: type[CallerError]
) -> None:
    bench.ask("create_topic", topic="/default/lossy", policy={"reliable": False})
    before = bench.proposals.state.snapshot()
    args = {"topic": TOPIC, "subscription": "s", **fields}
    assert bench.refused("set_subscription_settings", **args) is error
    assert bench.proposals.state.snapshot() == before


def test_a_deleted_subscription_is_forgotten_with_all_that_was_set(bench: Asked) -> None:
    bench.join()
    bench.ask("set_subscription_settings", topic=TOPIC, subscription="s", max_unacked=5)
    record = bench.proposals.state.topic(TOPIC)
    known = KnownConsumer(5, record.topic_id, 0, "s", "shared", "c2")
    bench.proposals.apply(KnowConsumer(consumer=known, known_max=10))
    bench.request(bench.client, Kind.CLOSE_CONSUMER, None, 2)
    bench.ask("delete_subscription", TOPIC, subscription="s")
    assert bench.proposals.state.topic(TOPIC).settings == {}
    assert bench.proposals.state.consumers.find(5) is None
    bench.client.take()
    bench.join()
    assert bench.core().max_unacked > 5


def test_what_cannot_be_remembered_does_not_fail_the_operation(bench: Asked) -> None:
    bench.join()
    bench.request(
        bench.session,
        Kind.ADMIN,
        wire.Admin("set_failure_policy", TOPIC, {"subscription": "s", "failure": DROP}),
    )
    bench.syncer.step()
    bench.proposals.step(StorageFailed("no disk"))
    assert bench.session.only(Kind.RESULT)
    bench.proposals.refusal = Overloaded("too many")
    bench.ask("set_failure_policy", TOPIC, subscription="s", failure=DROP)
    assert bench.core().failure.poison == "drop" and bench.proposals.state.topic(TOPIC).settings == {}


def test_a_whole_subscription_is_forgotten_by_its_topic(bench: Asked) -> None:
    bench.ask("create_topic", topic="/default/many", partitions=2)
    bench.ask("set_subscription_settings", topic="/default/many", subscription="s", max_unacked=5)
    assert bench.ask("forget_subscription", topic="/default/many", subscription="s") is None
    assert bench.proposals.state.topic("/default/many").settings == {}
    assert bench.ask("forget_subscription", topic="/default/many", subscription="s") is None
    assert bench.refused("forget_subscription", topic="/default/none", subscription="s") is TopicNotFound
    assert bench.refused("forget_subscription", topic="/default/many", subscription="") is InvalidName
    bench.ask("set_subscription_settings", topic="/default/many", subscription="s", max_unacked=5)
    bench.ask("forget_subscription", topic="/default/many", subscription="s", topic_id=99)
    assert bench.proposals.state.topic("/default/many").settings == {}, "only owners name an incarnation"


def test_an_update_is_told_with_all_that_the_topic_has(bench: Asked) -> None:
    bench.ask("set_subscription_settings", topic=TOPIC, subscription="s", max_unacked=5)
    before = bench.proposals.state.copy()
    bench.ask("update_topic", topic=TOPIC, policy={"max_unacked": 9})
    [change] = bench.proposals.state.changes_since(before)
    assert isinstance(change, TopicUpdated) and change.record.settings["s"].max_unacked == 5


# -- settle: acks and nacks that name no consumer -----------------------------------------------------


@pytest.mark.parametrize("mode", ["exclusive", "shared", "failover", "key_shared"])
def test_anyone_may_settle_what_is_in_flight(bench: Asked, mode: str) -> None:
    bench.fill(6)
    bench.join(start="earliest", mode=mode, failure=QUICK)
    if mode == "shared":
        bench.join(handle=3, mode=mode)
    bench.turn()
    assert sorted(bench.client.records()) == expected(0, 6)
    assert bench.settle((0, 2), (4, 5)) == {} and bench.core().ack_floor == 2
    assert bench.settle((0, 5), (3, 4), (90, 99), (5, 5), (1 << 63, (1 << 64) - 1)) == {}
    assert bench.core().ack_floor == 5, "twice, unknown and impossible ones change nothing"
    assert bench.counters["acks_in"] == 5
    bench.settle(nacks=[(5, -1, "bad"), (5, 0, "again"), (0, 5, ""), (1 << 63, -1, ""), (-3, 0, "")])
    assert bench.core().statistics()["nacked"] == 1 and bench.core().statistics()["blocked"] == 1
    bench.settle((5, 6))
    assert bench.core().ack_floor == 6, "a blocked record is acked by anyone, too"
    bench.core().check()


def test_a_key_goes_on_when_anyone_acks_it(bench: Asked) -> None:
    bench.request(bench.client, Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "p"), 1)
    bench.publish(bench.client, numbered(4, keys=[b"a"] * 4))
    bench.turn()
    bench.client.take()
    bench.join(start="earliest", mode="key_shared", credit_records=1)
    bench.turn()
    assert bench.client.records() == expected(0, 1)
    assert bench.route(bench.client, wire.credit_frame(2, 1, 0))
    bench.turn()
    got = bench.client.records()
    bench.settle((0, 1))
    bench.turn()
    assert got + bench.client.records() == expected(1, 2)
    bench.settle((0, 2))
    bench.core().check()
    assert bench.core().ack_floor == 2


def test_a_settled_record_of_a_gone_consumer_does_not_come_again(bench: Asked) -> None:
    bench.fill(2)
    bench.join(start="earliest")
    bench.turn()
    bench.request(bench.client, Kind.CLOSE_CONSUMER, None, 2)
    bench.client.take()
    bench.settle((0, 1))
    bench.join()
    bench.turn()
    assert bench.client.records() == expected(1, 2)


def test_nothing_is_settled_on_a_non_reliable_topic(bench: Asked) -> None:
    bench.ask("create_topic", topic="/default/lossy", policy={"reliable": False})
    args = {"subscription": "s", "acks": np.array([(0, 1)], "<u8").tobytes(), "nacks": [(1, -1, "")]}
    assert bench.ask("settle", "/default/lossy", **args) == {}


@pytest.mark.parametrize(
    "args, error",
    [
        ({"subscription": "none"}, SubscriptionNotFound),
        ({}, InvalidArgument),
        ({"subscription": 5}, InvalidArgument),
        ({"subscription": "s", "acks": b"x" * 15}, InvalidArgument),
        ({"subscription": "s", "acks": [1, 2]}, InvalidArgument),
        ({"subscription": "s", "nacks": 5}, InvalidArgument),
        ({"subscription": "s", "nacks": [(1, 2)]}, InvalidArgument),
        ({"subscription": "s", "nacks": [("1", 2, "")]}, InvalidArgument),
        ({"subscription": "s", "nacks": [(1, 2, None)]}, InvalidArgument),
    ],
)
def test_what_cannot_be_settled_is_said(bench: Asked, args: dict[str, Any], error: type[CallerError]) -> None:
    bench.join()
    assert bench.refused("settle", TOPIC, **args) is error


# -- questions to owners ------------------------------------------------------------------------------


def test_the_mode_is_asked_of_the_owner(bench: Asked) -> None:
    questions = Questions(bench.router.route, lambda: None)
    bench.router.operations.ask_owner = questions.ask

    def mode() -> Any:
        return bench.ask("subscription_settings", topic=TOPIC, subscription="s")["mode"]

    assert mode() is None
    bench.join(mode="key_shared")
    assert mode() == "key_shared"
    bench.ask("create_topic", topic="/default/lossy", policy={"reliable": False})
    bench.join("l", 3, "/default/lossy", mode="failover")
    assert bench.ask("subscription_settings", topic="/default/lossy", subscription="l")["mode"] == "failover"


def test_a_question_over_a_ring_comes_back_or_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Asked(tmp_path, 2)

    class Ring:
        room = True
        taken = 0

        def forward(self, *_: object) -> bool:
            self.taken += self.room
            return self.room

    ring = Ring()
    bench.router.remote = ring  # type: ignore[assignment]
    there = bench.name_owned_by(1)
    questions = Questions(bench.router.route, lambda: None)
    got: list[Any] = []
    questions.ask(there, "describe_subscription", {"subscription": "s"}, got.append)
    questions.ask(there, "describe_subscription", {"subscription": "s"}, got.append)
    assert ring.taken == 2 and got == []
    [first, second] = questions.requests
    answer = wire.result_frame({"mode": "shared"}, first) + wire.result_frame(1, 999)
    bench.router.answered(questions, answer)
    questions.send(answer)
    assert got == [{"mode": "shared"}] and list(questions.requests) == [second]
    bench.router.worker_restarted(questions, 1)
    assert isinstance(got[1], OwnerMoved)
    ring.room = False
    with pytest.raises(Overloaded):
        questions.ask(there, "describe_subscription", {}, got.append)
    bench.router.operations.ask_owner = questions.ask
    assert bench.refused("subscription_settings", topic=there, subscription="s") is Overloaded
    ring.room = True
    monkeypatch.setattr(questions_module, "QUESTIONS_MAX", 0)
    with pytest.raises(Overloaded):
        questions.ask(there, "describe_subscription", {}, got.append)
    assert len(got) == 2
    bench.shard.close()


def test_an_owner_that_fails_fails_the_question(bench: Asked) -> None:
    bench.router.operations.ask_owner = lambda partition, op, args, answer: answer(OwnerMoved("moved"))
    assert bench.refused("subscription_settings", topic=TOPIC, subscription="s") is OwnerMoved


def test_an_answer_for_a_client_that_left_is_dropped(bench: Asked) -> None:
    bench.request(bench.session, Kind.ADMIN, wire.Admin("create_namespace", "", {"namespace": "team"}))
    bench.session.closed = True
    bench.proposals.step()
    assert bench.session.take() == [] and "team" in bench.proposals.state.namespaces()


# -- lists in pages -----------------------------------------------------------------------------------


def test_lists_come_in_pages_by_name(bench: Asked) -> None:
    for name in ("b", "a", "c", "other"):
        bench.ask("create_topic", topic=f"/default/{name}")
    pages = []
    after: str | None = ""
    while after is not None:
        page = bench.ask("list_topics", after=after, limit=2, namespace="default")
        pages.append([one["topic"].rpartition("/")[2] for one in page["entries"]])
        after = page["after"]
    names = [name for page in pages for name in page]
    assert names == sorted(names) and {"a", "b", "c", "other"} <= set(names)
    assert all(len(page) == 2 for page in pages[:-1])
    found = bench.ask("list_topics", limit=10, prefix="/default/o")
    assert [one["topic"] for one in found["entries"]] == ["/default/other"] and found["after"] is None
    assert bench.ask("list_topics", limit=10, prefix="/default/x") == {"entries": [], "after": None}
    assert isinstance(bench.ask("list_topics"), list), "as older clients ask"
    for args in ({"limit": -1}, {"limit": "x"}, {"after": 3}, {"prefix": 3}):
        assert bench.refused("list_topics", **args) is InvalidArgument


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("namespaces", {}),
        ("roles", {}),
        ("bindings", {}),
        ("api_keys", {}),
        ("revocations", {}),
        ("schema.subjects", {}),
    ],
)
def test_every_list_of_the_metadata_has_pages(bench: Asked, op: str, args: dict[str, Any]) -> None:
    whole = bench.ask(op, **args)
    assert bench.ask(op, limit=1000, **args) == {"entries": whole, "after": None}
    if whole:
        assert bench.ask(op, limit=1, **args)["entries"] == whole[:1]


def test_the_subscriptions_of_a_partition_have_pages(bench: Asked) -> None:
    for handle, name in enumerate(("s2", "s1", "t1"), 2):
        bench.join(name, handle)
    page = bench.ask("list_subscriptions", TOPIC, limit=1, prefix="s")
    assert [one["subscription"] for one in page["entries"]] == ["s1"] and page["after"] == "s1"
    page = bench.ask("list_subscriptions", TOPIC, limit=5, prefix="s", after="s1")
    assert [one["subscription"] for one in page["entries"]] == ["s2"] and page["after"] is None


def test_a_subscription_names_few_consumers_and_counts_all(
    bench: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumers, "CONSUMER_NAMES_LISTED_MAX", 2)
    for handle in range(2, 6):
        bench.join("s", handle)
    [one] = bench.ask("list_subscriptions", TOPIC, limit=5)["entries"]
    assert len(one["consumer_names"]) == 2 and one["consumers"] == 4


def test_a_page_ends_where_it_grows_large() -> None:
    rows = [f"{number:03}" for number in range(10)]
    page = listed(Page(limit=10), rows, str, lambda row: "x" * (PAGE_BYTES // 4))
    assert isinstance(page, dict) and len(page["entries"]) == 3 and page["after"] == "002"
    page = listed(Page(limit=10, after="002"), rows, str, lambda row: "x" * PAGE_BYTES)
    assert isinstance(page, dict) and len(page["entries"]) == 1, "one at least, or it never ends"
    with pytest.raises(LimitExceeded, match="too many for one answer"):
        listed(Page(), rows, str, lambda row: "x" * (ANSWER_BYTES_MAX // 4))


def test_a_service_puts_all_pages_together() -> None:
    pages = {"": {"entries": ["a"], "after": "a"}, "a": {"entries": ["b"], "after": None}}

    async def ask(op: str, after: str, limit: int) -> Any:
        return pages[after]

    assert asyncio.run(whole_list(ask, "namespaces")) == ["a", "b"]


def test_an_answer_that_nobody_could_take_is_an_error() -> None:
    (frame,) = frames_in(wire.result_frame("x" * ANSWER_BYTES_MAX, 7))
    assert frame.correlation == 7 and type(frame.error) is LimitExceeded
    (frame,) = frames_in(wire.result_frame("x" * (ANSWER_BYTES_MAX - 100), 7))
    assert frame.kind == Kind.RESULT
