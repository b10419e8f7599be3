"""Admission at a door: who comes in, what is remembered of failures, and how late a refusal is told."""

from __future__ import annotations

from typing import Any, cast

import pytest

from danube.broker.admission import GUESSING_S, MINUTE_NS, REFUSAL_S, SOURCES_MAX, Admission
from danube.core.metadata.commands import ApiKey, DeleteApiKey, PutApiKey, Revocation, Revoke
from danube.core.metadata.machine import Metadata
from danube.core.security.api_keys import api_key_text, hash_of_key
from danube.core.security.principals import Principal
from danube.errors import IssuerUnavailable, NotAuthenticated, TokenExpired, Unavailable
from danube.host.credentials import Credentials, Provider, secret_key

NOW_US = 1_700_000_000_000_000
CREDENTIALS = Credentials([secret_key("", b"a secret of thirty-two bytes, or more")])


class Entrance:
    def __init__(self) -> None:
        self.now_us, self.now_ns = NOW_US, 0
        self.machine = Metadata()
        self.admission = Admission(
            CREDENTIALS, lambda: self.machine.access, failures_per_minute=3,
            now_us=lambda: self.now_us, now_ns=lambda: self.now_ns,
        )  # fmt: skip

    def refused(self, token: str, source: str = "192.0.2.1") -> str:
        with pytest.raises((NotAuthenticated, TokenExpired)) as caught:
            self.admission.admit(token, source)
        return str(caught.value)


@pytest.fixture
def entrance() -> Entrance:
    CREDENTIALS.forget()
    return Entrance()


def signed(name: str = "app", **claims: object) -> str:
    return CREDENTIALS.sign(Principal("service_account", name), 60, NOW_US, **claims)


def test_a_token_names_its_holder(entrance: Entrance) -> None:
    assert entrance.admission.admit(signed(), "a").principal == Principal("service_account", "app")


def test_a_broker_that_is_cut_off_lets_in_super_admins_alone(entrance: Entrance) -> None:
    noticed: list[str] = []
    admission = entrance.admission
    admission.on_admitted = lambda identity: noticed.append(str(identity.principal))
    admission.super_admins = frozenset({Principal("service_account", "root")})
    admission.rights_known = lambda: False
    with pytest.raises(Unavailable, match="cannot tell who may do what") as caught:
        admission.admit(signed(), "a")
    assert caught.value.retryable and noticed == []
    entrance.refused("x")
    assert admission.admit(signed("root"), "a").principal.name == "root"
    admission.rights_known = lambda: True
    assert admission.admit(signed(), "a").principal.name == "app"


def test_who_is_admitted_is_noticed_and_who_is_refused_is_not(entrance: Entrance) -> None:
    noticed: list[str] = []
    entrance.admission.on_admitted = lambda identity: noticed.append(str(identity.principal))
    entrance.admission.admit(signed(), "a")
    entrance.admission.admit(signed("first", bootstrap=True), "a")
    for bad in ("x", "", signed()[:-2]):
        entrance.refused(bad)
    revoke = Revoke(revocation=Revocation("principal", "bootstrap", NOW_US + 1, NOW_US + 1), now_us=NOW_US)
    entrance.machine.apply(1, revoke)
    entrance.refused(signed("first", bootstrap=True))
    assert noticed == ["service_account:app", "bootstrap"]


def test_refusals_do_not_tell_why(entrance: Entrance) -> None:
    bad = {entrance.refused(text) for text in ("x", signed()[:-2], "dnb_x_y", signed() + "x")}
    assert bad == {"the credential is not accepted"}
    assert "who asks" in entrance.refused("")


def test_an_expired_token_is_named(entrance: Entrance) -> None:
    entrance.now_us += 121_000_000
    assert "expired" in entrance.refused(signed())


def test_guessing_takes_longer_from_the_address_that_guesses(entrance: Entrance) -> None:
    for _ in range(3):
        entrance.refused("x")
        assert entrance.admission.pause_s("192.0.2.1") == REFUSAL_S
    entrance.refused("x")
    assert entrance.admission.pause_s("192.0.2.1") == GUESSING_S
    assert entrance.admission.pause_s("192.0.2.2") == REFUSAL_S
    assert entrance.admission.admit(signed(), "192.0.2.1"), "who is known comes in from there all the same"
    entrance.now_ns += MINUTE_NS + 1
    entrance.refused("x")
    assert entrance.admission.pause_s("192.0.2.1") == REFUSAL_S


