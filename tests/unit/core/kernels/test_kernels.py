"""Kernels agree with their twins, load once, and stay out of processes that do not ask for them."""

from __future__ import annotations

import itertools
import json
import os
import random
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import google_crc32c
import numpy as np
import pytest

from danube.core import kernels
from danube.core.batch import checksum
from danube.core.batch.columns import encode
from danube.core.batch.format import stamp
from danube.core.batch.scan import ScanResult, StopReason, scan, scan_twin
from danube.core.kernels import cache, crc, entries, jit
from danube.core.kernels.cache import Compiled
from danube.errors import InvalidArgument

needs_kernels = pytest.mark.skipif(bool(jit.reason), reason=jit.reason)


def _stored(payloads: list[bytes], base_offset: int) -> bytes:
    batch = bytearray(encode(payloads, publish_time_us=1).to_bytes())
    stamp(batch, base_offset, 1, 2)
    return bytes(batch)


def _log(counts: list[int], base_offset: int = 5) -> list[bytes]:
    parts = []
    for count in counts:
        parts.append(_stored([b"x" * (count % 50)] * count, base_offset))
        base_offset += count
    return parts


def _plain(result: ScanResult) -> tuple[list[list[int]], int, StopReason]:
    return [column.tolist() for column in result[:4]], result.stop, result.reason


def _agreed(
    buffer: bytes, expected_offset: int | None, start: int = 0, end: int | None = None
) -> tuple[list[list[int]], int, StopReason]:
    """Scan by kernel and by twin; both must say the same."""
    found = _plain(scan(buffer, start, end, expected_offset))
    stop = len(buffer) if end is None else min(end, len(buffer))
    assert found == _plain(scan_twin(buffer, start, stop, expected_offset))
    return found


def test_a_scan_finds_every_batch_and_ends_at_the_end(kernels_or_twins: str) -> None:
    parts = _log([1, 10, 3, 100])
    (positions, sizes, offsets, counts), stop, reason = _agreed(b"".join(parts), 5)
    assert sizes == [len(part) for part in parts]
    assert positions == np.cumsum([0, *sizes[:-1]]).tolist()
    assert (offsets, counts) == ([5, 6, 16, 19], [1, 10, 3, 100])
    assert (stop, reason) == (sum(sizes), StopReason.END)


def test_a_scan_of_nothing_is_empty(kernels_or_twins: str) -> None:
    log = b"".join(_log([1]))
    for start, end in ((0, 0), (len(log), None), (8, 8), (16, 3)):
        (positions, _, _, _), stop, reason = _agreed(log, 5, start, end)
        assert (positions, stop, reason) == ([], start, StopReason.END)
    with pytest.raises(InvalidArgument):
        scan(log, len(log) + 1)
    with pytest.raises(InvalidArgument):
        scan(log, -1)


def test_a_scan_takes_more_batches_than_it_has_room_for_at_once(kernels_or_twins: str) -> None:
    one = [_stored([b"x"], offset) for offset in range(3)]
    log = b"".join(_stored([b"x"], offset) for offset in range(20_000))
    (_, _, offsets, _), stop, reason = _plain(scan(log, 0, None, 0))
    assert offsets == list(range(20_000))
    assert (stop, reason) == (20_000 * len(one[0]), StopReason.END)
    broken = log[: 512 * len(one[0])] + one[2]
    assert _agreed(broken, 0)[1:] == (512 * len(one[0]), StopReason.OFFSET_MISMATCH)


def test_a_scan_of_a_log_cut_anywhere_stops_at_the_cut_batch(kernels_or_twins: str) -> None:
    parts = _log([1, 4, 2])
    log = b"".join(parts)
    ends = np.cumsum([0, *map(len, parts)]).tolist()
    for size in range(len(log) + 1):
        (positions, _, _, _), stop, reason = _agreed(log[:size], 5)
        assert stop == max(end for end in ends if end <= size)
        assert len(positions) == ends.index(stop)
        assert reason is (StopReason.END if size in ends else StopReason.CUT)


def test_a_scan_stops_at_every_flipped_bit(kernels_or_twins: str) -> None:
    parts = _log([1, 4, 2])
    log = bytearray(b"".join(parts))
    start, end = len(parts[0]), len(parts[0]) + len(parts[1])
    for position in range(start, end):
        for bit in range(8):
            log[position] ^= 1 << bit
            (positions, _, _, _), stop, reason = _agreed(bytes(log), 5)
            assert (len(positions), stop) == (1, start)
            in_header = position - start < 28 or 32 <= position - start < 36
            allowed = {StopReason.BAD_HEADER} if in_header else {StopReason.BAD_HEADER, StopReason.BAD_BODY}
            assert reason in allowed
            log[position] ^= 1 << bit


