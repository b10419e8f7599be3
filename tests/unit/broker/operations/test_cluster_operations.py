"""``danube brokers``, BrokerAdmin and the operations behind both, on a cluster's metadata and alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from danube.broker.operations import cluster as cluster_operations
from danube.broker.operations.arguments import arguments_of
from danube.cli.main import root
from danube.cli.terminal.services import Services
from danube.core.cluster.commands import SetBrokerMode
from danube.core.metadata.commands import CreateTopic
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.core.placement.balance import BalanceSettings
from danube.core.placement.load_report import LoadReport
from danube.core.protocol.native import Admin
from danube.errors import DanubeError, NotFound, NotLeader, Unavailable
from danube.server.proto import DanubeAdmin_pb2 as pb
from danube.server.services.broker_admin import BrokerAdmin
from danube.server.services.topic_admin import TopicAdmin
from tests.answers import fitting
from tests.fakes.broker_calls import FakeBrokerCalls, FakeCall
from tests.unit.cluster_site import Site


class Broker:
    """Carries out operations on a site's metadata, and is a client and a broker behind gRPC for them."""

    def __init__(self, site: Site | None) -> None:
        self.site = site
        self.state = site.state if site is not None else Metadata()
        self.clustered = site is not None
        self.asked: list[str] = []

    def refresh(self) -> None:
        pass

    def status(self) -> dict[str, Any]:
        return {"native": "127.0.0.1:6660", "grpc": "127.0.0.1:6650", "version": "1", "broker_id": "9"}

    def propose(self, command: Any, answer: Any, view: Any = lambda made: None) -> None:
        assert self.site is not None
        try:
            self.site.do(command)
        except DanubeError as error:
            answer(error)
            return
        answer(view(None))

    def cluster(self, op: str, **arguments: Any) -> Any:
        self.asked.append(op)
        answers: list[Any] = []
        args = arguments_of(Admin(op, "", arguments))
        cluster_operations.TABLE[op](self, args, answers.append)  # type: ignore[arg-type]
        (answer,) = answers
        if isinstance(answer, DanubeError):
            raise answer
        return json.loads(json.dumps(fitting(op, answer)))

    # As the command line sees it

    @contextmanager
    def connect(self, url: str, **options: Any) -> Iterator[Any]:
        admin = SimpleNamespace(cluster=self.cluster, list_topics=lambda limit: [])
        yield SimpleNamespace(admin=admin)

    def danube(self, *words: str, code: int = 0) -> Result:
        services = Services(connect=self.connect, environ={}, shows_progress=lambda: False)
        result = CliRunner().invoke(root, list(words), obj=services, prog_name="danube")
        assert result.exit_code == code, result.output
        return result

    def json(self, *words: str, code: int = 0) -> Any:
        result = self.danube(*words, "-o", "json", code=code)
        return json.loads(result.stdout) if code == 0 else json.loads(result.stderr)["error"]

    # As gRPC sees it

    def call(self, method: str, request: Any) -> Any:
        fake = FakeBrokerCalls()
        fake.clustered = self.site is not None
        fake.metadata = self.state

        async def ask(op: str, **arguments: Any) -> Any:
            return self.cluster(op, **arguments)

        fake.ask = ask  # type: ignore[method-assign]
        servicers = [BrokerAdmin(fake), TopicAdmin(fake)]
        servicer = next(one for one in servicers if hasattr(one, method))
        return asyncio.run(getattr(servicer, method)(request, FakeCall()))


def apply(state: Metadata, command: Any) -> None:
    state.apply(state.version + 1, command)


@pytest.fixture
def lopsided() -> Broker:
    """Broker 1 owns all 40 topics, 2 has just come; 1 leads."""
    site = Site(BalanceSettings(strategy="fair", aggressiveness="conservative"), brokers=1)
    site.topics(40)
    site.settle()
    site.register(2)
    site.report(2, LoadReport(cpu=0.25, bytes_per_s=10.0))
    site.step()
    return Broker(site)


# -- in a cluster ----------------------------------------------------------------------------------


def test_brokers_are_listed_with_what_is_known_of_them(lopsided: Broker) -> None:
    one, two = lopsided.json("brokers", "list")
    assert (one["broker_id"], one["role"], one["partitions"], one["alive"]) == ("1", "leader", 40, True)
    assert (two["role"], two["mode"], two["load"]["cpu"]) == ("follower", "active", 0.25)
    assert "b2:6660" in lopsided.danube("brokers", "ls").stdout
    listed = lopsided.call("list_brokers", pb.Empty()).brokers
    assert [(row.broker_id, row.broker_role) for row in listed] == [
        ("1", "Cluster_Leader"),
        ("2", "Cluster_Follower"),
    ]


