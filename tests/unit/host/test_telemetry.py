"""Telemetry: one line an event, whatever is in it; floods are counted instead of written."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.host import telemetry
from danube.host.telemetry import Suppressor, escape, events, fact_text, quote

HOSTILE = [
    "line\nbreak",
    "return\rhome",
    "\x1b[2J\x1b[31mred",
    'quote" level=ERROR forged="yes',
    "back\\slash\\",
    "nul\x00",
    "\u202egnp.exe",
    "\u2028separator",
    "\ud800 lone",
    "x" * 100_000,
    "a b=c",
    "",
]
Lines = Callable[[], list[str]]


@pytest.fixture
def root_restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger(telemetry.ROOT)
    before = (list(root.handlers), root.level, ours.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


@pytest.fixture
def output(tmp_path: Path, root_restored: None) -> Iterator[Callable[[str], Lines]]:
    """``output(format)`` configures telemetry into a file and returns a reader of its lines."""
    path = tmp_path / "lines"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def configure(form: str, level: str = "debug") -> Lines:
        telemetry.configure(level, form, process="worker-1", descriptor=descriptor)
        return lambda: path.read_text().split("\n")[:-1]

    yield configure
    os.close(descriptor)


def test_a_text_line_has_time_level_process_logger_event_and_facts(output: Any) -> None:
    lines = output("text")
    events("wal").info("segment sealed", topic="/default/orders", size_bytes=5, whole=True, owner=None)
    (line,) = lines()
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO    worker-1 wal: segment sealed "
        r"topic=/default/orders size_bytes=5 whole=true owner=None",
        line,
    )


def test_a_json_line_is_one_object_with_typed_facts(output: Any) -> None:
    lines = output("json")
    events("wal").warning("odd", size_bytes=5, level="fsync", rate=0.5)
    found = json.loads(lines()[0])
    assert (found["level"], found["process"], found["logger"], found["event"]) == (
        "warning",
        "worker-1",
        "danube.wal",
        "odd",
    )
    assert (found["size_bytes"], found["fact_level"], found["rate"]) == (5, "fsync", 0.5)


@pytest.mark.parametrize("form", ["text", "json"])
def test_nothing_a_peer_sends_makes_a_second_line_or_steers_a_terminal(output: Any, form: str) -> None:
    lines = output(form)
    for text in HOSTILE:
        events("door").warning(
            "refused", name=text, raw=text.encode("utf-8", "surrogatepass"), **{"k\n=v": text}
        )
    found = lines()
    assert len(found) == len(HOSTILE)
    assert all(line.isprintable() for line in found)
    assert max(map(len, found)) < 20_000
    if form == "text":
        assert not any(re.search(r"(?<!\\)\" level=ERROR", line) for line in found)


def test_an_exception_is_one_line_with_its_traceback(output: Any) -> None:
    lines = output("text")
    try:
        raise ValueError("two\nlines")
    except ValueError as error:
        events("door").failure("broke", error, source="x")
    (line,) = lines()
    assert 'traceback="Traceback (most recent call last):\\n' in line
    assert "two\\nlines" in line


def test_other_libraries_come_out_the_same_way(output: Any) -> None:
    lines = output("text")
    logging.getLogger("asyncio").warning("took %s", "long\n")
    logging.getLogger("asyncio").info("unwanted")
    assert len(lines()) == 1
    assert "asyncio: took long\\n" in lines()[0]


def test_a_percent_sign_is_no_format(output: Any) -> None:
    lines = output("text")
    events("door").info("100% of %s", why="%d")
    assert "100% of %s why=%d" in lines()[0]


def test_the_level_is_kept(output: Any) -> None:
    lines = output("text", "warning")
    events("door").info("unwanted")
    events("door").limited("unwanted", source="x", level=logging.INFO)
    events("door").error("wanted")
    assert len(lines()) == 1


def test_configuring_twice_does_not_write_twice(output: Any) -> None:
    output("text")
    lines = output("text")
    events("door").error("once")
    assert len(lines()) == 1


def test_a_closed_descriptor_stops_nobody(root_restored: None) -> None:
    read_end, write_end = os.pipe()
    os.close(read_end)
    telemetry.configure("info", "text", descriptor=write_end)
    events("door").error("nobody reads this")
    os.close(write_end)
    events("door").error("not even a descriptor")


def test_lines_of_parent_and_child_do_not_mix_after_a_fork(output: Any) -> None:
    lines = output("text")
    before = events("door")
    before.info("parent", n=0)
    child = os.fork()
    if child == 0:
        try:
            for n in range(200):
                before.info("child", n=n)
        finally:
            os._exit(0)
    for n in range(200):
        before.info("parent", n=n)
    assert os.waitpid(child, 0)[1] == 0
    found = lines()
    assert len(found) == 401
    assert all(re.search(r"door: (parent|child) n=\d+$", line) for line in found)


def test_a_flood_from_one_source_is_one_line_a_second(output: Any) -> None:
    lines = output("text")
    door = events("door")
    for _ in range(1_000):
        door.limited("handshake refused", source="10.0.0.1")
    assert len(lines()) <= 2
    door.limited("handshake refused", source="10.0.0.2")
    door.limited("another event", source="10.0.0.1")
    assert len(lines()) <= 4


def test_a_state_that_lasts_is_told_once_and_again_when_it_changes(output: Any) -> None:
    lines = output("text")
    door = events("door")
    for missing in ("a", "a, b", "a"):
        for _ in range(100):
            door.lasting("waiting", source="seeds", missing=missing)
    assert [line.rpartition("missing=")[2] for line in lines()] == ["a", '"a, b"']


def test_suppressed_events_are_counted_in_the_next_line() -> None:
    suppressor = Suppressor(interval_ns=100)
    assert suppressor.admit("a", 0) == 0
    assert [suppressor.admit("a", now) for now in range(1, 100)] == [None] * 99
    assert suppressor.admit("a", 100) == 99
    assert suppressor.admit("a", 200) == 0


def test_many_sources_share_one_bucket_and_no_memory() -> None:
    suppressor = Suppressor(interval_ns=1_000, sources_max=10)
    admitted = [suppressor.admit(source, 5) for source in range(10_000)]
    assert sum(one is not None for one in admitted) <= 11
    assert len(suppressor._seen) <= 11
    assert suppressor.admit("new", 2_000) == 0, "quiet sources make room"


@given(st.text())
def test_escaped_text_is_printable_and_quoted_text_reads_back(text: str) -> None:
    assert escape(text).isprintable()
    shown = quote(text, 10_000)
    assert shown.isprintable()
    assert shown[0] == shown[-1] == '"'
    inner = shown[1:-1]
    assert not re.search(r'(?<!\\)(\\\\)*"', inner), "no quote ends the value early"


@given(st.text(min_size=1))
def test_a_bare_value_cannot_be_mistaken(text: str) -> None:
    shown = fact_text(text)
    assert shown.startswith('"') or not set(shown) & set(' "=\\')
