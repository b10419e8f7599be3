"""Rows of the table: what they read from requests, whatever a client sends."""

from __future__ import annotations

from typing import Any

import pytest

from danube.core.metadata.commands import Binding, ConfigureTopicSchema, PutBinding, TopicSchema
from danube.core.partition.policy import FailurePolicy
from danube.core.protocol.native import Admin, Lookup, Subscribe
from danube.core.security.authority import EVERYBODY, Authority
from danube.core.security.operations import ADMIN, ADMIN_ROWS, NATIVE, judge
from danube.core.security.principals import ANONYMOUS, Identity, Principal
from danube.errors import NotAllowed, NotAuthenticated
from tests.golden.authority_cases import identity_of, site

ODD: tuple[Any, ...] = (
    None,
    7,
    True,
    1.5,
    b"\xff",
    [],
    ["x", 7, None],
    {},
    {"topic": "/team/orders"},
    "\udc00",
)
NAMES = ("topic", "namespace", "subject", "schema_id", "scope", "resource", "resource_name", "id",
         "role_names", "principal", "principal_type", "principal_name", "policy", "failure",
         "ttl_s")  # fmt: skip


def allowed(caller: str | Identity, row: Any, request: Any, machine: Any = None) -> bool:
    machine = machine or site()
    identity = caller if isinstance(caller, Identity) else identity_of(caller)
    try:
        judge(Authority(lambda: machine.access), identity, row, request, machine)
    except NotAllowed:
        return False
    return True


@pytest.mark.parametrize("row", ADMIN_ROWS, ids=lambda row: row.name)
def test_odd_arguments_give_nobody_anything(row: Any) -> None:
    machine = site()
    nobody = Identity(Principal("user", "stranger"), "token")
    for odd in ODD:
        request = Admin(row.name, "", dict.fromkeys(NAMES, odd))
        own = row.name in ("can", "issue_token") and odd is None
        assert allowed(nobody, row, request, machine) == own
        judge(Authority(lambda: machine.access), identity_of("admin"), row, request, machine)


def test_nothing_is_judged_where_access_is_not_controlled() -> None:
    judge(EVERYBODY, ANONYMOUS, ADMIN["accept_loss"], Admin("accept_loss"), site())
    with pytest.raises(NotAuthenticated):
        allowed(ANONYMOUS, NATIVE["ADMIN"], None)
    assert allowed("other", NATIVE["ADMIN"], None)


def test_a_dead_letter_topic_needs_produce() -> None:
    for topic, may in (("/team/letters", False), ("", True)):
        request = Subscribe("/team/orders", "s", "c", failure=FailurePolicy(dead_letter_topic=topic))
        assert allowed("consumer", NATIVE["SUBSCRIBE"], request) == may
    request = Subscribe("/team/orders", "s", "c", failure=FailurePolicy(dead_letter_topic="/other/letters"))
    assert not allowed("ns-admin", NATIVE["SUBSCRIBE"], request)
    request = Subscribe("/team/orders", "s", "c", failure=FailurePolicy(dead_letter_topic="/team/letters"))
    assert allowed("ns-admin", NATIVE["SUBSCRIBE"], request)


def test_a_lookup_that_makes_needs_produce() -> None:
    assert allowed("viewer", NATIVE["LOOKUP"], Lookup("/team/missing"))
    assert not allowed("viewer", NATIVE["LOOKUP"], Lookup("/team/missing", create=True))


def test_a_subject_is_read_through_a_topic_that_follows_it() -> None:
    machine = site()
    reads = Admin("schema.get", "", {"subject": "team-value"})
    assert allowed("consumer", ADMIN["schema.get"], reads, machine)
    assert not allowed("other", ADMIN["schema.get"], reads, machine)
    by_id = Admin("schema.get", "", {"schema_id": 1})
    with pytest.raises(NotAllowed) as caught:
        judge(Authority(lambda: machine.access), identity_of("other"), ADMIN["schema.get"], by_id, machine)
    assert "schema 1" in str(caught.value) and "team-value" not in str(caught.value)
    command = ConfigureTopicSchema(topic="/team/orders", schema=TopicSchema("other-value"))
    machine.apply(machine.version + 1, command)
    assert not allowed("consumer", ADMIN["schema.get"], reads, machine), (
        "no topic of its namespace follows it"
    )
    assert allowed(
        "consumer", ADMIN["schema.get"], Admin("schema.get", "", {"subject": "other-value"}), machine
    )


def test_a_role_on_one_topic_reads_its_subject() -> None:
    machine = site()
    binding = Binding("t", "user", "one", ("consumer",), "topic", "/team/orders")
    machine.apply(machine.version + 1, PutBinding(binding=binding))
    one = Identity(Principal("user", "one"), "token")
    assert allowed(one, ADMIN["schema.get"], Admin("schema.get", "", {"subject": "team-value"}), machine)
    assert not allowed(one, ADMIN["schema.get"], Admin("schema.get", "", {"subject": "other-value"}), machine)


def test_an_existing_binding_is_replaced_by_whoever_could_make_it() -> None:
    machine = site()
    binding = Binding("b", "user", "root", ("admin",), "namespace", "team")
    machine.apply(machine.version + 1, PutBinding(binding=binding))
    place = {"scope": "namespace", "resource_name": "/team", "id": "b"}
    gives = {"principal_type": "user", "principal_name": "bob", "role_names": ["consumer"]}
    assert not allowed(
        "ns-admin", ADMIN["put_binding"], Admin("put_binding", "", {**place, **gives}), machine
    )
    assert not allowed("ns-admin", ADMIN["delete_binding"], Admin("delete_binding", "", place), machine)
    place["id"] = "own"
    assert allowed("ns-admin", ADMIN["put_binding"], Admin("put_binding", "", {**place, **gives}), machine)
    own = Binding("own", "user", "bob", ("consumer",), "namespace", "team")
    machine.apply(machine.version + 1, PutBinding(binding=own))
    assert allowed("ns-admin", ADMIN["delete_binding"], Admin("delete_binding", "", place), machine)


@pytest.mark.parametrize(
    ("args", "may"),
    [
        ({}, True),
        ({"principal": "user:producer"}, True),
        ({"principal": "user:admin"}, False),
        ({"ttl_s": 86_400}, True),
        ({"ttl_s": 86_401}, False),
        ({"ttl_s": "1"}, False),
    ],
)
def test_one_s_own_token_lives_for_a_day_at_most(args: dict[str, Any], may: bool) -> None:
    assert allowed("producer", ADMIN["issue_token"], Admin("issue_token", "", args)) == may
    assert allowed("admin", ADMIN["issue_token"], Admin("issue_token", "", args))


def test_what_groups_could_do_is_told_to_administrators() -> None:
    assert allowed("producer", ADMIN["can"], Admin("can", "", {"principal": "user:producer"}))
    assert allowed("producer", ADMIN["can"], Admin("can", "", {"groups": []}))
    assert not allowed("producer", ADMIN["can"], Admin("can", "", {"groups": ["writers"]}))
    assert allowed("admin", ADMIN["can"], Admin("can", "", {"groups": ["writers"]}))
