"""Tokens and certificates of jobs: which options and variables mean what, and what is refused."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from danube.client.machine.tls import TlsOptions
from danube.errors import InvalidArgument
from tests.fakes.broker import FakeBroker

pytest.importorskip("pyarrow")
from danube.spark.history.access import ENVIRONMENT, BrokerAccess, access_of
from danube.spark.history.options import read_options
from danube.spark.jobs.compact import compact
from danube.spark.jobs.export import export
from danube.spark.jobs.replay.options import read_replay_options

PLAIN, SECURED = "danube://broker:6660", "danube+tls://broker:6660"
SECRET = "eyJhbGciOiJub25lIn0"
NAMED = {"tlsCa": "/ca", "tlsCert": "/cert", "tlsKey": "/key", "tlsServerName": "name"}
TLS = TlsOptions(ca_file="/ca", cert_file="/cert", key_file="/key", server_name="name")


def test_options_go_before_the_environment() -> None:
    environ = {
        "DANUBE_TOKEN": "theirs", "DANUBE_TOKEN_FILE": "/theirs", "DANUBE_TLS_CA": "/theirs",
    }  # fmt: skip
    assert access_of(SECURED, {"token": SECRET, **NAMED}, environ) == BrokerAccess(SECRET, "", TLS)
    assert access_of(PLAIN, {"tokenFile": "/t", **NAMED}, environ) == BrokerAccess("", "/t", TLS)
    own = TlsOptions(ca_file="/theirs")
    assert access_of(SECURED, {}, environ) == BrokerAccess("", "/theirs", own)
    assert access_of(PLAIN, {}, environ) == BrokerAccess("", "/theirs")
    assert access_of(PLAIN, {}, {"DANUBE_TOKEN": "theirs"}) == BrokerAccess("theirs")
    assert access_of("", {}, {}) == ENVIRONMENT


@pytest.mark.parametrize(
    ("values", "url", "what"),
    [
        ({"token": SECRET, "tokenFile": "/t"}, PLAIN, "token and tokenFile exclude each other"),
        ({"tlsKey": "/key"}, SECURED, "a key without a certificate"),
        ({"token": f"{SECRET}\n{SECRET}"}, PLAIN, "the token holds no token"),
        ({"tlsCa": "/ca"}, "", "an option tlsCa and no broker"),
    ],
)
def test_what_contradicts_itself_is_refused_without_the_token(
    values: dict[str, str], url: str, what: str
) -> None:
    with pytest.raises(InvalidArgument, match=what) as raised:
        access_of(url, values, {})
    assert SECRET not in f"{raised.value!r} {raised.value} {raised.value.why} {raised.value.hint}"


def test_a_token_is_not_shown_and_travels() -> None:
    found = read_options(
        {"topic": "/default/a", "broker": SECURED, "TOKEN": SECRET, "tls-ca": "/ca"}, streaming=None
    )
    assert SECRET not in repr(found) + repr(found.access) and "token=..." in repr(found.access)
    assert pickle.loads(pickle.dumps(found)).access == BrokerAccess(SECRET, "", TlsOptions(ca_file="/ca"))


def test_a_token_file_that_is_missing_is_named() -> None:
    access = access_of(PLAIN, {"tokenFile": "/none.token"}, {})
    with FakeBroker() as running, pytest.raises(InvalidArgument, match=r"/none\.token cannot be read"):
        access.connect(running.url).open()


# -- jobs ---------------------------------------------------------------------------------------------

REPLAY = {"storage": "/data", "topic": "/default/a", "broker": PLAIN}
TO = {"to": SECURED, "toTopic": "/default/b"}


def replayed(**given: str) -> tuple[BrokerAccess, BrokerAccess | None]:
    """What a replay shows to its source and to its target."""
    read = read_replay_options({**REPLAY, **given})
    publish = read.target.publish
    return read.source.access, None if publish is None else publish.access


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DANUBE_TOKEN", "DANUBE_TOKEN_FILE", "DANUBE_TLS_CA"):
        monkeypatch.delenv(name, raising=False)


def test_a_replay_shows_no_token_to_the_other_broker() -> None:
    target = {**TO, "tokenFile": "/to", "tlsCa": "/ca"}
    to = BrokerAccess("", "/to", TlsOptions(ca_file="/ca"))
    assert replayed(**target) == (ENVIRONMENT, to)
    assert replayed(**target, sourceTokenFile="/from") == (BrokerAccess("", "/from"), to)
    assert replayed(**target, broker=SECURED) == (to, to), "one broker"
    assert replayed(toDirectory="/lake", tokenFile="/from") == (BrokerAccess("", "/from"), None)


def test_a_replay_without_a_broker_to_read_from_has_no_use_for_its_token() -> None:
    with pytest.raises(InvalidArgument, match="an option token and no broker"):
        replayed(**TO, broker="", sourceToken=SECRET)


def test_export_and_compact_take_them_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    shown: list[BrokerAccess] = []

    def noted(url: str, access: BrokerAccess, wait_s: float) -> None:
        shown.append(access)

    monkeypatch.setattr(compact, "LiveBroker", noted)
    given = {"storage": f"file://{tmp_path}", "broker": SECURED, "tokenFile": "/t", "tlsCa": "/ca"}
    compact._live(compact.read_job_options(given, compact.READERS))
    given |= {"target": str(tmp_path)}
    catalogue = export._catalogue(export.read_job_options(given, export.READERS), given)
    shown.append(catalogue.options.access)
    assert shown == [BrokerAccess("", "/t", TlsOptions(ca_file="/ca"))] * 2