def test_brokers_come_in_pages_in_the_order_of_their_numbers() -> None:
    broker = Broker(Site(brokers=12))
    whole = broker.cluster("brokers")
    assert [one["broker_id"] for one in whole] == [str(number) for number in range(1, 13)]
    pages: list[Any] = []
    after: str | None = ""
    while after is not None:
        page = broker.cluster("brokers", after=after, limit=5)
        pages.append(page["entries"])
        after = page["after"]
    assert [len(page) for page in pages] == [5, 5, 2] and list(chain(*pages)) == whole


def test_a_dead_broker_is_shown_and_not_listed_over_grpc(lopsided: Broker) -> None:
    assert lopsided.site is not None
    lopsided.site.die(2)
    lopsided.site.run(4)
    assert [row["alive"] for row in lopsided.json("brokers", "list")] == [True, False]
    assert len(lopsided.call("list_brokers", pb.Empty()).brokers) == 1


def test_the_leader_is_known_and_missed(lopsided: Broker) -> None:
    assert lopsided.site is not None
    assert lopsided.json("brokers", "leader") == {"broker_id": "1", "native_address": "b1:6660"}
    assert lopsided.call("get_leader_broker", pb.Empty()).leader == "1"
    lopsided.site.duties.begin(lopsided.state, lopsided.site.now_us)
    lopsided.site.die(1)
    lopsided.site.run(4)
    told = lopsided.json("brokers", "leader", code=6)
    assert (told["reason"], told["retryable"]) == ("NotLeader", True) and NotLeader.status == "UNAVAILABLE"
    assert lopsided.call("get_leader_broker", pb.Empty()).leader == "not_found"


def test_balance_says_who_has_much_and_who_little(lopsided: Broker) -> None:
    found = lopsided.json("brokers", "balance")
    assert found["coefficient_of_variation"] == 1.0
    assert (found["strategy"], found["threshold"]) == ("fair", 0.4)
    assert [(row["load"], row["overloaded"], row["underloaded"]) for row in found["brokers"]] == [
        (40.0, True, False),
        (0.0, False, True),
    ]
    shown = lopsided.danube("brokers", "balance")
    assert "deviation 100 % of the mean" in shown.stderr
    told = lopsided.call("get_cluster_balance", pb.ClusterBalanceRequest())
    assert (told.mean_load, told.broker_count, told.assignment_strategy) == (20, 2, "Fair")
    assert told.brokers[0].is_overloaded and told.brokers[0].topic_count == 40


def test_a_dry_run_of_rebalancing_changes_nothing(lopsided: Broker) -> None:
    before = lopsided.state.snapshot()
    found = lopsided.json("brokers", "rebalance", "--dry-run", "--max-moves", "3")
    assert not found["started"] and len(found["moves"]) == 3
    assert found["moves"][0]["from_broker"] == "1" and "the mean is" in found["moves"][0]["reason"]
    told = lopsided.call("trigger_rebalance", pb.RebalanceRequest(dry_run=True))
    assert (told.success, told.moves_executed, len(told.proposed_moves)) == (True, 0, 4)
    lopsided.call("unload_broker", pb.UnloadBrokerRequest(broker_id="1", dry_run=True))
    assert lopsided.state.snapshot() == before


def test_rebalancing_is_what_the_dry_run_said(lopsided: Broker) -> None:
    assert lopsided.site is not None
    foreseen = lopsided.json("brokers", "rebalance", "--dry-run")["moves"]
    told = lopsided.call("trigger_rebalance", pb.RebalanceRequest())
    assert told.success and "background" in told.error_message and told.moves_executed == 4
    lopsided.site.step()
    moving = {lopsided.state.topic_with_id(one.topic_id).topic for one in lopsided.site.asked()}  # type: ignore[union-attr]
    assert moving == {move["partition"] for move in foreseen}
    lopsided.site.settle()
    assert lopsided.site.counts() == {1: 36, 2: 4}
    assert "in the background" in lopsided.danube("brokers", "rebalance").stderr


