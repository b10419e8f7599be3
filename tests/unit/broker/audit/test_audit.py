"""Audit files: every change of a byte, a line or a file is found, and no acknowledged line is lost."""

from __future__ import annotations

import asyncio
import errno
import itertools
import json
import logging
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube.broker.admission import Admission
from danube.broker.audit import audit as audit_module
from danube.broker.audit import trail as trail_module
from danube.broker.audit.audit import DENIED, Audit
from danube.broker.audit.lines import (
    LINE_BYTES_MAX,
    START,
    TEXT_CHARACTERS_MAX,
    ZERO,
    Entry,
    Place,
    decode,
    encode,
    follows,
    text_of,
)
from danube.broker.audit.trail import END_BYTES, list_files, read_end, read_head, trail, verify
from danube.broker.audit.writer import AuditWriter
from danube.core.metadata.roles import Access
from danube.core.protocol import native as wire
from danube.core.security.operations import GRPC
from danube.core.security.principals import ANONYMOUS, INTERNAL, Identity, Principal
from danube.errors import NotAuthenticated, NotFound, ProtocolError, StorageFailed, StorageFull
from danube.host import files
from danube.host.credentials import Credentials, secret_key
from danube.server.proto import DanubeApi_pb2 as pb
from tests.unit.faulty_os import FaultyOs, Killed, fail_with

NOW_US = 1_795_855_243_000_001
CALLS = ("open", "pwritev", "fdatasync", "ftruncate", "rename", "unlink", "close", "fsync")


class Clock:
    def __init__(self) -> None:
        self.now_us = NOW_US

    def __call__(self) -> int:
        self.now_us += 1
        return self.now_us


ANN = Identity(Principal("user", "ann"), "token")


def entry(number: int, **facts: Any) -> Entry:
    return Entry(
        NOW_US + 1_000 + number,
        "delete_topic",
        "allowed",
        "user:ann",
        resource=f"/default/t{number}",
        **facts,
    )


def writer_at(directory: Path, worker: int = 0, **options: Any) -> AuditWriter:
    made = AuditWriter(directory, worker, Clock(), **options)
    made.open()
    return made


def written(directory: Path, count: int = 4, **options: Any) -> Path:
    """A chain of ``count`` lines and the line that begins it, in one file."""
    writer = writer_at(directory, **options)
    for number in range(count):
        writer.append(entry(number))
        if "file_bytes_max" in options:
            writer.sync()  # makes the next file
    writer.close()
    return next(one.path for one in reversed(list_files(directory)) if one.path.stat().st_size)


def found(directory: Path, **options: Any) -> list[str]:
    return [finding.what for finding in verify(directory, **options).findings]


# -- lines --------------------------------------------------------------------------------------------------


def test_a_line_names_its_place_and_the_line_before() -> None:
    raw, place = encode(entry(1, request_id="7", code=1161, details={"roles": ["producer"]}), START)
    line = decode(raw)
    assert line.place == place == Place(1, place.hash) and line.prev == ZERO
    assert line.fields["time"] == "2026-11-28T08:40:43.001002Z"
    assert (line.fields["principal"], line.fields["code"]) == ("user:ann", 1161)
    assert line.fields["details"] == {"roles": ["producer"]}
    assert json.loads(raw)["hash"] == place.hash
    following = decode(encode(entry(2), place)[0])
    assert follows(following, place) == ""
    assert "another line" in follows(following, Place(1, ZERO))
    assert "line 1 of the chain is missing" in follows(following, START)


def test_what_a_peer_chose_cannot_make_a_line_long_or_two() -> None:
    hostile = 'a\n"}\r{\u2028\ud800' * 10_000
    details = {f"{hostile}{number}": [hostile] * 100 for number in range(100)}
    raw, _ = encode(
        Entry(1, hostile, "denied", hostile, "token", hostile, hostile, 1, hostile, details), START
    )
    assert len(raw) <= LINE_BYTES_MAX and raw.count(b"\n") == 1
    line = decode(raw)
    assert line.fields["principal"] == hostile[:TEXT_CHARACTERS_MAX] + "..."
    assert "left_out" in line.fields["details"]