def test_failures_of_few_addresses_are_remembered(entrance: Entrance) -> None:
    for number in range(SOURCES_MAX + 10):
        entrance.refused("", f"source {number}")
    assert len(entrance.admission._failures) == SOURCES_MAX


def test_a_revoked_token_is_no_good(entrance: Entrance) -> None:
    text = signed(jti="7")
    identity = entrance.admission.admit(text, "a")
    assert not entrance.admission.revoked(identity)
    taken_back = Revocation(kind="token", value="7", end_us=NOW_US + 10**9)
    entrance.machine.apply(1, Revoke(revocation=taken_back, now_us=NOW_US))
    assert entrance.admission.revoked(identity)
    assert entrance.refused(text) == "the credential is not accepted"


def test_an_api_key_is_taken_like_a_token_until_it_is_deleted(entrance: Entrance) -> None:
    text = api_key_text("k1", bytes(range(32)))
    key = ApiKey("k1", hash_of_key(text), "service_account:old", NOW_US)
    entrance.machine.apply(1, PutApiKey(key=key))
    identity = entrance.admission.admit(text, "a")
    assert (identity.principal, identity.how) == (Principal("service_account", "old"), "key")
    entrance.machine.apply(2, DeleteApiKey(id="k1"))
    assert entrance.admission.revoked(identity)
    assert entrance.refused(text) == "the credential is not accepted"


def test_an_api_key_is_exchanged_for_a_token_that_goes_with_it(entrance: Entrance) -> None:
    text = api_key_text("k1", bytes(range(32)))
    key = ApiKey("k1", hash_of_key(text), "service_account:old", NOW_US, NOW_US + 7_200_000_000)
    entrance.machine.apply(1, PutApiKey(key=key))
    token = entrance.admission.exchange(text, "a")
    identity = entrance.admission.admit(token, "a")
    assert (identity.principal, identity.how) == (Principal("service_account", "old"), "token")
    assert identity.expires_us == NOW_US + 3_600_000_000
    entrance.now_us += 7_000_000_000
    late = entrance.admission.admit(entrance.admission.exchange(text, "a"), "a")
    assert late.expires_us == key.expires_us, "no token outlives its key"
    entrance.machine.apply(2, DeleteApiKey(id="k1"))
    assert entrance.admission.revoked(identity) and entrance.admission.revoked(late)


def test_nothing_but_a_good_api_key_is_exchanged(entrance: Entrance) -> None:
    for text in ("", "x", signed(), api_key_text("k1", bytes(32))):
        with pytest.raises(NotAuthenticated, match="not accepted"):
            entrance.admission.exchange(text, "192.0.2.1")
    assert entrance.admission.pause_s("192.0.2.1") == GUESSING_S, "failures count like others"


def test_keys_that_are_not_there_count_as_a_refusal_and_are_named(entrance: Entrance) -> None:
    told: list[int] = []
    entrance.admission.on_refused = lambda identity, source, code, why: told.append(code)
    entrance.admission.credentials = cast(Any, Away())
    for _ in range(4):
        with pytest.raises(IssuerUnavailable):
            entrance.admission.admit("a.b.c", "192.0.2.1")
    assert told == [IssuerUnavailable.code] * 4
    assert entrance.admission.pause_s("192.0.2.1") == GUESSING_S


class Away:
    def check(self, text: str, now_us: int) -> None:
        raise IssuerUnavailable("the keys are being read")


class Source:
    issuer = "https://id.example"

    def __init__(self) -> None:
        self.course: list[str] = []

    def start(self) -> None:
        self.course.append("start")

    def stop(self) -> None:
        self.course.append("stop")


def test_keys_of_a_provider_are_read_from_open_to_close() -> None:
    source = Source()
    provider = Provider(cast(Any, source), "danube")
    for credentials in (Credentials([], provider=provider), CREDENTIALS):
        admission = Admission(credentials, lambda: Metadata().access, failures_per_minute=3)
        admission.open()
        admission.close()
    assert source.course == ["start", "stop"]
