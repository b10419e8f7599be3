"""The chain of changes of members, whose heads are in the metadata of the cluster."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from danube.broker.audit.audit import MEMBERS_CHAIN
from danube.broker.audit.heads import heads_of
from danube.broker.audit.lines import Place
from danube.broker.audit.trail import encode_head, head_name, list_files, read_end, read_head, trail, verify
from danube.cluster.log.committed import read_committed
from danube.cluster.log.node_files import load_node
from tests import fork_server
from tests.broker_process import BrokerProcess, free_port, wait_until

WITHIN_S = 60.0  # a head is put at once; a slow and loaded machine gets more


def danube(data: Path, *words: str, code: int = 0) -> Any:
    command = [sys.executable, "-m", "danube", *words, "--data-dir", str(data), "-o", "json"]
    done = fork_server.run(command, cwd=fork_server.ROOT)
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout or "null")


def heads_of_members(data: Path) -> list[Place]:
    """Heads that the metadata has of the controller's chain."""
    keys, broker = read_committed(data / "metadata" / "metadata.log").cluster.keys, load_node(data).node_id
    known = heads_of(keys, int(broker)).get(MEMBERS_CHAIN)
    return [] if known is None else [one.place for one in known.heads]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """The directory of a broker, a cluster of its own, that has ended and was asked to remove a member."""
    address, data = f"127.0.0.1:{free_port()}", tmp_path / "data"
    arguments = ["--raft-addr", address, "--seed-nodes", address]
    with BrokerProcess(data, arguments=arguments, environment={"DANUBE_AUDIT__MODE": "on"}):
        danube(data, "cluster", "remove-node", "--node-id", "77", code=3)
        place = read_head(data / "audit", MEMBERS_CHAIN)
        assert place is not None and place.number >= 2
        wait_until(lambda: place in heads_of_members(data), WITHIN_S, "the head is in the metadata")
    return data


def test_a_change_of_members_that_is_cut_off_is_found(data: Path) -> None:
    assert danube(data, "audit", "verify")["findings"] == []
    directory = data / "audit"
    (file,) = [one.path for one in list_files(directory) if one.worker == MEMBERS_CHAIN]
    *kept, gone = file.read_bytes().splitlines(keepends=True)
    assert b'"member_remove"' in gone
    file.write_bytes(b"".join(kept))
    line = read_end(file)[0]
    assert line is not None
    (directory / head_name(MEMBERS_CHAIN)).write_bytes(encode_head(line.place))
    assert not verify(directory).findings, "the files alone look well"
    assert "member_remove" not in [one["operation"] for one in trail(directory)]
    (found,) = danube(data, "audit", "verify", code=10)["findings"]
    assert f"worker-{MEMBERS_CHAIN}" in found["file"] and "metadata" in found["what"]
