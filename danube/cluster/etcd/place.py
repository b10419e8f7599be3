"""Place of a cluster's metadata in etcd, and how a node becomes part of the cluster there.

etcd holds no cluster     make it, where this node was never part of one
it holds one              become a member of it, where it is the one that this node knows, or knows none
anything else             refuse: the prefix, or the etcd, is another one's
"""

from __future__ import annotations

import asyncio
import secrets
import ssl
from pathlib import Path
from typing import TYPE_CHECKING, Final

from danube.cluster.etcd.calls import EtcdCalls, EtcdPlace
from danube.cluster.etcd.engine import EtcdEngine
from danube.cluster.etcd.log import EtcdLog, Known
from danube.cluster.log.node_files import ETCD, NODE_FILE, NodeRecord, load_node
from danube.cluster.log.waiting import Waiting
from danube.errors import ConfigInvalid, Damage, DanubeError, EtcdRefused, Unavailable, WrongState
from danube.host import telemetry
from danube.host.clock import wall_us

if TYPE_CHECKING:
    from danube.cluster.raft.engine import Host, Machine, Members
    from danube.config.sections import ClusterConfig

ASK_INTERVAL_S: Final = 0.2
PREFIX_DEFAULT: Final = "danube"
_PASSWORD_BYTES_MAX: Final = 4_096

_log = telemetry.events("cluster.etcd")


def place_of(cluster: ClusterConfig) -> EtcdPlace:
    """Return the configured etcd; raises ConfigInvalid for files that cannot be used."""
    # The configuration has checked the form; Python 3.14 splits no URL of several hosts.
    scheme, _, rest = cluster.metadata.partition("://")
    hosts, _, path = rest.partition("/")
    secure = scheme == "etcds"
    endpoints = tuple(f"{'https' if secure else 'http'}://{one}" for one in hosts.split(","))
    password = cluster.etcd_password.reveal()
    if cluster.etcd_password_file:
        password = _read_secret(Path(cluster.etcd_password_file))
    return EtcdPlace(
        endpoints=endpoints,
        prefix=f"/{path.strip('/') or PREFIX_DEFAULT}/",
        user=cluster.etcd_user,
        password=password,
        tls=_tls(cluster) if secure else None,
        compacted=cluster.etcd_compact,
    )


def _read_secret(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_PASSWORD_BYTES_MAX).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigInvalid(
            f"cluster.etcd_password_file {path} cannot be read", why=str(error), hint="it holds the password"
        ) from None


def _tls(cluster: ClusterConfig) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=cluster.etcd_ca_file or None)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        # Python 3.13 refuses authorities without a key usage; what one Python takes, the others take.
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT
        if cluster.etcd_cert_file:
            context.load_cert_chain(cluster.etcd_cert_file, cluster.etcd_key_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigInvalid(
            "the TLS files for etcd cannot be used",
            why=str(error),
            hint="cluster.etcd_ca_file, etcd_cert_file and etcd_key_file are PEM files that it may read",
        ) from None
    return context


def check_place(cluster: ClusterConfig, data_dir: Path) -> None:
    """Raise an error if a broker cannot start on this etcd; an unreachable etcd is waited for."""
    record = load_node(data_dir) if (data_dir / NODE_FILE).exists() else None
    place = place_of(cluster)
    calls = place.calls()
    try:
        known = _checked(calls, place)
        _refuse_foreign(record or NodeRecord(""), known, place, cluster.name)
    except EtcdRefused:
        raise
    except Unavailable as error:
        _log.warning("etcd is not there yet", why=error.why or str(error))
    finally:
        calls.close()


def _checked(calls: EtcdCalls, place: EtcdPlace) -> Known:
    calls.check_version()
    return EtcdLog(calls, place.prefix).read()


def _refuse_foreign(record: NodeRecord, known: Known, place: EtcdPlace, name: str) -> None:
    """Raise an error if this node and the keys below the prefix do not belong together."""
    where = f"{', '.join(place.endpoints)} below {place.prefix}"
    if record.cluster_id and not known.revision:
        raise WrongState(
            f"etcd at {where} holds no cluster, and this broker is part of cluster {record.cluster_id}",
            why="the prefix is another one, or etcd lost its data",
            hint="check cluster.metadata; restore etcd from its backup, or begin with an empty directory",
        )
    if record.cluster_id and record.cluster_id != known.head.cluster_id:
        raise WrongState(
            f"etcd at {where} holds cluster {known.head.cluster_id}, and this broker is part of cluster"
            f" {record.cluster_id}",
            hint="check cluster.metadata, or start with an empty data directory to take part in that cluster",
        )
    if known.revision and known.head.name != name:
        raise ConfigInvalid(
            f"etcd at {where} holds the cluster named {known.head.name!r}, and cluster.name is {name!r}",
            hint="set cluster.name alike on all brokers, or give this cluster a prefix of its own",
        )


class EtcdFormation:
    """Tries until this node is a member; ``waiting`` says meanwhile why it is not."""

    def __init__(
        self, place: EtcdPlace, record: NodeRecord, name: str, raft_addr: str, machine: Machine
    ) -> None:
        self._place = place
        self._record = record
        self._name = name
        self._raft_addr = raft_addr
        self._machine = machine
        self._since_us = wall_us()
        self._known: Known
        self.waiting: Waiting | None = None

    async def find(self) -> Known:
        """Wait until etcd knows this node, or knows that it was removed."""
        while True:
            try:
                self._known = await asyncio.to_thread(self._try)
                return self._known
            except DanubeError as error:
                _log.lasting("not part of the cluster yet", source="etcd", why=str(error), hint=error.hint)
                hint = error.hint or "check that etcd runs, and cluster.metadata"
                self.waiting = Waiting(str(error), hint, self._since_us, list(self._place.endpoints))
            await asyncio.sleep(ASK_INTERVAL_S)

    def make_engine(
        self,
        node_id: str,
        directory: Path,
        machine: Machine,
        host: Host,
        *,
        cluster_id: str,
        bootstrap: Members | None,
        heartbeat_ms: int,
    ) -> EtcdEngine:
        """Make the engine of this node, see MakeEngine; its initial state is in etcd."""
        return EtcdEngine(node_id, machine, host, self._place, self._known)

    def _try(self) -> Known:
        calls = self._place.calls()
        try:
            return self._take_part(calls, EtcdLog(calls, self._place.prefix))
        finally:
            calls.close()

    def _take_part(self, calls: EtcdCalls, log: EtcdLog) -> Known:
        known = _checked(calls, self._place)
        record, address = self._record, self._raft_addr
        _refuse_foreign(record, known, self._place, self._name)
        if not known.revision:
            log.make_cluster(secrets.token_hex(8), self._name)
            known = log.read()
            _refuse_foreign(record, known, self._place, self._name)
        if known.head.index < self._machine.applied_index:
            raise Damage(
                "the metadata in etcd went back",
                why=f"this broker has applied entry {self._machine.applied_index}, and the last one there is"
                f" {known.head.index}",
                hint="etcd was restored from an old backup; restore a newer one",
            )
        if record.node_id not in known.members and record.state != ETCD:
            log.add_member(record.node_id, address)
            known = log.read()
            if record.node_id not in known.members:
                raise Unavailable("this node is not a member yet", hint="it tries again")
        elif known.members.get(record.node_id, address) != address:
            log.move_member(record.node_id, address)
            known = log.read()
        return known
