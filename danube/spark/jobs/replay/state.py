"""State of a replay between runs: its ranges, and where its records go.

The state is written once, before the first record is published.  A run that finds it takes its ranges from
it, so that records which came since, or expired at the front, move no number.  Nothing else is needed: the
target knows how far each lane is.  A lost file is made anew, and the job goes on as long as the first offsets
of its ranges are the same.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import msgspec

from danube.core.batch.checksum import key_hash
from danube.errors import ConfigInvalid, Conflict, Damage
from danube.host import files
from danube.spark.jobs.replay.target import LaneRange

FORMAT: Final = 1
_SIZE_MAX: Final = 64 << 20


class ReplayState(msgspec.Struct):
    """``work``: hash of the options; ``partitions`` of the target topic, 0 for files.

    ``history``: the one that the lanes' offsets were found in, see :mod:`danube.spark.history.selecting`.
    """

    format: int
    job: str
    work: str
    lanes: list[LaneRange]
    partitions: int = 0
    keep_partitions: bool = False
    history: str = ""


def work_hash(*words: str) -> str:
    """Return 16 hexadecimal digits that are equal for two replays of the same work."""
    return f"{key_hash(chr(0).join(words).encode()):016x}"


def default_state_path(job: str) -> Path:
    """Return the file below ``$XDG_STATE_HOME``, else ``~/.local/state``; ConfigInvalid without a home."""
    base = files.user_directory("XDG_STATE_HOME", ".local/state", os.environ)
    if base is None:
        raise ConfigInvalid(
            "there is no place for the state of a replay",
            why="HOME is not set, and the system knows no home of this user",
            hint="name a file with --state",
        )
    return base / "danube" / "replay" / f"{job}.json"


def load_state(path: Path, job: str, work: str) -> ReplayState | None:
    """The state of an earlier run; None if there is none.

    Conflict where it is of another job or of other work under this job's name, Damage where it cannot
    be read.
    """
    try:
        content = files.read_bounded(path, _SIZE_MAX)
    except FileNotFoundError:
        return None
    try:
        state = msgspec.json.decode(content, type=ReplayState)
    except msgspec.DecodeError as error:
        raise Damage(
            f"{path} is no state of a replay",
            why=str(error),
            hint="move it away; the job goes on without it if no record of its ranges has expired",
            file=str(path),
        ) from None
    if state.format != FORMAT or state.job != job or state.work != work:
        raise Conflict(
            f"{path} belongs to another replay",
            why=f"it is of job {state.job}, work {state.work}; this is job {job}, work {work}",
            hint="give the changed replay another --job, or another --state",
        )
    return state


def save_state(path: Path, state: ReplayState) -> None:
    """Write it durably."""
    files.make_directory(path.parent)
    files.replace_durably(path, msgspec.json.format(msgspec.json.encode(state)) + b"\n")


def check_same_target(state: ReplayState, partitions: int, keep_partitions: bool) -> None:
    """Records of a lane must go where they went in the run before."""
    if (state.partitions, state.keep_partitions) == (partitions, keep_partitions):
        return
    raise Conflict(
        f"the target has {partitions} partitions, it had {state.partitions} when job {state.job} began",
        why="records would go to other partitions than in the run before, and be stored twice",
        hint="replay into the topic as it was, or under another --job into another topic",
    )
