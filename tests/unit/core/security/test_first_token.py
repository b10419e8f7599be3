"""The first token: what it may ask for, and when it is taken back."""

from __future__ import annotations

from typing import Any

import pytest

from danube.core.metadata.commands import Binding, Command, DeleteRevocation, PutBinding, Revocation, Revoke
from danube.core.metadata.machine import Metadata
from danube.core.metadata.roles import PERMISSIONS
from danube.core.security.authority import CLUSTER, Authority, Resource, super_admins_of, topic_resource
from danube.core.security.first_token import HANDED_OVER, NEWER, may_live, taking_back
from danube.core.security.operations import (
    ADMIN,
    ADMIN_ROWS,
    FIRST_TOKEN,
    GRPC_ROWS,
    NATIVE_ROWS,
    OPEN,
    Effect,
    Row,
    judge,
)
from danube.core.security.principals import BOOTSTRAP, Identity, Principal
from danube.errors import InvalidArgument, NotAllowed, NotAuthenticated
from tests.golden.authority_cases import TARGETS, admin_request, grpc_request, native_request, site

NOW_US = 1_700_000_000_000_000
ROWS = (*ADMIN_ROWS, *NATIVE_ROWS, *GRPC_ROWS)


def first(issued_us: int = NOW_US) -> Identity:
    return Identity(BOOTSTRAP, "token", issued_us + 86_400_000_000, "1", b"k" * 16, "id", issued_us)


def request_of(row: Row) -> Any:
    made = admin_request if row in ADMIN_ROWS else native_request if row in NATIVE_ROWS else grpc_request
    return made(row, TARGETS[0], {})


# -- what it may ask for ------------------------------------------------------------------------------


def test_its_list_is_of_rows_that_make_or_read_who_may_what() -> None:
    known = {row.name: row for row in ROWS}
    assert known.keys() >= FIRST_TOKEN
    assert all(known[name].effect is not Effect.DESTROY for name in FIRST_TOKEN)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_every_other_row_is_refused_and_says_what_to_do(row: Row) -> None:
    machine = site()
    authority = Authority(lambda: machine.access)
    if row.permission == OPEN or row.name in FIRST_TOKEN:
        judge(authority, first(), row, request_of(row), machine)
        return
    with pytest.raises(NotAllowed) as caught:
        judge(authority, first(), row, request_of(row), machine)
    assert "first token" in str(caught.value) and "first token" in caught.value.why
    assert "danube security bindings create" in caught.value.hint


def test_it_holds_nothing_on_topics_and_namespaces_whatever_is_bound() -> None:
    """Doors that know a topic by an id ask for the permission alone."""
    machine = site()
    authority = Authority(lambda: machine.access, super_admins_of(["user:bootstrap", "bootstrap"]))
    for binding in (
        Binding("b", "bootstrap", "", ("admin",), "cluster", ""),
        Binding("u", "user", "bootstrap", ("admin",), "cluster", ""),
    ):
        machine.apply(machine.version + 1, PutBinding(binding=binding))
    for permission in PERMISSIONS:
        for resource in (CLUSTER, Resource("namespace", "team"), topic_resource("/team/orders")):
            allowed = authority.decide(first(), permission, resource).allowed
            assert allowed == (permission == "ManageCluster" and resource == CLUSTER)
    with pytest.raises(NotAllowed, match="first token") as caught:
        authority.demand(first(), "Produce", topic_resource("/team/orders"))
    assert "tokens issue" in caught.value.hint
    assert not authority.sees_topic(first())("/team/orders")
    assert not authority.visible(first(), topic_resource("/team/orders"))


def test_a_broker_that_forwards_its_request_says_so() -> None:
    """Another broker knows who asks by the name alone, and judges alike."""
    assert str(BOOTSTRAP) == "bootstrap"
    kind, _, name = str(BOOTSTRAP).partition(":")
    assert Principal(kind, name) == BOOTSTRAP


@pytest.mark.parametrize("text", ["bootstrap", "bootstrap:", "bootstrap:admin"])
def test_no_text_names_it(text: str) -> None:
    with pytest.raises(InvalidArgument):
        Principal.parse(text)


# -- when it is taken back ----------------------------------------------------------------------------


