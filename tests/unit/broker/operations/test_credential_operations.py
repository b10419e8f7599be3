"""Operations on API keys, tokens and revocations, and who may do what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube.broker.operations import roles
from danube.broker.operations.arguments import arguments_of
from danube.broker.operations.context import Operations
from danube.broker.operations.credentials import TABLE, TTL_S_MAX
from danube.core.metadata.commands import Binding
from danube.core.protocol.native import Admin
from danube.core.security.api_keys import identity_of_key
from danube.core.security.authority import Authority
from danube.core.security.operations import OWN_TOKEN_TTL_S_MAX
from danube.core.security.principals import Identity, Principal
from danube.errors import Conflict, DanubeError, InvalidArgument, InvalidName, NotFound, NotSupported
from danube.host import clock
from tests.answers import fitting
from tests.unit.broker_parts import RoutedBench

DAY_S = 86_400
ANNA = Principal("user", "anna")


class Signed:
    """Notes what it is to sign."""

    def __init__(self) -> None:
        self.asked: list[tuple[Principal, int, dict[str, Any]]] = []

    def sign(self, principal: Principal, ttl_s: int, now_us: int, **claims: Any) -> str:
        self.asked.append((principal, ttl_s, claims))
        return "signed"


class Bench(RoutedBench):
    """A broker's operations, asked by one identity or another."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.operations: Operations = self.router.operations
        self.operations.authority = Authority(lambda: self.operations.state.access)
        self.signer = Signed()
        self.operations.signer = self.signer

    def ask(self, op: str, identity: Identity | None = None, **args: Any) -> Any:  # type: ignore[override]
        operations = self.operations if identity is None else self.operations.acting_for(identity)
        answers: list[Any] = []
        TABLE[op](operations, arguments_of(Admin(op, "", args)), answers.append)
        self.proposals.step()
        [answer] = answers
        if isinstance(answer, DanubeError):
            raise answer
        return fitting(op, answer)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.shard.close()


def test_a_key_is_shown_once_and_kept_as_its_hash(bench: Bench) -> None:
    made = bench.ask("create_api_key", principal="service_account:app", ttl_s=60, description="laptop")
    access = bench.operations.state.access
    identity = identity_of_key(access, made["key"], clock.wall_us())
    assert str(identity.principal) == made["principal"] == "service_account:app"
    assert identity.expires_us == made["expires_us"] == made["created_us"] + 60_000_000
    [shown] = bench.ask("api_keys")
    assert shown == {name: value for name, value in made.items() if name != "key"}
    assert "secret_hash" not in shown and made["key"].encode() not in bench.operations.state.snapshot()
    other = bench.ask("create_api_key", principal="user:anna", id="mine")
    assert other["id"] == "mine" and other["expires_us"] == 0
    with pytest.raises(Conflict):
        bench.ask("create_api_key", principal="user:anna", id="mine")
    assert bench.ask("api_keys", limit=1)["entries"] == [min((shown, bench.ask("api_keys")[1]), key=_id)]
    assert bench.ask("delete_api_key", id="mine") is None
    with pytest.raises(NotFound):
        bench.ask("delete_api_key", id="mine")


def _id(row: dict[str, Any]) -> str:
    return str(row["id"])


@pytest.mark.parametrize(
    ("args", "error"),
    [
        ({}, InvalidArgument),
        ({"principal": "anna"}, InvalidArgument),
        ({"principal": "broker_internal:1"}, InvalidArgument),
        ({"principal": "user:"}, InvalidName),
        ({"principal": "user:a", "ttl_s": -1}, InvalidArgument),
        ({"principal": "user:a", "ttl_s": TTL_S_MAX + 1}, InvalidArgument),
        ({"principal": "user:a", "id": "a b"}, InvalidArgument),
    ],
)
def test_keys_that_cannot_be(bench: Bench, args: dict[str, Any], error: type[DanubeError]) -> None:
    with pytest.raises(error):
        bench.ask("create_api_key", **args)
    assert bench.ask("api_keys") == []


def test_credentials_are_taken_back_and_let_in_again(bench: Bench) -> None:
    before = clock.wall_us()
    revoked = bench.ask("revoke", kind="principal", value="user:anna", reason="left")
    assert before <= revoked["before_us"] <= clock.wall_us()
    assert revoked["end_us"] >= before + TTL_S_MAX * 1_000_000
    bench.ask("revoke", kind="token", value="jti", ttl_s=60)
    assert [one["kind"] for one in bench.ask("revocations")] == ["principal", "token"]
    assert bench.ask("revocations", limit=1)["entries"] == [revoked]
    token = Identity(ANNA, "token", issued_us=before - 1)
    assert bench.operations.state.access.credentials.revoked(token).endswith("left")
    assert bench.ask("delete_revocation", kind="principal", value="user:anna") is None
    assert bench.operations.state.access.credentials.revoked(token) == ""
    for args in ({"kind": "principal", "value": "anna"}, {"kind": "moon", "value": "x"}, {"kind": "token"}):
        with pytest.raises(InvalidArgument):
            bench.ask("revoke", **args)


