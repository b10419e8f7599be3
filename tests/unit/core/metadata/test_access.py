"""Roles and bindings: names of permissions, scopes, spellings of resources, and what is missing."""

from __future__ import annotations

import pytest

from danube.core.metadata import roles as access_module
from danube.core.metadata.commands import (
    Binding,
    Command,
    CreateNamespace,
    DeleteBinding,
    DeleteRole,
    PutBinding,
    PutRole,
    Role,
)
from danube.core.metadata.machine import Metadata
from danube.core.metadata.roles import BUILT_IN_ROLES, PERMISSIONS, resource_in
from danube.errors import CallerError, InvalidArgument, InvalidName, LimitExceeded, NotFound, WrongState


def propose(machine: Metadata, command: Command) -> bool:
    needed = machine.check(command)
    if needed:
        assert machine.apply(machine.version + 1, command) == []
    return needed


def role(name: str = "r", *permissions: str, system: bool = False) -> PutRole:
    return PutRole(role=Role(name, permissions or ("Produce",), system))


def binding(name: str = "b", scope: str = "cluster", resource: str = "", **fields: object) -> PutBinding:
    given = {"principal_type": "user", "principal_name": "anna", "role_names": ("r",), **fields}
    return PutBinding(binding=Binding(id=name, scope=scope, resource_name=resource, **given))  # type: ignore[arg-type]


def test_roles_are_put_replaced_and_deleted() -> None:
    machine = Metadata()
    assert propose(machine, role("b", *PERMISSIONS)) and propose(machine, role("a"))
    assert not propose(machine, role("a")), "it is so already"
    assert propose(machine, role("a", "Consume", "Lookup"))
    assert [one.name for one in machine.access.roles()] == ["a", "b"]
    found = machine.access._roles.get("a")
    assert found is not None and found.permissions == ("Consume", "Lookup")
    for held in (machine.copy(), Metadata.restore(machine.snapshot())):
        assert held.access.roles() == machine.access.roles()
        propose(held, DeleteRole(name="a"))
        assert held.access._roles.get("a") is None
    assert machine.access._roles.get("a") is not None


def test_a_role_of_the_system_stays() -> None:
    machine = Metadata()
    propose(machine, role("root", "ManageCluster", system=True))
    for judge in (machine.check, lambda command: machine.apply(machine.version + 1, command)):
        with pytest.raises(WrongState):
            judge(DeleteRole(name="root"))
    assert machine.access._roles.get("root") is not None


def test_bindings_are_found_by_scope_and_resource() -> None:
    machine = Metadata()
    everyone = [
        binding("c"), binding("n", "namespace", "default"), binding("n", "topic", "/default/t"),
        binding("m", "topic", "/default/t"), binding("s", "topic", "user-events"),
    ]  # fmt: skip
    for one in everyone:
        propose(machine, one)
    machine = Metadata.restore(machine.snapshot())
    ids = [(one.scope, one.resource_name, one.id) for one in machine.access.bindings()]
    assert ids == sorted(ids) and len(ids) == 5
    assert [one.id for one in machine.access.bindings("topic")] == ["m", "n", "s"]
    assert [one.id for one in machine.access.bindings("topic", "/default/t")] == ["m", "n"]
    assert [one.id for one in machine.access.bindings("namespace", "/default")] == ["n"]
    assert [one.id for one in machine.access.bindings("cluster", "")] == ["c"]
    propose(machine, DeleteBinding(scope="namespace", resource_name="/default", id="n"))
    assert machine.access.bindings("namespace") == []
    assert not propose(machine, binding("c")) and propose(machine, binding("c", principal_name="bert"))


def test_a_namespace_has_one_spelling() -> None:
    assert resource_in("namespace", "/payments") == resource_in("namespace", "payments") == "payments"
    assert resource_in("topic", "/a/b") == "/a/b"


@pytest.mark.parametrize(
    "command, error",
    [
        (role(""), InvalidName),
        (role("r", "produce"), InvalidArgument),
        (role("r", "Produce", "Produce"), InvalidArgument),
        (DeleteRole(name="none"), NotFound),
        (binding(""), InvalidName),
        (binding(principal_type=""), InvalidName),
        (binding(principal_name="a\nb"), InvalidName),
        (binding(role_names=()), InvalidArgument),
        (binding(role_names=("r",) * 17), InvalidArgument),
        (binding(role_names=("",)), InvalidName),
        (binding("b", "galaxy"), InvalidArgument),
        (binding("b", "cluster", "x"), InvalidArgument),
        (binding("b", "topic", ""), InvalidArgument),
        (binding("b", "namespace", resource_in("namespace", "/")), InvalidArgument),
        (binding("b", "topic", "/default/t-part-0"), InvalidArgument),
        (binding("b", "topic", "a\x00"), InvalidName),
        (binding("b", "namespace", "/default"), InvalidArgument),
        (DeleteBinding(scope="cluster", resource_name="", id="none"), NotFound),
        (DeleteBinding(scope="topic", resource_name="", id="b"), InvalidArgument),
    ],
)
def test_what_is_refused_changes_nothing(command: Command, error: type[CallerError]) -> None:
    machine = Metadata()
    before = machine.snapshot()
    with pytest.raises(error):
        machine.check(command)
    assert machine.snapshot() == before


def test_roles_and_bindings_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Metadata()
    propose(machine, role("a"))
    propose(machine, binding("a"))
    monkeypatch.setattr(access_module, "ROLES_MAX", 1)
    monkeypatch.setattr(access_module, "BINDINGS_MAX", 1)
    assert propose(machine, role("a", "Consume")) and propose(machine, binding("a", principal_name="x"))
    with pytest.raises(LimitExceeded):
        propose(machine, role("b"))
    with pytest.raises(LimitExceeded):
        propose(machine, binding("b"))
    machine.apply(machine.version + 1, role("b"))
    assert len(machine.access.roles()) == 2, "what was agreed stays applicable"


def test_built_in_roles_are_there_and_may_be_replaced() -> None:
    machine = Metadata()
    assert [one.name for one in machine.access.every_role()] == sorted(BUILT_IN_ROLES)
    assert machine.access.roles() == [], "they are made by code"
    assert machine.access.find_role("admin") == Role("admin", PERMISSIONS, system=True)
    with pytest.raises(WrongState, match="built in"):
        machine.check(DeleteRole(name="producer"))
    propose(machine, role("producer", "Produce"))
    assert machine.access.find_role("producer") == Role("producer", ("Produce",))
    assert len(machine.access.every_role()) == len(BUILT_IN_ROLES)
    propose(machine, DeleteRole(name="producer"))
    assert machine.access.find_role("producer") == BUILT_IN_ROLES["producer"]


def test_the_version_moves_with_each_change_and_with_nothing_else() -> None:
    machine = Metadata()
    assert machine.access.version == 0
    propose(machine, role())
    assert machine.access.version == 1
    machine.apply(2, CreateNamespace(namespace="other"))
    assert (machine.version, machine.access.version) == (2, 1)
    with pytest.raises(NotFound):
        machine.apply(3, DeleteRole(name="missing"))
    assert machine.access.version == 1, "a refused command changes nothing"
    propose(machine, binding())
    assert machine.access.version == 4 == machine.copy().access.version
    machine.apply(5, CreateNamespace(namespace="third"))
    assert Metadata.restore(machine.snapshot()).access.version == 5, "the snapshot's index stands for it"
    assert Metadata.restore(Metadata().snapshot()).access.version == 0
