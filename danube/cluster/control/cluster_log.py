"""Metadata of a cluster as a worker sees it: read from its host's copy, changed through its controller.

Readers:   as danube.cluster.log.local_log, without a lock; the controller is the only writer.
Proposals: go to the controller of this host.  The answer comes when they are applied to the copy here, so
           the change can be read at once.
Repeated:  each object is an origin of its own and sends one numbered proposal at a time, so a repetition
           after a lost answer is recognised and never applied twice.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from danube.cluster.control.calls import Barrier, Propose, Proposed, Reached, decode_outcomes
from danube.cluster.control.door import ControllerClient
from danube.cluster.control.proposer import PROPOSAL_BYTES_MAX, PROPOSAL_COMMANDS_MAX
from danube.cluster.log import log_file
from danube.cluster.log.local_log import LocalLog
from danube.core.metadata.commands import Command, Outcome, encode_command, join_commands
from danube.core.metadata.snapshot import version_of
from danube.errors import (
    CallerError,
    ClosedError,
    Damage,
    DanubeError,
    NotFound,
    ProtocolError,
    StorageIncompatible,
    broken,
)

PROPOSE_TIMEOUT_S: Final = 10.0


class ClusterLog(LocalLog):
    """The Consensus port over the host's ``metadata.log`` and the controller at ``address``.

    An object belongs to the process that made it, and to one thread at a time.  Raises NotFound while
    the controller has not made the copy yet, Damage, StorageIncompatible and StorageFailed.
    """

    def __init__(
        self, directory: str | Path, address: str, *, propose_timeout_s: float = PROPOSE_TIMEOUT_S
    ) -> None:
        self._client = ControllerClient(address)
        self._propose_timeout_s = propose_timeout_s
        self._origin = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._sequence = 0
        super().__init__(directory, create=False)

    def close(self) -> None:
        """Close file and connection; may be called twice."""
        self._client.close()
        super().close()

    def propose_many(self, commands: Sequence[Command]) -> list[Outcome]:
        """Have commands agreed on, see Consensus; those that one entry holds together stand or fall together.

        Where an entry's outcome is not known the error stands in the place of each of its commands.
        """
        if os.getpid() != self._process_id:
            broken("a metadata log is used by a process that did not open it", directory=self._directory)
        if self._descriptor < 0:
            raise ClosedError("the metadata log was closed")
        outcomes: list[Outcome] = [None] * len(commands)
        places: list[int] = []
        encoded: list[bytes] = []
        size = 0
        for place, command in enumerate(commands):
            try:
                one = encode_command(command)
            except CallerError as error:
                outcomes[place] = error
                continue
            if places and (size + len(one) > PROPOSAL_BYTES_MAX or len(places) == PROPOSAL_COMMANDS_MAX):
                self._propose_together(places, encoded, outcomes)
                places, encoded, size = [], [], 0
            places.append(place)
            encoded.append(one)
            size += len(one)
        if places:
            self._propose_together(places, encoded, outcomes)
        return outcomes

    def _propose_together(self, places: list[int], encoded: list[bytes], outcomes: list[Outcome]) -> None:
        self._sequence += 1
        timeout_ms = int(self._propose_timeout_s * 1000)
        request = Propose(self._origin, self._sequence, join_commands(encoded), timeout_ms)
        try:
            # The controller answers at its own deadline; the margin is for the way.
            answer = self._client.ask(request, self._propose_timeout_s + 1.0)
            if not isinstance(answer, Proposed) or len(answer.outcomes) != len(places):
                raise ProtocolError("the controller answered something else")
            received = decode_outcomes(answer.outcomes)
        except DanubeError as error:
            for place in places:
                outcomes[place] = error
            return
        for place, outcome in zip(places, received, strict=True):
            outcomes[place] = outcome
        self._read_up_to(answer.version)

    def read_barrier(self, timeout_s: float = PROPOSE_TIMEOUT_S) -> None:
        """Return when ``state`` holds all that was acknowledged anywhere before the call.

        Raises Unavailable where no majority answers in time.
        """
        answer = self._client.ask(Barrier(int(timeout_s * 1000)), timeout_s + 1.0)
        if not isinstance(answer, Reached):
            raise ProtocolError("the controller answered something else")
        self._read_up_to(answer.version)

    def _read_up_to(self, version: int) -> None:
        """Apply entries up to the controller's position; the next refresh returns the changes."""
        with log_file.storage_errors(self._path):
            self._catch_up()
        if self.version < version:
            broken("the copy lacks what the controller applied", version=version, here=self.version)

    def _open(self, create: bool) -> None:
        """Open without the lock, and do not change bytes behind the mark: they are the controller's."""
        with log_file.storage_errors(self._path):
            if not os.path.exists(self._path):
                raise NotFound(
                    f"there is no metadata log in {self._directory}", why="the controller has not made it yet"
                )
            self._change_over()
            self._catch_up()
        self._changes.clear()


def copy_exists(directory: str | Path) -> bool:
    """Whether the controller has made its host's copy; readers can open it then.

    A damaged one, as a power cut may leave it, is none: the controller makes it anew.
    """
    path = os.path.join(directory, "metadata.log")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        head = log_file.read_head(descriptor, path)
        version_of(head.snapshot)
        committed_end = log_file.read_mark(descriptor, path)
        content = log_file.read_all(descriptor, head.entries_start, committed_end, path)
        return all(log_file.committed_entries(content, head.entries_start, path))
    except StorageIncompatible:
        raise
    except Damage:
        return False
    finally:
        os.close(descriptor)


def agreed_copy_exists(directory: str | Path, address: str) -> bool:
    """Whether the host's copy holds anything that a cluster agreed on; an empty one is shown earlier."""
    if not copy_exists(directory):
        return False
    try:
        log = ClusterLog(directory, address)
    except NotFound:
        return False
    try:
        return bool(log.state.cluster.agreement.index)
    finally:
        log.close()
