"""The controller: the one process of a host that takes part in the cluster's agreement.

Workers read the metadata from the controller's copy (``metadata.log``) and send it their proposals.  The
controller has its own process and loop, so a busy worker delays no heartbeat.  If it dies at any point
nothing is lost: its promises are in its journal, and the next controller continues from there.
"""

from __future__ import annotations

import asyncio
import ipaddress
import signal
import socket
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from danube import __version__
from danube.broker.audit.audit import MEMBERS_CHAIN, open_audit
from danube.broker.clustered.load_source import LoadSource
from danube.broker.clustered.member_heads import keep_heads
from danube.broker.processes import last_resort
from danube.cluster.control.cluster_log import copy_exists
from danube.cluster.control.dismissal import EXIT_DISMISSED, dismissed
from danube.cluster.control.door import serve_host
from danube.cluster.control.node import (
    JOURNAL_DIRECTORY,
    JOURNAL_FILE,
    METADATA_DIRECTORY,
    MakeEngine,
    Node,
    NodeSettings,
)
from danube.cluster.control.recovery import refuse_unfinished, refuse_unsound
from danube.cluster.control.registration import Local, Proposals, Registration
from danube.cluster.control.survey import check_node_file
from danube.cluster.etcd.place import check_place, place_of
from danube.cluster.links.addresses import parse_addresses, split_address
from danube.cluster.links.tls import TlsFiles, contexts
from danube.cluster.links.transport import bind
from danube.cluster.log.node_files import NODE_FILE, load_node
from danube.core.placement.balance import BalanceSettings
from danube.core.security.principals import Identity, Principal
from danube.errors import WrongState
from danube.host import telemetry
from danube.host.local_socket import loopback_address
from danube.host.tls import TlsWatch
from danube.ipc.counters import snapshot

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from danube.broker.audit.audit import Audit
    from danube.broker.processes.contexts import ControllerContext
    from danube.cluster.control.calls import Change
    from danube.config.loading import BrokerConfig
    from danube.config.sections import BalanceConfig, ClusterConfig

HEARTBEAT_S: Final = 0.5
OTHERS_POLL_S: Final = 0.02
_ALL_HOSTS: Final = ("0.0.0.0", "[::]")  # noqa: S104 - only compared, not listened on
NAME: Final = "controller"
HOST: Final = Identity(Principal("host", ""), "socket")  # a command or a worker, by a socket of this user

_log = telemetry.events("controller")


def run_controller(context: ControllerContext, config: BrokerConfig) -> int | None:
    """Run the controller's process; return EXIT_DISMISSED if its node was removed."""
    telemetry.configure(config.log.level, config.log.format, process=NAME)
    cluster = config.cluster
    settings = node_settings(cluster, context.settings.data_dir, balance_settings(config.balance))
    make_engine = None if settings.etcd is not None else _raft_engine()
    with asyncio.Runner() as runner:
        return runner.run(Controller(context, settings, make_engine, config).run())


def _raft_engine() -> MakeEngine:
    from danube.cluster.raft.raftos_engine import RaftosEngine

    return RaftosEngine


def balance_settings(balance: BalanceConfig) -> BalanceSettings:
    """Return the settings of balancing that the configuration states."""
    return BalanceSettings(
        strategy=balance.strategy,
        aggressiveness=balance.aggressiveness,
        automatic=balance.automatic,
        interval_s=balance.interval_ms // 1000,
        moves_max=balance.moves_max,
        weights=balance.weight_by_measure,
    )


def local_broker(broker_id: int, config: BrokerConfig, addresses: Mapping[str, str]) -> Local:
    """Return this broker's registration: its addresses, with the member's host if it listens on all."""
    host = config.cluster.raft_addr.rpartition(":")[0]

    def reached(door: str) -> str:
        address = addresses.get(door, "")
        own_host, _, port = address.rpartition(":")
        return f"{host}:{port}" if own_host in _ALL_HOSTS else address

    return Local(
        broker_id=broker_id,
        native_address=config.server.advertised or reached("native"),
        grpc_address=config.grpc.advertised or reached("grpc"),
        admin_address=reached("admin"),
        metrics_address=reached("metrics"),
        version=__version__,
        shared=config.storage.mode != "local",
        lease_ms=config.cluster.lease_ms,
    )


