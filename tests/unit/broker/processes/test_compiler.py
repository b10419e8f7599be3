"""Kernels compiled beside a broker: how they reach its processes, and what is told when they do not."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from danube.broker.processes.compiler import KernelCompiler
from danube.core import kernels
from danube.core.kernels import cache


@pytest.fixture
def compiler() -> Iterator[KernelCompiler]:
    made = KernelCompiler()
    yield made
    made.close()


@pytest.fixture
def content(with_kernels: None) -> bytes:
    """Kernels as they are kept; the process of the test begins with the twins."""
    kept = cache.read()
    if kept is None:
        pytest.skip("no cache folder can be written")
    kernels.unload()
    return kept


def compiles(monkeypatch: pytest.MonkeyPatch, content: bytes | Exception, warning: str = "") -> None:
    def compile_kept() -> tuple[bytes, str]:
        if isinstance(content, Exception):
            raise content
        return content, warning

    monkeypatch.setattr(kernels, "compile_kept", compile_kept)


def finish(compiler: KernelCompiler) -> None:
    """Take turns until the process has ended."""
    deadline = time.monotonic() + 200
    while compiler.pid:
        assert time.monotonic() < deadline
        compiler.turn()
        time.sleep(0.01)


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_all_processes_go_over_to_kernels_that_were_compiled_meanwhile(
    compiler: KernelCompiler, content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """A process that was forked before takes them, and so does the supervisor for those that come."""
    caplog.set_level(logging.INFO)
    compiles(monkeypatch, content)
    compiler.take()
    assert not kernels.available, "nothing is there yet"
    read, write = os.pipe()
    worker = os.fork()
    if worker == 0:
        os.close(write)
        os.read(read, 1)
        compiler.take()
        os._exit(0 if kernels.available and kernels.load_kept().available else 1)
    os.close(read)
    compiler.start(lambda: None)
    finish(compiler)
    assert kernels.available
    os.close(write)
    assert os.waitpid(worker, 0)[1] == 0
    assert any("kernels are compiled" in line for line in said(caplog))


def test_who_reads_before_all_is_there_finds_nothing(compiler: KernelCompiler, content: bytes) -> None:
    os.pwrite(compiler._memory, content[: len(content) // 2], 8)
    compiler.take()
    assert not kernels.available
    compiler._publish(content)
    compiler.take()
    assert kernels.available


def test_kernels_that_could_not_be_kept_are_used_and_told(
    compiler: KernelCompiler, content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    compiles(monkeypatch, content, "no folder")
    compiler.start(lambda: None)
    finish(compiler)
    assert kernels.available
    assert any("again at the next start" in line for line in said(caplog))


def test_a_compiler_that_fails_leaves_the_twins(
    compiler: KernelCompiler, content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    compiles(monkeypatch, ImportError("numba is broken"))
    compiler.start(lambda: None)
    finish(compiler)
    compiler.turn()
    assert not kernels.available
    assert any("without compiled kernels" in line for line in said(caplog))


def test_what_cannot_be_linked_leaves_the_twins_and_is_tried_once(
    compiler: KernelCompiler, content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    compiler._publish(cache.pack(cache.unpack(content)._replace(names=["not in it"])))
    compiler.take()
    compiler.take()
    assert not kernels.available
    assert sum("without compiled kernels" in line for line in said(caplog)) == 1


def test_a_process_that_cannot_be_forked_leaves_the_twins(
    compiler: KernelCompiler, content: bytes, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    def fork() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", fork)
    compiler.start(lambda: None)
    compiler.turn()
    assert not compiler.pid and not kernels.available
    assert any("without compiled kernels" in line for line in said(caplog))


def test_a_broker_that_stops_ends_what_is_compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = KernelCompiler()
    monkeypatch.setattr(kernels, "compile_kept", signal.pause)
    compiler.start(lambda: None)
    pid = compiler.pid
    compiler.close()
    assert not compiler.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
