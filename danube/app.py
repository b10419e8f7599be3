"""The composition root: the one place where configuration, supervisor, workers and doors meet."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Final

from danube.broker.processes import supervisor
from danube.broker.processes.reloads import Reloads
from danube.broker.processes.supervisor import ControllerSide, SupervisorSettings, WorkerContext
from danube.config import exposure
from danube.config.auth import packed_keys, with_keys
from danube.config.loading import BrokerConfig, Started, values
from danube.config.sections import NO_PORT
from danube.errors import ConfigInvalid
from danube.host import telemetry

METADATA_POLL_S: Final = 0.05
WAITING_ROOM_S: Final = 1.0  # a cluster whose nodes start together is there by then
_log = telemetry.events("app")

if TYPE_CHECKING:
    from danube.broker.processes.contexts import MetricsContext, MetricsMain, MoverMain
    from danube.broker.routing.passing import ConnectionPassing
    from danube.broker.worker.worker import Worker
    from danube.host.tls import TlsPort
    from danube.server.native import NativeServer


def start(
    config: BrokerConfig,
    announce: Callable[[str | Started], None],
    again: Callable[[], BrokerConfig] | None = None,
) -> int:
    """Run a broker in this process until it is told to stop; returns the exit code.

    ``announce`` gets lines about a slow start and, once all workers serve, one Started.  ``again`` reads the
    configuration anew, for the list of keys.  Raises DanubeError when the broker cannot start.
    """
    exposure.refuse(config)
    settings = SupervisorSettings(
        data_dir=config.data_dir,
        workers=config.workers,
        host=config.server.host,
        native_port=config.server.native_port,
        extra_ports={"grpc": config.grpc.port, "admin": config.admin.port},
        local_socket=config.local_socket,
        metrics_port=config.metrics.port,
        reloads=_reloads(config, again),
        progress=announce,
        on_ready=announce,
    )
    controller = _controller(config)
    _restore(config, announce)
    _check_keys(config)
    _import_worker_parts()
    _check_tls(config)
    return supervisor.run(
        settings,
        lambda context: run_worker(context, config),
        _mover_main(config),
        _metrics_main(config),
        controller,
    )


def _restore(config: BrokerConfig, announce: Callable[[str | Started], None]) -> None:
    """End a restore that was cut off; begin one where nothing is here and the configuration asks for it."""
    from danube.broker.tiers import restore

    if config.storage.mode == "local" or config.storage.restore != "if_empty":
        restore.finish_restore(config.data_dir)
        return
    from danube.wal.stores.opening import open_store

    restored = restore.restore_if_empty(open_store(config.storage), config.data_dir)
    if restored is not None:
        announce(f"restored {restored.topics} topics, {restored.objects} objects from the store")
        for problem in restored.problems:
            announce(problem)


def _mover_main(config: BrokerConfig) -> MoverMain | None:
    """The main function of the mover; None if everything stays local."""
    if config.storage.mode == "local":
        return None
    from danube.broker.mover.mover import run_mover
    from danube.wal.stores.opening import open_store

    open_store(config.storage)  # settings that cannot be used stop the start, not the mover again and again
    return lambda context: run_mover(context, config)


def _metrics_main(config: BrokerConfig) -> MetricsMain | None:
    """The main function of the process that serves metrics; None if they are off."""
    if config.metrics.port == NO_PORT:
        return None

    def main(context: MetricsContext) -> None:  # no other process needs its modules
        from danube.server.metrics.process import run_metrics

        run_metrics(context, config)

    return main


def _controller(config: BrokerConfig) -> ControllerSide | None:
    """The member of a cluster that this host runs; None if the broker is alone."""
    from danube.cluster.log.node_files import NODE_FILE, STAGING, load_node, refuse_etcd

    if not config.cluster.enabled:
        if (config.data_dir / STAGING).exists():
            from danube.cluster.control.recovery import refuse_unfinished

            refuse_unfinished(config.data_dir)
        if (config.data_dir / NODE_FILE).exists():
            refuse_etcd(load_node(config.data_dir), config.data_dir)
        journal = config.data_dir / "raft" / "raft.log"
        if journal.exists():
            raise ConfigInvalid(
                f"{config.data_dir} belongs to a member of a cluster",
                why="alone it would change what the members have agreed on",
                hint="give --seed-nodes and --raft-addr as before",
            )
        return None
    from danube.broker.clustered.controller import check_cluster, open_door, run_controller

    check_cluster(config.cluster, config.data_dir)
    return ControllerSide(lambda context: run_controller(context, config), lambda: open_door(config.cluster))


def _import_worker_parts() -> None:
    """Import the workers' modules before the fork, so that workers share them and start at once."""
    import uvloop  # noqa: F401

    import danube.broker.worker.worker
    import danube.server.arrivals
    import danube.server.grpc.doors
    import danube.server.grpc.placing
    import danube.server.native  # noqa: F401


