"""Times StreamMessages out of batches and batches out of StreamMessages, beside the generated class.

    python -m perf.grpc_messages [--records 1,10,100,1000] [--size 1024] [--seconds 0.2]

One JSON line per case: microseconds per record (the best of several rounds).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from typing import Any

from danube.core import kernels
from danube.core.batch.columns import BatchView, encode
from danube.server.messages.sent_messages import encode_messages, own_of, parsed, read_together
from danube.server.messages.stream_messages import framed_messages
from danube.server.proto.DanubeApi_pb2 import MsgID, StreamMessage
from perf.kernels import best_ns

TOPIC = "/default/orders"
NAMES = {"producer_name": "producer", "origin": "http://127.0.0.1:6650"}
PRODUCER_ID = 2**62
TIME_US = 1_700_000_000_000_000


def cases(records: int, size: int) -> Iterator[tuple[str, Callable[[], Any]]]:
    payloads = [bytes([index % 256]) * size for index in range(records)]
    request_ids = list(range(100_000, 100_000 + records))
    times = [TIME_US + 1_000 * (index // 50) for index in range(records)]
    keys = [b"key-%d" % (index % 97) for index in range(records)]
    attributes = [{"trace": f"id-{index}"} for index in range(records)]
    sent = {"request_ids": request_ids, "publish_times": times}
    for name, columns in (
        ("out: payloads alone", {}),
        ("out: as sent over gRPC", sent),
        ("out: with keys", {**sent, "keys": keys}),
        ("out: with keys and attributes", {**sent, "keys": keys, "attributes": attributes}),
    ):
        batch = encode(payloads, publish_time_us=TIME_US, **NAMES, **columns).to_bytes()
        yield name, lambda batch=batch: framed_messages(BatchView(batch), TOPIC, PRODUCER_ID)  # type: ignore[misc]
    place = MsgID(producer_id=PRODUCER_ID, topic_name=TOPIC, broker_addr=NAMES["origin"])
    messages = [
        StreamMessage(
            request_id=request_id,
            msg_id=place,
            payload=payload,
            publish_time=time_us // 1_000,
            producer_name=NAMES["producer_name"],
        )
        for request_id, payload, time_us in zip(request_ids, payloads, times, strict=True)
    ]
    wire = [message.SerializeToString() for message in messages]
    own = [own_of(one) for one in messages]
    yield "in: reading one by one", lambda: [own_of(parsed(each)) for each in wire]
    yield "in: one batch of messages read one by one", lambda: encode_messages(own, **NAMES)
    lots = read_together(wire)
    if lots is not None:
        yield "in: reading together", lambda: read_together(wire)
        yield "in: one batch of messages read together", lambda: encode_messages(lots[0].columns, **NAMES)
    yield "out: by the generated class", lambda: [_generated(message) for message in messages]


def _generated(message: StreamMessage) -> bytes:
    place = message.msg_id
    return StreamMessage(
        request_id=message.request_id,
        msg_id=MsgID(producer_id=place.producer_id, topic_name=TOPIC, broker_addr=place.broker_addr),
        payload=message.payload,
        publish_time=message.publish_time,
        producer_name=message.producer_name,
    ).SerializeToString()


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="perf.grpc_messages", description=__doc__)
    parser.add_argument("--records", default="1,10,100,1000")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--seconds", type=float, default=0.2)
    options = parser.parse_args(words)
    kernels.load()
    for records in map(int, options.records.split(",")):
        for name, call in cases(records, options.size):
            us = best_ns(call, options.seconds) / 1_000 / records
            print(json.dumps({"case": name, "records": records, "size": options.size, "us": round(us, 3)}))


if __name__ == "__main__":
    main()