def node_settings(
    cluster: ClusterConfig, data_dir: Path, balance: BalanceSettings | None = None
) -> NodeSettings:
    """Return this member's settings from the configuration; raises ConfigInvalid for unusable files."""
    files = TlsFiles(cluster.cert_file, cluster.key_file, cluster.ca_file)
    return NodeSettings(
        data_dir=data_dir,
        cluster=cluster.name,
        raft_addr=cluster.raft_addr,
        seeds=tuple(parse_addresses(cluster.seed_nodes)),
        join=tuple(parse_addresses(cluster.join)),
        heartbeat_ms=cluster.heartbeat_ms,
        tls=contexts(files) if cluster.cert_file else None,
        balance=balance or BalanceSettings(),
        etcd=place_of(cluster) if cluster.metadata else None,
    )


def check_cluster(cluster: ClusterConfig, data_dir: Path) -> None:
    """Raise ConfigInvalid, WrongState or Damage if a controller could not run; called before its start."""
    if not cluster.metadata:
        from danube.cluster.raft.raftos_engine import check_installed

        check_installed()
    node_settings(cluster, data_dir)
    if cluster.metadata:
        _refuse_journal(data_dir)
    else:
        refuse_unsound(data_dir)
    member = (data_dir / NODE_FILE).exists() and load_node(data_dir).cluster_id
    if copy_exists(data_dir / METADATA_DIRECTORY) and not member:
        raise WrongState(
            f"{data_dir} holds the topics of a broker that was alone",
            why="members of a cluster must all begin with the same",
            hint=f"`danube cluster adopt --data-dir {data_dir} --raft-addr {cluster.raft_addr}` makes it the"
            " first member of a new cluster; a broker that joins one, or uses etcd, begins with an empty"
            " directory",
        )
    if cluster.metadata:
        check_place(cluster, data_dir)


def _refuse_journal(data_dir: Path) -> None:
    """Raise WrongState if this node has a journal: then the cluster's metadata is not in etcd."""
    refuse_unfinished(data_dir)
    check_node_file(data_dir)
    if (data_dir / JOURNAL_DIRECTORY / JOURNAL_FILE).exists():
        raise WrongState(
            f"{data_dir} belongs to a member of a cluster without etcd",
            why="what its members have agreed on is in their journals",
            hint="give --seed-nodes and --raft-addr as before, or start with an empty data directory",
        )


def open_door(cluster: ClusterConfig) -> socket.socket:
    """Return the listening socket for members: on the address, or for a name on all addresses."""
    host, port = split_address(cluster.raft_addr)
    with suppress(ValueError):
        return bind(str(ipaddress.ip_address(host)), port)
    return bind(host if host == "localhost" else "", port)


