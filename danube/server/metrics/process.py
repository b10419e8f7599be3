"""The metrics process: queries the workers, reads their counters in shared memory, serves both over HTTP.

It keeps no state and may be killed at any time; the supervisor keeps its sockets and starts another one.  In
shared memory it only writes its own heartbeat.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Final

from danube import __version__
from danube.broker.processes import last_resort
from danube.broker.processes.data_dir import broker_id
from danube.cluster.control.calls import ClusterStatus, Status
from danube.cluster.control.door import ControllerClient
from danube.config import exposure
from danube.core.partition.pending import Measured, host_of
from danube.errors import DanubeError
from danube.host import clock, telemetry
from danube.host.handshakes import Handshakes
from danube.host.tls import TlsPort, TlsWatch
from danube.ipc.counters import snapshot
from danube.server.metrics import text as metrics_text
from danube.server.metrics.gathering import Gathering, MeasuredLink
from danube.server.metrics.series import topics_within
from danube.server.metrics.server import CONNECTIONS_MAX, MetricsServer
from danube.server.metrics.text import Observed, ObservedMember
from danube.server.tls import tls_ports

if TYPE_CHECKING:
    from danube.broker.processes.contexts import MetricsContext
    from danube.config.loading import BrokerConfig
    from danube.config.sections import MetricsConfig

HEARTBEAT_S: Final = 0.5
CONTROLLER_MAX_S: Final = 1.0

_log = telemetry.events("metrics")


def run_metrics(context: MetricsContext, config: BrokerConfig) -> None:
    """The main function of the metrics process."""
    telemetry.configure(config.log.level, config.log.format, process="metrics")
    with asyncio.Runner() as runner:
        name = partial(broker_id, context.settings.data_dir, clustered=config.cluster.enabled)
        insecure = any(exposure.open_doors(config))
        port = tls_ports(config).get("metrics") if config.tls.cert_file else None
        runner.run(Metrics(context, config.metrics, name, port, insecure=insecure).run())


class Metrics:
    """Parts and loop of the metrics process."""

    def __init__(
        self,
        context: MetricsContext,
        bounds: MetricsConfig,
        broker: Callable[[], int],
        tls: TlsPort | None = None,
        *,
        insecure: bool = False,
    ) -> None:
        self._tls = tls
        self._certificates = TlsWatch(tls.all if tls is not None else ())
        self._context = context
        self._broker = broker  # its id; a new member of a cluster has none at first
        self._insecure = insecure
        self._series_max = bounds.series_max
        topics_max = topics_within(bounds.series_max, bounds.topics_max, context.workers)
        self._gathering = Gathering(context.workers, topics_max)
        self._server = MetricsServer(self.page, metrics_text.CONTENT_TYPE)
        self._answers: dict[int, Measured] | None = None  # answers of the round that _text shows
        self._text = b""
        self._making = asyncio.Lock()
        self._controller = ControllerClient(context.controller_address)
        self._stop = asyncio.Event()

    async def run(self) -> None:
        """Run until the supervisor stops it."""
        loop = asyncio.get_running_loop()
        last_resort.install(loop)
        loop.add_signal_handler(signal.SIGTERM, self._stop.set)
        if self._context.drain.requested:
            self._stop.set()
        self._beat(loop)
        await loop.create_unix_server(lambda: MeasuredLink(self._gathering), sock=self._context.listener)
        handshakes = None
        if self._tls is None:
            await loop.create_server(self._server.factory, sock=self._context.door)
        else:
            handshakes = Handshakes(self._context.door, self._tls, self._server.factory, most=CONNECTIONS_MAX)
        _log.info("metrics are served")
        await self._stop.wait()
        if handshakes is not None:
            handshakes.close()
        self._server.close()
        for link in list(self._gathering.links):
            link.close()
        await asyncio.sleep(0)

    def _beat(self, loop: asyncio.AbstractEventLoop) -> None:
        self._context.heartbeat()
        if self._context.settings.reloads is not None:
            self._certificates.look(self._context.settings.reloads.count)
        loop.call_later(HEARTBEAT_S, self._beat, loop)

    async def page(self) -> bytes:
        """Return the text of one round of answers, made once for all callers of the round."""
        answers = await self._gathering.answers()
        async with self._making:
            if answers is not self._answers:
                observed = self._observed(answers, await self._member_side())
                self._text = metrics_text.text(observed, self._series_max)
                self._answers = answers
            return self._text

    async def _member_side(self) -> ObservedMember | None:
        """Return this host's member; its status is None if the controller does not answer within a second."""
        lease = self._context.lease
        if not self._context.controller_address or lease is None:
            return None
        status: ClusterStatus | None = None
        try:
            answer = await asyncio.to_thread(self._controller.ask, Status(), CONTROLLER_MAX_S)
            status = answer if isinstance(answer, ClusterStatus) else None
        except DanubeError as error:
            _log.limited("the controller did not answer", source="controller", why=str(error))
        left_s = max(0, lease.end_ns - clock.elapsed_ns()) / 1e9
        return ObservedMember(status=status, lease_s=left_s)

    def _observed(self, answers: dict[int, Measured], member: ObservedMember | None) -> Observed:
        context = self._context
        mover = context.mover
        return Observed(
            broker=str(self._broker()),
            version=__version__,
            started_at_us=context.started_at_us,
            now_us=clock.wall_us(),
            counters=snapshot(context.region),
            answered=frozenset(answers),
            measured=host_of(answers.values(), context.workers),
            insecure=self._insecure,
            mover_alive=mover is not None and mover.alive(clock.monotonic_ns()),
            mover_starts=mover.start_count if mover is not None else 0,
            store_answers=mover is not None and mover.store_answers,
            upload_share=mover.upload_share if mover is not None else 0.0,
            tls_failed=self._certificates.failed,
            member=member,
        )
