"""Times reading a manifest of many segments and planning reads over it.

    python -m perf.manifest [--entries 100000]

One JSON line: processor milliseconds for encoding, for decoding, for a find and for a plan of a range after
decoding, and the most memory (MiB) that decoding and planning took above what was there before.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from typing import Any

import numpy as np

from danube.wal.tier.manifest import SEGMENT_ENTRY, Manifest, SegmentEntry

_RECORDS = 1_000
_SEARCHES = 1_000


def made(count: int) -> Manifest:
    """A manifest of ``count`` contiguous segments of a thousand records each."""
    entries = np.zeros(count, SEGMENT_ENTRY)
    base = np.arange(count, dtype=np.uint64) * np.uint64(_RECORDS)
    entries["base_offset"], entries["end_offset"] = base, base + np.uint64(_RECORDS)
    entries["record_count"], entries["batch_count"] = _RECORDS, 10
    entries["size_bytes"], entries["data_end"] = 1_000_000, 990_000
    entries["first_append_us"] = np.arange(count) * 1_000
    entries["last_append_us"] = entries["first_append_us"] + 999
    return Manifest("/default/perf", 1, 0, 1, 1, 0, entries)


def measure(count: int) -> dict[str, Any]:
    """Processor milliseconds for each step; MiB at most in use for decoding and planning a quarter."""
    started = time.process_time()
    data = made(count).encode()
    encoded = time.process_time()
    manifest = Manifest.decode(data)
    decoded = time.process_time()
    planned_count = len(_quarter(manifest, count))
    planned = time.process_time()
    for number in range(_SEARCHES):
        manifest.find(number * count * _RECORDS // _SEARCHES)
    found = time.process_time()
    tracemalloc.start()  # it would more than double the times
    _quarter(Manifest.decode(data), count)
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return {
        "entries": count,
        "bytes": len(data),
        "encode_ms": round(1e3 * (encoded - started), 3),
        "decode_ms": round(1e3 * (decoded - encoded), 3),
        "plan_ms": round(1e3 * (planned - decoded), 3),
        "planned": planned_count,
        "find_us": round(1e6 * (found - planned) / _SEARCHES, 3),
        "memory_mib": round(memory / 2**20, 1),
    }


def _quarter(manifest: Manifest, count: int) -> list[SegmentEntry]:
    end = count * _RECORDS
    return [manifest.entry(index) for index in manifest.plan(end // 4, end // 2)]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="perf.manifest", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--entries", type=int, default=100_000)
    print(json.dumps(measure(parser.parse_args(words).entries)))


if __name__ == "__main__":
    main()