def test_details_are_plain_values() -> None:
    raw, _ = encode(entry(1, details={"path": Path("/x"), "none": None, "deep": {"a": 1}}), START)
    assert decode(raw).fields["details"] == {"path": "/x", "none": None, "deep": "{'a': 1}"}


@pytest.mark.parametrize("name", ["permissions", "topic", "value"])
def test_no_request_that_can_be_decoded_is_too_deep_for_a_line(
    tmp_path: Path, loop: asyncio.AbstractEventLoop, name: str
) -> None:
    """An error of another kind than ours would end the worker."""
    audit = Audit(writer_at(tmp_path), loop)
    depth = 0
    for depth in range(50, 1_000, 50):
        raw = msgspec.msgpack.encode({"op": "delete_topic", "args": {name: 0}})[:-1] + b"\x91" * depth + b"\1"
        try:
            request = wire.decode_control(raw, wire.Admin)
        except ProtocolError:
            break
        audit.request(ANN, request, 1)
    audit.close()
    told = [line for line in trail(tmp_path) if line["operation"] == "delete_topic"]
    assert len(told) == depth // 50 - (depth < 950) > 10 and not found(tmp_path)


def test_text_of_what_cannot_be_shown_is_a_mark() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    assert text_of(deep) == "..."
    while deep:
        deep = deep.pop()


@pytest.mark.parametrize("content", [b"", b"\n", b"{}\n", b'{"seq":1,"hash":"' + b"0" * 64 + b'"}\n'])
def test_what_is_no_line_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="hash"):
        decode(content)


def test_a_hash_that_fits_does_not_make_a_line() -> None:
    import hashlib

    body = b'{"seq":true'
    raw = body + b',"hash":"' + hashlib.sha256(body).hexdigest().encode() + b'"}\n'
    with pytest.raises(ValueError, match="no line of an audit file"):
        decode(raw)


# -- verification -------------------------------------------------------------------------------------------


def test_a_chain_that_nobody_touched_is_whole(tmp_path: Path) -> None:
    written(tmp_path)
    writer_at(tmp_path, worker=1).close()
    verified = verify(tmp_path)
    assert not verified.findings and not verified.notes and verified.lines == 6
    assert verified.heads[0] == read_head(tmp_path, 0)


def test_each_flip_of_each_byte_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, count=2)
    content = path.read_bytes()
    for position in range(len(content)):
        for mask in (1, 0x20, 0x80):
            changed = bytearray(content)
            changed[position] ^= mask
            path.write_bytes(changed)
            assert found(tmp_path), (position, mask)


def test_each_cut_is_found(tmp_path: Path) -> None:
    """Cut at every length from either end, and every piece of the middle at line borders and beside them."""
    path = written(tmp_path, count=3)
    content = path.read_bytes()
    borders = [0, *itertools.accumulate(map(len, content.splitlines(keepends=True)))]
    for size in range(len(content)):
        path.write_bytes(content[:size])
        assert found(tmp_path), f"kept {size}"
        path.write_bytes(content[-size:] if size else b"")
        assert found(tmp_path), f"kept the last {size}"
    near = sorted(
        {place + step for place in borders for step in (-1, 0, 1) if 0 <= place + step <= len(content)}
    )
    for start, end in itertools.combinations(near, 2):
        path.write_bytes(content[:start] + content[end:])
        assert found(tmp_path), (start, end)


def test_each_other_order_of_lines_is_found(tmp_path: Path) -> None:
    path = written(tmp_path, count=4)
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 5
    for order in itertools.permutations(lines):
        path.write_bytes(b"".join(order))
        assert bool(found(tmp_path)) == (list(order) != lines)


