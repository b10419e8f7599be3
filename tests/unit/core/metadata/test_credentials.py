"""API keys and revocations: what is kept, what is refused, what takes a credential back."""

from __future__ import annotations

from typing import Any

import pytest

from danube.core.cluster.commands import PutKey
from danube.core.metadata import credentials as credentials_module
from danube.core.metadata.commands import (
    ApiKey,
    Command,
    CreateNamespace,
    DeleteApiKey,
    DeleteRevocation,
    PutApiKey,
    PutRole,
    Revocation,
    Revoke,
    Role,
)
from danube.core.metadata.credentials import descent_from, exchanged_token_id
from danube.core.metadata.machine import Metadata
from danube.core.security.principals import INTERNAL, Identity, Principal
from danube.errors import CallerError, Conflict, InvalidArgument, InvalidName, LimitExceeded, NotFound
from danube.wal.verify.state import read_snapshot

ANNA = Principal("user", "anna")
TOKEN = Identity(ANNA, "token", 1_000, "k1", b"\x01" * 16, "jti-1", 100)
END = 10_000


def machine_with(*commands: Command) -> Metadata:
    machine = Metadata()
    for command in commands:
        propose(machine, command)
    return machine


def propose(machine: Metadata, command: Command) -> bool:
    needed = machine.check(command)
    if needed:
        assert machine.apply(machine.version + 1, command) == []
    return needed


def put(key_id: str = "a", **fields: Any) -> PutApiKey:
    given = {"secret_hash": bytes(32), "principal": "user:anna", "created_us": 1, **fields}
    return PutApiKey(key=ApiKey(key_id, **given))


def revoke(kind: str, value: str, end_us: int = END, now_us: int = 200, **more: Any) -> Revoke:
    return Revoke(revocation=Revocation(kind, value, end_us, **more), now_us=now_us)


def why(machine: Metadata, identity: Identity) -> str:
    return machine.access.credentials.revoked(identity)


def test_keys_are_put_once_and_deleted() -> None:
    machine = machine_with(put("b"), put("a"))
    assert [key.id for key in machine.access.credentials.api_keys()] == ["a", "b"]
    with pytest.raises(Conflict):
        machine.check(put("a"))
    by_key = Identity(ANNA, "key", key_id="a", token_key=b"x" * 16, issued_us=1)
    exchanged = TOKEN._replace(token_id=exchanged_token_id("a", "7"))
    assert why(machine, by_key) == why(machine, exchanged) == ""
    propose(machine, DeleteApiKey(id="a"))
    assert "deleted" in why(machine, by_key) and "deleted" in why(machine, exchanged)
    assert machine.access.credentials.find_key("a") is None and machine.access.version == 3
    with pytest.raises(NotFound):
        machine.apply(4, DeleteApiKey(id="a"))
    assert machine.access.version == 3, "a refused command changes nothing"


@pytest.mark.parametrize(
    ("kind", "value", "more"),
    [
        ("token", "jti-1", {}),
        ("credential", "01" * 16, {}),
        ("signing_key", "k1", {}),
        ("principal", "user:anna", {"before_us": 101}),
    ],
)
def test_a_credential_is_taken_back(kind: str, value: str, more: dict[str, int]) -> None:
    machine = machine_with(revoke(kind, value, reason="lost", **more))
    assert why(machine, TOKEN) == "the credential was revoked: lost"
    other = Identity(Principal("user", "bert"), "token", 1_000, "k2", b"\x02" * 16, "jti-2", 100)
    assert why(machine, other) == ""
    assert propose(machine, DeleteRevocation(revoked=kind, value=value)) and why(machine, TOKEN) == ""
    with pytest.raises(NotFound):
        machine.check(DeleteRevocation(revoked=kind, value=value))


@pytest.mark.parametrize(
    ("kind", "value"), [("token", "jti-1"), ("credential", "01" * 16), ("signing_key", "k1")]
)
def test_what_a_credential_asked_for_goes_with_it(kind: str, value: str) -> None:
    child = Identity(
        Principal("user", "bert"), "token", 1_000, "k2", b"\x02" * 16, "c", 150, descent_from(TOKEN)
    )
    grandchild = child._replace(token_id="g", token_key=b"\x03" * 16, descent=descent_from(child))
    machine = machine_with(revoke(kind, value))
    assert why(machine, child) == why(machine, grandchild) == "the credential that asked for it was revoked"
    propose(machine, DeleteRevocation(revoked=kind, value=value))
    assert why(machine, child) == why(machine, grandchild) == ""
    propose(machine, revoke("principal", "user:anna", before_us=1_000))
    assert why(machine, child) == "", "that takes back what is of this principal"