def test_a_scan_without_an_expected_offset_takes_gaps(kernels_or_twins: str) -> None:
    parts = [_stored([b"a"], 7), _stored([b"b"], 3)]
    assert _agreed(b"".join(parts), None)[0][2] == [7, 3]
    assert _agreed(b"".join(parts), 7)[1:] == (len(parts[0]), StopReason.OFFSET_MISMATCH)
    assert _agreed(b"".join(parts), 8)[1:] == (0, StopReason.OFFSET_MISMATCH)


def test_a_scan_of_zeros_or_noise_finds_nothing(kernels_or_twins: str, source: random.Random) -> None:
    for noise in (bytes(4096), source.randbytes(4096), b"DNB1" * 1000):
        assert _agreed(noise, None)[1:] == (0, StopReason.BAD_HEADER)
        assert _agreed(noise[:50], None)[1:] == (0, StopReason.CUT)


def test_a_scan_refuses_headers_that_are_well_summed_and_malformed(kernels_or_twins: str) -> None:
    """A checksum proves what was written, not that it makes sense."""
    honest = _stored([b"abc"], 5)
    for position, value in ((36, 0x0800), (40, 0), (96, 1 << 30), (102, 1), (38, 0xFFF0)):
        batch = bytearray(honest)
        batch[position : position + 2] = (value & 0xFFFF).to_bytes(2, "little")
        if position == 96:
            batch[96:100] = value.to_bytes(4, "little")
        batch[28:32] = google_crc32c.value(bytes(batch[36:])).to_bytes(4, "little")
        stamp(batch, 5, 1, 2)
        assert _agreed(bytes(batch), 5)[1:] == (0, StopReason.BAD_HEADER), position


def test_the_checksum_kernel_is_crc32c_at_every_size_and_alignment(
    source: random.Random, with_kernels: None
) -> None:
    crc32c_of = kernels._checksum_by(kernels.compiled)
    data = source.randbytes(300_000)
    sizes = [*range(70), 191, 192, 575, 576, 577, 583, 6143, 6144, 6145, 6720, 39_000]
    sizes += [98_303, 98_304, 98_305, 98_880, 105_199, 250_001]
    for size in sizes:
        for start in (0, 1, 7):
            expected = google_crc32c.value(data[start : start + size])
            assert crc32c_of(memoryview(data)[start : start + size]) == expected
            assert crc32c_of(memoryview(bytearray(data))[start : start + size]) == expected


def test_the_table_steps_are_the_instructions(source: random.Random) -> None:
    for _ in range(50):
        data = source.randbytes(source.randrange(40))
        state = np.uint64(0xFFFFFFFF)
        whole = len(data) & ~7
        for start in range(0, whole, 8):
            state = crc._table_word(state, np.uint64(int.from_bytes(data[start : start + 8], "little")))
        for octet in data[whole:]:
            state = crc._table_octet(state, octet)
        assert int(state) ^ 0xFFFFFFFF == google_crc32c.value(data)


@needs_kernels
@pytest.mark.slow
def test_without_the_instruction_the_kernel_steps_by_tables() -> None:
    code = """
import google_crc32c
import numpy
from danube.core.kernels import jit
jit.hardware_crc = False
from danube.core.kernels import crc
data = bytes(range(256)) * 500
for size in (0, 1, 8, 9, 600, 7000, 12_345, 123_456):
    octets = numpy.frombuffer(data[:size], numpy.uint8)
    assert crc.crc32c(octets, 0, size) == google_crc32c.value(data[:size]), size
print(crc._word is jit.crc_word)
"""
    assert _run(code) == "False"


def test_text_is_valid_where_python_decodes_it(source: random.Random, with_kernels: None) -> None:
    interesting = [0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xDF, 0xE0, 0xEC, 0xED]
    interesting += [0xEE, 0xEF, 0xF0, 0xF1, 0xF3, 0xF4, 0xF5, 0xFF]
    texts = [bytes(octets) for size in range(4) for octets in itertools.product(interesting, repeat=size)]
    texts += [bytes(source.choices(interesting, k=4)) for _ in range(20_000)]
    texts += [b"ascii" * size + text for size in range(4) for text in texts[:600]]
    texts += [chr(point).encode("utf-8", "surrogatepass") for point in range(0x80, 0x110000, 97)]
    valid = 0
    for text in texts:
        try:
            text.decode()
            expected = True
        except UnicodeDecodeError:
            expected = False
        octets = np.frombuffer(text, np.uint8)
        assert kernels.compiled.text_is_valid(octets, 0, len(octets)) == expected, text
        valid += expected
    assert 0 < valid < len(texts)


