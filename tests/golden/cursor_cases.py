"""The cursor files that the golden vectors pin: one that names its log, and one of before, that does not."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from danube.wal.log.cursors import FILE_NAMES, CursorStore
from danube.wal.segments.segment import NO_LOG, log_id_of
from danube.wal.verify.state import read_cursors
from tests.unit.wal_samples import IDENTITY

FOLDER = Path(__file__).resolve().parent / "cursors"
LOG_IDS = {"named": log_id_of("/default/orders", IDENTITY.topic_id, 1_000), "before": NO_LOG}


def vectors() -> dict[str, bytes]:
    """Bytes of each file without the zeros at its end, written through the store of cursors."""
    made: dict[str, bytes] = {}
    with tempfile.TemporaryDirectory() as place:
        for name, log_id in LOG_IDS.items():
            directory = Path(place) / name
            directory.mkdir()
            store = CursorStore(directory, IDENTITY, log_id=log_id)
            store.load()
            for changes in ({"a": b"state 1", "ü name": b""}, {"a": b"state 2"}, {"ü name": None}):
                for subscription, blob in changes.items():
                    if blob is None:
                        store.remove(subscription)
                    else:
                        store.store(subscription, blob)
                store.write()
            store.close()
            found = [(directory / one).read_bytes().rstrip(b"\0") for one in FILE_NAMES]
            (made[name],) = [data + bytes(-len(data) % 8) for data in found if data]
    return made


def describe(data: bytes) -> dict[str, Any]:
    """What the independent reader sees, as JSON."""
    cursors = read_cursors(data)
    states = {name: state.hex() if state is not None else None for name, state in cursors.states.items()}
    return {
        "identity": list(cursors.identity), "log_id": cursors.log_id.hex(), "generation": cursors.generation,
        "states": states, "places": cursors.places, "end": cursors.end, "problems": cursors.problems,
    }  # fmt: skip
