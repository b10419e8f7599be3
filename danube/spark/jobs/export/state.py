"""State of an export: a checkpoint beside its table, and the plan of the round that is under way.

    <table>/_danube/checkpoint-<round, 10 digits>.json   what rounds up to this one have exported
    <table>/_danube/plan-<round>.json                    the files that the round writes, and of which offsets
    <table>/_danube/staged/                              files that are written and not in the table yet

A round is planned once, and the plan is on disk before the first file is.  A run that was killed goes on with
that plan, so it writes the same files of the same records, and no record comes twice.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import msgspec

from danube.errors import Conflict, StorageFailed
from danube.host import files

FORMAT: Final = 1
FOLDER: Final = "_danube"
STAGED: Final = "staged"
_NAME: Final = re.compile(r"(checkpoint|plan)-(\d{10})\.json\Z")
_BYTES_MAX: Final = 256 << 20
_KEPT: Final = 3


class FilePlan(msgspec.Struct, frozen=True, array_like=True):
    """One file of a round: records ``start .. end`` of a partition."""

    name: str
    partition: int
    start: int
    end: int


class RoundPlan(msgspec.Struct, frozen=True, kw_only=True):
    """``ends``: the offset that each partition comes to with this round.  ``shape``: its columns.

    ``history``: the one that the offsets were found in, see :mod:`danube.spark.history.selecting`.
    ``schema``: ``subject:version``, the newest that the values were taken up from; empty without values.
    """

    format: int = FORMAT
    topic: str
    topic_id: int
    number: int
    shape: str = ""
    schema: str = ""
    ends: dict[str, int]
    files: list[FilePlan] = []
    history: str = ""


class ExportState:
    """The state of one table, on a disk that the driver and all executors share."""

    def __init__(self, table: Path) -> None:
        self.table = table
        self.folder = table / FOLDER
        self.staged = self.folder / STAGED

    def prepare(self) -> None:
        """Make the folders."""
        try:
            self.staged.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._failed(error) from None

    def checkpoint(self, topic: str, topic_id: int) -> RoundPlan:
        """The last round that is wholly in the table; round 0 before the first.

        Conflict where the table holds another topic, or one that was deleted and made again.
        """
        newest = self._newest("checkpoint")
        if newest is None:
            return RoundPlan(topic=topic, topic_id=topic_id, number=0, ends={})
        if (newest.topic, newest.topic_id) != (topic, topic_id):
            raise Conflict(
                f"{self.table} holds the export of {newest.topic} (id {newest.topic_id})",
                why=f"this is {topic} (id {topic_id})",
                hint="choose another target",
            )
        return newest

    def plan(self, number: int) -> RoundPlan | None:
        """The plan of a round that began; None when it did not."""
        return self._read(self.folder / f"plan-{number:010d}.json")

    def begin(self, plan: RoundPlan) -> None:
        """From now on the round is this one."""
        self._write("plan", plan)

    def finish(self, plan: RoundPlan) -> None:
        """The round is in the table."""
        self._write("checkpoint", msgspec.structs.replace(plan, files=[]))
        for path in self._all("plan"):
            path.unlink(missing_ok=True)
        for path in self._all("checkpoint")[:-_KEPT]:
            path.unlink(missing_ok=True)

    def _newest(self, kind: str) -> RoundPlan | None:
        found = self._all(kind)
        return self._read(found[-1]) if found else None

    def _all(self, kind: str) -> list[Path]:
        try:
            paths = [path for path in self.folder.iterdir() if (m := _NAME.match(path.name)) and m[1] == kind]
        except FileNotFoundError:
            return []
        return sorted(paths)

    def _read(self, path: Path) -> RoundPlan | None:
        try:
            return msgspec.json.decode(files.read_bounded(path, _BYTES_MAX), type=RoundPlan)
        except FileNotFoundError:
            return None
        except (msgspec.DecodeError, OSError) as error:
            raise StorageFailed(
                f"{path} cannot be read", why=str(error), hint="restore it, or export to a new target"
            ) from None

    def _write(self, kind: str, plan: RoundPlan) -> None:
        try:
            files.replace_durably(self.folder / f"{kind}-{plan.number:010d}.json", msgspec.json.encode(plan))
        except OSError as error:
            raise self._failed(error) from None

    def _failed(self, error: OSError) -> StorageFailed:
        return StorageFailed(f"{self.folder} cannot be written", why=error.strerror or str(error))
