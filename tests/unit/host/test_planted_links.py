"""Links that somebody planted where the broker writes: what they name stays as it is (row S24)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from danube.broker.audit.lines import Entry
from danube.broker.audit.writer import AuditWriter
from danube.broker.processes.copied import note_place
from danube.broker.processes.data_dir import BrokerState, DataDir
from danube.cluster.log.local_log import LocalLog
from danube.cluster.log.node_files import NodeRecord, store_node
from danube.core.metadata.commands import CreateNamespace
from danube.errors import DanubeError
from danube.host import files
from danube.host.disk_reserve import Reserve

VICTIM = b"what belongs to somebody else" * 400


def use_data_dir(directory: Path) -> None:
    data = DataDir(directory)
    try:
        data.next_incarnations(1)
        data.write_pid()
        data.write_state(BrokerState(1, True, {}, [], "", 0))
    finally:
        data.close()


def use_metadata(directory: Path) -> None:
    with LocalLog(directory) as log:
        log.propose(CreateNamespace(namespace="n"))


def use_audit(directory: Path) -> None:
    writer = AuditWriter(directory, 0, lambda: 1)
    writer.append(Entry(1, "delete_topic", "allowed"))
    writer.close()


def use_node(directory: Path) -> None:
    store_node(directory, NodeRecord("7"))


def use_reserve(directory: Path) -> None:
    reserve = Reserve()
    reserve.keep(directory / "reserve-0")
    reserve.fill()
    reserve.replace_durably(directory / "danube.json", b"{}")


@pytest.mark.parametrize(
    ("use", "name"),
    [
        *((use_data_dir, name) for name in (
            "danube.lock", "format", "format.new", "incarnation", "incarnation.new", "danube.pid",
            "danube.json", "reserve-supervisor",
        )),
        *((use_metadata, name) for name in ("metadata.log", "metadata.lock", "metadata.new")),
        *((use_audit, name) for name in ("worker-0-000001.jsonl", "worker-0-000002.jsonl", "worker-0.head")),
        *((use_node, name) for name in ("node_id", "node_id.new")),
        *((use_reserve, name) for name in ("reserve-0", "danube.json", "danube.json.new")),
        (note_place, "place"),
        (note_place, "place.new"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("there", [True, False])
def test_what_a_planted_link_names_stays_as_it_is(
    tmp_path: Path, use: Callable[[Path], None], name: str, there: bool
) -> None:
    directory, victim = tmp_path / "data", tmp_path / "victim"
    directory.mkdir(0o700)
    if there:
        victim.write_bytes(VICTIM)
    (directory / name).symlink_to(victim)
    try:
        use(directory)
    except (DanubeError, OSError):
        pass  # it may refuse to start
    assert victim.read_bytes() == VICTIM if there else not victim.exists()


def test_a_file_is_written_itself_and_read_through_links(tmp_path: Path) -> None:
    """Files of the configuration may be links, as in Kubernetes."""
    (tmp_path / "file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    assert files.read_bounded(tmp_path / "link", 10) == b"x"
    with pytest.raises(OSError, match="symbolic link"):
        files.open_existing(tmp_path / "link", writable=True)
