"""Kernels agree with their twins, load once, and stay out of processes that do not ask for them."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import random
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
from danube.core.kernels import cache, crc, jit
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


@needs_kernels
def test_the_checksum_kernel_is_crc32c_at_every_size_and_alignment(source: random.Random) -> None:
    data = source.randbytes(300_000)
    sizes = [*range(70), 191, 192, 575, 576, 577, 583, 6143, 6144, 6145, 6720, 39_000]
    sizes += [98_303, 98_304, 98_305, 98_880, 105_199, 250_001]
    for size in sizes:
        for start in (0, 1, 7):
            expected = google_crc32c.value(data[start : start + size])
            assert crc.crc32c_of(memoryview(data)[start : start + size]) == expected
            assert crc.crc32c_of(memoryview(bytearray(data))[start : start + size]) == expected


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
def test_without_the_instruction_the_kernel_steps_by_tables(tmp_path: Path) -> None:
    code = """
import google_crc32c
from danube.core.kernels import jit
jit.hardware_crc = False
from danube.core.kernels import crc
data = bytes(range(256)) * 500
for size in (0, 1, 8, 9, 600, 7000, 12_345, 123_456):
    assert crc.crc32c_of(memoryview(data[:size])) == google_crc32c.value(data[:size]), size
print(crc._word is jit.crc_word)
"""
    # A cache of its own: the same kernel is compiled differently here.
    assert _run(code, NUMBA_CACHE_DIR=str(tmp_path)) == "False"


@needs_kernels
def test_text_is_valid_where_python_decodes_it(source: random.Random) -> None:
    kernels_batch = importlib.import_module("danube.core.kernels.batch")
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
        assert kernels_batch.text_is_valid(octets, 0, len(octets)) == expected, text
        valid += expected
    assert 0 < valid < len(texts)


@needs_kernels
def test_loading_installs_the_checksum_kernel_and_unloading_removes_it() -> None:
    data = bytearray(os.urandom(100_000))
    expected = google_crc32c.value(bytes(data))
    before = kernels.available
    try:
        assert kernels.load().available
        assert checksum._kernel is (crc.crc32c_of if jit.hardware_crc else None)
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
    expected = str(not jit.reason)
    assert _run(code) == f"False {expected} {expected}"
    assert _run(code, DANUBE_KERNELS="off") == "False False False"


def test_without_numba_the_twins_are_used() -> None:
    code = """
import sys
sys.modules["numba"] = None
from danube.core import kernels
from danube.core.kernels import batch, crc
print(kernels.load().available, kernels.load().reason.startswith("numba cannot be imported"))
"""
    assert _run(code, DANUBE_KERNELS="") == "False True"


@pytest.mark.slow
def test_a_second_start_compiles_nothing_and_starts_no_thread() -> None:
    code = """
import json, os, threading
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
print(json.dumps([report.compiled, lines, again.compiled, threading.active_count(), started, status]))
"""
    _run(code, DANUBE_KERNELS="")  # fills the cache where nobody did before
    compiled, lines, again, threads, started, status = json.loads(_run(code, DANUBE_KERNELS=""))
    assert (compiled, lines, again) == ([], [], [])
    assert (threads, started, status) == (1, 0, 0)


@needs_kernels
@pytest.mark.slow
def test_a_kernel_cached_before_a_source_changed_is_compiled_again(tmp_path: Path) -> None:
    load = """
