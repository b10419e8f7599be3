"""``danube load`` against a broker with TLS and tokens, over both protocols."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from danube import sync
from danube.client.machine.tls import TlsOptions
from tests.broker_process import BrokerProcess
from tests.certificates import Authority
from tests.e2e.authority_site import ENVIRONMENT, root, token
from tests.e2e.test_load import check_passed, loads

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        find_spec("locust") is None, reason="Locust is not installed: pip install 'danube-broker[load]'"
    ),
]


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """Where the broker is; one principal may test it: ``tester``, namespace-admin of ``default``."""
    place = tmp_path_factory.mktemp("secured")
    authority = Authority(place / "authority")
    served = authority.sign("server", "IP:127.0.0.1,DNS:localhost")
    environment = {
        **ENVIRONMENT,
        "DANUBE_TLS__CERT_FILE": served.cert_file,
        "DANUBE_TLS__KEY_FILE": served.key_file,
    }
    with BrokerProcess(place / "data", workers=1, environment=environment) as broker:
        url = broker.address.replace("danube://", "danube+tls://")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DANUBE_TLS_CA", str(authority.cert))
            options = TlsOptions(ca_file=str(authority.cert))
            with sync.connect(url, token=root(), tls=options) as client:
                client.admin.put_binding(
                    "tester", "service_account:tester", ["namespace-admin"], "namespace", "default"
                )
            yield ["-s", url, "--grpc-broker", broker.grpc_address, "--protocol", "both", "-u", "12"]


def test_both_protocols_show_the_token(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = token("tester")
    (tmp_path / "token").write_text(secret)
    monkeypatch.setenv("DANUBE_TOKEN_FILE", str(tmp_path / "token"))
    with loads(tmp_path) as load:
        run = load(*words, "--run-time", "2s", "-o", "json")
        report = run.end(0)
        check_passed(json.loads(report), ("grpc", "native"))
        assert secret not in report + run.errors.read_text()


def test_who_has_no_right_gets_no_run(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DANUBE_TOKEN", token("stranger"))
    with loads(tmp_path) as load:
        run = load(*words, "--run-time", "2s")
        run.end(5)
        assert "service_account:stranger has no permission" in run.errors.read_text()