def _check_keys(config: BrokerConfig) -> None:
    """Refuse the start if a key cannot be used: workers that find it out would start again and again."""
    if config.auth.asks:
        from danube.config.auth import credentials_of, keys_of

        credentials_of(config.auth, keys_of(config.auth, short_allowed=config.only_this_host))


def _reloads(config: BrokerConfig, again: Callable[[], BrokerConfig] | None) -> Reloads | None:
    """Return the means of `danube reload`: files are looked at, and the list of keys is read again."""
    if not (config.has_certificates or config.auth.asks):
        return None
    if again is None or not config.auth.asks:
        return Reloads()

    def read() -> bytes:
        found = again()
        packed = packed_keys(found.auth)
        changed = dataclasses.replace(config, auth=with_keys(config.auth, packed))
        if config.auth.has_key and not changed.auth.has_key:
            what = "the configuration has no key that checks tokens any more"
            raise ConfigInvalid(what, hint="name one in auth.jwt.keys, or start the broker again")
        _check_keys(changed)
        present = values(changed)
        if waiting := [key for key, text in values(found).items() if text != present[key]]:
            _log.warning("settings that have changed hold from the next start", settings=",".join(waiting))
        return packed

    return Reloads(read)


def _with_present_keys(config: BrokerConfig, reloads: Reloads | None) -> BrokerConfig:
    """The configuration of a worker: one that is replaced begins with the list of keys that was read last."""
    if reloads is None:
        return config
    return dataclasses.replace(config, auth=with_keys(config.auth, reloads.keys))


def _check_tls(config: BrokerConfig) -> None:
    """Raise ConfigInvalid before anything is started; each process loads the files itself, with its keys."""
    if config.tls.cert_file or config.grpc.cert_file:
        from danube.server.tls import tls_ports

        tls_ports(config)


def run_worker(context: WorkerContext, config: BrokerConfig) -> None:
    """The main function of a worker process."""
    import uvloop

    from danube.host import allocator

    telemetry.configure(config.log.level, config.log.format, process=f"worker-{context.worker}")
    allocator.keep_large_blocks()
    allocator.collect_rarely()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(context, config))


async def _serve(context: WorkerContext, config: BrokerConfig) -> None:
    from danube.broker.worker.worker import Worker
    from danube.server.arrivals import PassedConnections
    from danube.server.grpc.doors import grpc_doors
    from danube.server.grpc.placing import SHARES_MAX

    config = _with_present_keys(config, context.settings.reloads)
    tls: dict[str, TlsPort] = {}
    if config.tls.cert_file or config.grpc.cert_file:
        from danube.server.tls import tls_ports

        tls = tls_ports(config)
    if context.controller_address and not await _cluster_joined(context, config, tls):
        return
    worker = Worker(context, config, asyncio.get_running_loop())
    native = native_server(worker, config, _passing(context, "native"))
    grpc = grpc_doors(worker, None if "grpc" in tls else _passing(context, "grpc", SHARES_MAX))
    passed = None
    if context.passage is not None:
        passed = PassedConnections(context.passage, {"native": native, "grpc": grpc["grpc"]})
    await worker.run({"native": native, **grpc}, tls, passed)


def _passing(context: WorkerContext, door: str, shares_max: float = 0) -> ConnectionPassing | None:
    """The way to this door of other workers; None if there are none."""
    from danube.broker.routing.passing import ConnectionPassing

    if context.passage is None:
        return None
    return ConnectionPassing(context.worker, context.region, context.passage, door, shares_max=shares_max)


async def _cluster_joined(context: WorkerContext, config: BrokerConfig, tls: Mapping[str, TlsPort]) -> bool:
    """Wait until this host takes part in a cluster; False when the broker stops before.

    If that takes longer, connecting clients get an error that names the reason.
    """
    from danube.broker.processes.directories import METADATA
    from danube.cluster.control.cluster_log import agreed_copy_exists
    from danube.server.waiting_room import WaitingRoom

    directory = context.settings.data_dir / METADATA
    loop = asyncio.get_running_loop()
    began_s, room = loop.time(), None
    try:
        while not agreed_copy_exists(directory, context.controller_address):
            if context.drain.requested:
                return False
            context.heartbeat()
            if room is None and loop.time() - began_s > WAITING_ROOM_S:
                room = WaitingRoom(context, config, tls)
                await room.open()
            await asyncio.sleep(METADATA_POLL_S)
        return True
    finally:
        if room is not None:
            room.close()


def native_server(
    worker: Worker, config: BrokerConfig, passing: ConnectionPassing | None = None
) -> NativeServer:
    """The native door of one worker, with its share of the connections."""
    from danube.server.native import NativeServer

    context = worker.context
    share = -(-config.limits.connections_max // context.workers)
    return NativeServer(
        worker.index,
        worker.router,
        connections_max=share,
        places=worker.places,
        handshake_timeout_s=config.limits.handshake_timeout_ms / 1000,
        session_timeout_ms=config.limits.session_timeout_ms,
        turns=worker,
        count=worker.counters.add,
        address=lambda: worker.cluster.directory.address if worker.cluster is not None else "",
        passing=passing,
        admission=worker.admission,
    )