@needs_kernels
def test_loading_installs_the_checksum_kernel_and_unloading_removes_it() -> None:
    data = bytearray(os.urandom(100_000))
    expected = google_crc32c.value(bytes(data))
    before = kernels.available
    try:
        assert kernels.load().available
        assert (checksum._kernel is not None) == jit.hardware_crc
        assert checksum.crc32c(data) == checksum.crc32c(memoryview(data)) == expected
        kernels.unload()
        assert checksum._kernel is None
        assert checksum.crc32c(data) == expected
    finally:
        if before:
            kernels.load()


def _run(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip()


def test_reading_and_encoding_never_import_numba() -> None:
    code = """
import sys
from danube.core import kernels
from danube.core.batch import columns, selection
columns.BatchView(columns.encode([b"a"], publish_time_us=1).to_bytes()).check()
print(kernels.available, "numba" in sys.modules, "llvmlite" in sys.modules)
"""
    assert _run(code) == "False False False"


def test_kernels_can_be_switched_off() -> None:
    code = """
import sys
from danube.core import kernels
report = kernels.load(print)
print(report.available, report.reason, "numba" in sys.modules, kernels.available)
"""
    assert _run(code, DANUBE_KERNELS="off") == "False switched off by DANUBE_KERNELS=off False False"


def test_a_client_loads_them_when_it_is_told_to() -> None:
    code = """
import danube
before = danube.core.kernels.available if hasattr(danube, "core") else False
print(before, danube.load_kernels(), danube.core.kernels.available)
"""
    expected = str(kernels.load().available)
    assert _run(code) == f"False {expected} {expected}"
    assert _run(code, DANUBE_KERNELS="off") == "False False False"


def test_without_numba_the_twins_are_used() -> None:
    code = """
import sys
sys.modules["numba"] = None
from danube.core import kernels
from danube.core.kernels import batch, crc
print(kernels.load().available, kernels.load().reason)
"""
    assert _run(code, DANUBE_KERNELS="") == "False numba is not installed"


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_starts_no_thread() -> None:
    code = """
import json, os, sys, threading
import numpy  # whose OpenBLAS may start threads of its own
from danube.core import kernels
lines = []
before = len(os.listdir("/proc/self/task"))
report = kernels.load(lines.append)
again = kernels.load(lines.append)
started = len(os.listdir("/proc/self/task")) - before
pid = os.fork()
if pid == 0:
    os._exit(0 if kernels.available else 1)
_, status = os.waitpid(pid, 0)
imported = "numba" in sys.modules
print(json.dumps([lines, again.available, imported, threading.active_count(), started, status]))
"""
    _run(code, DANUBE_KERNELS="")  # fills the cache where nobody did before
    lines, again, imported, threads, started, status = json.loads(_run(code, DANUBE_KERNELS=""))
    assert (lines, again, imported) == ([], True, False)
    assert (threads, started, status) == (1, 0, 0)


@needs_kernels
@pytest.mark.slow
def test_kernels_kept_before_a_source_changed_are_compiled_again(tmp_path: Path) -> None:
    folder = {"NUMBA_CACHE_DIR": str(tmp_path)}  # this test's own, which it spoils
    other = "from danube.core.kernels import cache\ncache.sources_digest = lambda: b'of other sources'\n"
    compiled, kept = [["compiled kernel crc32c (1 of 1)"], True, True, ""], [[], False, True, ""]
    assert json.loads(_run(LOAD_ONE, **folder)) == compiled
    assert json.loads(_run(LOAD_ONE, **folder)) == kept
    assert json.loads(_run(other + LOAD_ONE, **folder)) == compiled
    assert json.loads(_run(other + LOAD_ONE, **folder)) == kept
    assert json.loads(_run(LOAD_ONE, **folder)) == compiled


LOAD_ONE = """
import json, sys
import numpy
from danube.core import kernels
from danube.core.kernels import compiling
compiling.MODULES = ("crc",)
compiling.cursor.SIGNATURES = {}
lines = []
report = kernels.load(lines.append)
right = kernels.compiled.crc32c(numpy.frombuffer(b"123456789", numpy.uint8), 0, 9) == 0xE3069283
print(json.dumps([lines, "numba" in sys.modules, right, report.warning]))
"""


def _load_one(folder: Path) -> list[Any]:
    found: list[Any] = json.loads(_run(LOAD_ONE, NUMBA_CACHE_DIR=str(folder)))
    return found


CONTENT = cache.pack(Compiled(["crc32c"], True, b"code of a kernel"))


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "of other sources", "a folder", "gone"])
def test_a_damaged_cache_file_is_passed_over(damage: str, tmp_path: Path) -> None:
    assert cache._write(str(tmp_path), "k.kernels", CONTENT)
    file = tmp_path / "k.kernels"
    content = bytearray(file.read_bytes())
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage != "gone":
        content[len(content) // 2] ^= damage == "flipped"
        content[0] ^= damage == "of other sources"
        file.write_bytes(b"" if damage == "empty" else content[: len(content) - (damage == "cut")])
    assert cache._read(str(tmp_path), "k.kernels") is None


def test_kernels_come_out_of_the_cache_as_they_went_in() -> None:
    compiled = cache.unpack(CONTENT)
    assert compiled == (["crc32c"], True, b"code of a kernel")
    with pytest.raises(ValueError, match="damaged"):
        cache.unpack(CONTENT[:-1])
    with pytest.raises(ValueError, match="damaged"):
        cache.unpack(b"")


@needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("code", [b"no object file", b""])
def test_a_cache_that_cannot_be_linked_is_compiled_again(code: bytes, tmp_path: Path) -> None:
    compiled, kept = [["compiled kernel crc32c (1 of 1)"], True, True, ""], [[], False, True, ""]
    assert _load_one(tmp_path) == compiled
    (file,) = (tmp_path / "danube").glob("all.*.kernels")
    file.write_bytes(cache.pack(Compiled(["crc32c"], True, code)))
    assert _load_one(tmp_path) == compiled
    assert _load_one(tmp_path) == kept, "it took the place of what cannot be linked"


@needs_kernels
@pytest.mark.slow
def test_without_a_folder_to_write_kernels_are_compiled_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    warning = "no cache folder can be written; NUMBA_CACHE_DIR names one that can"
    assert _load_one(tmp_path / "file") == [["compiled kernel crc32c (1 of 1)"], True, True, warning]


def test_folders_are_tried_in_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    beside = str(Path(cache.__file__).parent / "__pycache__")
    private = str(tmp_path / f"danube-kernels-{os.getuid()}")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache.folders() == [beside, "/cache/danube", private]
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/users/of")
    assert cache.folders() == [beside, "/users/of/.cache/danube", private]
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # a user that no table names, without HOME
    assert cache.folders() == [beside, private]
    monkeypatch.chdir(tmp_path)
    assert cache.folders() == [beside], "no code is loaded from the current folder"
    monkeypatch.setattr("tempfile.gettempdir", lambda: (_ for _ in ()).throw(FileNotFoundError()))
    assert cache.folders() == [beside]
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/chosen")
    assert cache.folders() == ["/chosen/danube"]


def test_kernels_beside_the_code_can_be_read_by_all_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "_HERE", str(tmp_path))
    beside, elsewhere = tmp_path / "__pycache__", tmp_path.parent / "private"
    for folder in (beside, elsewhere):
        assert cache._write(str(folder), "k.kernels", CONTENT)
    assert stat.S_IMODE((beside / "k.kernels").stat().st_mode) == 0o644
    assert stat.S_IMODE(beside.stat().st_mode) & 0o055 == 0o055
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o700


