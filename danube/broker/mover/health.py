"""Health of the object store: the mover learns it from its own calls and reports it to workers.

After a while without a call the mover reads one small object, so that an outage of an idle store is noticed
too.  During an outage the gate lets one call a minute through.  If such a call, or the small read, succeeds,
all waiting calls are released.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from danube.core.partition.tier_plan import OutageGate
from danube.errors import DanubeError, StoreRefused, StoreUnavailable
from danube.host import clock
from danube.wal.tier.binding import stored_identity

if TYPE_CHECKING:
    from danube.broker.mover.copies import Ended, Job
    from danube.broker.mover.owner_link import OwnerLink
    from danube.broker.processes.contexts import Pulse
    from danube.wal.stores.objects import ObjectStore

ASK_AFTER_NS: Final = 15_000_000_000  # without any word from the store


class StoreHealth:
    """All methods run on the mover's loop; ``links`` are those that are open."""

    def __init__(
        self, store: ObjectStore, links: Iterable[OwnerLink], pulse: Pulse, back: Callable[[], None]
    ) -> None:
        """``back`` is called when an outage is over, as far as the gate or the store's first answer tells."""
        self.error = ""  # why it does not answer; empty while it does, and before it was heard of
        self.hint = ""  # what helps then
        self.gate = OutageGate()
        self._back = back
        self._store = store
        self._links = links
        self._pulse = pulse
        self._answers: bool | None = None
        self._asking = False
        self._heard_ns = clock.monotonic_ns()

    def ask_if_silent(self, block: Callable[[Job, Ended], None]) -> None:
        """Ask when nothing was heard for a while; ``block`` runs a job in a thread."""
        if not self._asking and clock.monotonic_ns() - self._heard_ns >= ASK_AFTER_NS:
            self._asking = True
            block(lambda: stored_identity(self._store), self._asked)

    def _asked(self, _: Any, error: DanubeError | None) -> None:
        self._asking = False
        self._heard_ns = clock.monotonic_ns()
        outage = self._answers is False
        self.heard(error)
        if outage and self._answers:
            self.gate.succeeded(clock.wall_us())
            self._back()

    def judge(self, error: DanubeError | None, now_us: int, chance: float) -> None:
        """A call that the gate admitted ended so; ``chance`` as in retry_delay_us."""
        self.heard(error)
        if isinstance(error, StoreUnavailable | StoreRefused):
            self.gate.failed(now_us, chance)
        elif self.gate.succeeded(now_us):
            self._back()

    def answered(self) -> None:
        self._take(True, "", "")

    def heard(self, error: DanubeError | None) -> None:
        """A call ended so; an error that the store has no part in says nothing of it."""
        if error is None:
            self.answered()
        elif isinstance(error, StoreUnavailable | StoreRefused):
            self.failed(error)

    def failed(self, error: DanubeError) -> None:
        """Note that the store did not answer, refused, or belongs to another broker."""
        self._take(False, str(error), error.hint)

    def tell(self, link: OwnerLink) -> None:
        """Send the store's known condition to a worker that has just connected."""
        if self._answers is not None:
            link.send("store", **self._condition())

    def _take(self, answers: bool, error: str, hint: str) -> None:
        self._heard_ns = clock.monotonic_ns()
        if (answers, error, hint) == (self._answers, self.error, self.hint):
            return
        self._answers, self.error, self.hint = answers, error, hint
        self._pulse.tell_store("" if answers else f"{error} ({hint})" if hint else error)
        for link in list(self._links):
            link.send("store", **self._condition())

    def _condition(self) -> dict[str, Any]:
        return {
            "name": self._store.name, "answers": bool(self._answers), "error": self.error, "hint": self.hint,
        }  # fmt: skip
