"""Ports that others than this host reach although nobody is asked who they are.

A broker does not start with such a port unless it was told that this is meant (``server.insecure``).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from danube.config.problems import Problem
from danube.errors import ConfigInvalid
from danube.host.local_socket import loopback

if TYPE_CHECKING:
    from danube.config.loading import BrokerConfig

HINT: Final = "listen on 127.0.0.1, or say that it is meant: --insecure (server.insecure: true)"


def open_doors(config: BrokerConfig) -> Iterator[tuple[str, str]]:
    """Yield the key and a sentence of each address that others reach without being asked anything."""
    guards = {"encryption": bool(config.tls.cert_file), "authentication": config.asks_clients}
    lacking = " or ".join(name for name, there in guards.items() if not there)
    if not loopback(config.server.host) and lacking:
        yield (
            "server.host",
            f"listening on {config.server.host} without {lacking}: anyone who reaches it may read and write",
        )
    cluster = config.cluster
    host = cluster.raft_addr.rpartition(":")[0]
    if cluster.enabled and not cluster.cert_file and not loopback(host):  # over etcd they meet there, too
        yield (
            "cluster.raft_addr",
            f"members are reached at {cluster.raft_addr} without certificates:"
            " anyone who reaches it may change the cluster",
        )


def refuse(config: BrokerConfig) -> None:
    """Raise ConfigInvalid, before anything is started, if an open port is not said to be meant."""
    if config.server.insecure:
        return
    problems = [Problem(key, sentence, HINT) for key, sentence in open_doors(config)]
    if problems:
        first = problems[0]
        raise ConfigInvalid(
            f"{first.origin}: {first.what}",
            why="a broker is open to others only if that is said",
            hint=HINT,
            problems=problems,
        )
