"""A run over tiered storage: publish while the store fails and processes die, then read it three ways.

Everything acknowledged must be there once and in order for a consumer from the start, for a fresh broker
that has the bucket alone, and for ``danube verify``, which shares no code with what wrote it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from danube import sync
from danube.errors import DanubeError, OperationTimeout
from tests.broker_process import ROOT, BrokerProcess
from tests.crash.nemesis import kill_all, kill_mover, kill_worker
from tests.crash.store_faults import for_nemesis
from tests.fakes.s3_proxy import S3Proxy
from tests.s3_server import S3Server

TOPICS = ("/default/tiered-0", "/default/tiered-1")
RECORDS_PER_SEND = 50
PAYLOAD_BYTES = 1_000
SETTINGS = {
    "DANUBE_STORAGE__SEAL_AFTER": "1s",
    "DANUBE_STORAGE__LOCAL_RETENTION_TIME": "1s",
    "DANUBE_STORAGE__CACHE_SIZE": "16MiB",
    "DANUBE_STORAGE__MERGE_BELOW": "1MiB",
    "DANUBE_STORAGE__MERGE_TO": "4MiB",
    "DANUBE_WAL__SEGMENT_SIZE": "16MiB",
}


@dataclass
class Journal:
    """What producers know to be stored: by topic the offset and payload of every acknowledged record."""

    acknowledged: dict[str, dict[int, bytes]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def note(self, topic: str, base_offset: int, payloads: list[bytes]) -> None:
        with self.lock:
            known = self.acknowledged.setdefault(topic, {})
            for offset, payload in enumerate(payloads, base_offset):
                if known.setdefault(offset, payload) != payload:
                    self.problems.append(f"offset {offset} of {topic} was acknowledged twice")

    @property
    def count(self) -> int:
        with self.lock:
            return sum(map(len, self.acknowledged.values()))


class TieredRun:
    """One broker on an S3 server behind a proxy that fails, its producers, and what is done to them."""

    def __init__(self, folder: Path, server: S3Server, source: random.Random) -> None:
        self.folder = folder
        self.server = server
        self.source = source
        self.bucket = server.make_bucket()
        self.proxy = S3Proxy("127.0.0.1", server.port, client=server.client(), seed=source.randrange(1 << 30))
        self.journal = Journal()
        self.faults: list[str] = []
        self._stopped = threading.Event()
        self._producers: list[threading.Thread] = []

    def __enter__(self) -> TieredRun:
        self.proxy.start()
        environment = SETTINGS | self.server.environ(self.bucket, "run", endpoint=self.proxy.endpoint)
        self.broker = BrokerProcess(self.folder / "data", workers=2, environment=environment).start()
        with sync.connect(self.broker.address) as client:
            for topic in TOPICS:
                client.admin.create_topic(topic)
        for topic in TOPICS:
            thread = threading.Thread(target=self._produce, args=(topic,))
            self._producers.append(thread)
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop_producers()
        self.broker.kill()
        with suppress(Exception):
            self.proxy.refuse()

    # -- load -------------------------------------------------------------------------------------

    def _produce(self, topic: str) -> None:
        """Send one batch after the other; a resend after a crash is stored once."""
        sequence = 0
        while not self._stopped.is_set():
            try:
                with (
                    sync.connect(self.broker.address) as client,
                    client.producer(topic, name="p") as producer,
                ):
                    while not self._stopped.is_set():
                        payloads = [
                            b"%d:" % (sequence + index) + b"x" * PAYLOAD_BYTES
                            for index in range(RECORDS_PER_SEND)
                        ]
                        (ack,) = producer.send_many(payloads)
                        self.journal.note(topic, ack.offset, payloads)
                        sequence += RECORDS_PER_SEND
                        self._stopped.wait(0.01)
            except DanubeError:
                sequence += RECORDS_PER_SEND  # what has no answer is not asked about again
                self._stopped.wait(0.1)

    def stop_producers(self) -> None:
        self._stopped.set()
        for thread in self._producers:
            thread.join(60)

    # -- faults -----------------------------------------------------------------------------------

    def torment(self, seconds: float) -> None:
        """Do one thing after another to the store and the processes."""
        deadline = time.monotonic() + seconds
        processes = {fault.__name__: fault for fault in (kill_worker, kill_mover, kill_all)}
        actions = processes | for_nemesis(self.proxy)
        while time.monotonic() < deadline:
            name = self.source.choice(list(actions))
            self.faults.append(name)
            actions[name](self.broker, self.source)
            time.sleep(self.source.uniform(0.2, 1.0))

    # -- the end ----------------------------------------------------------------------------------

    def settle(self, timeout_s: float = 90) -> None:
        """Stop publishing, heal the store and wait until everything is off the host."""
        self.stop_producers()
        self.proxy.clear()
        deadline = time.monotonic() + timeout_s
        with sync.connect(self.broker.address) as client:
            for topic in TOPICS:
                client.admin.seal(topic)
            while True:
                status = client.admin.storage_status("")
                pending = [one for one in _topics(status) if one["pending_bytes"]]
                if not pending:
                    return
                assert time.monotonic() < deadline, pending
                time.sleep(0.2)

    def check_reader(self, address: str, what: str) -> None:
        """A consumer from the start sees every acknowledged record once, in order."""
        for topic, acknowledged in self.journal.acknowledged.items():
            seen = self._read(address, topic, f"audit-{what}", max(acknowledged))
            for offset, payload in acknowledged.items():
                assert seen.get(offset) == payload, f"{what}: {topic} {offset} is missing or another record"
            numbers = [int(payload.split(b":")[0]) for payload in seen.values()]
            assert len(numbers) == len(set(numbers)), f"{what}: a record of {topic} is there twice"

    def _read(self, address: str, topic: str, subscription: str, last: int) -> dict[int, bytes]:
        """Everything from the start to the offset ``last``, as it comes."""
        seen: dict[int, bytes] = {}
        with (
            sync.connect(address) as client,
            client.consumer(topic, subscription, "exclusive", start="earliest") as consumer,
        ):
            expected = 0
            while expected <= last:
                try:
                    message = consumer.receive(timeout=30)
                except OperationTimeout:
                    raise AssertionError(f"{subscription}: {topic} {expected} never came") from None
                assert message.offset == expected, f"{subscription}: {topic} {message.offset}, not {expected}"
                message.ack_nowait()
                seen[expected] = message.payload
                expected += 1
        return seen

    def check_restored(self) -> None:
        """A broker with an empty disk has all of it from the bucket."""
        self.broker.stop(30)
        environment = self.server.environ(self.bucket, "run")
        restored = self.folder / "restored"
        command = [sys.executable, "-m", "danube", "storage", "restore", environment["DANUBE_STORAGE__URL"]]
        subprocess.run(
            [*command, "--data-dir", str(restored), "--s3-endpoint", self.server.endpoint],
            cwd=ROOT, env={**os.environ, **environment}, check=True, capture_output=True, timeout=60,
        )  # fmt: skip
        with BrokerProcess(restored, workers=2, environment=SETTINGS | environment) as fresh:
            self.check_reader(fresh.address, "restored")

    def check_verified(self) -> dict[str, Any]:
        """``danube verify`` of the bucket finds nothing."""
        environment = self.server.environ(self.bucket, "run")
        command = [sys.executable, "-m", "danube", "verify", environment["DANUBE_STORAGE__URL"], "-o", "json"]
        ran = subprocess.run(
            [*command, "--s3-endpoint", self.server.endpoint],
            cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=120,
            check=False,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-1000:]
        return dict(json.loads(ran.stdout))


def _topics(status: Any) -> list[dict[str, Any]]:
    import msgspec

    found: list[dict[str, Any]] = msgspec.to_builtins(status)["topics"]
    return found
