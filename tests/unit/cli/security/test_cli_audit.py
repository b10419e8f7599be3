"""``danube audit``: what it shows of the files, and how it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from danube.broker.audit import trail
from danube.broker.audit.heads import HeadKeeper, key_of
from danube.broker.audit.lines import Entry
from danube.broker.audit.writer import AuditWriter
from danube.cli.main import root
from danube.cli.terminal.services import Services
from danube.cluster.log.local_log import LocalLog

NOW_US = 1_795_855_243_000_000


class Line:
    def __init__(self, data: Path) -> None:
        self.data = data

    def __call__(self, *words: str, exit_code: int = 0) -> Result:
        command = ["audit", *words, "--data-dir", str(self.data)]
        result = CliRunner().invoke(root, command, obj=Services(environ={}))
        assert result.exit_code == exit_code, result.output
        return result

    def json(self, *words: str, exit_code: int = 0) -> Any:
        return json.loads(self(*words, "-o", "json", exit_code=exit_code).stdout)


@pytest.fixture
def danube(tmp_path: Path) -> Line:
    """Two workers; four requests, a second apart."""
    writers = [AuditWriter(tmp_path / "audit", worker, lambda: NOW_US) for worker in (0, 1)]
    for writer in writers:
        writer.open()
    for number in range(4):
        when = NOW_US + 1_000_000 * number
        who = ("user:ann", "user:bob")[number // 2]
        outcome = ("allowed", "denied")[number % 2]
        writers[number % 2].append(Entry(when, "create_topic", outcome, who, resource=f"/default/t{number}"))
    for writer in writers:
        writer.close()
    return Line(tmp_path)


def test_the_newest_lines_are_shown(danube: Line) -> None:
    assert [one["resource"] for one in danube.json("tail", "-n", "2")] == ["/default/t2", "/default/t3"]
    shown = danube("tail").stdout
    assert shown.index("/default/t0") < shown.index("/default/t3") and "user:bob" in shown


def test_following_reads_what_is_new_and_notices_new_files(
    danube: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[tuple[str, int]] = []
    honest = trail.read_part
    writer = AuditWriter(danube.data / "audit", 0, lambda: NOW_US)
    entries = [Entry(NOW_US + 9_000_000 + number, "create_topic", "allowed", resource=f"/default/n{number}")
               for number in range(3)]  # fmt: skip

    def counted(path: Path, position: int, size: int = -1) -> bytes:
        raw = honest(path, position, size)
        read.append((path.name, len(raw)))
        return raw

    def turn(_seconds: float) -> None:
        turns.append(0)
        if len(turns) == 1:
            writer.open()  # a new file
            writer.append(entries[0])
        elif len(turns) == 2:
            writer.append(entries[1])
            writer.append(entries[2])
        elif len(turns) == 3:
            read.clear()
        else:
            raise KeyboardInterrupt

    turns: list[int] = []
    monkeypatch.setattr(trail, "read_part", counted)
    monkeypatch.setattr("danube.cli.security.audit.time.sleep", turn)
    said = CliRunner().invoke(
        root, ["audit", "tail", "-n", "2", "-f", "--data-dir", str(danube.data)], obj=Services(environ={})
    )
    shown = [json.loads(line)["resource"] for line in said.stdout.splitlines()]
    assert shown == ["/default/t2", "/default/t3", "", *(f"/default/n{number}" for number in range(3))]
    assert sorted(read) == [("worker-0-000002.jsonl", 0), ("worker-1-000001.jsonl", 0)], "the newest, no more"


def test_a_file_that_is_begun_in_advance_hides_no_line_of_the_one_before(danube: Line) -> None:
    reader = trail.TrailReader(danube.data / "audit")
    assert len(list(reader.lines())) == 6
    (danube.data / "audit" / "worker-0-000002.jsonl").touch()
    assert list(reader.lines()) == []
    with (danube.data / "audit" / "worker-0-000001.jsonl").open("ab") as file:
        file.write(b'{"time":"2026"}\n{"ti')
        file.flush()
        assert [one["time"] for one in reader.lines()] == ["2026"]
        file.write(b'me":"2027"}\n')
    assert [one["time"] for one in reader.lines()] == ["2027"]


@pytest.mark.parametrize(
    ("words", "numbers"),
    [
        (["--principal", "user:bob"], [2, 3]),
        (["--outcome", "denied"], [1, 3]),
        (["--resource", "/default/t1"], [1]),
        (["--operation", "create_topic", "--since", "2026-11-28T08:40:45Z"], [2, 3]),
        (["--operation", "create_topic", "--until", "2026-11-28T10:40:45+02:00"], [0, 1]),
        (["--operation", "create_topic", "--since", "2026-11-28T08:40:46"], [3]),
    ],
)
def test_lines_are_found_by_what_they_say(danube: Line, words: list[str], numbers: list[int]) -> None:
    found = danube.json("find", *words)
    assert [one["resource"] for one in found] == [f"/default/t{number}" for number in numbers]


def test_what_does_not_fit_is_an_error(danube: Line) -> None:
    danube("find", "--principal", "user:eve", exit_code=3)
    danube("find", "--since", "yesterday", exit_code=2)
    danube("verify", "--head", "x", exit_code=2)
    danube.data = danube.data / "elsewhere"
    for command in ("tail", "find", "export", "verify"):
        assert "no audit files" in danube(command, exit_code=3).stderr


def keep_heads(data: Path, broker: int = 0) -> None:
    """Put heads into the metadata, as a running broker of this directory does."""
    with LocalLog(data / "metadata") as log:
        for worker in (0, 1):
            keeper = HeadKeeper(
                key_of(broker, worker), data / "audit", lambda: log.state.cluster.keys,
                lambda command, then: then(log.propose(command)),
            )  # fmt: skip
            head = trail.read_head(data / "audit", worker)
            assert head is not None and keeper.put(head, NOW_US)


def test_a_chain_made_anew_differs_from_the_heads_in_the_metadata(danube: Line) -> None:
    assert danube.json("verify")["findings"] == []
    assert "not compared with the heads in the metadata" in danube("verify").stderr
    keep_heads(danube.data)
    assert "metadata" not in danube("verify").stderr
    shown = danube.json("heads")
    assert [one["head"] for one in shown] == danube.json("verify")["heads"]
    assert shown[0]["head"] in danube("heads").stdout
    directory = danube.data / "audit"
    for path in directory.iterdir():
        path.unlink()
    for worker in (0, 1):
        writer = AuditWriter(directory, worker, lambda: NOW_US)
        writer.open()
        writer.append(Entry(NOW_US, "create_topic", "allowed", "user:eve"))
        writer.append(Entry(NOW_US, "create_topic", "allowed", "user:eve"))
        writer.close()
    found = danube.json("verify", exit_code=10)["findings"]
    assert ["made anew" in one["what"] for one in found] == [True, True]


def test_heads_of_another_directory_are_not_compared_and_told(danube: Line) -> None:
    keep_heads(danube.data)
    (danube.data / "audit").rename(danube.data / "moved")
    command = ["audit", "verify", "--data-dir", str(danube.data)]
    services = Services(environ={"DANUBE_AUDIT__DIRECTORY": str(danube.data / "moved")})
    result = CliRunner().invoke(root, command, obj=services)
    assert result.exit_code == 0 and result.stderr.count("were not compared") == 2


def test_heads_are_shown_by_broker(danube: Line) -> None:
    assert "there is no metadata log" in danube("heads", exit_code=3).stderr
    keep_heads(danube.data, broker=7)
    assert len(danube.json("heads", "--broker", "7")) == 2
    assert "knows no heads of that broker" in danube("heads", exit_code=3).stderr
    assert "knows no heads" in danube("verify").stderr
    log = danube.data / "metadata" / "metadata.log"
    log.rename(danube.data / "away")
    log.mkdir()
    assert "cannot be read" in danube("heads", exit_code=12).stderr
    assert "not compared with the heads in the metadata" in danube("verify").stderr
    log.rmdir()
    (danube.data / "away").rename(log)
    (danube.data / "node_id").write_text("7\ncluster one member\n")
    assert len(danube.json("heads")) == 2 and danube.json("verify")["findings"] == []


def test_an_export_is_what_is_stored(danube: Line) -> None:
    rows = [json.loads(line) for line in danube("export", "--operation", "create_topic").stdout.splitlines()]
    stored = b"".join(sorted(path.read_bytes() for path in (danube.data / "audit").glob("*.jsonl"))).decode()
    assert len(rows) == 4 and all(f'"hash":"{row["hash"]}"' in stored for row in rows)


def test_verification_ends_with_10_where_something_was_changed(danube: Line) -> None:
    heads = danube.json("verify")["heads"]
    said = danube("verify", "--head", heads[0]).stdout
    assert "6 lines, 0 findings" in said and f"head {heads[1]}" in said
    path = danube.data / "audit" / "worker-0-000001.jsonl"
    path.write_bytes(path.read_bytes().replace(b"user:ann", b"user:eve"))
    found = danube.json("verify", exit_code=10)
    assert "a byte was changed" in found["findings"][0]["what"]
    assert "worker-0-000001.jsonl:2:" in danube("verify", exit_code=10).stdout
    assert danube.json("verify", "--head", "0:9:" + "0" * 64, exit_code=10)["findings"]
