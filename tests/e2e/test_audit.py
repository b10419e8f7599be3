"""The audit of a running broker: what it tells, what kill -9 leaves of it, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from danube import sync
from danube.broker.audit.lines import Entry
from danube.broker.audit.trail import trail, verify
from danube.broker.audit.writer import AuditWriter
from danube.errors import NotFound
from danube.host.clock import wall_us
from danube.server.proto import DanubeAdmin_pb2 as pb
from tests.broker_process import BrokerProcess, wait_until
from tests.e2e.authority_site import ENVIRONMENT, root, token
from tests.e2e.grpc_parts import DanubeCalls
from tests.grpc_client import GrpcError

ON = {"DANUBE_AUDIT__MODE": "on"}


def told(directory: Path) -> list[tuple[str, str]]:
    return [
        (one["operation"], one["resource"]) for one in trail(directory) if "audit." not in one["operation"]
    ]


def danube(*words: str | Path) -> Any:
    command = [sys.executable, "-m", "danube", *map(str, words), "-o", "json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_requests_that_change_something_are_told_and_reading_is_not(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", workers=2, environment=ON) as broker:
        with sync.connect(broker.address) as client:
            client.admin.create_topic("/default/a", partitions=2)
            client.admin.list_topics()
            with client.producer("/default/a") as producer:
                producer.send(b"secret payload")
            client.admin.delete_topic("/default/a")
            made, gone = client.admin.audit(resource="/default/a")
            assert (made["operation"], gone["operation"]) == ("create_topic", "delete_topic")
            assert client.admin.audit(newest=1) == [gone] == client.admin.audit(since=gone["time"], limit=5)
        audit = tmp_path / "data" / "audit"
        assert told(audit) == [("create_topic", "/default/a"), ("delete_topic", "/default/a")]
        found = danube("audit", "verify", "--data-dir", tmp_path / "data")
        assert found["findings"] == [] and len(found["heads"]) == 2
        (row,) = danube("audit", "find", "--operation", "create_topic", "--data-dir", tmp_path / "data")
        assert row["principal"] == "anonymous" and row["details"] == {"partitions": 2}
    assert b"secret payload" not in b"".join(path.read_bytes() for path in audit.iterdir())
    assert not verify(audit).findings


def test_a_grpc_call_that_administers_is_told_under_its_caller(tmp_path: Path) -> None:
    create, delete = "TopicAdmin/CreateTopic", "SecurityAdmin/DeleteRole"
    with BrokerProcess(tmp_path / "data", workers=1, environment=ON | ENVIRONMENT) as broker:
        calls = DanubeCalls(broker.admin_address)
        calls.fields = [("authorization", f"Bearer {root()}")]
        calls.admin(create, pb.NewTopicRequest(name="/default/a", dispatch_strategy=1))
        calls.admin("BrokerAdmin/ListNamespaces", pb.Empty())
        calls.fields = [("authorization", f"Bearer {token('bob')}")]
        with pytest.raises(GrpcError):
            calls.admin(delete, pb.DeleteRoleRequest(name="mine"))
        calls.close()
    lines = [
        (one["operation"].partition(".")[2], one["resource"], one["principal"], one["outcome"])
        for one in trail(tmp_path / "data" / "audit")
        if one["operation"].startswith("/")
    ]
    assert lines == [
        (create, "/default/a", "user:root", "allowed"),
        (delete, "mine", "service_account:bob", "denied"),
    ]


def test_kill_9_of_all_processes_loses_no_line_of_a_request_that_was_carried_out(tmp_path: Path) -> None:
    broker = BrokerProcess(tmp_path / "data", workers=2, environment=ON)
    made = []
    for life in range(3):
        with broker.start(), sync.connect(broker.address) as client:
            for number in range(5):
                client.admin.create_topic(f"/default/t{life}-{number}")
                made.append(("create_topic", f"/default/t{life}-{number}"))
            broker.kill()
    audit = tmp_path / "data" / "audit"
    assert set(told(audit)) == set(made) and not verify(audit).findings


def test_a_chain_made_anew_is_found_by_the_metadata_of_a_running_broker(tmp_path: Path) -> None:
    """Also once the broker has gone on with it."""
    data, audit = tmp_path / "data", tmp_path / "data" / "audit"
    broker = BrokerProcess(data, workers=1, environment=ON)
    with broker.start(), sync.connect(broker.address) as client:
        client.admin.create_topic("/default/a")
        broker.stop()
    heads = danube("audit", "heads", "--data-dir", data)
    assert danube("audit", "verify", "--data-dir", data)["heads"] == [heads[-1]["head"]]
    for path in audit.iterdir():
        path.unlink()
    writer = AuditWriter(audit, 0, wall_us)
    for number in range(10):
        writer.append(Entry(wall_us(), "create_topic", "allowed", "user:eve", resource=f"/t{number}"))
    writer.close()
    with broker.start():
        wait_until(lambda: len(danube("audit", "heads", "--data-dir", data)) > len(heads), 60, "a new head")
        command = [sys.executable, "-m", "danube", "audit", "verify", "--data-dir", str(data)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 10 and "the chain was made anew" in done.stdout


def test_without_the_setting_nothing_is_written(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data", workers=1) as broker, sync.connect(broker.address) as client:
        client.admin.create_topic("/default/a")
        with pytest.raises(NotFound, match="writes no audit files"):
            client.admin.audit()
    assert not (tmp_path / "data" / "audit").exists()


def test_files_that_cannot_be_written_stop_nothing_unless_they_must(tmp_path: Path) -> None:
    """The folder is a file; tests of a line that is required are in unit/broker/audit."""
    (tmp_path / "file").touch()
    there = {"DANUBE_AUDIT__DIRECTORY": str(tmp_path / "file")}
    with (
        BrokerProcess(tmp_path / "data", workers=1, environment=ON | there) as broker,
        sync.connect(broker.address) as client,
    ):
        client.admin.create_topic("/default/a")
        said = broker.output_path.read_text()
    assert "audit files cannot be written" in said and "an audit line was not written" in said
