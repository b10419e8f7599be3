"""Which of the proposed commands become the next entry: what every log does before it stores anything."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from danube.core.metadata.commands import Command, Outcome, encode_command
from danube.core.metadata.machine import Metadata
from danube.core.metadata.outcomes import outcome_of
from danube.errors import CallerError, LimitExceeded
from danube.limits import METADATA_COMMANDS_PER_ENTRY_MAX

_LIST_BYTES: Final = 5  # what a MessagePack list takes besides its elements


class Accepted(NamedTuple):
    """A command on its way into an entry, and the place of its result."""

    place: int
    command: Command
    encoded: bytes


def accept(
    state: Metadata, commands: Sequence[Command], start: int, results: list[Outcome], entry_bytes_max: int
) -> tuple[list[Accepted], int]:
    """The commands of one entry that would change something, and the place after the last one looked at.

    The results of all others are filled in.  ``state`` is not changed.
    """
    end = min(start + METADATA_COMMANDS_PER_ENTRY_MAX, len(commands))
    # Later commands may depend on earlier ones that are not stored yet, so a copy runs ahead.
    ahead = state if end - start == 1 else state.copy()
    accepted: list[Accepted] = []
    free_bytes = entry_bytes_max - _LIST_BYTES
    for place in range(start, end):
        command = commands[place]
        try:
            if not ahead.check(command):
                results[place] = outcome_of(ahead, command, [])
                continue
            encoded = encode_command(command)
            _check_size(encoded, entry_bytes_max)
        except CallerError as error:
            results[place] = error
            continue
        if len(encoded) > free_bytes:
            return accepted, place
        if ahead is not state:
            ahead.apply(ahead.version + 1, command)
        free_bytes -= len(encoded)
        accepted.append(Accepted(place, command, encoded))
    return accepted, end


def _check_size(encoded: bytes, entry_bytes_max: int) -> None:
    if len(encoded) > entry_bytes_max - _LIST_BYTES:
        why = f"it has {len(encoded)} bytes, and an entry of this log {entry_bytes_max} at most"
        raise LimitExceeded("metadata command is too large", why=why, limit=entry_bytes_max)
