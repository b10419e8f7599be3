"""`danube verify` and `danube inspect`: what they print, and the exit code they leave with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from danube.cli.main import root
from danube.cli.stored.places import split_key
from danube.cli.terminal.services import Services
from danube.cluster.log.local_log import LocalLog
from danube.core.metadata.commands import CreateTopic
from danube.core.partition.policy import TopicPolicy
from danube.errors import InvalidArgument, StoreRefused, StoreUnavailable
from danube.wal.log.log import Log, LogIdentity
from danube.wal.segments.segment import file_name
from danube.wal.stores.directory import LocalStore
from danube.wal.tier.keys import manifest_key, segment_key
from danube.wal.tier.manifest import Manifest
from tests.unit.store_samples import (
    TOPIC,
    entry_for,
    fill_directory,
    fill_store,
    partition_directory,
    put_manifest,
)
from tests.unit.wal_samples import IDENTITY, SMALL, append, memory_directory, roll, sync


class Places:
    """A data directory whose topic has id 1, a store of it, and the command line."""

    def __init__(self, root_directory: Path) -> None:
        self.data = root_directory / "data"
        self.store = root_directory / "store"
        self.store.mkdir()
        self.identity = LogIdentity(1, 0)
        self.directory = partition_directory(self.data, self.identity)
        log = Log.open(self.directory, self.identity, 1, SMALL)
        append(log, b"first", b"second")
        log.write()
        roll(log, b"producers")
        append(log, b"third")
        log.write()
        sync(log)
        log.abandon()
        with LocalLog(self.data / "metadata") as metadata:
            metadata.propose(CreateTopic(topic=TOPIC, policy=TopicPolicy(), created_us=1))
        objects = LocalStore(self.store)
        segment = (self.directory / file_name(0)).read_bytes()
        entry = entry_for(segment)
        self.key = segment_key(self.identity, entry)
        objects.put(self.key, segment)
        put_manifest(objects, Manifest.empty(TOPIC, self.identity, 1).with_added(entry))
        objects.put("store.json", b'{"format": 1, "store_id": "x", "created_us": 1}')
        self.manifest_key = manifest_key(self.identity, 1, 1)

    @property
    def url(self) -> str:
        return f"file://{self.store}"

    def __call__(self, *words: Any, exit_code: int = 0) -> Result:
        services = Services(environ={}, shows_progress=lambda: True)
        result = CliRunner().invoke(root, [str(word) for word in words], obj=services, prog_name="danube")
        assert result.exit_code == exit_code, result.output
        return result

    def json(self, *words: Any, exit_code: int = 0) -> Any:
        return json.loads(self(*words, "-o", "json", exit_code=exit_code).stdout)


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    with memory_directory(tmp_path) as directory:
        yield Places(directory)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


def test_a_clean_directory_and_store_leave_with_0(places: Places) -> None:
    assert places("verify", places.data).stdout.startswith(
        "clean: 1 partitions, 2 segments, 0 objects, 3 records"
    )
    both = places.json("verify", places.data, places.url)
    assert both["clean"] and (both["objects"], both["segments"], both["findings"]) == (1, 2, [])
    assert places.json("verify", places.store)["objects"] == 1  # a store's directory without file://


def test_findings_leave_with_10_and_name_file_byte_and_offsets(places: Places) -> None:
    flip(places.directory / file_name(0), 64 + 60)
    printed = places("verify", places.data, exit_code=10).stdout
    assert f"gap: {places.directory / file_name(0)} byte " in printed and "(offsets 0 to 2)" in printed
    assert printed.splitlines()[-1].endswith("bytes") and "findings:" in printed
    found = places.json("verify", places.data, exit_code=10)
    assert not found["clean"]
    gap = next(finding for finding in found["findings"] if finding["kind"] == "gap")
    assert gap["offsets"] == [0, 2] and gap["where"].endswith(file_name(0))
    (places.store / places.key).unlink()
    missing = places.json("verify", places.url, exit_code=10)["findings"]
    assert [(one["kind"], one["where"], one["byte"]) for one in missing] == [("missing", places.key, None)]


def test_many_findings_are_shortened_for_people(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    from danube.cli.stored import verify

    monkeypatch.setattr(verify, "_ROWS_MAX", 1)
    flip(places.directory / file_name(0), 64 + 60)
    assert "more; -o json lists all" in places("verify", places.data, exit_code=10).stdout


def test_one_topic_by_name(places: Places) -> None:
    other = Log.open(partition_directory(places.data, LogIdentity(2, 0)), LogIdentity(2, 0), 1, SMALL)
    append(other, b"x")
    other.close()
    assert places.json("verify", places.data)["partitions"] == 2
    for name in (TOPIC, "orders"):
        assert places.json("verify", places.data, "--topic", name)["partitions"] == 1
        assert places.json("verify", places.url, "--topic", name)["objects"] == 1
        assert places.json("verify", places.data, places.url, "--topic", name)["objects"] == 1
    for place in (places.data, places.url):
        assert "nothing of topic" in places("verify", place, "--topic", "others", exit_code=3).stderr


def test_what_cannot_be_verified(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    places("verify", exit_code=2)
    assert "no directory" in places("verify", places.data / "none", exit_code=3).stderr
    places("verify", "ftp://somewhere/else", exit_code=11)
    for error in (StoreUnavailable("it is down"), StoreRefused("no entry")):

        def fail(*_: Any, failure: Exception = error) -> Any:
            raise failure

        monkeypatch.setattr(LocalStore, "list", fail)
        monkeypatch.setattr(LocalStore, "head", fail)
        places("verify", places.url, exit_code=12)
        places("inspect", f"{places.url}/{places.key}", exit_code=12)


def test_inspect_tells_each_kind_of_file(places: Places) -> None:
    sealed = places.directory / file_name(0)
    words = {
        sealed: "sealed segment of partition 0 of topic 0000000000000001: 2 records in 1 batches",
        places.directory / file_name(2): "active or unsealed segment",
        places.directory / "mark": "sync mark of partition 0",
        places.data / "metadata" / "metadata.log": "metadata log, file 1",
        places.store / places.manifest_key: f"manifest 1-1 of {TOPIC}",
        places.store / "store.json": "store.json",
    }
    for path, expected in words.items():
        assert expected in places("inspect", path).stdout
        assert places.json("inspect", path)["problems"] == []
    found = places.json("inspect", sealed)
    assert (found["base_offset"], found["end_offset"], found["records"], found["sealed"]) == (0, 2, 2, True)
    assert found["first_append_us"].startswith("2023-") and found["producers"] == [
        {"producer": "", "records": 2}
    ]
    assert places.json("inspect", places.data / "metadata" / "metadata.log")["topics"][0]["topic"] == TOPIC


def test_inspect_reads_objects_by_their_address(places: Places) -> None:
    manifest = places.json("inspect", f"{places.url}/{places.manifest_key}")
    assert (manifest["uploaded_end"], manifest["topic"]) == (2, TOPIC)
    assert manifest["entries"][0]["key"] == places.key.rpartition("/")[2]
    assert "sealed segment" in places("inspect", f"{places.url}/{places.key}").stdout
    assert "store.json" in places("inspect", f"{places.url}/store.json").stdout
    missing = places.key.replace("00000000000000000002", "00000000000000000003")
    places("inspect", f"{places.url}/{missing}", exit_code=3)
    places("inspect", f"{places.url}/other", exit_code=2)


def test_inspect_tells_damaged_files_as_far_as_they_go(places: Places) -> None:
    sealed = places.directory / file_name(0)
    flip(sealed, 64 + 60)
    printed = places("inspect", sealed, exit_code=10).stdout
    assert "0 records" in printed and "problem: checksum" in printed
    flip(sealed, 0)
    assert places.json("inspect", sealed, exit_code=10)["kind"] == "segment"
    path = places.store / places.manifest_key
    path.write_bytes(path.read_bytes()[:-20])
    cut = places.json("inspect", path, exit_code=10)
    assert cut["topic"] == TOPIC and cut["problems"][0]["kind"] == "truncated"
    tail = places.directory / file_name(2)
    data = tail.read_bytes()
    end = len(data.rstrip(b"\0")) + 7 & ~7
    tail.write_bytes(data[:end] + b"torn" + data[end + 4 :])
    assert "are not a whole batch" in places("inspect", tail).stdout
    for name in ("store.json", "metadata.log", "mark", "cursors-a", "producers", "0" * 20):
        (places.store / name).write_bytes(b"\x01 not what it should be")
        places("inspect", places.store / name, exit_code=10)


def test_inspect_refuses_what_is_not_stored_data(places: Places) -> None:
    (places.store / "notes").write_text("hello")
    assert "not one of Danube's files" in places("inspect", places.store / "notes", exit_code=2).stderr
    places("inspect", places.store / "none", exit_code=3)
    places("inspect", places.store, exit_code=12)


def test_inspect_of_cursors_shows_each_subscription(tmp_path: Path) -> None:
    from danube.wal.inspection import inspect_bytes
    from danube.wal.log.cursors import CursorStore

    directory = fill_directory(tmp_path)
    store = CursorStore(directory, IDENTITY)
    store.load()
    store.store("broken", b"nonsense")
    store.remove("readers")
    store.write()
    found = inspect_bytes("cursors-a", store.copy())
    assert [row["subscription"] for row in found.rows["subscriptions"]] == ["broken"]
    assert "stored cursor is cut" in found.problems[0].what
    store.close()
    file = next(path for path in directory.glob("cursors-?") if path.read_bytes().strip(b"\0"))
    rows = inspect_bytes(file.name, file.read_bytes()).rows["subscriptions"]
    assert {row["subscription"]: row["state"] for row in rows}["readers"] == "removed"
    assert inspect_bytes("cursors-a", bytes(64)).words == "cursors, never written"
    whole = fill_directory(tmp_path / "again")
    file = next(path for path in whole.glob("cursors-?") if path.read_bytes().strip(b"\0"))
    row = inspect_bytes(file.name, file.read_bytes()).rows["subscriptions"][0]
    assert (row["subscription"], row["mode"], row["ack_floor"]) == ("readers", "shared", 4)


def test_inspect_of_the_rarer_files(tmp_path: Path) -> None:
    from danube.core.metadata.machine import Metadata
    from danube.wal.inspection import inspect_bytes
    from danube.wal.recovery.producers import Checkpoint, write_checkpoint

    write_checkpoint(tmp_path, IDENTITY, Checkpoint(7, b"snapshot"))
    found = inspect_bytes("producers", (tmp_path / "producers").read_bytes())
    assert found.facts["end_offset"] == 7 and not found.problems
    snapshot = Metadata().snapshot()
    assert inspect_bytes("metadata/00000000000000000000", snapshot).facts["version"] == 0
    assert inspect_bytes("mark", bytes(128)).words == "sync mark, never written"
    damage = inspect_bytes("damage.json", b'[{"file": "x", "position": 1}]')
    assert damage.words.startswith("1 damaged ranges") and damage.rows["ranges"][0]["file"] == "x"
    assert inspect_bytes("store.json", b"7").facts == {"value": 7}


def test_long_lists_are_shortened_for_people(places: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    from danube.cli.stored import inspect

    objects = LocalStore(places.store)
    manifest = fill_store(objects, fill_directory(places.store.parent / "more"))
    monkeypatch.setattr(inspect, "_ROWS_MAX", 2)
    path = places.store / manifest_key(IDENTITY, manifest.epoch, manifest.generation)
    assert "and 1 more; -o json lists all of them" in places("inspect", path).stdout


def test_addresses_of_objects() -> None:
    assert split_key("s3://b/p/q/store.json") == ("s3://b/p/q", "store.json")
    assert split_key("s3://b/metadata/01") == ("s3://b", "metadata/01")
    assert split_key("s3://b/partitions/x/partitions/y") == ("s3://b/partitions/x", "partitions/y")
    for wrong in ("s3://b", "s3://b/partitions/", "s3://b/other"):
        with pytest.raises(InvalidArgument):
            split_key(wrong)