def test_lines_that_came_twice_or_were_made_up_are_found(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    for at in range(len(lines)):
        path.write_bytes(b"".join([*lines[: at + 1], *lines[at:]]))
        assert found(tmp_path)
        forged = encode(entry(99), decode(lines[at]).place)[0]
        path.write_bytes(b"".join([*lines[: at + 1], forged, *lines[at + 1 :]]))
        assert bool(found(tmp_path)) == (
            at + 1 < len(lines)
        )  # behind the end it is what a killed writer left


def test_files_that_are_missing_or_changed_places_are_found(tmp_path: Path) -> None:
    written(tmp_path, count=12, file_bytes_max=1_000)
    paths = [one.path for one in list_files(tmp_path)]
    assert len(paths) > 3 and not found(tmp_path)
    for path in paths:
        content = path.read_bytes()
        path.unlink()
        assert found(tmp_path), path
        path.write_bytes(content)
    first, second = paths[1].read_bytes(), paths[2].read_bytes()
    paths[1].write_bytes(second)
    paths[2].write_bytes(first)
    assert found(tmp_path)


def test_a_cut_of_end_and_head_together_is_found_by_a_head_that_was_kept_elsewhere(tmp_path: Path) -> None:
    path = written(tmp_path)
    kept = verify(tmp_path).heads
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    place = decode(lines[-2]).place
    (tmp_path / "worker-0.head").write_text(json.dumps({"seq": place.number, "hash": place.hash}))
    assert not found(tmp_path)
    assert "the end was cut" in found(tmp_path, anchors={0: [kept[0]]})[0]


def test_a_head_without_files_or_that_cannot_be_read_is_a_finding(tmp_path: Path) -> None:
    path = written(tmp_path)
    (tmp_path / "worker-0.head").write_text("{}")
    assert "cannot be read" in found(tmp_path)[0]
    (tmp_path / "worker-0.head").unlink()
    assert "cannot be read" in found(tmp_path)[0]
    path.unlink()
    with pytest.raises(NotFound, match="no audit files"):
        verify(tmp_path)
    with pytest.raises(NotFound, match="no audit files"):
        verify(tmp_path / "missing")


def test_the_trail_has_the_lines_of_all_workers_by_time(tmp_path: Path) -> None:
    path = written(tmp_path)
    other = writer_at(tmp_path, worker=1)
    other.append(entry(1))
    other.close()
    path.write_bytes(path.read_bytes() + b"no line\n{}\n[]\n")
    times = [line["time"] for line in trail(tmp_path)]
    assert times == sorted(times) and len(times) == 7
    assert {line["worker"] for line in trail(tmp_path)} == {0, 1}


# -- the writer ---------------------------------------------------------------------------------------------


def test_files_are_the_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        path = written(tmp_path / "audit")
    finally:
        os.umask(before)
    modes = {oct(one.stat().st_mode & 0o777) for one in (tmp_path / "audit").iterdir()}
    assert modes == {"0o600"} and path.parent.stat().st_mode & 0o777 == 0o700


def test_a_new_writer_goes_on_behind_the_old_one(tmp_path: Path) -> None:
    written(tmp_path)
    written(tmp_path)
    assert [one.number for one in list_files(tmp_path)] == [1, 2]
    assert verify(tmp_path).lines == 10 and not found(tmp_path)


def test_a_line_that_a_killed_writer_left_in_part_is_no_finding(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes() + encode(entry(9), Place(5, ZERO))[0][:40])
    verified = verify(tmp_path)
    assert not verified.findings and "not whole" in verified.notes[0]
    written(tmp_path)
    assert not found(tmp_path)
    path.write_bytes(path.read_bytes() + b"x")
    assert "does not know" in found(tmp_path)[0]


def test_a_cut_end_stays_visible_after_a_new_start(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]))
    written(tmp_path)
    assert any("is missing" in what for what in found(tmp_path))


def test_an_end_that_cannot_be_read_does_not_stop_a_start(tmp_path: Path) -> None:
    path = written(tmp_path)
    path.write_bytes(b"no line\n")
    written(tmp_path)
    assert found(tmp_path)
    assert [one["seq"] for one in trail(tmp_path)][:1] == [6]


