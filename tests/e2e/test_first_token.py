"""The life of the first token of `danube start --secure`, on a broker with two workers."""

from __future__ import annotations

import json
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import danube
from danube import sync
from danube.cli.broker.secured import prepare
from danube.cli.main import root
from danube.cli.terminal.services import Services
from danube.errors import DanubeError, InvalidArgument, NotAllowed, NotAuthenticated
from tests.broker_process import BrokerProcess, wait_until
from tests.e2e.authority_site import administrator

GENEROUS_S = 60.0  # what is taken back is so within 5 s; a slow and loaded machine gets more


class Secured:
    """A secured host, and its broker."""

    def __init__(self, data: Path) -> None:
        self.folder = prepare(data)
        arguments = ["--config", str(self.folder / "danube.yml")]
        self.broker = BrokerProcess(data, workers=2, arguments=arguments)

    @property
    def url(self) -> str:
        return f"danube+tls://localhost:{self.broker.port}"

    def first(self) -> str:
        return (self.folder / "admin.token").read_text().strip()

    def connect(self, token: str) -> sync.Client:
        tls = danube.TlsOptions(ca_file=str(self.folder / "authority.pem"))
        return sync.connect(self.url, token=token, tls=tls, timeout=30, connect_timeout=30)

    def refused(self, token: str) -> bool:
        try:
            with self.connect(token):
                return False
        except NotAuthenticated:
            return True

    def audited(self, **wanted: str) -> set[str]:
        """Files of the workers that hold such a line."""
        return {
            path.name.rpartition("-")[0]
            for path in (self.broker.data_dir / "audit").glob("worker-*.jsonl")
            for text in path.read_text().splitlines()
            if wanted.items() <= json.loads(text).items()
        }


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    made = Secured(tmp_path_factory.mktemp("first-token") / "data")
    with made.broker:
        yield made


def test_its_whole_life(host: Secured) -> None:
    first = host.first()
    assert stat.S_IMODE((host.folder / "admin.token").stat().st_mode) == 0o600
    with host.connect(first) as client:
        _makes(client)
        _is_refused(client)
        ops = administrator(host.url, host.folder)
        wait_until(lambda: _administers(host, ops), GENEROUS_S, "the administrator")
        wait_until(lambda: _ended(client), GENEROUS_S, "its open connection ends")
    _dead_on_both_workers(host, first)
    assert host.audited(operation="take_back_first_token", principal="user:ops")
    with host.connect(ops) as client:
        (taken,) = [one for one in client.admin.revocations() if one["value"] == "bootstrap"]
    assert host.broker.stop() == 0
    assert prepare(host.broker.data_dir) == host.folder and host.first() == first, "there is no other"
    host.broker.start()
    assert host.refused(first)
    wait_until(lambda: time.time() > taken["before_us"] / 1e6 + 1, GENEROUS_S, "a later second")
    _the_way_back(host, first, ops)


def _makes(client: sync.Client) -> None:
    admin = client.admin
    admin.put_role("writer", ["Produce", "Lookup"])
    assert "writer" in [role["name"] for role in admin.roles()]
    admin.put_binding("app", "service_account:app", ["writer"], "namespace", "default")
    # Rights for its own name are those of whoever has that name, and not its own.
    admin.put_binding("own", "user:bootstrap", ["viewer"], "cluster", "")
    assert {"app", "own"} <= {binding["id"] for binding in admin.bindings()}
    assert admin.create_api_key("service_account:app", name="app-key")["key"].startswith("dnb_")
    assert [key["id"] for key in admin.api_keys()] == ["app-key"]
    assert admin.issue_token("service_account:app")["principal"] == "service_account:app"
    asked: dict[str, Any] = {"scope": "topic", "principal": "service_account:app"}
    wait_until(
        lambda: admin.can("Produce", "/default/orders", **asked)["allowed"],
        GENEROUS_S,
        "the right of the app",
    )


def _is_refused(client: sync.Client) -> None:
    attempts: dict[str, Callable[[], object]] = {
        "create": lambda: client.admin.create_topic("/default/orders"),
        "list": lambda: client.admin.list_topics(),
        "status": lambda: client.admin.status(),
        "produce": lambda: client.producer("/default/orders").open(),
        "consume": lambda: client.consumer("/default/orders", "s").open(),
        "revoke": lambda: client.admin.revoke("principal", "user:ops"),
        "delete": lambda: client.admin.delete_role("writer"),
        "tenant": lambda: client.admin.put_tenant("acme", ["default"]),
    }
    for name, attempt in attempts.items():
        with pytest.raises(NotAllowed) as caught:
            attempt()
        assert "first token" in str(caught.value), name
        assert "danube security bindings create" in caught.value.hint, name
    for own in ("", "bootstrap"):
        with pytest.raises(InvalidArgument):
            client.admin.issue_token(own)


def _administers(host: Secured, token: str) -> bool:
    try:
        with host.connect(token) as client:
            client.admin.list_topics()
            return True
    except NotAllowed:
        return False  # this worker has not read of the binding yet


def _ended(client: sync.Client) -> bool:
    try:
        client.admin.roles()
    except NotAuthenticated:
        return True
    except DanubeError:
        pass  # the connection ends, and the client connects again
    return False


def _dead_on_both_workers(host: Secured, first: str) -> None:
    """Connections come to either worker by chance; the audit says at which one it was refused."""

    def refused_by_both() -> bool:
        assert host.refused(first)
        return host.audited(operation="login", outcome="denied") == {"worker-0", "worker-1"}

    wait_until(refused_by_both, 4 * GENEROUS_S, "both workers refuse it")


def _the_way_back(host: Secured, first: str, ops: str) -> None:
    """An owner who has lost the administrator's token makes another first one, offline."""
    data = str(host.broker.data_dir)
    done = CliRunner().invoke(root, ["security", "init", "--data-dir", data], obj=Services(environ={}))
    assert done.exit_code == 0, done.output
    later = host.first()
    assert later != first and host.refused(first)
    with host.connect(later) as client:
        client.admin.put_binding("again", "user:bob", ["admin"], "cluster", "")
        with pytest.raises(NotAllowed, match="first token"):
            client.admin.create_topic("/default/orders")
    assert not host.refused(ops)
    wait_until(lambda: host.refused(later), GENEROUS_S, "the administrator ends this one as well")
