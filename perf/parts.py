"""Times parts by themselves: batch kernels beside their twins in Python, gRPC messages beside batches.

    python -m perf.parts [kernels|messages] [--records 1,100] [--size 1024] [--seconds 0.05]

One JSON line for each case: nanoseconds of a call and of a record, the best of several rounds.  Which of two
ways the product uses at which size follows from these lines.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from danube.core import kernels
from danube.core.batch import checksum, selection
from danube.core.batch.columns import BatchView, check_columns, check_columns_twin, encode
from danube.core.batch.format import read_header, stamp
from danube.core.batch.scan import scan, scan_twin
from danube.server.messages.sent_messages import encode_messages, own_of, parsed, read_together
from danube.server.messages.stream_messages import framed_messages
from danube.server.proto.DanubeApi_pb2 import MsgID, StreamMessage

ROUNDS = 5
TIME_US = 1_700_000_000_000_000
TOPIC = "/default/orders"
NAMES = {"producer_name": "producer", "origin": "http://127.0.0.1:6650"}
PRODUCER_ID = 2**62
Call = Callable[[], Any]


class Case(NamedTuple):
    """A call of the product, and its twin where there is one."""

    name: str
    call: Call
    twin: Call | None = None


def best_ns(call: Call, seconds: float) -> float:
    """Nanoseconds of one call: the best of some rounds that last ``seconds`` together."""

    def mean_ns(repeats: int) -> float:
        started = time.perf_counter_ns()
        for _ in range(repeats):
            call()
        return (time.perf_counter_ns() - started) / repeats

    once = max(1.0, mean_ns(1))
    return min(mean_ns(max(1, int(seconds * 1e9 / ROUNDS / once))) for _ in range(ROUNDS))


def stored(payloads: list[bytes], **columns: Any) -> bytearray:
    batch = bytearray(encode(payloads, publish_time_us=1, producer_name="p", **columns).to_bytes())
    stamp(batch, base_offset=1_000, epoch=1, append_time_us=2)
    return batch


def kernel_cases(records: int, size: int) -> Iterator[Case]:
    """Kernels, or the product's path, and the twin in Python where there is one."""
    payloads = [bytes([index % 256]) * size for index in range(records)]
    uneven = [payload[: size - index % 2] for index, payload in enumerate(payloads)]
    keys = [b"key-%d" % (index % 97) for index in range(records)]
    plain, keyed = stored(payloads), stored(payloads, keys=keys)
    header, keyed_header = read_header(plain), read_header(keyed)
    body, half = memoryview(plain)[36:], np.arange(0, records, 2, dtype=np.int64)
    view, keyed_view = BatchView(plain, header), BatchView(keyed, keyed_header)
    expected, end = header.base_offset, len(plain)
    if kernels.available:
        from danube.core.kernels import crc

        yield Case("crc32c", lambda: crc.crc32c_of(body), lambda: checksum.crc32c(bytes(body)))
    yield Case("scan", lambda: scan(plain, 0, None, expected), lambda: scan_twin(plain, 0, end, expected))
    yield Case(
        "check_columns",
        lambda: check_columns(plain, header, 1 << 20),
        lambda: check_columns_twin(view, 1 << 20),
    )
    yield Case(
        "select half",
        lambda: selection.select(plain, header, half),
        lambda: selection.select_twin(plain, header, half),
    )
    yield Case(
        "ring_hashes",
        lambda: selection.ring_hashes(keyed, keyed_header),
        lambda: selection.ring_hashes_twin(keyed_view),
    )
    yield Case("encode", lambda: encode(payloads, publish_time_us=1, producer_name="p"))
    yield Case("encode with keys", lambda: encode(payloads, keys=keys, publish_time_us=1, producer_name="p"))
    yield Case("payloads, one size", lambda: BatchView(plain, header).payloads())
    mixed = encode(uneven, publish_time_us=1).to_bytes()
    yield Case("payloads, many sizes", lambda: BatchView(mixed).payloads())


def message_cases(records: int, size: int) -> Iterator[Case]:
    """StreamMessages out of batches and batches out of StreamMessages, beside the generated class."""
    payloads = [bytes([index % 256]) * size for index in range(records)]
    request_ids = list(range(100_000, 100_000 + records))
    times = [TIME_US + 1_000 * (index // 50) for index in range(records)]
    sent: dict[str, Any] = {"request_ids": request_ids, "publish_times": times}
    keys = {**sent, "keys": [b"key-%d" % (index % 97) for index in range(records)]}
    attributes = {**keys, "attributes": [{"trace": f"id-{index}"} for index in range(records)]}
    for name, columns in (
        ("payloads alone", {}), ("as sent over gRPC", sent), ("with keys", keys),
        ("with keys and attributes", attributes),
    ):  # fmt: skip
        batch = encode(payloads, publish_time_us=TIME_US, **NAMES, **columns).to_bytes()
        yield Case(f"out: {name}", lambda batch=batch: framed_messages(BatchView(batch), TOPIC, PRODUCER_ID))  # type: ignore[misc]
    messages = [
        generated(request_id, payload, time_us // 1_000)
        for request_id, payload, time_us in zip(request_ids, payloads, times, strict=True)
    ]
    wire = [message.SerializeToString() for message in messages]
    own, lots = [own_of(one) for one in messages], read_together(wire)
    yield Case("in: reading one by one", lambda: [own_of(parsed(each)) for each in wire])
    yield Case("in: one batch of messages read one by one", lambda: encode_messages(own, **NAMES))
    if lots is not None:
        yield Case("in: reading together", lambda: read_together(wire))
        yield Case("in: one batch read together", lambda: encode_messages(lots[0].columns, **NAMES))
    yield Case(
        "out: by the generated class",
        lambda: [
            generated(one.request_id, one.payload, one.publish_time).SerializeToString() for one in messages
        ],
    )


def generated(request_id: int, payload: bytes, publish_time: int) -> StreamMessage:
    place = MsgID(producer_id=PRODUCER_ID, topic_name=TOPIC, broker_addr=NAMES["origin"])
    return StreamMessage(
        request_id=request_id, msg_id=place, payload=payload, publish_time=publish_time,
        producer_name=NAMES["producer_name"],
    )  # fmt: skip


CASES = {"kernels": kernel_cases, "messages": message_cases}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="perf.parts", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", nargs="*", default=list(CASES), help=" ".join(CASES))
    parser.add_argument("--records", default="1,10,100,1000", help="in a call")
    parser.add_argument("--size", type=int, default=1024, help="bytes of a payload (1024)")
    parser.add_argument("--seconds", type=float, default=0.05, help="for each case (0.05)")
    options = parser.parse_args(words)
    kernels.load()
    for part in options.part:
        for records in map(int, options.records.split(",")):
            for name, call, twin in CASES[part](records, options.size):
                ns = best_ns(call, options.seconds)
                row = {"case": name, "records": records, "size": options.size, "ns": round(ns)}
                row["ns_per_record"] = round(ns / records, 1)
                if twin is not None:
                    row["twin_ns"] = round(best_ns(twin, options.seconds))
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
