"""The independent reader of the small files that a start reads, and of offers in the store."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

import msgspec

from danube.core.batch.checksum import crc32c
from danube.wal.verify.bytes import FindingKind
from danube.wal.verify.objects import Entry

Flaw = tuple[FindingKind, str]
_Row = tuple[int, int, int, int, int, int, int, int, int, int, int, bytes, bytes, bytes]
_Offer = tuple[int, int, int, int, list[_Row]]
_NODE: Final = re.compile(r"[1-9]\d{0,18}\n(cluster \S+ (forming|member|etcd)\n)?(left \S+\n)*\Z")
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


def _flaw_of_host(data: bytes) -> Flaw | None:
    value = _json(data)
    kinds = {"place": str, "since": int, "since_us": int, "clean": bool}
    if isinstance(value, dict) and all(type(value.get(name)) is kind for name, kind in kinds.items()):
        return None
    return (
        FindingKind.CHECKSUM,
        "it does not say where the broker ran last; the next start leaves offsets out",
    )


def _flaw_of_plan(data: bytes) -> Flaw | None:
    value = _json(data)
    names = ("node_id", "cluster_id", "left", "kept")
    if isinstance(value, dict) and all(isinstance(value.get(name), str) for name in names):
        return None
    return FindingKind.CHECKSUM, "it is no plan of a recovery"


def flaw_of_owner(data: bytes) -> Flaw | None:
    """The file ``owner`` of a partition's directory: in which epochs which broker owned it."""
    value = _json(data)
    if isinstance(value, dict):
        names = ("broker_id", "first_epoch", "last_epoch")
        found = [number for name in names if type(number := value.get(name)) is int and number >= 0]
        if len(found) == len(names) and found[1] <= found[2]:
            return None
    return FindingKind.CHECKSUM, "it does not say who owned the partition; its records are set aside"


def read_offer(data: bytes, numbers: tuple[int, int]) -> tuple[list[Entry], Flaw | None]:
    """An object ``returned-*``, of the broker and the last epoch ``numbers``: the entries that it offers."""
    try:
        broker_id, first, last, log_end, rows = msgspec.msgpack.decode(data, type=_Offer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return [], (FindingKind.CHECKSUM, f"it offers nothing that can be read: {error}")
    entries = [Entry._make(row) for row in rows]
    if (broker_id, last) != numbers:
        return entries, (FindingKind.IDENTITY, f"it is an offer of broker {broker_id} and epoch {last}")
    if first > last or any(not one.base_offset < one.end_offset <= log_end for one in entries):
        return entries, (FindingKind.CHECKSUM, "its epochs or offsets cannot be")
    return entries, None


class WitnessFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a log's file below ``witnesses``; ``log_id`` is empty if the file states none."""

    format: int = 1
    log_id: str = ""
    began: bool = False
    start: int = 0
    end: int = 0
    subscriptions: frozenset[str] = frozenset()


def read_witness(data: bytes) -> tuple[WitnessFacts, Flaw | None]:
    """A checksum in front of JSON; one that a power cut emptied says nothing."""
    nothing = WitnessFacts()
    if not data.strip(b"\0"):
        return nothing, None
    digits, _, content = data.rstrip(b"\n").partition(b" ")
    try:
        facts = msgspec.json.decode(content, type=WitnessFacts)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return nothing, (FindingKind.CHECKSUM, "it says nothing that can be read")
    if digits != b"%08x" % crc32c(content) or not 0 <= facts.start <= facts.end:
        return nothing, (FindingKind.CHECKSUM, "it fails its checksum, or its offsets cannot be")
    if facts.format != 1:
        return nothing, (FindingKind.VERSION, f"it has format {facts.format}")
    return facts, None


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
    "host": (_flaw_of_host, False),
    "recovering/plan": (_flaw_of_plan, False),
}
