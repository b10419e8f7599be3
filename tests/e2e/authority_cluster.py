"""Three brokers that ask for tokens over TLS, and know each other by the cluster's certificates."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import danube.sync
from danube.errors import NotAllowed, NotFound, Unavailable
from danube.host.tls import PEER_NAME, TlsFiles
from tests.broker_cluster import BrokerCluster
from tests.broker_process import BrokerProcess, wait_until
from tests.certificates import Authority
from tests.e2e.authority_site import ENVIRONMENT, root, token
from tests.e2e.grpc_parts import DanubeCalls

NAMES = "IP:127.0.0.1"
ASKED_S = 60.0  # while a cluster chooses a leader
KNOWN_S = 30.0  # for what was given to be known everywhere, on a slow and loaded machine


class ClusterSite:
    """The cluster, its two authorities, and its administrator, who asks the first broker."""

    def __init__(self, place: Path) -> None:
        self.members = Authority(place / "members", "members")
        self.servers = Authority(place / "servers", "servers")
        self.node = self.members.sign("node", f"{NAMES},DNS:{PEER_NAME}")
        self.server = self.servers.sign("server", NAMES)
        self.cluster = BrokerCluster(place, 3)
        self._witnesses = 0
        for broker in self.cluster.brokers:
            broker.environment |= ENVIRONMENT | {
                "DANUBE_CLUSTER__CERT_FILE": self.node.cert_file,
                "DANUBE_CLUSTER__KEY_FILE": self.node.key_file,
                "DANUBE_CLUSTER__CA_FILE": self.node.ca_file,
                "DANUBE_TLS__CERT_FILE": self.server.cert_file,
                "DANUBE_TLS__KEY_FILE": self.server.key_file,
                "DANUBE_TLS__CA_FILE": self.server.ca_file,
                "DANUBE_TLS__CLIENT_CERTIFICATES": "optional",
                "DANUBE_AUTH__FAILURES_PER_MINUTE": "100000",
            }

    @property
    def brokers(self) -> list[BrokerProcess]:
        return self.cluster.brokers

    def connect(
        self, broker: BrokerProcess, credential: str, shown: TlsFiles | None = None, timeout_s: float = 60
    ) -> danube.sync.Client:
        """A native client, with a certificate where one is given."""
        more = {} if shown is None else {"cert_file": shown.cert_file, "key_file": shown.key_file}
        options = danube.TlsOptions(ca_file=self.server.ca_file, **more)
        url = f"danube+tls://127.0.0.1:{broker.port}"
        return danube.sync.connect(url, tls=options, token=credential, timeout=timeout_s)

    def connect_as_broker(self, broker: BrokerProcess, shown: TlsFiles | None) -> danube.sync.Client:
        """A client at the door of brokers."""
        more = {} if shown is None else {"cert_file": shown.cert_file, "key_file": shown.key_file}
        options = danube.TlsOptions(ca_file=self.node.ca_file, server_name=PEER_NAME, **more)
        return danube.sync.connect(f"danube+tls://127.0.0.1:{broker.port}", tls=options, timeout=5)

    def calls(self, address: str, credential: str = "", shown: TlsFiles | None = None) -> DanubeCalls:
        """A gRPC client."""
        context = ssl.create_default_context(cafile=self.server.ca_file)
        context.set_alpn_protocols(["h2"])
        if shown is not None:
            context.load_cert_chain(shown.cert_file, shown.key_file)
        made = DanubeCalls(address, tls=context)
        made.fields = [("authorization", f"Bearer {credential}")] if credential else []
        return made

    def administrator(self, broker: BrokerProcess | None = None) -> danube.sync.Client:
        return self.connect(broker or self.brokers[0], root())

    def ask(self, op: str, **args: object) -> None:
        """Ask the first broker for something, again while it cannot answer."""

        def asked() -> bool:
            try:
                with self.administrator() as client:
                    ask(client, op, **args)
            except Unavailable:  # the cluster has no leader, or a broker no lease
                return False
            except NotFound:  # it was deleted by a request whose answer was lost
                return True
            return True

        wait_until(asked, ASKED_S, f"{op} is done")

    def wait_known(self) -> None:
        """Until every broker has heard of all that was done before: of a binding that is made now."""
        self._witnesses += 1
        name = f"witness-{self._witnesses}"
        self.ask("put_binding", **binding(name, "viewer", "cluster", ""))
        for broker in self.brokers:
            wait_until(lambda broker=broker: self._may_look(broker, name), KNOWN_S, "bindings are known")

    def _may_look(self, broker: BrokerProcess, name: str) -> bool:
        """False also where a broker lost its cluster, as when its controller is killed."""
        try:
            with self.connect(broker, token_of(name)) as client:
                ask(client, "status")
        except (NotAllowed, Unavailable):
            return False
        return True


def bind(client: danube.sync.Client, name: str, role: str, scope: str, resource: str) -> None:
    """Give a user a role."""
    ask(client, "put_binding", **binding(name, role, scope, resource))


def binding(name: str, role: str, scope: str, resource: str) -> dict[str, object]:
    """Return the arguments that give a user a role."""
    return {
        "id": name, "principal_type": "user", "principal_name": name, "role_names": [role],
        "scope": scope, "resource_name": resource,
    }  # fmt: skip


def ask(client: danube.sync.Client, op: str, **args: Any) -> Any:
    """One operation, as any client may send it."""
    with client._connection.lock:
        reply = client._session.admin(op, **args)
    return client._connection.wait(reply)


def token_of(name: str) -> str:
    return token(name, "user")
