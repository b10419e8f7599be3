"""The router's judge: what opens a handle is kept, and judged again when rights have changed."""

from __future__ import annotations

import pytest

from danube.broker.operations.arguments import listed
from danube.broker.routing.judging import (
    JUDGED_AT_ONCE,
    SUGGESTS,
    UNUSED_GRANTS_MAX,
    Judging,
    Recall,
    asking,
    discreet,
)
from danube.core.metadata.commands import Binding, CreateTopic, DeleteBinding, PutBinding, SetNamespacePolicy
from danube.core.metadata.machine import Metadata
from danube.core.metadata.policies import NamespacePolicy
from danube.core.partition.policy import FailurePolicy, TopicPolicy
from danube.core.protocol.native import Admin, Frame, Kind, Lookup, OpenProducer, Subscribe
from danube.core.security.arguments import Page
from danube.core.security.authority import EVERYBODY, Authority
from danube.core.security.principals import INTERNAL, Identity, Principal
from danube.errors import DanubeError, InvalidArgument, NotAllowed, TopicNotFound
from tests.unit.broker_parts import RecordingSession

ADA = Identity(Principal("service_account", "ada"), "token")
TOPIC = "/default/orders"


class Court:
    def __init__(self) -> None:
        self.machine = Metadata()
        self.routed: list[tuple[int, int]] = []
        self.room = True
        self.authority = Authority(lambda: self.machine.access)
        self.judging = Judging(self.authority, lambda: self.machine, self._route)
        self.session = RecordingSession(1)
        self.session.identity = ADA

    def _route(self, session: object, frame: Frame, buffer: memoryview) -> bool:
        if self.room:
            self.routed.append((frame.kind, frame.handle))
        return self.room

    def bind(self, role: str, topic: str = TOPIC) -> None:
        binding = Binding(role, "service_account", "ada", (role,), "topic", topic)
        self._apply(PutBinding(binding=binding))

    def unbind(self, role: str, topic: str = TOPIC) -> None:
        self._apply(DeleteBinding(id=role, scope="topic", resource_name=topic))

    def _apply(self, command: object) -> None:
        self.machine.apply(self.machine.version + 1, command)  # type: ignore[arg-type]

    def open(self, handle: int, topic: str = TOPIC) -> None:
        self.judging.open_producer(self.session, handle, OpenProducer(topic, "p"))
        self.session.producers[handle] = object()

    def errors(self) -> list[tuple[int, int]]:
        return [(frame.kind, frame.handle) for frame in self.session.take()]


@pytest.fixture
def court() -> Court:
    return Court()


def test_nothing_is_allowed_without_a_role(court: Court) -> None:
    for ask in (
        lambda: court.judging.lookup(court.session, Lookup(TOPIC)),
        lambda: court.judging.open_producer(court.session, 1, OpenProducer(TOPIC, "p")),
        lambda: court.judging.subscribe(court.session, 1, Subscribe(TOPIC, "s", "c")),
        lambda: court.judging.admin(court.session, Admin("delete_topic", "", {"topic": TOPIC})),
        lambda: court.judging.admin(court.session, Admin("seek", f"{TOPIC}-part-3")),
    ):
        with pytest.raises(NotAllowed):
            ask()
    assert court.session.grants == {}


def test_a_lookup_that_makes_its_topic_needs_the_right_to_produce(court: Court) -> None:
    court.bind("consumer")
    court.judging.lookup(court.session, Lookup(TOPIC))
    with pytest.raises(NotAllowed):
        court.judging.lookup(court.session, Lookup(TOPIC, create=True))


def test_a_dead_letter_topic_is_one_more_topic_to_produce_to(court: Court) -> None:
    court.bind("consumer")
    letters = FailurePolicy(poison="dead_letter", dead_letter_topic="/other/planted")
    court.judging.subscribe(court.session, 1, Subscribe(TOPIC, "s", "c"))
    with pytest.raises(NotAllowed, match="/other/planted"):
        court.judging.subscribe(court.session, 2, Subscribe(TOPIC, "s", "c", failure=letters))


def test_subscriptions_are_named_after_who_consumes_where_the_namespace_says_so(court: Court) -> None:
    court.bind("consumer")
    court.judging.subscribe(court.session, 1, Subscribe(TOPIC, "anything", "c"))
    policy = NamespacePolicy(subscription_auth="prefix")
    court._apply(SetNamespacePolicy(namespace="default", policy=policy))
    for handle, name in enumerate(("ada", "ada-orders", "ada.orders", "ada_orders"), 2):
        court.judging.subscribe(court.session, handle, Subscribe(TOPIC, name, "c"))
    for name in ("bob", "adam", "anything", ""):
        with pytest.raises(NotAllowed, match="subscription_auth"):
            court.judging.subscribe(court.session, 9, Subscribe(TOPIC, name, "c"))
        with pytest.raises(NotAllowed, match="subscription_auth"):
            court.judging.admin(court.session, Admin("settle", TOPIC, {"subscription": name}))
    court.bind("namespace-admin")
    court.judging.subscribe(court.session, 9, Subscribe(TOPIC, "bob", "c"))


