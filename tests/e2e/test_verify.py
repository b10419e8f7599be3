"""`danube verify` beside a broker that publishes, uploads and evicts, and after something was harmed."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from danube import sync
from tests import fork_server
from tests.broker_process import ROOT

TOPIC = "/default/verified"
TIERED = {
    "DANUBE_STORAGE__LOCAL_RETENTION_TIME": "1ms",
    "DANUBE_STORAGE__SEAL_AFTER": "1s",
    "DANUBE_STORAGE__MERGE_BELOW": "32MiB",
}
ROUNDS = 5


def danube(*words: str) -> subprocess.CompletedProcess[str]:
    return fork_server.run([sys.executable, "-m", "danube", *words], cwd=ROOT)


def verified(exit_code: int, *words: str) -> dict[str, Any]:
    done = danube("verify", *words, "-o", "json")
    assert done.returncode == exit_code, done.stdout + done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def publish(address: str, stop: threading.Event, sent: list[int]) -> None:
    with sync.connect(address) as client, client.producer(TOPIC, name="writer") as producer:
        while not stop.is_set():
            for _ in range(100):
                producer.send_nowait(b"." * 2_000)
            producer.flush()
            sent[0] += 100
            stop.wait(0.01)


def test_it_is_clean_beside_a_broker_and_names_what_is_harmed(broker: Any, tmp_path: Path) -> None:
    data, store = tmp_path / "data", tmp_path / "store"
    store.mkdir()
    url = f"file://{store}"
    process = broker(workers=2, arguments=["--storage", url], environment=TIERED, data_dir=data)
    stop, sent = threading.Event(), [0]
    writer = threading.Thread(target=publish, args=(process.address, stop, sent))
    writer.start()
    try:
        reports = [verified(0, str(data), url) for _ in range(ROUNDS)]
    finally:
        stop.set()
        writer.join()
    counts = [report["records"] for report in reports]
    assert counts == sorted(counts) and all(report["clean"] for report in reports)
    sealed = danube("topics", "seal", TOPIC, "-s", process.address, "--wait")
    assert sealed.returncode == 0, sealed.stderr
    process.kill()
    whole = verified(0, str(data), url, "--topic", TOPIC)
    assert whole["records"] == sent[0] and whole["objects"] >= 1
    manifest = max(store.rglob("manifest-*"))
    inspected = json.loads(danube("inspect", str(manifest), "-o", "json").stdout)
    harmed_object = manifest.with_name(inspected["entries"][0]["key"])
    content = bytearray(harmed_object.read_bytes())
    content[len(content) // 2] ^= 1
    harmed_object.write_bytes(content)
    key = str(harmed_object.relative_to(store))
    harmed = verified(10, url)
    assert key in {finding["where"] for finding in harmed["findings"]}
    harmed_object.unlink()
    missing = verified(10, url)["findings"]
    assert [finding["kind"] for finding in missing if finding["where"] == key] == ["missing"]
    assert danube("verify", str(tmp_path / "nowhere")).returncode == 3
