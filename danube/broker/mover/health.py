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

ASK_AFTER_NS: Final = 15_000_000_000  # time without a call after which the store is read


class StoreHealth:
    """Condition of the store, as reported over the open ``links``; all methods run on the mover's loop."""

    def __init__(
        self, store: ObjectStore, links: Iterable[OwnerLink], pulse: Pulse, back: Callable[[], None]
    ) -> None:
        """``back`` is called at the end of an outage, and at the store's first answer."""
        self.error = ""  # why the store does not answer; empty while it does, and before any answer
        self.hint = ""  # what to do about the error
        self.gate = OutageGate()
        self._back = back
        self._store = store
        self._links = links
        self._pulse = pulse
        self._answers: bool | None = None
        self._asking = False
        self._heard_ns = clock.monotonic_ns()

    def ask_if_silent(self, block: Callable[[Job, Ended], None]) -> None:
        """Read an object after ASK_AFTER_NS without a call; ``block`` runs a job in a thread."""
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
        """Take the outcome of a call that the gate admitted; ``chance`` as in retry_delay_us."""
        self.heard(error)
        if isinstance(error, StoreUnavailable | StoreRefused):
            self.gate.failed(now_us, chance)
        elif self.gate.succeeded(now_us):
            self._back()

    def answered(self) -> None:
        self._take(True, "", "")

    def heard(self, error: DanubeError | None) -> None:
        """Take the outcome of any call; errors that are not the store's are ignored."""
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