@pytest.mark.parametrize(
    ("role", "hint", "shown"),
    [
        ("", "did you mean /default/orders?", False),
        ("consumer", "did you mean /default/orders?", True),
        ("consumer", "did you mean /default/orders or /default/order?", False),
        ("consumer", "did you mean default?", False),
        ("", "create the topic first", True),
    ],
)
def test_names_that_are_alike_are_told_to_who_may_see_them(
    court: Court, role: str, hint: str, shown: bool
) -> None:
    if role:
        court.bind(role)
    error = TopicNotFound("topic /default/orderz does not exist", why="w", hint=hint, seen=1)
    told = discreet(court.authority, ADA, error)
    assert (type(told), str(told), told.facts) == (TopicNotFound, str(error), {"seen": 1})
    assert told.hint == (hint if shown else "") and error.hint == hint
    assert discreet(court.authority, INTERNAL, error) is error


def test_every_hint_with_names_is_known_as_one() -> None:
    machine = Metadata()
    machine.apply(1, CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1))
    for ask in (lambda: machine.topic("/default/orderz"), lambda: machine.topics("defaulz")):
        with pytest.raises(DanubeError) as caught:
            ask()
        assert caught.value.hint.startswith(SUGGESTS)


def test_a_letter_is_judged_by_who_set_the_policy(court: Court) -> None:
    court.judging.letter("", "/other/letters")  # the operator's own
    with pytest.raises(NotAllowed, match="service_account:ada has no permission Produce"):
        court.judging.letter("service_account:ada", TOPIC)
    court.bind("producer")
    court.judging.letter("service_account:ada", TOPIC)


def test_the_broker_itself_needs_no_role_and_keeps_no_grant(court: Court) -> None:
    court.session.identity = INTERNAL
    court.judging.open_producer(court.session, 1, OpenProducer(TOPIC, "p"))
    assert court.session.grants == {}


def test_only_a_broker_asks_for_another(court: Court) -> None:
    court.bind("admin")
    told = (
        Admin("topic", forwarded=True),
        Admin("topic", on_behalf="user:root"),
        Admin("topic", groups=("a",)),
    )
    for request in told:
        with pytest.raises(NotAllowed, match="only a broker"):
            court.judging.admin(court.session, request)
    court.session.identity = INTERNAL
    with pytest.raises(NotAllowed, match="service_account:bob"):
        court.judging.admin(court.session, Admin("topic", "", {"topic": TOPIC}, True, "service_account:bob"))
    assert asking(INTERNAL, Admin("topic")) is INTERNAL
    forwarded = Admin("topic", "", {"topic": TOPIC}, True, "user:bob", ("team",))
    with pytest.raises(NotAllowed, match="user:bob"):
        court.judging.admin(court.session, forwarded)
    court._apply(PutBinding(binding=Binding("team", "group", "team", ("viewer",), "topic", TOPIC)))
    court.judging.admin(court.session, forwarded)


def test_only_a_broker_has_producers_that_no_limit_counts(court: Court) -> None:
    court.bind("admin")
    own = OpenProducer(TOPIC, "letters", internal=True)
    with pytest.raises(NotAllowed, match="only a broker"):
        court.judging.open_producer(court.session, 1, own)
    court.session.identity = INTERNAL
    court.judging.open_producer(court.session, 1, own)


def test_an_operation_without_a_row_is_nobody_s(court: Court) -> None:
    with pytest.raises(InvalidArgument, match="'unheard'"):
        court.judging.admin(court.session, Admin("unheard"))


def test_a_right_that_is_taken_away_closes_its_handles(court: Court) -> None:
    court.bind("producer")
    court.bind("producer", "/default/kept")
    court.open(1)
    court.open(2, "/default/kept")
    court.unbind("producer")
    court.judging.again(court.session)
    assert court.routed == [(Kind.CLOSE_PRODUCER, 1)]
    assert court.errors() == [(Kind.ERROR, 1)] and list(court.session.grants) == [2]


def test_with_a_full_ring_the_next_look_closes(court: Court) -> None:
    court.bind("producer")
    court.open(1)
    court.unbind("producer")
    court.room = False
    court.judging.again(court.session)
    assert court.errors() == [] and list(court.session.grants) == [1]
    court.room = True
    court.judging.again(court.session)
    assert court.errors() == [(Kind.ERROR, 1)]