def test_what_an_api_key_asked_for_goes_with_it() -> None:
    machine = machine_with(put("a"))
    by_key = Identity(ANNA, "key", key_id="a", token_key=b"x" * 16, issued_us=1)
    child = Identity(Principal("user", "bert"), "token", descent=descent_from(by_key))
    assert why(machine, child) == ""
    propose(machine, DeleteApiKey(id="a"))
    assert why(machine, child) == "the API key that asked for it was deleted"


def test_a_principal_s_later_credentials_are_good() -> None:
    machine = machine_with(revoke("principal", "user:anna", before_us=100))
    assert why(machine, TOKEN) == "", "issued at that time"
    assert why(machine, TOKEN._replace(issued_us=99)) and why(machine, TOKEN._replace(issued_us=0))
    assert why(machine, Identity(ANNA, "certificate")), "nobody knows when it was issued"
    assert why(machine, TOKEN._replace(principal=Principal("service_account", "anna"), issued_us=0)) == ""


def test_a_signing_key_means_tokens_alone_and_nothing_means_the_broker() -> None:
    machine = machine_with(
        revoke("signing_key", ""), put("k1"), revoke("principal", "broker_internal", before_us=END)
    )
    assert why(machine, Identity(ANNA, "certificate")) == "" == why(machine, INTERNAL)
    propose(machine, revoke("principal", "user:anna", before_us=END))
    assert why(machine, Identity(ANNA, "forwarded")) == "", "the broker that forwards has judged it"
    propose(machine, DeleteRevocation(revoked="principal", value="user:anna"))
    assert why(machine, Identity(ANNA, "key", key_id="k1")) == ""
    assert why(machine, TOKEN._replace(key_id=""))


def test_what_has_ended_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(credentials_module, "REVOCATIONS_MAX", 2)
    machine = machine_with(revoke("token", "a", end_us=300), revoke("token", "b", end_us=400))
    with pytest.raises(LimitExceeded):
        machine.check(revoke("token", "c", now_us=299))
    assert propose(machine, revoke("token", "b", end_us=500)), "one that is there may live longer"
    assert propose(machine, revoke("token", "c", now_us=300))
    assert [one.value for one in machine.access.credentials.revocations()] == ["b", "c"]
    assert not propose(machine, revoke("token", "c", now_us=301)), "it is so already"
    monkeypatch.setattr(credentials_module, "API_KEYS_MAX", 1)
    propose(machine, put("a"))
    with pytest.raises(LimitExceeded):
        machine.check(put("b"))


@pytest.mark.parametrize(
    ("command", "error"),
    [
        (put(""), InvalidArgument),
        (put("a_b"), InvalidArgument),
        (put("a:b"), InvalidArgument),
        (put("a" * 65), InvalidArgument),
        (put(secret_hash=b"short"), InvalidArgument),
        (put(principal=""), InvalidName),
        (revoke("galaxy", "x"), InvalidArgument),
        (revoke("token", ""), InvalidName),
        (revoke("token", "a\nb"), InvalidName),
        (revoke("token", "x", end_us=200), InvalidArgument),
        (DeleteApiKey(id="none"), NotFound),
    ],
)
def test_what_is_refused_changes_nothing(command: Command, error: type[CallerError]) -> None:
    machine = Metadata()
    with pytest.raises(error):
        machine.check(command)
    assert machine.snapshot() == Metadata().snapshot()


def test_snapshots_keep_all_and_older_formats_are_written_without_any() -> None:
    machine = machine_with(PutRole(role=Role("r", ("Lookup",))), put("a", expires_us=9), revoke("token", "t"))
    machine.apply(4, CreateNamespace(namespace="n"))
    snapshot = machine.snapshot()
    assert snapshot[:4] == b"DNM4" and read_snapshot(snapshot) == (4, [])
    held = Metadata.restore(snapshot)
    assert held.snapshot() == snapshot == machine.copy().snapshot()
    assert held.access.version == 3 and not held.cluster.used
    assert held.access.credentials.api_keys() == machine.access.credentials.api_keys()
    assert held.access.credentials.revocations() == machine.access.credentials.revocations()
    propose(held, DeleteApiKey(id="a"))
    assert held.snapshot()[:4] == b"DNM4" and machine.access.credentials.find_key("a") is not None
    propose(held, DeleteRevocation(revoked="token", value="t"))
    assert held.snapshot()[:4] == b"DNM2"


def test_a_cluster_s_snapshot_keeps_both_parts() -> None:
    machine = machine_with(put())
    machine.apply(2, PutKey(key="/k", value=b"v"))
    held = Metadata.restore(machine.snapshot())
    assert held.cluster.used and held.access.credentials.find_key("a") is not None
    assert held.snapshot() == machine.snapshot() and machine.snapshot()[:4] == b"DNM4"