def test_old_files_are_removed_and_the_chain_says_so(tmp_path: Path) -> None:
    written(tmp_path, count=12, file_bytes_max=1_000)
    old = [one.path for one in list_files(tmp_path)]
    for path in old[:-1]:
        os.utime(path, (1, 1))
    written(tmp_path, keep_us=1_000_000_000)
    left = [one.path for one in list_files(tmp_path)]
    assert left[0] == old[-1] and not found(tmp_path)
    left[0].unlink()  # one more than retention removed
    assert found(tmp_path)


def test_a_writer_that_goes_on_removes_old_files_behind_a_line(tmp_path: Path) -> None:
    os.utime(written(tmp_path), (1, 1))
    writer = writer_at(tmp_path, file_bytes_max=1)
    writer._keep_us = 1_000_000_000
    for number in range(4):
        writer.sync()
        writer.append(entry(number))
    writer.close()
    told = [line["details"]["files"] for line in trail(tmp_path) if line["operation"] == "audit.retention"]
    assert told == [["worker-0-000001.jsonl"]] and not found(tmp_path)
    assert list_files(tmp_path)[0].number == 2


def test_a_line_waits_for_no_disk_also_where_a_file_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on in the full file until another thread has made the next one."""
    os.utime(written(tmp_path), (1, 1))
    writer = writer_at(tmp_path, file_bytes_max=1)
    writer._keep_us = 1_000_000_000
    loop_thread, waited = threading.get_ident(), []
    for name in ("fdatasync", "fsync_directory", "open_new", "close", "unlink", "list_names"):
        honest = getattr(files, name)

        def counted(*given: Any, name: str = name, honest: Any = honest) -> Any:
            if threading.get_ident() == loop_thread:
                waited.append(name)
            return honest(*given)

        monkeypatch.setattr(files, name, counted)
    paths = []
    for number in range(8):
        writer.append(entry(number))
        paths.append(writer.path.name)
        if number % 2:
            other = threading.Thread(target=writer.sync)
            other.start()
            other.join()
    assert waited == []
    assert paths == [f"worker-0-00000{2 + number // 2}.jsonl" for number in range(8)]
    writer.close()
    monkeypatch.undo()
    assert not found(tmp_path) and not (tmp_path / "worker-0-000001.jsonl").exists()


def test_a_next_file_that_cannot_be_made_stops_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writer_at(tmp_path, file_bytes_max=1)
    for name in ("open_new", "fsync_directory"):
        with monkeypatch.context() as patched:
            patched.setattr(files, name, lambda _: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            writer.sync()
            writer.append(entry(1))
            assert writer.path.name == "worker-0-000001.jsonl" and len(list_files(tmp_path)) == 1
    writer.sync()
    writer.append(entry(2))
    assert writer.path.name == "worker-0-000002.jsonl"
    writer.close()
    assert not found(tmp_path)


def test_a_filled_file_is_on_the_disk_before_the_one_that_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power cut could take lines out of the middle of the chain."""
    writer = writer_at(tmp_path, file_bytes_max=1)
    writer.sync()  # makes the next file
    writer.append(entry(1))  # goes on there
    synced = []

    def noted(fd: int) -> None:
        synced.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}")))
        os.fdatasync(fd)

    monkeypatch.setattr(files, "fdatasync", noted)
    writer.sync()
    assert synced == ["worker-0-000001.jsonl", "worker-0-000002.jsonl"]
    writer.close()


def test_nothing_is_removed_without_an_age(tmp_path: Path) -> None:
    os.utime(written(tmp_path), (1, 1))
    written(tmp_path)
    assert len(list_files(tmp_path)) == 2


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_line_that_cannot_be_written_is_an_error_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    writer = writer_at(tmp_path)
    writer.append(entry(1))
    with monkeypatch.context() as patched:
        patched.setattr(files, "os", FaultyOs(("pwritev",), 1, fail_with(number)))
        with pytest.raises(StorageFull if number == errno.ENOSPC else StorageFailed):
            writer.append(entry(2))
    assert not found(tmp_path)
    writer.append(entry(3))
    writer.close()
    lost = [line["details"] for line in trail(tmp_path) if line["operation"] == "audit.lost"]
    assert lost == [{"lines": 1}] and not found(tmp_path)