def test_what_is_balanced_is_said_to_be() -> None:
    site = Site(brokers=2)
    site.topics(10)
    site.settle()
    broker = Broker(site)
    told = broker.call("trigger_rebalance", pb.RebalanceRequest())
    assert told.success and told.moves_executed == 0
    assert told.error_message == "Cluster is balanced (CV: 0.00, threshold: 0.30)"
    assert "nothing to move" in broker.danube("brokers", "rebalance").stderr


def test_a_broker_is_unloaded_and_activated(lopsided: Broker) -> None:
    site = lopsided.site
    assert site is not None
    told = lopsided.call("unload_broker", pb.UnloadBrokerRequest(broker_id="1"))
    assert (told.started, told.total, told.pending) == (True, 40, 40)
    site.settle()
    assert site.counts() == {1: 0, 2: 40}
    assert lopsided.json("brokers", "list")[0]["mode"] == "drained"
    again = lopsided.json("brokers", "unload", "1", "--wait")
    assert (again["total"], again["drained"]) == (0, True)
    assert lopsided.json("brokers", "activate", "1") == {"broker_id": "1", "mode": "active"}
    assert lopsided.call("activate_broker", pb.ActivateBrokerRequest(broker_id="1")).success
    assert lopsided.state.cluster.brokers.broker(1).reason == "admin_activate"


def test_a_namespace_is_taken_from_a_broker(lopsided: Broker) -> None:
    site = lopsided.site
    assert site is not None
    assert lopsided.json("brokers", "unload", "1", "--namespace", "other")["total"] == 0
    assert lopsided.json("brokers", "unload", "1", "--namespace", "default")["total"] == 40
    site.settle()
    assert site.counts() == {1: 0, 2: 40}
    assert lopsided.state.cluster.brokers.broker(1).mode == "active"


def test_what_cannot_be_unloaded_is_refused(lopsided: Broker) -> None:
    site = lopsided.site
    assert site is not None
    assert lopsided.json("brokers", "unload", "9", code=3)["reason"] == "NotFound"
    assert lopsided.json("brokers", "unload", "x", code=2)["reason"] == "InvalidArgument"
    site.do(SetBrokerMode(broker_id=2, mode="drained"))
    assert lopsided.json("brokers", "unload", "1", code=4)["reason"] == "WrongState"
    assert lopsided.json("topics", "unload", site.state.topics()[0].topic, code=4)["reason"] == "WrongState"


def test_a_topic_is_unloaded_whole_and_in_part() -> None:
    site = Site(brokers=3)
    record = site.topic("orders", 300)
    site.settle()
    broker = Broker(site)
    before = {one.partition: one.broker_id for one in site.ownerships()}
    assert broker.json("topics", "unload", "orders-part-7") == {"topic": record.topic, "partitions": 1}
    site.settle()
    after = {one.partition: one.broker_id for one in site.ownerships()}
    assert {place for place in before if before[place] != after[place]} == {7}
    assert broker.call("unload_topic", pb.TopicRequest(name="/default/orders")).success
    assert len(site.asked()) == 300
    site.settle(200)
    assert all(one.broker_id != after[one.partition] for one in site.ownerships())
    assert broker.json("topics", "unload", "nowhere", code=3)["reason"] == "TopicNotFound"


def test_a_topic_on_local_disks_stays() -> None:
    site = Site(brokers=0)
    site.register(1, shared=False)
    site.topic("orders")
    site.settle()
    site.register(2, shared=False)
    broker = Broker(site)
    assert "disks only" in broker.danube("topics", "unload", "orders", code=4).stderr
    assert broker.json("brokers", "unload", "1", "--dry-run")["stays"] == 1
    broker.json("brokers", "unload", "1")
    site.settle()
    assert site.counts()[1] == 1
    assert "1 partitions stay" in broker.json("brokers", "list")[0]["reason"]


def test_a_dead_broker_is_forgotten_and_what_it_alone_held_only_by_word() -> None:
    site = Site(brokers=2)
    site.register(3, shared=False)
    site.topics(9)
    site.settle()
    broker = Broker(site)
    assert broker.json("brokers", "forget", "3", code=4)["reason"] == "WrongState"
    site.die(2)
    site.die(3)
    site.run(4)
    assert broker.json("brokers", "forget", "2") == {"broker_id": "2", "lost": 0}
    assert "3 partitions" in broker.json("brokers", "forget", "3", code=4)["message"]
    assert broker.json("brokers", "forget", "3", "--accept-loss", code=2)["reason"] == "InvalidArgument"
    site.run(2)
    assert site.counts()[3] == 3
    assert broker.json("brokers", "forget", "3", "--accept-loss", "--yes") == {"broker_id": "3", "lost": 3}
    site.settle()
    assert site.counts() == {1: 9}