def test_code_of_another_user_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache._write(str(tmp_path), "k.kernels", CONTENT)
    assert cache._read(str(tmp_path), "k.kernels") == CONTENT
    own = os.stat(tmp_path).st_uid
    monkeypatch.setattr(cache, "_trusted", lambda owner: owner != own)
    assert cache._read(str(tmp_path), "k.kernels") is None
    assert not cache._write(str(tmp_path), "other.kernels", CONTENT)
    assert [one.name for one in tmp_path.iterdir()] == ["k.kernels"]


def test_a_full_disk_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert not cache._write(str(tmp_path), "k.kernels", CONTENT)
    assert list(tmp_path.iterdir()) == []


@needs_kernels
def test_a_numba_that_fails_in_any_way_leaves_the_twins(tmp_path: Path) -> None:
    code = """
from danube.core import kernels
from danube.core.kernels import compiling
def fail(progress): raise RuntimeError("cannot compile")
compiling.compile_all = fail
report = kernels.load()
print(report.available, kernels.available, "RuntimeError: cannot compile" in report.reason)
"""
    assert _run(code, DANUBE_KERNELS="", NUMBA_CACHE_DIR=str(tmp_path)) == "False False True"


def test_a_numba_that_breaks_while_it_is_imported_leaves_the_twins(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise AttributeError('module numpy has no attribute bool8')")
    code = "import danube, danube.core.kernels as k; print(danube.load_kernels(), k.load().reason)"
    found = _run(code, DANUBE_KERNELS="", PYTHONPATH=f"{tmp_path}{os.pathsep}{os.getcwd()}")
    assert found.startswith("False kernels cannot be compiled: ImportError: numba cannot be imported: ")
    assert found.endswith("module numpy has no attribute bool8")


def test_a_kernel_takes_what_it_was_made_for(with_kernels: None) -> None:
    """A writable array is taken as the read-only one that the kernel was made for, and others are refused."""
    scan_batches, text_is_valid = kernels.compiled.scan_batches, kernels.compiled.text_is_valid
    data = np.zeros(64, np.uint8)
    readable = np.frombuffer(bytes(64), np.uint8)
    rows, result = np.zeros((4, 4), np.int64), np.zeros(3, np.int64)
    for octets in (data, readable, data.view(np.memmap)):
        assert text_is_valid(octets, 0, 64) is True
        assert scan_batches(octets, 0, 64, -1, rows, result) is None
    assert text_is_valid(data, np.int64(0), np.uint8(64)) is True
    refused: tuple[tuple[Any, ...], ...] = (
        (data, 0),
        (data, 0, 64, 1),
        (bytes(64), 0, 64),
        (None, 0, 64),
        (data.astype(np.int8), 0, 64),
        (data.astype(np.float64), 0, 64),
        (data.reshape(8, 8), 0, 64),
        (np.zeros(128, np.uint8)[::2], 0, 64),
        (data, "0", 64),
        (data, 0.5, 64),
    )
    for arguments in refused:
        with pytest.raises(TypeError):
            text_is_valid(*arguments)
    with pytest.raises(OverflowError):
        text_is_valid(data, 0, 1 << 63)
    for bad in (rows.astype(">i8"), rows.T, rows.astype(np.uint64), rows[0]):
        with pytest.raises(TypeError, match="scan_batches"):
            scan_batches(data, 0, 64, -1, bad, result)
    read_only = result.copy()
    read_only.flags.writeable = False
    with pytest.raises(TypeError, match="scan_batches"):
        scan_batches(data, 0, 64, -1, rows, read_only)


FIELDS = ("DATA", "DIMENSIONS_COUNT", "DESCRIPTION", "FLAGS", "TYPE_NUMBER", "BYTE_ORDER", "DIMENSIONS")


@pytest.mark.parametrize("field", FIELDS)
def test_where_numpy_lays_out_arrays_otherwise_the_twins_are_used(
    field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernels.load_kept().available:
        pytest.skip("no kernels here")
    kernels.unload()
    monkeypatch.setattr(kernels, "compiled", None)
    monkeypatch.setattr(entries, f"_{field}", getattr(entries, f"_{field}") + 8)
    report = kernels.load()
    assert not report.available and not kernels.available
    assert report.reason == "this numpy lays out arrays in another way than kernels read them"


def test_kernels_count_references_right(with_kernels: None) -> None:
    data = np.zeros(64, np.uint8)
    before = [sys.getrefcount(one) for one in (data, None, True, TypeError)]
    for _ in range(1000):
        kernels.compiled.text_is_valid(data, 0, 64)
        kernels.compiled.seal(np.zeros(104, np.uint8))
        with pytest.raises(TypeError):
            kernels.compiled.text_is_valid(data, 0, None)
    after = [sys.getrefcount(one) for one in (data, None, True, TypeError)]
    assert all(abs(one - other) < 100 for one, other in zip(before, after, strict=True))


def test_kernels_that_compute_wrongly_are_not_used(
    with_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = cache.read()
    if content is None:
        pytest.skip("no cache folder can be written")
    before = kernels.compiled
    monkeypatch.setattr(kernels, "_CHECKED", (b"123456789", 1))
    with pytest.raises(ValueError, match="wrong checksum"):
        kernels.install(content)
    assert kernels.compiled is before
