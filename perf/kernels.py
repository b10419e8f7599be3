"""Times every batch kernel against its twin, and encoding and reading on their own.

    python -m perf.kernels [--records 1,10,100,1000,10000] [--sizes 100,1024] [--seconds 0.05]

One JSON line per case: nanoseconds per batch and per record for the kernel and for its twin (the
best of several rounds).  Which of the two the product uses at which size follows from these lines.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from danube.core import kernels
from danube.core.batch import checksum, selection
from danube.core.batch.columns import BatchView, check_columns, check_columns_twin, encode
from danube.core.batch.format import read_header, stamp
from danube.core.batch.payloads import payload_column
from danube.core.batch.scan import scan, scan_twin

Call = Callable[[], Any]
_ROUNDS = 5


def best_ns(call: Call, seconds: float) -> float:
    """Nanoseconds of one call: the best of some rounds that last ``seconds`` together."""
    started = time.perf_counter_ns()
    call()
    once = max(1, time.perf_counter_ns() - started)
    repeats = max(1, int(seconds * 1e9 / _ROUNDS / once))
    best = float("inf")
    for _ in range(_ROUNDS):
        started = time.perf_counter_ns()
        for _ in range(repeats):
            call()
        best = min(best, (time.perf_counter_ns() - started) / repeats)
    return best


def without_kernels(call: Callable[[Any], Any], argument: Any) -> Call:
    def twin() -> None:
        kernels.available = False
        try:
            call(argument)
        finally:
            kernels.available = True

    return twin


def cases(records: int, size: int) -> Iterator[tuple[str, Call, Call | None]]:
    """Name, kernel or product path, and twin where there is one."""
    payloads = [bytes([index % 256]) * size for index in range(records)]
    uneven = [payload[: size - index % 2] for index, payload in enumerate(payloads)]
    keys = [b"key-%d" % (index % 97) for index in range(records)]
    plain = _stamped(encode(payloads, publish_time_us=1, producer_name="p").to_bytes())
    keyed = _stamped(encode(payloads, keys=keys, publish_time_us=1, producer_name="p").to_bytes())
    header, keyed_header = read_header(plain), read_header(keyed)
    body = memoryview(plain)[36:]
    half = np.arange(0, records, 2, dtype=np.int64)
    expected = header.base_offset
    view = BatchView(keyed, keyed_header)

    if kernels.available:
        crc = checksum_kernel()
        yield "crc32c", lambda: crc(body), lambda: checksum.crc32c(bytes(body))
    yield "scan", lambda: scan(plain, 0, None, expected), lambda: scan_twin(plain, 0, len(plain), expected)
    yield (
        "check_columns",
        lambda: check_columns(plain, header, 1 << 20),
        lambda: check_columns_twin(BatchView(plain, header), 1 << 20),
    )
    yield (
        "select half",
        lambda: selection.select(plain, header, half),
        lambda: selection.select_twin(plain, header, half),
    )
    yield (
        "ring_hashes",
        lambda: selection.ring_hashes(keyed, keyed_header),
        lambda: selection.ring_hashes_twin(view),
    )
    if kernels.available:
        yield "lay out a list", lambda: payload_column(payloads), without_kernels(payload_column, payloads)
    yield "encode", lambda: encode(payloads, publish_time_us=1, producer_name="p"), None
    yield "encode with keys", lambda: encode(payloads, keys=keys, publish_time_us=1, producer_name="p"), None
    yield "payloads, one size", lambda: BatchView(plain, header).payloads(), None
    mixed = encode(uneven, publish_time_us=1).to_bytes()
    yield "payloads, many sizes", lambda: BatchView(mixed).payloads(), None


def checksum_kernel() -> Callable[[memoryview], int]:
    """The kernel behind checksum.crc32c, at any size."""
    from danube.core.kernels import crc

    return crc.crc32c_of


def _stamped(batch: bytes) -> bytearray:
    stored = bytearray(batch)
    stamp(stored, base_offset=1_000, epoch=1, append_time_us=2)
    return stored


def measure(records: int, size: int, seconds: float) -> Iterator[dict[str, Any]]:
    """One row a case."""
    for name, call, twin in cases(records, size):
        kernel_ns = best_ns(call, seconds)
        row: dict[str, Any] = {"case": name, "records": records, "record_bytes": size}
        row |= {"ns": round(kernel_ns), "ns_per_record": round(kernel_ns / records, 1)}
        if twin is not None:
            twin_ns = best_ns(twin, seconds)
            row |= {"twin_ns": round(twin_ns), "twin_over_kernel": round(twin_ns / kernel_ns, 2)}
        yield row


def main(arguments: list[str] | None = None) -> None:
    """Print a line per case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--records", default="1,10,100,1000,10000")
    parser.add_argument("--sizes", default="100,1024")
    parser.add_argument("--seconds", type=float, default=0.05, help="per case")
    options = parser.parse_args(arguments)
    report = kernels.load(lambda line: print(json.dumps({"progress": line}), flush=True))
    print(json.dumps({"kernels": report.available, "reason": report.reason}), flush=True)
    for size in map(int, options.sizes.split(",")):
        for records in map(int, options.records.split(",")):
            if records * size > 11 << 20:
                continue
            for row in measure(records, size, options.seconds):
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
