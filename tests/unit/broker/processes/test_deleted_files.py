"""Files that somebody deletes under a running broker: nothing more is acknowledged into them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from danube.broker.processes.data_dir import DataDir
from danube.broker.processes.supervisor import SECOND_NS, Supervisor
from danube.cluster.log.local_log import LocalLog
from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import TopicPolicy
from danube.core.protocol.native import Kind
from danube.errors import StorageFailed
from danube.host import files
from danube.wal.segments.segment import base_offset_of
from tests.unit.broker_parts import Bench, RecordingSession, numbered
from tests.unit.wal_samples import append, open_log


def segments(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if base_offset_of(path.name) is not None)


def test_a_file_is_there_deleted_or_another(tmp_path: Path) -> None:
    path = tmp_path / "file"
    fd = os.open(path, os.O_CREAT | os.O_RDWR)
    files.check_there(fd)
    files.check_there(fd, path)
    os.link(path, tmp_path / "backup")
    path.unlink()
    with pytest.raises(FileNotFoundError):
        files.check_there(fd, path)  # a backup of hard links keeps no name that the broker finds
    path.write_bytes(b"another")
    with pytest.raises(OSError, match="deleted or replaced"):
        files.check_there(fd, path)
    (tmp_path / "backup").unlink()
    with pytest.raises(OSError, match="deleted or replaced"):
        files.check_there(fd)
    os.close(fd)


@pytest.mark.parametrize("together", [False, True])
def test_a_sync_of_a_deleted_segment_fails_and_fences_the_log(tmp_path: Path, together: bool) -> None:
    log = open_log(tmp_path)
    append(log, b"one")
    log.write()
    job = log.sync_job()
    assert job is not None
    segments(tmp_path)[0].unlink()
    with pytest.raises(OSError, match=r"No such file|deleted"):
        job.check_files() if together else job.run()
    log.sync_failed(job, OSError("deleted"))
    assert log.fenced and log.synced_end == 0
    with pytest.raises(StorageFailed):
        job.check_files()
    log.abandon()


@pytest.mark.parametrize("what", ["segment", "directory"])
def test_no_fsync_acknowledgement_goes_on_into_a_deleted_file(tmp_path: Path, what: str) -> None:
    bench = Bench(tmp_path, durability="fsync")
    session = RecordingSession()
    bench.open_producer(session)
    bench.publish(session, numbered(3))
    bench.turn()
    bench.syncer.step()
    assert [frame.kind for frame in session.take()] == [Kind.PUBLISHED]
    directory = bench.hosted.directory
    assert directory is not None
    if what == "segment":
        segments(directory)[-1].unlink()
    else:
        shutil.rmtree(directory)
    bench.publish(session, numbered(3, start=3))
    bench.turn()
    bench.syncer.step()
    (refused,) = session.take()
    assert refused.kind == Kind.ERROR and isinstance(refused.error, StorageFailed)
    assert bench.hosted.failure is not None and "deleted or replaced" in str(bench.hosted.failure)
    assert "deleted or replaced" in bench.hosted.statistics()["state"], "describe says why"


def test_metadata_is_not_acknowledged_into_a_deleted_file(tmp_path: Path) -> None:
    def create(log: LocalLog, name: str) -> Any:
        return log.propose(CreateTopic(topic=f"/default/{name}", policy=TopicPolicy(), created_us=1))

    with LocalLog(tmp_path / "metadata", create=True) as log:
        create(log, "a")
        (tmp_path / "metadata" / "metadata.log").unlink()
        with pytest.raises(StorageFailed):
            create(log, "b")


@pytest.mark.parametrize("what", ["deleted", "replaced", "directory"])
def test_a_data_directory_that_is_not_the_broker_s_any_more_is_named(tmp_path: Path, what: str) -> None:
    data = DataDir(tmp_path / "data")
    data.check_there()
    if what == "directory":
        shutil.rmtree(tmp_path / "data")
    else:
        (tmp_path / "data" / "danube.lock").unlink()
    if what == "replaced":
        (tmp_path / "data" / "danube.lock").touch()
    with pytest.raises(StorageFailed, match="deleted or replaced under the running broker"):
        data.check_there()
    supervisor = SimpleNamespace(_looked_ns=0, _failure=None, _data=data, _stop_signals=0)
    Supervisor._check_directory(cast(Any, supervisor), SECOND_NS - 1)
    assert supervisor._failure is None, "once a second"
    Supervisor._check_directory(cast(Any, supervisor), SECOND_NS)
    assert isinstance(supervisor._failure, StorageFailed) and supervisor._stop_signals == 1
    Supervisor._check_directory(cast(Any, supervisor), 9 * SECOND_NS)
    assert supervisor._stop_signals == 1, "told once"
