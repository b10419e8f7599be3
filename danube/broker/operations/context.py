"""What any worker answers itself: one table of operations for native ADMIN frames and gRPC calls.

An operation takes plain values and answers one, or an error, on the loop: at once, or when a command
was committed or a definition examined.  Operations of a partition's owner are in
:mod:`danube.broker.shard.admin`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from danube.broker.operations import cluster as cluster_operations
from danube.broker.operations import roles as access_operations
from danube.broker.operations import schemas as schema_operations
from danube.broker.operations import storage as storage_operations
from danube.broker.operations import topics as topic_operations
from danube.broker.operations.arguments import Args
from danube.cluster.control.cluster_log import ClusterLog
from danube.errors import DanubeError, InvalidArgument
from danube.ids import check_topic_name

if TYPE_CHECKING:
    from danube.broker.operations.examinations import Examinations
    from danube.broker.operations.proposals import Proposals
    from danube.cluster.log.local_log import LocalLog
    from danube.core.metadata.commands import Command, Outcome, TopicRecord
    from danube.core.metadata.machine import Metadata
    from danube.core.partition.policy import TopicPolicy
    from danube.schema.model import Checks, Compatibility

Answer = Callable[[Any], None]
"""Takes the value, or the DanubeError that stands for it."""

Operation = Callable[["Operations", Args, Answer], None]
AskOwner = Callable[[str, str, Args, Answer], None]

_TABLE: dict[str, Operation] = {
    **topic_operations.TABLE,
    **schema_operations.TABLE,
    **access_operations.TABLE,
    **storage_operations.TABLE,
    **cluster_operations.TABLE,
}


class Operations:
    """The operations of one worker, and what they act on."""

    def __init__(
        self,
        metadata: LocalLog,
        proposals: Proposals,
        examinations: Examinations,
        *,
        refresh: Callable[[], None],
        metadata_changed: Callable[[], None],
        status: Callable[[], dict[str, Any]],
        default_policy: TopicPolicy,
        default_compatibility: Compatibility,
        compatibility_checks: Checks,
    ) -> None:
        self.refresh = refresh
        self.status = status
        self.examinations = examinations
        self.default_policy = default_policy
        self.default_compatibility = default_compatibility
        self.compatibility_checks = compatibility_checks
        self.ask_owner: AskOwner | None = None  # (partition, op, args, answer): an operation of its owner
        self.store: Callable[[], dict[str, Any]] | None = None  # its condition; None where storage is local
        self.clustered = isinstance(metadata, ClusterLog)
        self._metadata = metadata
        self._proposals = proposals
        self._metadata_changed = metadata_changed

    def carry_out(self, op: str, args: Args, answer: Answer) -> None:
        """Do what ``op`` says; raises the error of a request that cannot be taken, answers all others."""
        operation = _TABLE.get(op)
        if operation is None:
            raise InvalidArgument(f"operation {op[:80]!r} is not known", hint="the client may be newer")
        operation(self, args, answer)

    @property
    def state(self) -> Metadata:
        """The metadata as this worker has read it."""
        return self._metadata.state

    def find_topic(self, name: str) -> TopicRecord | None:
        """The topic of a logical name, looked for again in what others committed; raises InvalidName."""
        check_topic_name(name)
        if (found := self.state.find_topic(name)) is not None:
            return found
        self.refresh()
        return self.state.find_topic(name)

    def topic(self, name: str) -> TopicRecord:
        """Like find_topic; raises TopicNotFound, with suggestions, where there is none."""
        return self.find_topic(name) or self.state.topic(name)

    def propose(
        self, command: Command, answer: Answer, view: Callable[[Any], Any] = lambda made: None
    ) -> None:
        """Commit a command off the loop; answers ``view`` of what it gave, or the error of either."""

        def committed(outcome: Outcome) -> None:
            self._metadata_changed()
            if isinstance(outcome, DanubeError):
                answer(outcome)
                return
            try:
                value = view(outcome)
            except DanubeError as error:
                value = error
            answer(value)

        self._proposals.submit(command, committed)