def test_a_handle_in_use_keeps_the_grant_it_was_opened_by(court: Court) -> None:
    """Else a handle would live by the right to another topic."""
    court.bind("producer")
    court.bind("producer", "/default/kept")
    court.open(1)
    with pytest.raises(InvalidArgument, match="in use"):
        court.open(1, "/default/kept")
    court.unbind("producer")
    court.judging.again(court.session)
    assert court.errors() == [(Kind.ERROR, 1)]


def test_grants_of_closed_handles_are_dropped(court: Court) -> None:
    court.bind("producer")
    court.open(1)
    del court.session.producers[1]
    court.judging.again(court.session)
    assert court.session.grants == {} and court.routed == []
    court.open(1)


def test_a_handle_is_closed_only_as_what_it_was_opened(court: Court) -> None:
    """Else a consumer would go on without a grant, and outlive its rights."""
    court.bind("producer")
    court.open(1)
    with pytest.raises(InvalidArgument, match="producer's"):
        court.judging.close(court.session, 1, Kind.CLOSE_CONSUMER)
    assert list(court.session.grants) == [1]
    court.judging.close(court.session, 1, Kind.CLOSE_PRODUCER)
    court.judging.close(court.session, 1, Kind.CLOSE_PRODUCER)
    assert court.session.grants == {}


def test_grants_of_what_never_opens_do_not_pile_up(court: Court) -> None:
    court.bind("producer")
    court.open(1)
    for handle in range(2, 1_000):
        court.judging.open_producer(court.session, handle, OpenProducer(TOPIC, "p"))
    assert len(court.session.grants) <= UNUSED_GRANTS_MAX + 3 and 1 in court.session.grants


def test_lists_leave_out_what_is_not_seen(court: Court) -> None:
    court.bind("viewer", "/a/seen")

    def seen(op: str, names: list[str]) -> list[str]:
        return list(filter(court.judging.shows(ADA, op), names))

    assert seen("namespaces", ["a", "b"]) == ["a"] and seen("schema.subjects", ["s"]) == []
    assert court.judging.shows(INTERNAL, "namespaces") is None and court.judging.shows(ADA, "topic") is None


def test_a_page_does_not_end_at_the_name_of_what_is_hidden(court: Court) -> None:
    """Else whoever sees one topic could ask for every other, page by page."""
    court.bind("viewer", "/b/seen")
    names, shows = ["a", "b", "c"], court.judging.shows(ADA, "namespaces")
    assert listed(Page(limit=1), names, str, str, shows) == {"entries": ["b"], "after": None}
    assert listed(Page(limit=1, prefix="c"), names, str, str, shows) == {"entries": [], "after": None}


class Held:
    def __init__(self) -> None:
        self.judged = 0

    def judge_again(self) -> int:
        self.judged += 1
        return JUDGED_AT_ONCE // 2


def test_rights_are_looked_at_when_they_have_changed_and_in_parts(court: Court) -> None:
    held, later, forgotten = [Held() for _ in range(5)], [], []  # type: ignore[var-annotated]
    recall = Recall(
        court.authority, lambda: list(held), lambda: forgotten.append(1), lambda work: later.append(work)
    )
    recall.look()
    assert [one.judged for one in held] == [0] * 5 and not forgotten
    court.bind("producer")
    recall.look()
    assert sum(one.judged for one in held) == 2 and len(forgotten) == 1
    while later:
        later.pop()()
    assert [one.judged for one in held] == [1] * 5
    recall.look()
    assert [one.judged for one in held] == [1] * 5, "nothing has changed since"
    recall.policies_changed()
    recall.look()
    while later:
        later.pop()()
    recall.look()
    assert [one.judged for one in held] == [2] * 5 and len(forgotten) == 1, (
        "credentials are as good as before"
    )
    recall.begin()
    while later:
        later.pop()()
    assert [one.judged for one in held] == [3] * 5, "a key has gone"


def test_policies_recall_nothing_where_access_is_not_controlled() -> None:
    held = Held()
    recall = Recall(EVERYBODY, lambda: [held], lambda: None, lambda work: None)
    recall.policies_changed()
    recall.look()
    assert not held.judged


def test_a_policy_that_names_subscriptions_closes_those_of_others(court: Court) -> None:
    court.bind("consumer")
    for handle, name in ((1, "ada-orders"), (2, "anything")):
        court.judging.subscribe(court.session, handle, Subscribe(TOPIC, name, "c"))
        court.session.consumers[handle] = object()
    policy = NamespacePolicy(subscription_auth="prefix")
    court._apply(SetNamespacePolicy(namespace="default", policy=policy))
    assert court.judging.again(court.session) == 3
    assert court.routed == [(Kind.CLOSE_CONSUMER, 2)] and court.errors() == [(Kind.ERROR, 2)]
