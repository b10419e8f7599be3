"""Ports of the broker to the outside world: protocols that real parts and test doubles satisfy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, overload

from danube.core.cluster.commands import AnyClusterCommand, ClusterRecord
from danube.core.metadata.commands import Change, Command, OtherCommand, Outcome, TopicCommand, TopicRecord
from danube.core.metadata.machine import Metadata
from danube.errors import DanubeError


class Clock(Protocol):
    """Time.  The module danube.host.clock is one; a test's clock is moved by hand."""

    def monotonic_ns(self) -> int:
        """Time for deadlines and durations; never goes back."""

    def wall_us(self) -> int:
        """Microseconds since 1970 UTC, for stamps; may jump."""


class Consensus(Protocol):
    """The metadata machine behind an agreed, durable order of commands.  Its logs inherit ``propose``.

    ``state`` is the machine with all commands that were applied here.  Readers never change it.  A later call
    may replace it by another object, so readers do not keep it across calls.
    """

    @property
    def state(self) -> Metadata:
        """The machine as of the last propose or refresh."""

    @property
    def version(self) -> int:
        """Index of the last command applied here."""

    @overload
    def propose(self, command: TopicCommand) -> TopicRecord: ...

    @overload
    def propose(self, command: OtherCommand) -> None: ...

    @overload
    def propose(self, command: AnyClusterCommand) -> ClusterRecord | None: ...

    def propose(self, command: Command) -> TopicRecord | ClusterRecord | None:
        """Make a command durable, then apply it; return its outcome (:mod:`danube.core.metadata.outcomes`).

        Blocks.  Raises a CallerError if the command is not allowed (nothing was done), StorageFull or
        StorageFailed if it was not stored, OperationTimeout if another process holds the log, and Unavailable
        if its outcome is not known.
        """
        result = self.propose_many([command])[0]
        if isinstance(result, DanubeError):
            raise result
        return result

    def propose_many(self, commands: Sequence[Command]) -> list[Outcome]:
        """Like propose for each in turn, made durable together; a refusal takes its command's place."""

    def refresh(self) -> list[Change]:
        """Apply newly agreed commands; return every change since the last refresh, own ones too."""

    def close(self) -> None:
        """Let go of files and connections."""
