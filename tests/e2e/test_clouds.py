"""A real broker on Azure Blob and on Google Cloud Storage: there and back, and a new host from it alone."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.broker_process import ROOT, wait_until
from tests.cloud_servers import ACCOUNT_KEY, GOOGLE_SECRET, CloudServer
from tests.e2e.test_tiering import TIERED, TOPIC, payload, publish, read, wait_evicted

LARGE, SMALL = 4_000, 500  # records of a segment that goes up in parts, and of one that does not


def danube(environment: dict[str, str], *words: str) -> str:
    command = [sys.executable, "-m", "danube", *words]
    done = fork_server.run(command, environment={**os.environ, **environment}, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2_000:] + done.stderr[-2_000:]
    return done.stdout


@pytest.mark.parametrize("cloud", ["azure", "google"])
def test_history_goes_to_a_cloud_and_comes_back_also_on_another_host(
    broker: Any, tmp_path: Path, request: pytest.FixtureRequest, cloud: str
) -> None:
    server: CloudServer = request.getfixturevalue(f"{cloud}_server")
    store = server.environ(server.make_bucket(), "some/prefix")
    environment = {**TIERED, **store, "DANUBE_STORAGE__PART_SIZE": "5MiB", "DANUBE_STORAGE__MERGE_BELOW": "0"}
    process = broker(workers=2, environment=environment, data_dir=tmp_path / "data")
    end = 0
    for count in (LARGE, SMALL, SMALL):
        publish(process.address, end, count)
        end += count
        danube({}, "topics", "seal", TOPIC, "-s", process.address, "--wait")
    wait_evicted(process.address, end)
    publish(process.address, end, 100)
    expected = [(number, payload(number)) for number in range(end + 100)]
    assert read(process.address, "earliest", end + 100, "all") == expected
    assert read(process.address, LARGE + 7, 10, "middle") == expected[LARGE + 7 : LARGE + 17]
    danube({}, "topics", "seal", TOPIC, "-s", process.address, "--wait")
    status = json.loads(danube({}, "storage", "status", "-s", process.address, "-o", "json"))
    (row,) = [one for one in status["topics"] if one["topic"] == TOPIC]
    assert status["errors"] == 0 and row["objects"] == 4 and row["pending_bytes"] == 0
    wait_until(lambda: copied(server, store), 30, "metadata copied")
    process.kill()
    url = store["DANUBE_STORAGE__URL"]
    assert json.loads(danube(store, "verify", url, "-o", "json"))["clean"]
    restored = tmp_path / "restored"
    told = json.loads(danube(store, "storage", "restore", url, "--data-dir", str(restored), "-o", "json"))
    assert told["problems"] == [] and told["objects"] == 4
    again = broker(workers=1, environment=environment, data_dir=restored)
    assert read(again.address, "earliest", end + 100, "new") == expected
    for output in (process.output_path.read_text(), again.output_path.read_text()):
        assert ACCOUNT_KEY not in output and GOOGLE_SECRET not in output


def copied(server: CloudServer, store: dict[str, str]) -> bool:
    from danube.wal.stores.opening import open_store

    bucket = store["DANUBE_STORAGE__URL"].split("/")[2]
    keys = [info.key for info in open_store(server.settings(bucket, "some/prefix")).list("")]
    return any(key.startswith("metadata/") for key in keys)