def test_tokens_are_signed_for_others_and_for_oneself(bench: Bench) -> None:
    made = bench.ask("issue_token", principal="service_account:app")
    assert (made["token"], made["principal"]) == ("signed", "service_account:app")
    claims = {"jti": made["id"], "descent": ()}
    assert bench.signer.asked.pop() == (Principal("service_account", "app"), 90 * DAY_S, claims)
    bench.ask("issue_token", principal="user:bert", ttl_s=5)
    assert bench.signer.asked.pop()[1] == 5
    own = bench.ask("issue_token", Identity(ANNA, "certificate"))
    assert own["principal"] == "user:anna" and bench.signer.asked.pop()[1] == OWN_TOKEN_TTL_S_MAX
    now_us = clock.wall_us()
    assert abs(own["expires_us"] - now_us - OWN_TOKEN_TTL_S_MAX * 1_000_000) < 60_000_000
    bench.ask("issue_token", Identity(ANNA, "token", expires_us=now_us + 600_000_000), ttl_s=DAY_S)
    assert bench.signer.asked.pop()[1] <= 600, "nobody lives on by tokens for himself"
    bench.ask("issue_token", Identity(ANNA, "key", key_id="k1"))
    claims = bench.signer.asked.pop()[2]
    assert claims["jti"].startswith("api-key:k1:") and claims["descent"] == ("api_key:k1",), "it goes with it"
    parent = Identity(ANNA, "token", 0, "kid", b"\x01" * 16, "jti-1", 100, ("token:first",))
    bench.ask("issue_token", parent, principal="user:bert")
    descent = ("token:first", f"credential:{'01' * 16}", "token:jti-1", "signing_key:kid")
    assert bench.signer.asked.pop()[2]["descent"] == descent


def test_tokens_that_are_not_signed(bench: Bench) -> None:
    with pytest.raises(InvalidArgument, match="broker_internal"):
        bench.ask("issue_token")
    for args in ({"principal": "anna"}, {"principal": "user:a", "ttl_s": "x"}):
        with pytest.raises(InvalidArgument):
            bench.ask("issue_token", **args)
    bench.operations.signer = None
    with pytest.raises(NotSupported):
        bench.ask("issue_token", principal="user:a")


def test_can_tells_yes_or_no_and_why(bench: Bench) -> None:
    answers: list[Any] = []
    bound = Binding("b", "user", "anna", ("producer",), "topic", "/default/t")
    roles.TABLE["put_binding"](bench.operations, bound, answers.append)
    bench.proposals.step()
    yes = bench.ask("can", Identity(ANNA, "token"), permission="produce", resource_name="/default/t-part-2")
    assert yes == {
        "principal": "user:anna", "permission": "Produce", "scope": "topic", "resource_name": "/default/t",
        "allowed": True, "reason": "role producer, bound to it on topic /default/t by binding b",
        "binding": msgspec.structs.asdict(bound),
        "role": "producer",
    }  # fmt: skip
    no = bench.ask("can", permission="Produce", resource_name="/default/t", principal="user:bert")
    assert (no["allowed"], no["binding"], no["principal"]) == (False, None, "user:bert")
    bench.ask("revoke", kind="principal", value="user:anna")
    again = bench.ask("can", permission="Lookup", resource_name="/default/t", principal="user:anna")
    assert again["allowed"], "credentials that come later are good"
    group = msgspec.structs.replace(bound, id="g", principal_type="group", principal_name="team")
    roles.TABLE["put_binding"](bench.operations, group, answers.append)
    bench.proposals.step()
    asked = {"permission": "Produce", "resource_name": "/default/t", "principal": "user:bert"}
    assert not bench.ask("can", **asked)["allowed"]
    assert "group:team" in bench.ask("can", groups=["other", "team"], **asked)["reason"]
    member = Identity(Principal("user", "bert"), "token", groups=("team",))
    assert bench.ask("can", member, permission="Produce", resource_name="/default/t")["allowed"]
    with pytest.raises(InvalidArgument, match="groups"):
        bench.ask("can", groups="team", **asked)
    for scope, name in (("namespace", "/default"), ("cluster", "")):
        found = bench.ask("can", permission="View", scope=scope, resource_name=name, principal="user:anna")
        assert not found["allowed"] and found["resource_name"] == name.removeprefix("/")
    for args in (
        {"permission": "fly", "resource_name": "/default/t"},
        {"permission": "View", "scope": "moon"},
        {"permission": "View", "scope": "topic"},
        {"resource_name": "/default/t"},
        {"permission": "View", "resource_name": "/default/t", "principal": "anna"},
    ):
        with pytest.raises(InvalidArgument):
            bench.ask("can", **args)
