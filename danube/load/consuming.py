"""One consumer of a load test: receives records, checks and acknowledges them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from danube.errors import DanubeError
from danube.host.clock import monotonic_ns
from danube.load import stamp
from danube.load.collector import Collector
from danube.load.links.links import Delivery, Receiver
from danube.load.plan import size_label
from danube.load.producing import Record

TURN_S: Final = 0.25
PAUSE_S: Final = 1.0


class Consuming:
    """Receives for as long as the run lasts.  ``turn`` is called again and again until ``close``."""

    def __init__(
        self,
        collector: Collector,
        link_to: Callable[[], Receiver],
        record: Record,
        *,
        protocol: str,
        mode: str,
        durability: str,
        subscription: str,
    ) -> None:
        self._collector = collector
        self._link_to = link_to
        self._record = record
        self._run = int(collector.run, 16)
        self._kind = f"{protocol} {mode} consumer"
        self._name = f"{protocol} {mode} {durability}"
        self._subscription = subscription
        self._link: Receiver | None = None

    def turn(self) -> None:
        """Receive records for a short time; a lost consumer is made anew."""
        if self._link is None and not self._open():
            time.sleep(PAUSE_S)
            return
        link = self._link
        until = time.monotonic() + TURN_S
        try:
            while link is not None and (left_s := until - time.monotonic()) > 0:
                delivery = link.receive(left_s)
                if delivery is not None:
                    self._take(delivery)
        except DanubeError as error:
            self._record("consume", self._name, 0.0, 0, error)
            self.close()
            time.sleep(PAUSE_S)

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            self._collector.closed(self._subscription)
            link.close()

    def _open(self) -> bool:
        link = self._link_to()
        began_ns = monotonic_ns()
        failure: DanubeError | None = None
        try:
            link.open()
        except DanubeError as error:
            failure = error
        self._record("connect", self._kind, (monotonic_ns() - began_ns) / 1e6, 0, failure)
        if failure is not None:
            link.close()
            return False
        self._link = link
        self._collector.opened(self._subscription)
        return True

    def _take(self, delivery: Delivery) -> None:
        """Account for a record before it is acknowledged, because afterwards it will not come again."""
        now_ns = monotonic_ns()
        payload = delivery.payload
        found = stamp.read(payload)
        if isinstance(found, stamp.Damaged):
            self._collector.stray(self._subscription, "damaged")
        elif found is None or found.run != self._run:
            self._collector.stray(self._subscription, "foreign")
        elif self._collector.arrived(delivery.reader, found, delivery.partition, delivery.redelivered):
            name = f"{self._name} {size_label(len(payload))}"
            self._record("e2e", name, found.age_ms(now_ns), len(payload))
        delivery.ack()
