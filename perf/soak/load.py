"""Load of an epoch: two ``danube load`` processes, whose audit is the verdict; history is read again.

One makes a topic with three partitions for its run and deletes it, native and gRPC at once; the other fills a
topic that outlives epochs, synced before each acknowledgement, and what it stored is read again at the end.
"""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from typing import Any

from danube import sync
from danube.load import stamp
from danube.load.number_set import NumberSet
from perf.compare.processes import Started
from tests.broker_process import ROOT, BrokerProcess

KEPT_TOPIC = "/default/soak"
SIZES = "100:6,1KiB:3,16KiB:1"
LOADS = {
    "made": ("--protocol", "both", "--partitions", "3", "--consumers", "2", "--durability", "written"),
    "kept": ("--protocol", "native", "--topic", KEPT_TOPIC, "--consumers", "2"),
}
READ_S = 60.0
# A connection that a fault cut is what is asked for; a wrong level of an acknowledgement is not.
EXPECTED = "requests"
NEVER = "acknowledged at level"


class Load(Started):
    """One ``danube load`` until it is told to drain; its report is JSON in ``folder``."""

    def __init__(self, broker: BrokerProcess, folder: Path, name: str, rate: float) -> None:
        self.report_path = folder / f"{name}.json"
        command = [sys.executable, "-m", "danube", "load", "-s", broker.address, "--sizes", SIZES]
        command += ["--grpc-broker", broker.grpc_address, "--json", str(self.report_path), *LOADS[name]]
        command += ["--rate", str(rate), "--drain-timeout", "60s"]
        super().__init__(command, folder, {"PYTHONPATH": str(ROOT)})

    def halt(self) -> None:
        """Let producers stop and consumers take what is left."""
        self._process.send_signal(signal.SIGINT)

    def report(self, timeout_s: float) -> dict[str, Any]:
        """The audited result; RuntimeError when there is none."""
        code = self._process.wait(timeout_s)
        if not self.report_path.exists():
            raise RuntimeError(f"danube load ended with {code} and no report: {self.said()}")
        return dict(json.loads(self.report_path.read_text()))

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None


def make_kept_topic(address: str, retention_ms: int) -> None:
    with sync.connect(address) as client:
        known = {one.topic for one in client.admin.list_topics()}
        if KEPT_TOPIC not in known:
            client.admin.create_topic(KEPT_TOPIC, durability="fsync", retention_ms=retention_ms)


def kept_end(address: str) -> int:
    """How many records the kept topic has had that a consumer may see."""
    with sync.connect(address) as client:
        return int(client.admin.describe_topic(KEPT_TOPIC).partitions[0]["high_watermark"])


def unread(address: str, base: int, report: dict[str, Any]) -> list[str]:
    """Read the kept topic from ``base`` to its end, with a new subscription; what is not as it was sent.

    Every record is whole, and so many different ones are there as were acknowledged, or had no answer.
    """
    run, seen, found = int(report["run"]["id"], 16), dict[int, NumberSet](), []
    end = kept_end(address)
    with sync.connect(address) as client:
        name, offset = f"history-{report['run']['id']}", base - 1
        with client.consumer(KEPT_TOPIC, name, "exclusive", start=base) as consumer:
            while offset < end - 1:
                message = consumer.receive(timeout=READ_S)
                if message.offset <= offset:
                    found.append(f"offset {message.offset} came behind {offset}")
                offset = message.offset
                read = stamp.read(bytes(message.payload))
                if not isinstance(read, stamp.Stamp):
                    found.append(f"offset {offset} is damaged: {read}")
                elif read.run == run:
                    seen.setdefault(read.producer, NumberSet()).add(read.number, read.number + 1)
                message.ack()
        client.admin.delete_subscription(KEPT_TOPIC, name)
    count, records = sum(one.count for one in seen.values()), report["records"]
    if not records["acknowledged"] <= count <= records["acknowledged"] + records["not_known"]:
        found.append(
            f"{count} records are stored of {records['acknowledged']} acknowledged and"
            f" {records['not_known']} without an answer"
        )
    return found


def violations_of(report: dict[str, Any]) -> dict[str, list[str]]:
    """Findings of a run by kind, without the requests that a fault cut."""
    found: dict[str, list[str]] = {}
    for one in report["findings"]:
        if one["kind"] != EXPECTED or NEVER in one["what"]:
            sentence = f"{one['kind']}: {one['where']}: {one['what']} {'; '.join(one['examples'])}"
            found.setdefault(one["kind"], []).append(sentence)
    return found