class Host:
    """A machine whose commands are what the rule asks for."""

    def __init__(self, *super_admins: str) -> None:
        self.machine = Metadata()
        self.authority = Authority(lambda: self.machine.access, super_admins_of(super_admins))
        self.now_us = NOW_US

    def apply(self, command: Command) -> None:
        assert self.machine.check(command)
        self.machine.apply(self.machine.version + 1, command)

    def bind(self, role: str, scope: str = "cluster", resource: str = "") -> Identity:
        binding = Binding(f"{role}-{scope}", "user", "anna", (role,), scope, resource)
        self.apply(PutBinding(binding=binding))
        return Identity(Principal("user", "anna"), "token", issued_us=self.now_us)

    def comes(self, identity: Identity) -> Revocation | None:
        self.now_us += 1_000_000
        due = taking_back(self.machine.access, self.authority, identity, self.now_us)
        if due is not None:
            self.apply(Revoke(revocation=due, now_us=self.now_us))
        return due

    def dead(self, identity: Identity) -> bool:
        with_rights = self.authority.decide(identity, "ManageCluster", CLUSTER)
        return not with_rights.authenticated


def test_an_administrator_takes_it_back() -> None:
    host, token = Host(), first()
    assert host.comes(token) is not None and not host.dead(token), "it is good when it is shown"
    assert host.comes(token) is None, "once is enough"
    assert host.comes(host.bind("admin")) is not None
    assert host.dead(token)
    with pytest.raises(NotAuthenticated):
        judge(host.authority, token, ADMIN["can"], None, host.machine)


def test_it_need_not_have_been_shown() -> None:
    host = Host("user:root")
    root = Identity(Principal("user", "root"), "token", issued_us=NOW_US)
    due = host.comes(root)
    assert due is not None and due.reason == HANDED_OVER and host.dead(first())


@pytest.mark.parametrize(
    ("role", "scope", "resource"),
    [("viewer", "cluster", ""), ("producer", "cluster", ""), ("admin", "namespace", "default"),
     ("admin", "topic", "/default/t"), ("namespace-admin", "namespace", "default")],
)  # fmt: skip
def test_nobody_with_less_takes_it_back(role: str, scope: str, resource: str) -> None:
    host, token = Host(), first()
    host.comes(token)
    assert host.comes(host.bind(role, scope, resource)) is None and not host.dead(token)
    assert host.comes(Identity(Principal("user", "stranger"), "token")) is None


def test_what_it_made_stays() -> None:
    """The administrator's own token was asked for by the first one, and does not go with it."""
    host, token = Host(), first()
    anna = host.bind("admin")._replace(descent=("credential:" + token.token_key.hex(), "token:id"))
    host.comes(anna)
    assert host.dead(token) and not host.dead(anna)


def test_an_administrator_who_comes_again_writes_nothing() -> None:
    host = Host()
    anna = host.bind("admin")
    host.comes(anna)
    version = host.machine.version
    assert host.comes(anna) is None and host.machine.version == version
    assert not may_live(host.machine.access)


def test_a_later_one_is_good_until_an_administrator_comes_again() -> None:
    host = Host()
    anna, token = host.bind("admin"), first()
    host.comes(anna)
    host.now_us += 5_000_000
    later = first(host.now_us)
    due = host.comes(later)
    assert due is not None and due.reason == NEWER and not host.dead(later) and host.dead(token)
    assert host.comes(anna) is not None and host.dead(later)


def test_the_newest_that_was_shown_takes_its_forerunners_back() -> None:
    host, token, newer = Host(), first(), first(NOW_US + 3_000_000)
    host.comes(token)
    host.comes(newer)
    assert host.dead(token) and not host.dead(newer)
    assert host.comes(token) is None, "a forerunner moves nothing back"


def test_one_of_the_same_instant_is_taken_back_as_well() -> None:
    host = Host()
    anna = host.bind("admin")
    host.comes(anna)
    assert host.dead(first(host.now_us)) and not host.dead(first(host.now_us + 1_000_000))


def test_one_by_a_clock_that_is_ahead_is_taken_back_as_well() -> None:
    host, ahead = Host(), first(NOW_US + 60_000_000)
    host.comes(ahead)
    assert not host.dead(ahead)
    host.comes(host.bind("admin"))
    assert host.dead(ahead)


def test_the_end_of_the_revocation_is_after_the_last_that_it_means() -> None:
    host = Host()
    due = host.comes(host.bind("admin"))
    assert due is not None and due.end_us > first(host.now_us).expires_us + 300_000_000  # the most leeway


def test_a_deleted_revocation_comes_back_with_the_next_administrator() -> None:
    host, token = Host(), first()
    anna = host.bind("admin")
    host.comes(anna)
    host.apply(DeleteRevocation(revoked="principal", value="bootstrap"))
    assert not host.dead(token)
    assert host.comes(anna) is not None and host.dead(token)


def test_a_snapshot_keeps_it_dead() -> None:
    host = Host()
    host.comes(host.bind("admin"))
    host.machine = Metadata.restore(host.machine.snapshot())
    assert host.dead(first()) and not may_live(host.machine.access)