compiled, cached = jit.compile_all()
print(*compiled, "/", *cached, crc.crc32c_of(memoryview(b"123456789")) == 0xE3069283)
"""
    start = "from danube.core.kernels import cache, crc, jit"
    _run(start + load)
    assert _run(start + load) == "/ crc32c True"
    changed = "\ncache.sources_digest = lambda: b'of other sources'"
    folder = {"NUMBA_CACHE_DIR": str(tmp_path)}  # this test's own, which it spoils
    assert _run(start + changed + load, **folder) == "crc32c / True"
    assert _run(start + changed + load, **folder) == "/ crc32c True"
    assert _run(start + load, **folder) == "crc32c / True"


LOAD_ONE = """
import json, os
from danube.core.kernels import cache, crc, jit
compiled, cached = jit.compile_all()
right = crc.crc32c_of(memoryview(b"123456789")) == 0xE3069283
print(json.dumps([compiled, cached, right, jit.unkept()]))
"""


def _load_one(folder: Path) -> list[Any]:
    found: list[Any] = json.loads(_run(LOAD_ONE, NUMBA_CACHE_DIR=str(folder)))
    return found


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "of other sources", "a folder", "gone"])
def test_a_damaged_cache_file_is_passed_over(damage: str, tmp_path: Path) -> None:
    assert cache._write(str(tmp_path), "k.kernel", b"code of a kernel")
    file = tmp_path / "k.kernel"
    content = bytearray(file.read_bytes())
    file.unlink()
    if damage == "a folder":
        file.mkdir()
    elif damage != "gone":
        content[len(content) // 2] ^= damage == "flipped"
        content[0] ^= damage == "of other sources"
        file.write_bytes(b"" if damage == "empty" else content[: len(content) - (damage == "cut")])
    assert cache._read(str(tmp_path), "k.kernel") is None


@needs_kernels
@pytest.mark.slow
def test_a_cache_that_numba_cannot_read_is_compiled_again(tmp_path: Path) -> None:
    assert _load_one(tmp_path) == [["crc32c"], [], True, False]
    (kept,) = (tmp_path / "danube").glob("crc.crc32c.*.kernel")
    kept.write_bytes(cache._digest(b"no pickle") + b"no pickle")
    assert _load_one(tmp_path) == [["crc32c"], [], True, False]
    assert _load_one(tmp_path) == [[], ["crc32c"], True, False], "it took the place of what cannot be read"


@needs_kernels
@pytest.mark.slow
def test_without_a_folder_to_write_kernels_are_compiled_each_time(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert _load_one(tmp_path / "file") == [["crc32c"], [], True, True]


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


def test_code_of_another_user_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache._write(str(tmp_path), "k.kernel", b"code")
    assert cache._read(str(tmp_path), "k.kernel") == b"code"
    own = os.stat(tmp_path).st_uid
    monkeypatch.setattr(cache, "_trusted", lambda owner: owner != own)
    assert cache._read(str(tmp_path), "k.kernel") is None
    assert not cache._write(str(tmp_path), "other.kernel", b"code")
    assert [one.name for one in tmp_path.iterdir()] == ["k.kernel"]


def test_a_full_disk_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert not cache._write(str(tmp_path), "k.kernel", b"code")
    assert list(tmp_path.iterdir()) == []


@needs_kernels
def test_a_numba_that_fails_in_any_way_leaves_the_twins() -> None:
    code = """
from danube.core import kernels
from danube.core.kernels import jit
def fail(progress): raise RuntimeError("cannot cache function")
jit.compile_all = fail
report = kernels.load()
print(report.available, kernels.available, "RuntimeError: cannot cache function" in report.reason)
"""
    assert _run(code, DANUBE_KERNELS="") == "False False True"


def test_a_numba_that_breaks_while_it_is_imported_leaves_the_twins(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise AttributeError('module numpy has no attribute bool8')")
    code = "import danube, danube.core.kernels as k; print(danube.load_kernels(), k.load().reason)"
    found = _run(code, DANUBE_KERNELS="", PYTHONPATH=f"{tmp_path}{os.pathsep}{os.getcwd()}")
    assert found == "False numba cannot be imported: module numpy has no attribute bool8"


@needs_kernels
def test_nothing_is_compiled_while_a_worker_serves() -> None:
    """A writable array is taken as the read-only one that the kernel was compiled for."""
    assert kernels.load().available
    batch = kernels.batch_kernels()
    called: tuple[Any, ...] = (batch.text_is_valid, batch.check_offsets, batch.check_attributes, crc.crc32c)
    before = [len(kernel.overloads) for kernel in called]
    data = np.zeros(64, np.uint8)
    assert data.flags.writeable
    assert batch.text_is_valid(data, 0, 64) and batch.check_offsets(data, 0, 1, 0, 64) == -1
    assert batch.check_attributes(data, 0, 8, 1) is not None
    assert crc.crc32c(data, 0, 9) == google_crc32c.value(bytes(9))
    assert [len(kernel.overloads) for kernel in called] == before
    with pytest.raises(TypeError):
        crc.crc32c(np.zeros(8, np.float64), 0, 8)
