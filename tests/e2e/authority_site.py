"""A broker that asks everybody who they are, and tokens of those that it knows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import danube
from danube import sync
from danube.core.security.principals import Principal
from danube.errors import DanubeError, IssuerUnavailable, NotAllowed, NotAuthenticated
from danube.host import clock
from danube.host.credentials import Credentials, secret_key
from tests.broker_process import BrokerProcess

SECRET = "a secret of thirty-two bytes, or more"
CREDENTIALS = Credentials([secret_key("", SECRET.encode())])
ENVIRONMENT = {
    "DANUBE_AUTH__MODE": "token",
    "DANUBE_AUTH__JWT__SECRET_KEY": SECRET,
    "DANUBE_AUTH__SUPER_ADMINS": "user:root",
}
ENDS = (NotAllowed, NotAuthenticated)  # with which a handle ends whose right is taken back


def token(name: str, kind: str = "service_account", ttl_s: int = 3_600, age_s: int = 0) -> str:
    return CREDENTIALS.sign(Principal(kind, name), ttl_s, clock.wall_us() - age_s * 1_000_000)


def first_token() -> str:
    """One that is newer than the last that an administrator has taken back, even in this second."""
    who, now_us = Principal("user", "bootstrap"), clock.wall_us() + 2_000_000
    return CREDENTIALS.sign(who, 3_600, now_us, bootstrap=True)


def root() -> str:
    return token("root", "user")


def administrator(url: str, folder: Path) -> str:
    """A token of user:ops, whom the first token of a secured broker makes its administrator.

    ``folder``: the broker's folder ``security``.
    """
    tls, first = danube.TlsOptions(ca_file=str(folder / "authority.pem")), folder / "admin.token"
    with sync.connect(url, token=first.read_text().strip(), tls=tls) as client:
        client.admin.put_binding("admins", "user:ops", ["admin"], "cluster", "")
        return str(client.admin.issue_token("user:ops")["token"])


def comes_in(process: BrokerProcess, shown: str) -> bool:
    """Whether a client is let in; False while the issuer's keys are not known."""
    try:
        sync.connect(process.address, token=shown).open().close()
    except IssuerUnavailable:
        return False
    return True


def ended(attempt: Callable[[], object]) -> bool:
    """Whether an attempt is refused for its rights; other errors pass."""
    try:
        attempt()
    except ENDS:
        return True
    except DanubeError:
        return False
    return False


class Site:
    """The broker, and what its administrator does."""

    def __init__(self, broker: Callable[..., BrokerProcess], workers: int = 2) -> None:
        self.process = broker(workers=workers, environment=ENVIRONMENT)
        self.admin = sync.connect(self.process.address, token=root()).open()

    def connect(self, name: str, ttl_s: int = 3_600) -> sync.Client:
        return sync.connect(self.process.address, token=token(name, ttl_s=ttl_s), timeout=10)

    def namespace(self, name: str) -> None:
        self.ask("create_namespace", namespace=name)

    def namespaces(self, client: sync.Client) -> list[str]:
        """Those that this client sees."""
        found: list[str] = self.ask("namespaces", client=client)
        return found

    def bind(self, name: str, role: str, scope: str, resource: str) -> None:
        """Give a role, as ``danube-admin security bindings create`` does."""
        self.ask("put_binding", id=self._id(name, role, resource), principal_type="service_account",
                  principal_name=name, role_names=[role], scope=scope, resource_name=resource)  # fmt: skip

    def unbind(self, name: str, role: str, scope: str, resource: str) -> None:
        self.ask("delete_binding", id=self._id(name, role, resource), scope=scope, resource_name=resource)

    def put_role(self, name: str, *permissions: str) -> None:
        self.ask("put_role", name=name, permissions=list(permissions))

    def _id(self, name: str, role: str, resource: str) -> str:
        return f"{name}-{role}-{resource.replace('/', '-')}"

    def ask(self, op: str, client: sync.Client | None = None, **args: Any) -> Any:
        client = client or self.admin
        with client._connection.lock:
            reply = client._session.admin(op, **args)
        return client._connection.wait(reply)

    def close(self) -> None:
        self.admin.close()