class Controller:
    """The controller's process: a member, the sockets that it serves, and the supervisor's signals."""

    def __init__(
        self,
        context: ControllerContext,
        settings: NodeSettings,
        make_engine: MakeEngine | None,
        config: BrokerConfig | None = None,
    ) -> None:
        """Without a configuration, the process is a member but registers no broker."""
        self._context = context
        self._config = config
        self._registration: Registration | None = None
        self._settings = settings
        self._audit: Audit | None = None
        self._certificates = TlsWatch(settings.tls.all if settings.tls is not None else ())
        self._make_engine = make_engine
        self._stop = asyncio.Event()
        self._exit_code: int | None = None
        self._loop: asyncio.AbstractEventLoop

    async def run(self) -> int | None:
        """Run until the supervisor stops it, or the node is no longer a member."""
        self._loop = loop = asyncio.get_running_loop()
        last_resort.install(loop)
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        if self._context.drain.requested:
            self._stop.set()
        self._beat()
        if self._settings.tls is None:
            _log.warning("members are not authenticated", hint="set cluster.cert_file, key_file and ca_file")
        node = Node(self._settings, self._make_engine, self._failed)
        node.before_change = self._tell_change if self._open_audit() else None
        server = await serve_host(self._context.listener, node.asked)
        node.when_committed = server.committed
        taking_part = loop.create_task(node.run(self._context.door))
        taking_part.add_done_callback(self._took_part)
        registering = self._register(node)
        keeping = self._keep_heads(node)
        leaving = loop.create_task(self._leave_when_dismissed(node))
        leaving.add_done_callback(self._took_part)
        await self._stop.wait()
        leaving.cancel()
        if self._exit_code is None:
            await self._others_ended()
        if keeping is not None:
            keeping.cancel()
        if registering is not None and self._registration is not None:
            registering.cancel()
            await self._registration.leave()
        server.close()
        taking_part.cancel()
        node.stop()
        if self._audit is not None:
            self._audit.close()
        return self._exit_code

    def _open_audit(self) -> bool:
        """Begin the controller's own chain; return whether there is one."""
        if self._config is not None:
            self._audit = open_audit(self._config, MEMBERS_CHAIN, self._loop)
        return self._audit is not None

    def _tell_change(self, change: Change) -> None:
        """Write down who joins or leaves before it is asked of the leader; as `Audit.tell`."""
        if self._audit is not None:
            details = {"address": change.address} if change.address else {}
            self._audit.tell(
                HOST, f"member_{change.what}", change.node_id, source="controller", details=details
            )
            self._audit.tell_head()  # changes are rare, and each is worth hiding

    async def _leave_when_dismissed(self, node: Node) -> None:
        """Stop the broker once the cluster has removed this member, because it may no longer serve."""
        await dismissed(node)
        _log.error("this node was removed from the cluster", node_id=node.node_id)
        self._context.lease.end()
        self._exit_code = EXIT_DISMISSED
        self._stop.set()

    def _register(self, node: Node) -> asyncio.Task[None] | None:
        """Keep this host's broker registered while the node is part of a cluster."""
        if self._config is None or self._context.region is None:
            return None
        local = local_broker(int(node.node_id), self._config, self._context.addresses)
        _warn(local, self._settings.raft_addr)
        load = LoadSource(self._context.region)
        proposals = Proposals(node.asked)
        self._registration = Registration(local, proposals, self._context.lease, load.report)
        task = self._loop.create_task(self._registration.run())
        task.add_done_callback(self._took_part)
        return task

    def _keep_heads(self, node: Node) -> asyncio.Task[None] | None:
        """Have the heads of the controller's chain in the metadata, once this host is registered."""
        if self._audit is None or self._config is None or (registration := self._registration) is None:
            return None
        directory = self._config.audit_directory
        keeping = keep_heads(self._audit, directory, node, lambda: registration.registered)
        task = self._loop.create_task(keeping)
        task.add_done_callback(self._took_part)
        return task

    async def _others_ended(self) -> None:
        """Wait until workers and mover have stopped; the broker keeps its partitions until then.

        A signal to the whole process group reaches this process as early as them.
        """
        while self._others_run():  # noqa: ASYNC110
            await asyncio.sleep(OTHERS_POLL_S)

    def _others_run(self) -> bool:
        region, mover = self._context.region, self._context.mover
        workers = region is not None and any(one["pid"] for one in snapshot(region))
        return workers or (mover is not None and mover.pid != 0)

    def _took_part(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """End the process: a member whose state on disk is unknown may send nothing."""
        last_resort.leave("the member cannot go on", error)

    def _beat(self) -> None:
        self._context.heartbeat()
        if self._context.settings.reloads is not None:
            self._certificates.look(self._context.settings.reloads.count)
        if self._audit is not None:
            self._audit.sweep()
        self._loop.call_later(HEARTBEAT_S, self._beat)


def _warn(local: Local, raft_addr: str) -> None:
    """Warn about settings that serve a single host but not a member of a cluster."""
    if not local.shared:
        _log.warning(
            "partitions of reliable topics stay with a broker that dies",
            why="they are on its disk only",
            hint="set storage.url to a store that all brokers reach",
        )
    if loopback_address(local.native_address) and not loopback_address(raft_addr):
        _log.warning(
            "clients on other hosts are sent to an address that they cannot reach",
            address=local.native_address,
            hint="set server.host or server.advertised",
        )
