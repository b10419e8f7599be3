"""Audit lines in pages: all of them, each once, by time, whoever wrote and whatever lies between."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from danube.broker.audit import pages
from danube.broker.audit import trail as trail_module
from danube.broker.audit.audit import Audit
from danube.broker.audit.lines import Entry
from danube.broker.audit.pages import page
from danube.broker.audit.trail import list_files, trail
from danube.broker.audit.writer import AuditWriter
from danube.core.security.arguments import AuditLines
from danube.errors import DanubeError, InvalidArgument, LimitExceeded, NotFound, StorageFailed
from tests.unit.broker_parts import RoutedBench

US = 1_000_000


def writer_at(directory: Path, worker: int = 0, **options: Any) -> AuditWriter:
    writer = AuditWriter(directory, worker, lambda: US, keep_us=10**15, **options)
    writer.open()
    return writer


def told(writer: AuditWriter, *seconds: float, resource: str = "/default/t") -> None:
    for second in seconds:
        writer.append(Entry(int(second * US), "create_topic", "allowed", "user:ann", resource=resource))
        writer.sync()  # makes the next file, where one is full


def read(directory: Path, limit: int = 3, **asked: Any) -> list[dict[str, Any]]:
    """All lines by pages, without those that a writer tells of itself."""
    found: list[dict[str, Any]] = []
    after: str | None = ""
    while after is not None:
        answer = page(directory, AuditLines(after=after, limit=limit, **asked))
        assert isinstance(answer, dict) and len(answer["entries"]) <= limit
        assert answer["entries"] or answer["after"] is None or answer["after"] != after, "pages make progress"
        found += answer["entries"]
        after = answer["after"]
    return [one for one in found if one["operation"] == "create_topic"]


def seconds(lines: list[dict[str, Any]]) -> list[int]:
    return [int(one["time"][17:19]) for one in lines]


@pytest.mark.parametrize("part", [512, 4_096, trail_module.PART_BYTES])
@pytest.mark.parametrize("limit", [1, 7, 1_000])
def test_pages_give_all_lines_of_all_workers_once_and_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int, limit: int
) -> None:
    monkeypatch.setattr(trail_module, "PART_BYTES", part)
    first, second = writer_at(tmp_path, 0, file_bytes_max=1_500), writer_at(tmp_path, 1)
    told(first, *range(1, 40, 2))
    told(second, *range(2, 30, 2))
    assert len(list_files(tmp_path)) > 3, "one chain goes over several files"
    found = read(tmp_path, limit)
    assert seconds(found) == sorted([*range(1, 40, 2), *range(2, 30, 2)])
    assert found == [one for one in trail(tmp_path) if one["operation"] == "create_topic"]


def test_a_page_gives_what_fits(tmp_path: Path) -> None:
    writer = writer_at(tmp_path)
    told(writer, 1, 2, resource="/a/x")
    told(writer, 3, resource="/a/y")
    told(writer, 4, resource="/b/x")
    assert seconds(read(tmp_path, prefix="/a/")) == [1, 2, 3]
    assert seconds(read(tmp_path, resource="/a/x")) == [1, 2]
    assert seconds(read(tmp_path, since="1970-01-01T00:00:02", until="1970-01-01T00:00:04")) == [2, 3]
    assert read(tmp_path, outcome="denied") == [] == read(tmp_path, principal="user:bob")
    assert len(read(tmp_path, operation="create_topic", principal="user:ann", outcome="allowed")) == 4


def test_the_newest_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "NEWEST_BYTES", 2_000)
    first, second = writer_at(tmp_path, 0, file_bytes_max=1_500), writer_at(tmp_path, 1)
    told(first, *range(1, 40, 2))
    told(second, *range(2, 41, 2))
    answer = page(tmp_path, AuditLines(limit=4, newest=True))
    assert isinstance(answer, dict) and answer["after"] is None
    assert seconds(answer["entries"]) == [37, 38, 39, 40]


def test_what_is_no_line_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail_module, "PART_BYTES", 1_024)
    writer = writer_at(tmp_path)
    told(writer, 1)
    [file] = list_files(tmp_path)
    with file.path.open("ab") as raw:
        raw.write(b"{}\nno line\n" + b"x" * 5_000 + b"\n")
    told(writer, 2)
    with file.path.open("ab") as raw:
        raw.write(b'{"time": "torn')
    assert seconds(read(tmp_path)) == [1, 2]


def test_a_page_ends_where_it_read_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trail_module, "PART_BYTES", 1_024)
    monkeypatch.setattr(pages, "READ_BYTES", 2_048)
    told(writer_at(tmp_path), *range(1, 30))
    answer = page(tmp_path, AuditLines(limit=10, resource="/none/of/them"))
    assert isinstance(answer, dict) and answer["entries"] == [] and answer["after"], "another page goes on"
    assert read(tmp_path, resource="/none/of/them") == []


def test_without_a_limit_the_lines_fit_an_answer_or_it_is_an_error(tmp_path: Path) -> None:
    writer = writer_at(tmp_path)
    told(writer, 1, 2)
    whole = page(tmp_path, AuditLines(operation="create_topic"))
    assert isinstance(whole, list) and seconds(whole) == [1, 2]
    told(writer, *[3] * 1_000)
    with pytest.raises(LimitExceeded, match="too many for one answer"):
        page(tmp_path, AuditLines())


@pytest.mark.parametrize("after", ["x", "0-1", "0-1-2,", "-1-1-1", "0-1-2;1-1-2"])
def test_a_place_that_no_page_named_is_refused(tmp_path: Path, after: str) -> None:
    with pytest.raises(InvalidArgument, match="no place in audit files"):
        page(tmp_path, AuditLines(after=after, limit=1))


def test_a_thread_reads_and_the_loop_answers(tmp_path: Path) -> None:
    async def asked(audit: Audit, **fields: Any) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        audit.read(AuditLines(limit=5, **fields), answer.set_result)
        return await answer

    async def ask() -> None:
        writer = writer_at(tmp_path)
        told(writer, 1)
        audit = Audit(writer, asyncio.get_running_loop())
        [line] = [one for one in (await asked(audit))["entries"] if one["operation"] == "create_topic"]
        assert line["principal"] == "user:ann"
        assert isinstance(await asked(audit, after="x"), InvalidArgument)
        [file] = list_files(tmp_path)
        file.path.rename(tmp_path / "kept")
        file.path.mkdir()
        failed = await asked(audit)
        assert isinstance(failed, StorageFailed) and "cannot be read" in str(failed)
        file.path.rmdir()
        audit.close()

    asyncio.run(ask())


def test_a_broker_without_audit_files_says_so(tmp_path: Path) -> None:
    answers: list[DanubeError] = []
    bench = RoutedBench(tmp_path)
    bench.router.operations.audit_lines(AuditLines(), answers.append)
    bench.shard.close()
    assert isinstance(answers[0], NotFound) and "audit.mode" in str(msgspec.to_builtins(answers[0].hint))
