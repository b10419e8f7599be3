"""API keys: their text, and whom they prove."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.core.metadata.commands import ApiKey, PutApiKey, Revocation, Revoke
from danube.core.metadata.machine import Metadata
from danube.core.security.api_keys import api_key_text, hash_of_key, identity_of_key, looks_like_api_key
from danube.core.security.authority import CLUSTER, Authority, super_admins_of
from danube.core.security.principals import Principal
from danube.errors import NotAuthenticated, TokenExpired

TEXT = api_key_text("a1", bytes(range(32)))


def machine_with(text: str = TEXT, expires_us: int = 0) -> Metadata:
    machine = Metadata()
    key = ApiKey("a1", hash_of_key(text), "service_account:app", 5, expires_us)
    machine.apply(1, PutApiKey(key=key))
    return machine


def test_a_key_proves_its_principal() -> None:
    identity = identity_of_key(machine_with(expires_us=100).access, TEXT, 99)
    assert identity.principal == Principal("service_account", "app") and identity.how == "key"
    assert (identity.key_id, identity.expires_us, identity.issued_us) == ("a1", 100, 5)
    assert len(identity.token_key) == 16 and TEXT.encode() not in identity.token_key
    with pytest.raises(TokenExpired):
        identity_of_key(machine_with(expires_us=100).access, TEXT, 100)


@pytest.mark.parametrize(
    "text",
    ["", "dnb_", "dnb_a1_", TEXT[:-1], TEXT + "x", TEXT.replace("a1", "a2"), TEXT.upper(), TEXT + "\n",
     TEXT[:-1] + ("A" if TEXT[-1] != "A" else "B"), api_key_text("a1", bytes(32)), "dnb_a1_" + "é" * 43],
)  # fmt: skip
def test_other_texts_prove_nothing_and_are_told_alike(text: str) -> None:
    with pytest.raises(NotAuthenticated) as caught:
        identity_of_key(machine_with().access, text, 9)
    assert str(caught.value) == "the credential is not accepted"


@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_keys_differ_where_their_bits_differ(one: bytes, other: bytes) -> None:
    first, second = api_key_text("k", one), api_key_text("k", other)
    assert len(first) == len(second) and looks_like_api_key(first)
    assert (first == second) == (one == other)


def test_a_deleted_or_revoked_key_is_allowed_nothing() -> None:
    machine = machine_with()
    authority = Authority(lambda: machine.access, super_admins_of(["app"]))
    identity = identity_of_key(machine.access, TEXT, 9)
    assert authority.decide(identity, "ManageCluster", CLUSTER).allowed
    revocation = Revocation("credential", identity.token_key.hex(), 1_000)
    machine.apply(2, Revoke(revocation=revocation, now_us=10))
    with pytest.raises(NotAuthenticated, match="revoked"):
        authority.demand(identity, "ManageCluster", CLUSTER)
    assert not authority.sees_topic(identity)("/default/t")
    empty = Metadata()
    assert not Authority(lambda: empty.access).decide(identity, "Lookup", CLUSTER).authenticated
