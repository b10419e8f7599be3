"""Times reading a manifest of many segments and planning reads over it.

    python -m perf.manifest [--entries 100000]

One JSON line: milliseconds for encoding, for decoding, for a find and for a plan of a range after
decoding, and the most memory (MiB) that decoding and planning took above what was there before.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from typing import Any

import numpy as np

from danube.wal.manifest import SEGMENT_ENTRY, Manifest

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
    started = time.perf_counter()
    data = made(count).encode()
    encoded = time.perf_counter()
    tracemalloc.start()
    begun = time.perf_counter()
    manifest = Manifest.decode(data)
    decoded = time.perf_counter()
    end = count * _RECORDS
    planned = [manifest.entry(index) for index in manifest.plan(end // 4, end // 2)]
    plan_end = time.perf_counter()
    memory = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    search = time.perf_counter()
    for number in range(_SEARCHES):
        manifest.find(number * end // _SEARCHES)
    found = time.perf_counter()
    return {
        "entries": count,
        "bytes": len(data),
        "encode_ms": round(1e3 * (encoded - started), 3),
        "decode_ms": round(1e3 * (decoded - begun), 3),
        "plan_ms": round(1e3 * (plan_end - decoded), 3),
        "planned": len(planned),
        "find_us": round(1e6 * (found - search) / _SEARCHES, 3),
        "memory_mib": round(memory / 2**20, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--entries", type=int, default=100_000)
    print(json.dumps(measure(parser.parse_args().entries)))


if __name__ == "__main__":
    main()
