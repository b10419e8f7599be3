"""Faults of a cluster's storage: power cuts, and takeovers whose movers or store say nothing, or late.

Each broker has a disk of its own, whose power can be cut.  All reach one object store, through a proxy at the
bridge between their hosts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from tests.crash.cluster_nemesis import WEIGHTS, ClusterNemesis, Step
from tests.crash.power import FLAGS
from tests.crash.slow_starts import SLOW_ANSWER_S, let_mover_go, mover_of, stop_mover
from tests.fakes.s3_proxy import Fault

LONGER_S: Final = 8.0  # than a fault that only takes a broker away: retention looks every ten seconds
POWER_WEIGHTS: Final = {"power_cut": 8, "power_cut_at_once": 4, "power_cut_of_all": 3}
STORE_WEIGHTS: Final = {
    "takeover_with_stopped_movers": 4,
    "takeover_without_the_store": 2,
    "takeover_with_a_slow_store": 2,
    "takeover_with_a_silent_store": 2,
}


def weights_of(power: bool, store: bool) -> dict[str, int]:
    """What is drawn: the faults of every cluster, and those of its storage at least as often."""
    more = (POWER_WEIGHTS if power else {}) | (STORE_WEIGHTS if store else {})
    return dict.fromkeys(WEIGHTS, 1) | more if more else dict(WEIGHTS)


class StorageNemesis(ClusterNemesis):
    """Does those steps too."""

    # -- power ------------------------------------------------------------------------------------

    def power_cut(self, target: int, step: Step) -> dict[str, Any]:
        """A host loses its power, and comes back after its lease."""
        cut_ns = self._cut([target], step)
        time.sleep(step.seconds)
        return cut_ns

    def power_cut_at_once(self, target: int, step: Step) -> dict[str, Any]:
        """A host loses its power and is back at once: it may go on with its own logs."""
        return self._cut([target], step)

    def power_cut_of_all(self, target: int, step: Step) -> dict[str, Any]:
        """All hosts lose their power within a moment."""
        return self._cut([target, *self.others(target)], step)

    def _cut(self, places: list[int], step: Step) -> dict[str, Any]:
        flags = list(FLAGS)
        moments = []
        for number, place in enumerate(places):
            self.cluster.brokers[place].pause()  # as in cut_power()
            moments.append(self.cluster.disks[place].cut(flags[(step.number >> number) % len(flags)]))
        for place in places:
            self.cluster.brokers[place].kill()
        for place in places:
            self.cluster.power_back(place)
        return {"cut_ns": moments, "cut": places}

    # -- takeovers --------------------------------------------------------------------------------

    def takeover_with_stopped_movers(self, target: int, step: Step) -> None:
        """A broker dies while the movers of the others are stopped; they go on later."""
        movers = [mover_of(self.cluster.brokers[place]) for place in self.others(target)]
        try:
            for pid in movers:
                stop_mover(pid)
            self._lost(target, step)
        finally:
            for pid in movers:
                let_mover_go(pid)

    def takeover_without_the_store(self, target: int, step: Step) -> None:
        self.cluster.proxy.refuse()
        try:
            self._lost(target, step)
        finally:
            self.cluster.proxy.resume()

    def takeover_with_a_slow_store(self, target: int, step: Step) -> None:
        with self._store(Fault("delay", seconds=SLOW_ANSWER_S)):
            self._lost(target, step)

    def takeover_with_a_silent_store(self, target: int, step: Step) -> None:
        with self._store(Fault("blackhole")):
            self._lost(target, step)

    @contextmanager
    def _store(self, fault: Fault) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self.cluster.proxy.clear)
            self.cluster.proxy.add(fault)
            yield

    def _lost(self, target: int, step: Step) -> None:
        """Half of the time it comes back before all is well again, and then it begins without, too."""
        self.cluster.brokers[target].kill()
        time.sleep(step.seconds)
        if step.number % 2:
            self.cluster.brokers[target].launch()
        time.sleep(LONGER_S)