def test_a_full_disk_gathers_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path)
    writer = AuditWriter(tmp_path, 0, Clock())
    with monkeypatch.context() as patched:
        patched.setattr(files, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        for number in range(5):
            with pytest.raises(StorageFull):
                writer.append(entry(number))
    assert len(list_files(tmp_path)) == 2
    writer.append(entry(5))
    writer.close()
    assert len(list_files(tmp_path)) == 2 and not found(tmp_path)


def test_an_old_file_that_cannot_be_read_stops_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = written(tmp_path)
    os.utime(old, (1, 1))
    writer = writer_at(tmp_path, file_bytes_max=1)
    writer._keep_us = 1_000_000_000
    read = trail_module._read

    def refused(path: Path, *rest: Any) -> bytes:
        if path == old:
            raise StorageFailed("a bad block")
        return read(path, *rest)

    monkeypatch.setattr(trail_module, "_read", refused)
    writer.sync()
    writer.append(entry(8))  # in the next file
    writer.sync()
    writer.append(entry(9))
    writer.close()
    monkeypatch.undo()
    assert old.exists() and not found(tmp_path)


def test_a_directory_that_cannot_be_listed_is_an_error_and_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = AuditWriter(tmp_path, 0, Clock())
    with monkeypatch.context() as patched:
        patched.setattr(files, "list_names", lambda _: (_ for _ in ()).throw(OSError(errno.EIO, "gone")))
        with pytest.raises(StorageFailed):
            writer.append(entry(1))
    writer.append(entry(2))
    writer.close()
    lost = [line["details"] for line in trail(tmp_path) if line["operation"] == "audit.lost"]
    assert lost == [{"lines": 1}]


def test_the_end_of_a_large_file_is_read_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention looks for the ends of many files while a worker waits."""
    path = written(tmp_path, count=600)
    assert path.stat().st_size > END_BYTES
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("the whole file is read"))
    line, torn = read_end(path)
    assert line is not None and (line.place.number, torn) == (601, 0)


def test_each_failing_call_leaves_a_chain_that_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for when in itertools.count(1):
        directory = tmp_path / str(when)
        faulty = FaultyOs(CALLS, when, fail_with(errno.EIO))
        acknowledged = _life(directory, faulty, monkeypatch)
        assert not found(directory), (when, faulty.fired)
        assert acknowledged <= {line["resource"] for line in trail(directory)}, (when, faulty.fired)
        if not faulty.fired:
            assert when > 20
            return


def test_kill_9_at_each_call_loses_no_acknowledged_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for when in itertools.count(1):
        directory = tmp_path / str(when)
        faulty = FaultyOs(CALLS, when, lambda faulty, name, arguments: faulty.die())
        acknowledged = _life(directory, faulty, monkeypatch)
        written(directory)  # the next life
        assert not found(directory), (when, faulty.fired)
        assert acknowledged <= {line["resource"] for line in trail(directory)}, (when, faulty.fired)
        if not faulty.fired:
            assert when > 20
            return


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_kill_9_in_each_write_loses_no_acknowledged_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """As above, but a share of the bytes got into the file: at least one, at most all."""

    def part(faulty: FaultyOs, name: str, arguments: tuple[Any, ...]) -> Any:
        fd, buffers, position = arguments
        os.pwritev(fd, [bytes(buffers[0])[: max(1, int(len(buffers[0]) * share))]], position)
        faulty.die()

    for when in itertools.count(1):
        directory = tmp_path / str(when)
        faulty = FaultyOs(("pwritev",), when, part)
        acknowledged = _life(directory, faulty, monkeypatch)
        written(directory)
        assert acknowledged <= {line["resource"] for line in trail(directory)}, when
        assert not found(directory), when
        if not faulty.fired:
            assert when > 10
            return


def _life(directory: Path, faulty: FaultyOs, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Open, append over several files, sync and close; return the resources of acknowledged lines."""
    acknowledged = set()
    with monkeypatch.context() as patched:
        patched.setattr(files, "os", faulty)
        writer = AuditWriter(directory, 0, Clock(), file_bytes_max=700)
        try:
            try:
                writer.open()
            except StorageFailed:
                pass
            for number in range(6):
                try:
                    writer.append(entry(number))
                    acknowledged.add(f"/default/t{number}")
                    writer.sync()
                except (StorageFailed, OSError):
                    continue
            writer.close()
        except Killed:
            pass
    return acknowledged


# -- what a worker tells ------------------------------------------------------------------------------------


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    made = asyncio.new_event_loop()
    yield made
    made.run_until_complete(made.shutdown_default_executor())
    made.close()


def test_denials_are_one_line_a_second_for_each_source(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    clock = Clock()
    audit = Audit(writer_at(tmp_path), loop, now_us=clock)
    for _ in range(100):
        audit.tell(ANN, "delete_topic", "/default/a", DENIED, source="10.0.0.1", code=1161)
    audit.tell(ANN, "delete_topic", "/default/a", DENIED, source="10.0.0.2", code=1161)
    clock.now_us += 1_000_000
    audit.sweep()
    audit.tell(ANN, "delete_topic", "/default/a", DENIED, source="10.0.0.1", code=1161)
    audit.close()
    told = [
        (line["source"], line["details"]) for line in trail(tmp_path) if line["operation"] == "delete_topic"
    ]
    once = [("10.0.0.1", {}), ("10.0.0.2", {})]
    assert sorted(told, key=str) == sorted([*once, ("10.0.0.1", {"more": 99}), ("10.0.0.1", {})], key=str)


@pytest.mark.parametrize(
    ("asker", "told"),
    [(ANONYMOUS, True), (ANN, True), (INTERNAL, False), (Identity(ANN.principal, "forwarded"), False)],
)
def test_only_a_broker_can_say_that_a_request_was_told_elsewhere(
    tmp_path: Path, loop: asyncio.AbstractEventLoop, asker: Identity, told: bool
) -> None:
    audit = Audit(writer_at(tmp_path), loop)
    audit.request(asker, wire.Admin("delete_topic", "", {"topic": "/default/a"}, forwarded=True), 7)
    audit.close()
    found = [line["details"] for line in trail(tmp_path) if line["operation"] == "delete_topic"]
    assert found == ([{"forwarded": True}] if told else [])


def test_refused_credentials_are_told_folded_and_hold_nothing_secret(
    tmp_path: Path, loop: asyncio.AbstractEventLoop
) -> None:
    secret = b"a secret of thirty-two bytes, or more"
    clock = Clock()
    audit = Audit(writer_at(tmp_path), loop, now_us=clock)
    admission = Admission(
        Credentials([secret_key("", secret)]), lambda: Access(), failures_per_minute=3, now_us=clock
    )
    admission.on_refused = audit.refused
    good = admission.credentials.sign(ANN.principal, 60, clock.now_us)
    admission.admit(good, "192.0.2.1")
    for token in [good[:-2], "guess-5ecre7", ""] * 20:
        with pytest.raises(NotAuthenticated):
            admission.admit(token, "192.0.2.1")
    clock.now_us += 1_000_000
    audit.close()
    lines = [line for line in trail(tmp_path) if line["operation"] == "login"]
    assert [line["details"].get("more") for line in lines] == [None, 59]
    assert {(one["source"], one["outcome"], one["principal"]) for one in lines} == {
        ("192.0.2.1", "denied", "anonymous")
    }
    raw = b"".join(one.path.read_bytes() for one in list_files(tmp_path))
    assert b"5ecre7" not in raw and good[:-2].encode() not in raw and secret not in raw


def test_every_denied_grpc_call_is_told(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    audit = Audit(writer_at(tmp_path), loop)
    row = GRPC["/danube.ProducerService/CreateProducer"]
    asked = pb.ProducerRequest(topic_name="/default/a")
    audit.call(ANN, row, asked, "192.0.2.1:5")
    audit.call(ANN, row, asked, "192.0.2.1:5", code=1161)
    audit.close()
    told = [(line["resource"], line["outcome"]) for line in trail(tmp_path) if line["operation"] == row.name]
    assert told == [("/default/a", "denied")]


def test_many_sources_of_denials_take_no_more_memory(tmp_path: Path, loop: asyncio.AbstractEventLoop) -> None:
    audit = Audit(writer_at(tmp_path), loop)
    for number in range(1_500):
        audit.tell(ANN, "login", "", DENIED, source=f"s{number}", code=1160)
    assert len(audit._folded) <= 1_024
    audit.close()


def test_a_line_that_is_required_and_cannot_be_written_refuses_the_request(
    tmp_path: Path, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    required, other = (
        Audit(writer_at(tmp_path, worker), loop, required=required)
        for worker, required in ((0, True), (1, False))
    )
    with monkeypatch.context() as patched, caplog.at_level(logging.ERROR):
        patched.setattr(files, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
        with pytest.raises(StorageFull):
            required.tell(ANN, "delete_topic", "/default/a")
        other.tell(ANN, "delete_topic", "/default/a")
        required.tell(ANN, "delete_topic", "/default/a", DENIED)  # refused anyway
    assert "an audit line was not written" in caplog.text
    required.close()
    other.close()


def test_lines_are_synced_in_groups(
    tmp_path: Path, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    synced = []
    audit = Audit(writer_at(tmp_path), loop)

    async def tell() -> None:
        for number in range(50):
            audit.tell(ANN, "delete_topic", f"/default/{number}")
        while not synced:
            await asyncio.sleep(0.01)

    monkeypatch.setattr(files, "fdatasync", synced.append)
    loop.run_until_complete(tell())
    assert len(synced) == 1
    monkeypatch.setattr(files, "fdatasync", lambda fd: (_ for _ in ()).throw(OSError(errno.EIO, "gone")))
    audit.tell(ANN, "delete_topic", "/default/x")
    audit._sync_in_thread()
    assert "not synced" in caplog.text
    monkeypatch.undo()
    audit.tell(ANN, "delete_topic", "/default/y")
    audit.close()
    assert len(list_files(tmp_path)) == 2 and not found(tmp_path)  # after a failed sync a new file begins


def test_a_disk_that_hangs_holds_one_thread(
    tmp_path: Path, loop: asyncio.AbstractEventLoop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_module, "SYNC_DELAY_S", 0)
    audit = Audit(writer_at(tmp_path), loop)
    hanging, begun = threading.Event(), []

    def sync(fd: int) -> None:
        begun.append(fd)
        hanging.wait(20)

    monkeypatch.setattr(files, "fdatasync", sync)

    async def tell() -> None:
        audit.tell(ANN, "delete_topic", "/default/a")
        while not begun:
            await asyncio.sleep(0)
        for number in range(20):
            audit.tell(ANN, "delete_topic", f"/default/{number}")
            await asyncio.sleep(0.005)
        assert len(begun) == 1
        hanging.set()
        while len(begun) < 2:  # what was written meanwhile
            await asyncio.sleep(0)
        while audit._sync_due is not None:
            await asyncio.sleep(0)

    loop.run_until_complete(tell())
    assert len(begun) == 2
    audit.close()


def test_the_head_is_named_in_the_log(
    tmp_path: Path, loop: asyncio.AbstractEventLoop, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    audit = Audit(writer_at(tmp_path), loop, now_us=clock)
    with caplog.at_level(logging.INFO, "danube"):
        audit.sweep()
        audit.sweep()
        assert caplog.text.count("audit head") == 1
        audit.tell(ANN, "delete_topic", "/default/a")
        audit.sweep()
        assert caplog.text.count("audit head") == 1
        clock.now_us += 60_000_000
        audit.sweep()
    assert caplog.text.count("audit head") == 2
    audit.close()