def test_topics_are_listed_by_their_owners(lopsided: Broker) -> None:
    assert len(lopsided.call("list_broker_topics", pb.BrokerRequest(broker_id="1")).topics) == 40
    assert not lopsided.call("list_broker_topics", pb.BrokerRequest(broker_id="2")).topics
    name = lopsided.state.topics()[0].topic
    (first, *_) = lopsided.call("list_namespace_topics", pb.NamespaceRequest(name="default")).topics
    assert (first.name, first.broker_id) == (name, "1")


# -- alone -----------------------------------------------------------------------------------------


def test_a_broker_that_is_alone_is_a_cluster_of_one() -> None:
    broker = Broker(None)
    apply(broker.state, CreateTopic(topic="/default/t", policy=TopicPolicy(), partitions=3, created_us=1))
    (row,) = broker.json("brokers", "list")
    assert (row["broker_id"], row["role"], row["mode"], row["partitions"]) == ("9", "leader", "active", 3)
    assert broker.json("brokers", "leader") == {"broker_id": "9", "native_address": "127.0.0.1:6660"}
    assert broker.call("get_leader_broker", pb.Empty()).leader == "9"
    assert broker.json("brokers", "activate", "9") == {"broker_id": "9", "mode": "active"}


def test_what_a_broker_alone_has_is_in_balance() -> None:
    broker = Broker(None)
    apply(broker.state, CreateTopic(topic="/default/t", policy=TopicPolicy(), partitions=3, created_us=1))
    found = broker.json("brokers", "balance")
    (own,) = found["brokers"]
    assert (own["broker_id"], own["partitions"], own["load"]) == ("9", 3, 3.0)
    assert (found["broker_count"], found["coefficient_of_variation"]) == (1, 0.0)
    assert "deviation 0 %" in broker.danube("brokers", "balance").stderr
    told = broker.call("get_cluster_balance", pb.ClusterBalanceRequest())
    assert (told.mean_load, told.broker_count, told.brokers[0].topic_count) == (3, 1, 3)
    for words in (["rebalance"], ["rebalance", "--dry-run"]):
        found = broker.json("brokers", *words)
        assert (found["moves"], found["started"]) == ([], False)
    moved = broker.call("trigger_rebalance", pb.RebalanceRequest())
    assert moved.success and "balanced" in moved.error_message


@pytest.mark.parametrize(
    ("words", "reason", "code"),
    [
        (["brokers", "activate", "1"], "NotFound", 3),
        (["brokers", "forget", "1"], "NotFound", 3),
        (["brokers", "forget", "9"], "WrongState", 4),
        (["brokers", "unload", "9"], "WrongState", 4),
        (["topics", "unload", "t"], "WrongState", 4),
        (["topics", "unload", "t-part-1"], "WrongState", 4),
        (["topics", "unload", "t-part-7"], "TopicNotFound", 3),
    ],
)
def test_what_a_broker_alone_cannot_do(words: list[str], reason: str, code: int) -> None:
    broker = Broker(None)
    apply(broker.state, CreateTopic(topic="/default/t", policy=TopicPolicy(), partitions=3, created_us=1))
    assert broker.json(*words, code=code)["reason"] == reason


@pytest.mark.parametrize("op", [op for op in cluster_operations.TABLE if op != "member_status"])
def test_a_broker_that_waits_for_its_cluster_is_not_taken_for_one_alone(op: str) -> None:
    broker = Broker(None)
    broker.clustered = True
    with pytest.raises(Unavailable, match="waits for its cluster"):
        broker.cluster(op, broker_id="9", topic="/default/t")


def test_errors_of_later_commands_are_told() -> None:
    site = Site(brokers=2)
    site.topic("orders", 300)
    site.settle()
    broker = Broker(site)
    proposed: list[Any] = []

    def propose(command: Any, answer: Any, view: Any = lambda made: None) -> None:
        proposed.append(command)
        answer(view(None) if len(proposed) == 1 else NotFound("it was deleted"))

    broker.propose = propose  # type: ignore[method-assign]
    with pytest.raises(NotFound):
        broker.cluster("unload_topic", topic="/default/orders")
    assert len(proposed) == 2
