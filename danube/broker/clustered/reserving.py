"""Offsets that the owner of a partition may assign: reserved in the metadata in advance.

Only for topics whose records are in a shared store: there the next owner begins behind the reserved offsets,
so no offset is given twice.  If records are on one disk only, that disk decides the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from danube.core.cluster.commands import ReserveOffsets
from danube.core.partition.partition import OffsetBudget
from danube.core.placement.recovered import LOG_EPOCHS
from danube.errors import DanubeError
from danube.host import telemetry

if TYPE_CHECKING:
    from danube.broker.clustered.directory import Directory
    from danube.broker.clustered.owning import Place, Submit
    from danube.broker.partition.hosted import HostedPartition
    from danube.core.metadata.commands import Outcome

Then = Callable[[DanubeError | None], None]

_log = telemetry.events("owning")


class Reserving:
    """Reservations of one worker's partitions; all methods run on its loop."""

    def __init__(self, directory: Directory, submit: Submit) -> None:
        self._directory = directory
        self._submit = submit

    def budget(self, place: Place, epoch: int) -> OffsetBudget:
        """Return the budget of a new ownership, which is empty until a reservation was made."""
        known = self._directory.reservation(*place)
        mine = known.broker_id == self._directory.broker_id and known.epoch == epoch and not known.closed
        return OffsetBudget(known.end if mine else 0)

    def look(self, hosted: HostedPartition, then: Then | None = None) -> None:
        """Reserve more offsets if few are left; ``then`` gets None once that is done, or the error."""
        budget = hosted.budget
        wanted = budget.wanted(hosted.core.log_end) if budget is not None else None
        if budget is None or wanted is None:
            if then is not None:
                then(None)
            return
        end = max(wanted, self._directory.reservation(hosted.topic_id, hosted.index).end)
        budget.asked(end)

        def done(error: DanubeError | None) -> None:
            if error is None:
                budget.reserved(end)
            else:
                budget.refused()
                _log.limited("offsets not reserved", source=hosted.name, why=str(error))
            if then is not None:
                then(error)

        self._propose(hosted, end, done)

    def close(self, hosted: HostedPartition) -> None:
        """Close the partition's reservation, so that its next owner begins at the log's end."""
        if hosted.budget is not None and not hosted.budget.closed:
            end = hosted.budget.close(hosted.core.log_end)
            self._propose(hosted, end, lambda error: None, last=True)

    def _propose(self, hosted: HostedPartition, end: int, then: Then, *, last: bool = False) -> None:
        epoch = hosted.core.epoch // LOG_EPOCHS
        command = ReserveOffsets(
            broker_id=self._directory.broker_id,
            partitions=((hosted.topic_id, hosted.index, epoch, end),),
            last=last,
        )

        def committed(outcome: Outcome) -> None:
            then(outcome if isinstance(outcome, DanubeError) else None)

        try:
            self._submit(command, committed)
        except DanubeError as error:
            then(error)
