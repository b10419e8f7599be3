"""The independent reader of the small files at the top of a data directory, those that a start reads."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from danube.core.checksum import crc32c
from danube.wal.verify_bytes import FindingKind

Flaw = tuple[FindingKind, str]
_NODE: Final = re.compile(r"[1-9]\d{0,18}\n(cluster \S+ (forming|member)\n)?(left \S+\n)*\Z")
_PLACE: Final = re.compile(r"\d+ \d+\n\Z")


def _flaw_of_format(data: bytes) -> Flaw | None:
    text = data.decode("ascii", "replace").strip()
    if not text.isdecimal():
        return FindingKind.CHECKSUM, "it holds no format"
    return None if int(text) <= 1 else (FindingKind.VERSION, f"the data has format {text}")


def _flaw_of_incarnation(data: bytes) -> Flaw | None:
    words = data.split()
    if len(words) == 2 and words[0].isdigit() and words[1] == b"%08x" % crc32c(words[0]):
        return None
    return FindingKind.CHECKSUM, "the number fails its checksum"


def _flaw_of_node(data: bytes) -> Flaw | None:
    if _NODE.match(data.decode("ascii", "replace")):
        return None
    return FindingKind.CHECKSUM, "it holds no node id"


def _flaw_of_store(data: bytes) -> Flaw | None:
    value = _json(data)
    if not isinstance(value, dict) or not isinstance(value.get("store_id"), str):
        return FindingKind.CHECKSUM, "it names no store"
    return None if value.get("format") == 1 else (FindingKind.VERSION, f"it has format {value.get('format')}")


def _flaw_of_deletions(data: bytes) -> Flaw | None:
    value = _json(data)
    if isinstance(value, dict) and all(isinstance(count, int) for count in value.values()):
        return None
    return FindingKind.CHECKSUM, "it does not name the topics whose objects are to be deleted"


def _flaw_of_place(data: bytes) -> Flaw | None:
    if not data.strip(b"\0") or _PLACE.match(data.decode("ascii", "replace")):
        return None
    return FindingKind.CHECKSUM, "it does not say where the directory was made"


def _json(data: bytes) -> object:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


# By name: what is wrong with the file's bytes, and whether each directory in use has it.
TOP_FILES: Final[dict[str, tuple[Callable[[bytes], Flaw | None], bool]]] = {
    "format": (_flaw_of_format, True),
    "incarnation": (_flaw_of_incarnation, True),
    "node_id": (_flaw_of_node, False),
    "store": (_flaw_of_store, False),
    "deletions": (_flaw_of_deletions, False),
    "place": (_flaw_of_place, False),
}
