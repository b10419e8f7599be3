"""The command line: what it prints where, and with which exit code it leaves."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from danube import errors
from danube.cli.main import COMMANDS, root
from danube.cli.terminal import failure
from danube.cli.terminal.arguments import Position, attributes, position
from danube.cli.terminal.output import facts, plain, table
from danube.cli.terminal.services import Services
from danube.errors import DanubeError, ObjectMissing, StoreDamaged, StoreUnavailable
from tests.unit.cli_stub import StubBroker

ROOT = Path(__file__).resolve().parents[4]
HEAVY = {
    "numpy",
    "numba",
    "llvmlite",
    "uvloop",
    "yaml",
    "msgspec",
    "asyncio",
    "logging",
    "xxhash",
    "google_crc32c",
}


class Line:
    """Runs ``danube`` against the stub."""

    def __init__(self) -> None:
        self.broker = StubBroker()
        self.can_ask = False
        self.environ: dict[str, str] = {}

    def __call__(self, *words: str, input: str | bytes | None = None, exit_code: int = 0) -> Result:
        services = Services(
            connect=self.broker.connect,
            connect_async=self.broker.connect_async,
            environ=self.environ,
            can_ask=lambda: self.can_ask,
            shows_progress=lambda: False,
        )
        result = CliRunner().invoke(root, list(words), input=input, obj=services, prog_name="danube")
        assert result.exit_code == exit_code, result.output
        return result

    def json(self, *words: str, **options: Any) -> Any:
        return json.loads(self(*words, "-o", "json", **options).stdout)

    def called(self, name: str) -> list[tuple[Any, ...]]:
        return [call[1:] for call in self.broker.calls if call[0] == name]


@pytest.fixture
def danube(monkeypatch: pytest.MonkeyPatch) -> Line:
    monkeypatch.delenv("DANUBE_SERVICE_URL", raising=False)
    return Line()


# -- the frame -----------------------------------------------------------------------------------


def test_help_imports_only_click() -> None:
    code = (
        "import sys\nsys.argv = ['danube', '--help']\nfrom danube.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print('\\n' + ' '.join(name.partition('.')[0] for name in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert "produce" in result.stdout
    assert not HEAVY & set(result.stdout.split("\n")[-2].split())


def test_every_command_has_help_and_does_not_import_the_heavy_parts() -> None:
    code = (
        "import sys\nfrom danube.cli.main import COMMANDS, root\nimport click\n"
        "context = click.Context(root)\n"
        "for name in COMMANDS:\n"
        "    command = root.get_command(context, name)\n"
        "    assert command.help, name\n"
        "    for inner in getattr(command, 'commands', {}).values(): assert inner.help, inner.name\n"
        "print(' '.join(name.partition('.')[0] for name in sys.modules))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not (HEAVY - {"msgspec"}) & set(result.stdout.split())


def test_a_misspelt_command_is_suggested(danube: Line) -> None:
    assert "Did you mean consume?" in danube("consme", exit_code=2).stderr
    assert "Did you mean delete?" in danube("topics", "delte", exit_code=2).stderr


def test_aliases_reach_the_same_command(danube: Line) -> None:
    danube.broker.put("/default/t", b"x")
    assert danube("topic", "ls").stdout == danube("topics", "list").stdout


def test_the_table_of_commands_is_what_is_there(danube: Line) -> None:
    shown = danube("--help").stdout
    assert all(f"  {name} " in shown and entry.help in shown for name, entry in COMMANDS.items())
    assert danube().stdout == shown


def test_usage_errors_leave_with_2_and_json_ones_as_json(danube: Line) -> None:
    assert danube("produce", "--count", "0", exit_code=2).stdout == ""
    error = json.loads(danube("produce", "--count", "0", "-o", "json", exit_code=2).stderr)["error"]
    assert (error["reason"], error["retryable"]) == ("UsageError", False)


@pytest.mark.parametrize("cls", errors.catalogue(), ids=lambda cls: cls.__name__)
def test_every_error_becomes_its_exit_code(
    cls: type[errors.DanubeError], capsys: pytest.CaptureFixture[str]
) -> None:
    error = cls("what happened", why="the reason", hint="the way out")
    assert failure.report(error, as_json=False) == cls.exit_code
    assert capsys.readouterr().err == "error: what happened\n  why: the reason\n  try: the way out\n"
    assert failure.report(error, as_json=True) == cls.exit_code
    body = json.loads(capsys.readouterr().err)["error"]
    assert body == {
        "code": cls.code,
        "reason": cls.__name__,
        "message": "what happened: the reason",
        "hint": "the way out",
        "retryable": cls.retryable,
    }


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [
        (KeyboardInterrupt(), 130),
        (click.Abort(), 130),
        (failure.Terminated(), 143),
        (failure.OutputClosed(), 141),
        (TimeoutError(), 7),
        (ConnectionResetError("reset"), 6),
        (ExceptionGroup("several", [errors.TopicNotFound("x")]), 3),
        (SystemExit(5), 5),
    ],
)
def test_other_endings_have_their_exit_code(error: BaseException, exit_code: int) -> None:
    assert failure.report(error, as_json=True) == exit_code


def test_a_bug_is_told_as_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert failure.report(KeyError("x"), as_json=False) == 1
    assert "this is a bug" in capsys.readouterr().err


def test_hostile_text_in_an_error_steers_no_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    failure.report(errors.TopicNotFound("\x1b[2J\nerror: forged"), as_json=False)
    assert capsys.readouterr().err == "error: \\x1b[2J\\nerror: forged\n"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["-o", "json"], True),
        (["--output=json"], True),
        (["-ojson"], True),
        (["-o", "table"], False),
        (["--", "-o", "json"], False),
        ([], False),
    ],
)
def test_json_is_recognised_before_parsing(words: list[str], wanted: bool) -> None:
    assert failure.wants_json(words) is wanted


# -- values and tables ---------------------------------------------------------------------------


def test_ids_are_text_and_instants_are_rfc_3339_in_json() -> None:
    found = plain({"topic_id": 2**64 - 1, "publish_time": 1_000_001, "lag": 7, "blob": b"\xff", "ok": True})
    assert found == {
        "topic_id": "18446744073709551615",
        "publish_time": "1970-01-01T00:00:01.000001Z",
        "lag": 7,
        "blob": base64.b64encode(b"\xff").decode(),
        "ok": True,
    }


def test_tables_show_the_same_values_and_escape_them() -> None:
    text = table([{"name": "a\x1b[0m", "lag": 5}, {"name": "b", "lag": 12345}], ("name", "missing", "lag"))
    assert text == "NAME        LAG\na\\x1b[0m      5\nb         12345"
    assert facts({"a": 1, "inner": {"b": [1, 2]}, "rows": [{"x": None}]}) == (
        "a  1\ninner\n  b  1, 2\nrows\n  X\n  -"
    )


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("earliest", Position("earliest")),
        ("now", Position("latest")),
        ("15", Position("offset", 15)),
        ("offset:15", Position("offset", 15)),
        ("1970-01-01T00:00:01Z", Position("time", 1_000_000)),
        ("1970-01-01T01:00:01+01:00", Position("time", 1_000_000)),
        ("1970-01-02", Position("time", 86_400_000_000)),
    ],
)
def test_places_to_begin_are_read(text: str, wanted: Position) -> None:
    assert position(text) == wanted


def test_a_time_ago_is_before_now() -> None:
    hour, minute = position("-1h"), position("-1m")
    assert hour.kind == minute.kind == "time"
    assert 58 * 60 * 10**6 < minute.value - hour.value < 60 * 60 * 10**6


@pytest.mark.parametrize("text", ["", "soon", "offset:x", "-", "-5", "2026-13-01", "9" * 30])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter):
        position(text)


def test_attributes_are_name_and_value() -> None:
    assert attributes("a:b,url:http://x:1") == {"a": "b", "url": "http://x:1"}
    for text in ("a", "a:b,", ":b", "a:1,a:2"):
        with pytest.raises(click.BadParameter):
            attributes(text)


# -- produce -------------------------------------------------------------------------------------


def test_a_record_is_sent_with_upstreams_flags(danube: Line) -> None:
    words = ["-s", "http://127.0.0.1:6650", "-t", "/ns/t", "-n", "p1", "-m", "hi", "-a", "a:b", "-k", "key"]
    danube("produce", *words, "-c", "3", "-i", "1", "-p", "2", "--reliable")
    assert danube.broker.urls == ["danube://127.0.0.1:6650"]
    assert [(m.payload, m.key, m.attributes) for m in danube.broker.topics["/ns/t"]] == [
        (b"hi", "key", {"a": "b"})
    ] * 3
    ((topic, options),) = danube.called("producer")
    assert (topic, options) == ("/ns/t", {"name": "p1", "reliable": True, "partitions": 2})


def test_a_bare_topic_is_in_the_default_namespace(danube: Line) -> None:
    said = danube("produce", "hello", "-m", "hi").stdout
    assert said == "sent 1 record to /default/hello: partition 0 offset 0 (written)\n"


def test_producers_of_two_calls_do_not_fence_each_other(danube: Line) -> None:
    danube("produce", "t", "-m", "x")
    ((_, options),) = danube.called("producer")
    assert options["name"].startswith("cli-")


def test_each_line_of_standard_input_is_a_record(danube: Line) -> None:
    said = danube("produce", "t", "--batch", "2", "-o", "json", input=b"a\n\nb\xff\nlast").stdout
    assert [m.payload for m in danube.broker.topics["/default/t"]] == [b"a", b"", b"b\xff", b"last"]
    acks = [json.loads(line) for line in said.splitlines()]
    assert sum(ack["record_count"] for ack in acks) == 4
    assert acks[0] == {
        "topic": "/default/t", "partition": 0, "offset": 0, "record_count": 2, "durability": "written",
    }  # fmt: skip


def test_a_file_is_one_record_or_one_per_line(danube: Line, tmp_path: Path) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"1\n2\n")
    danube("produce", "whole", "-f", str(path))
    danube("produce", "lines", "-f", str(path), "--lines", "-k", "k")
    assert [m.payload for m in danube.broker.topics["/default/whole"]] == [b"1\n2\n"]
    assert [(m.payload, m.key) for m in danube.broker.topics["/default/lines"]] == [(b"1", "k"), (b"2", "k")]
    danube("produce", "t", "-f", str(tmp_path / "absent"), exit_code=2)


def test_json_lines_carry_key_and_attributes(danube: Line) -> None:
    lines = [
        {"payload": "text", "key": "k", "attributes": {"a": "1"}},
        {"payload_base64": "/w=="},
        {"payload": {"x": [1]}},
    ]
    text = "\n".join(json.dumps(one) for one in lines) + "\n\n"
    danube("produce", "t", "--ndjson", "-a", "b:2", input=text)
    assert [(m.payload, m.key, m.attributes) for m in danube.broker.topics["/default/t"]] == [
        (b"text", "k", {"a": "1", "b": "2"}),
        (b"\xff", None, {"b": "2"}),
        (b'{"x":[1]}', None, {"b": "2"}),
    ]


@pytest.mark.parametrize(
    "line", ["{", "[]", '{"key": 1}', '{"payload": "x", "attributes": {"a": 1}}', "[" * 100_000]
)
def test_a_line_that_is_no_record_is_refused_with_its_number(danube: Line, line: str) -> None:
    assert (
        "line 1 is not a record" in danube("produce", "t", "--ndjson", input=line + "\n", exit_code=2).stderr
    )


def test_where_and_why_a_line_stops_being_json_is_told_in_our_words(danube: Line) -> None:
    refused = danube("produce", "t", "--ndjson", input='{"payload": "a",}\n', exit_code=2).stderr
    assert "line 1, column 17: a comma stands before the end of an array or object" in refused


def test_what_consume_prints_produce_takes_back(danube: Line) -> None:
    danube(
        "produce", "a", "--ndjson", input='{"payload_base64": "/w==", "key": "k", "attributes": {"x": "y"}}\n'
    )
    printed = danube("consume", "a", "--from", "earliest", "-c", "1", "-o", "json").stdout
    danube("produce", "b", "--ndjson", input=printed)
    first, second = danube.broker.topics["/default/a"][0], danube.broker.topics["/default/b"][0]
    assert (first.payload, first.key, first.attributes) == (second.payload, second.key, second.attributes)


def test_a_line_longer_than_a_record_is_refused(danube: Line) -> None:
    said = danube("produce", "t", input=b"x" * (8 * 2**20 + 1) + b"\n", exit_code=8).stderr
    assert "longer than" in said


def test_a_failure_in_between_is_partial(danube: Line) -> None:
    danube.broker.fail_after = 2
    said = danube("produce", "t", "--batch", "1", input="1\n2\n3\n4\n", exit_code=9).stderr
    assert "sent 2 records, then failed" in said


def test_a_failure_of_the_first_record_is_itself(danube: Line) -> None:
    danube.broker.fail_after = 0
    danube("produce", "t", "-m", "x", exit_code=6)


def test_nothing_to_send_is_a_usage_error(danube: Line) -> None:
    danube.can_ask = True
    danube("produce", "t", exit_code=2)


# -- consume -------------------------------------------------------------------------------------


def test_records_are_printed_then_acknowledged(danube: Line) -> None:
    danube.broker.put("/default/t", b"one", b"two\x1b[2J", b"\xff\xfe")
    said = danube("consume", "t", "-m", "s", "--from", "earliest", "-c", "3").stdout
    assert said == "0:0  one\n0:1  two\\x1b[2J\n0:2  [binary data, 2 bytes]\n"
    assert danube.broker.acks == [0, 1, 2]
    assert danube.called("delete_subscription") == []


def test_no_ack_acknowledges_nothing(danube: Line) -> None:
    danube.broker.put("/default/t", b"one")
    danube("consume", "t", "-m", "s", "--from", "earliest", "-c", "1", "--no-ack")
    assert danube.broker.acks == []


def test_without_a_subscription_nothing_is_left_behind(danube: Line) -> None:
    danube.broker.put("/default/t", b"one")
    assert danube("consume", "t", "--from", "0", "-c", "1", "-o", "raw").stdout == "one\n"
    assert danube.broker.subscriptions == {}
    assert danube.called("delete_subscription") == [], "it needs a right that a consumer does not have"


@pytest.mark.parametrize(("principal", "begin"), [("", "cli-"), ("service_account:ann", "ann-cli-")])
def test_a_temporary_subscription_is_named_after_who_consumes(
    danube: Line, principal: str, begin: str
) -> None:
    danube.broker.put("/default/t", b"one")
    danube.broker.principal = principal
    danube("consume", "t", "--from", "0", "-c", "1")
    danube("consume", "t", "-m", "s", "--from", "0", "-c", "1")
    first, second = danube.called("consumer")
    assert first[1].startswith(begin) and first[2]["temporary"]
    assert second[1] == "s" and "temporary" not in second[2]


def test_json_records_are_lines_with_everything(danube: Line) -> None:
    danube.broker.add("/default/t", b"pay", "k", {"a": "b"})
    assert danube.json("consume", "t", "--from", "earliest", "-c", "1") == {
        "topic": "/default/t",
        "partition": 0,
        "offset": 0,
        "key": "k",
        "attributes": {"a": "b"},
        "publish_time": "2026-11-21T08:00:00.000005Z",
        "producer_name": "p",
        "redelivery_count": 0,
        "payload": "pay",
    }


def test_raw_records_are_their_bytes_and_the_delimiter(danube: Line) -> None:
    danube.broker.put("/default/t", b"\xff\n", b"")
    result = danube("consume", "t", "--from", "earliest", "-c", "2", "-o", "raw", "--delimiter", ";")
    assert result.stdout_bytes == b"\xff\n;;"


def test_until_end_leaves_at_the_end(danube: Line) -> None:
    danube.broker.put("/default/t", *[b"x"] * 50)
    assert len(danube("consume", "t", "--from", "earliest", "--until-end").stdout.splitlines()) == 50
    assert danube("consume", "t", "--from", "latest", "--until-end").stdout == ""


def test_until_end_of_an_empty_topic_leaves_at_once(danube: Line) -> None:
    danube.broker.put("/default/t")
    danube.broker.topics["/default/t"] = []
    assert danube("consume", "t", "--until-end").stdout == ""


def test_until_end_of_a_topic_that_stores_nothing_is_refused(danube: Line) -> None:
    danube("topics", "create", "t", "--non-reliable")
    assert "stores nothing" in danube("consume", "t", "--until-end", exit_code=2).stderr


def test_too_few_records_in_time_is_a_timeout(danube: Line) -> None:
    danube.broker.put("/default/t", b"one")
    result = danube("consume", "t", "--from", "earliest", "-c", "2", "--timeout", "100ms", exit_code=7)
    assert result.stdout == "0:0  one\n"
    assert "received 1 of 2 records" in result.stderr


def test_a_timeout_without_a_count_is_an_ordinary_end(danube: Line) -> None:
    danube.broker.put("/default/t", b"one")
    assert danube("consume", "t", "--from", "earliest", "--timeout", "100ms").stdout == "0:0  one\n"


@pytest.mark.parametrize(
    ("reason", "exit_code"),
    [
        (ObjectMissing("there is no object a.seg", hint="restore it"), 12),
        (StoreDamaged("object a.seg is damaged"), 12),
        (StoreUnavailable("the store does not answer"), 7),
        (None, 7),
    ],
)
def test_what_is_left_below_the_end_is_no_end(
    danube: Line, reason: DanubeError | None, exit_code: int
) -> None:
    danube.broker.put("/default/t", *[b"x"] * 5)
    danube.broker.readable_end, danube.broker.waits_for = 3, reason
    line = ("consume", "t", "--from", "earliest", "--until-end", "--timeout", "100ms")
    result = danube(*line, exit_code=exit_code)
    assert len(result.stdout.splitlines()) == 3
    assert "received 3 records and not the end of /default/t" in result.stderr
    assert reason is None or str(reason) in result.stderr


def test_a_timeout_without_a_count_is_no_ordinary_end_where_the_broker_cannot_read(danube: Line) -> None:
    danube.broker.put("/default/t", b"one", b"two")
    danube.broker.readable_end, danube.broker.waits_for = 1, ObjectMissing("there is no object a.seg")
    result = danube("consume", "t", "--from", "earliest", "--timeout", "100ms", exit_code=12)
    assert "there is no object a.seg" in result.stderr
    danube("consume", "t", "--from", "earliest", "-c", "2", "--timeout", "100ms", exit_code=12)
    danube("consume", "t", "--from", "earliest", "-c", "1", "--timeout", "100ms")


def test_storage_status_says_what_helps(danube: Line) -> None:
    danube.broker.store = {"name": "s3://b", "answers": False, "error": "refused", "hint": "check the key"}
    said = danube("storage", "status").stderr
    assert "the object store s3://b does not answer: refused" in said and "try: check the key" in said
    del danube.broker.store["hint"]
    assert "try:" not in danube("storage", "status").stderr


def test_the_start_of_an_existing_subscription_is_not_moved_silently(danube: Line) -> None:
    danube.broker.put("/default/t", b"one")
    danube.broker.subscriptions["/default/t", "s"] = 0
    said = danube("consume", "t", "-m", "s", "--from", "latest", "-c", "1").stderr
    assert "--from is not used" in said


def test_upstreams_subscription_types_are_understood(danube: Line) -> None:
    danube.broker.put("/default/t", b"one")
    for given, mode in (("fail-over", "failover"), ("key-shared", "key_shared"), ("exclusive", "exclusive")):
        danube(
            "consume", "-t", "/default/t", "-m", given, "--sub-type", given, "--from", "earliest", "-c", "1"
        )
        assert danube.called("consumer")[-1][2]["mode"] == mode
    danube("consume", "t", "--filter", "eu-*", "-c", "1", exit_code=2)
    danube("consume", "t", "--filter", "eu-*", "--sub-type", "key-shared", "--from", "0", "-c", "1")
    assert danube.called("consumer")[-1][2]["filters"] == ["eu-*"]


def test_an_unknown_topic_is_suggested(danube: Line) -> None:
    danube.broker.put("/default/orders", b"x")
    assert "did you mean /default/orders?" in danube("consume", "ordrs", "-c", "1", exit_code=3).stderr
    assert "did you mean /default/orders?" in danube("topics", "describe", "ordrs", exit_code=3).stderr


# -- topics and subscriptions --------------------------------------------------------------------


def test_a_topic_is_created_with_its_policy(danube: Line) -> None:
    made = danube.json(
        *("topics", "create", "t", "-p", "4", "--durability", "fsync", "--retention-time", "1h"),
        *("--retention-size", "1KiB", "--poison", "drop", "--ack-timeout", "5s"),
    )
    ((_, options),) = danube.called("create_topic")
    assert options == {
        "partitions": 4,
        "durability": "fsync",
        "retention_ms": 3_600_000,
        "retention_bytes": 1_024,
        "failure": {"poison": "drop", "ack_timeout_ms": 5_000},
    }
    assert made["topic_id"] == str(2**63 + 5)
    danube("topics", "create", "t", exit_code=4)


def test_an_update_keeps_the_rest_of_the_failure_policy(danube: Line) -> None:
    danube("topics", "create", "t", "--poison", "drop")
    danube("topics", "update", "t", "--ack-timeout", "1s")
    assert danube.called("update_topic") == [
        ("/default/t", {"failure": {"poison": "drop", "ack_timeout_ms": 1_000}})
    ]
    danube("topics", "update", "t", exit_code=2)


def test_the_table_of_topics_is_made_from_the_json(danube: Line) -> None:
    for name in ("/default/a", "/other/b"):
        danube.broker.put(name, b"x")
    listed = danube.json("topics", "list")
    shown = danube("topics", "list").stdout.splitlines()
    assert (
        [line.split()[0] for line in shown[1:]]
        == [one["topic"] for one in listed]
        == ["/default/a", "/other/b"]
    )
    assert [one["topic"] for one in danube.json("topics", "list", "--namespace", "other")] == ["/other/b"]


def test_a_description_is_one_object(danube: Line) -> None:
    danube.broker.put("/default/t", b"x")
    found = danube.json("topics", "describe", "t")
    assert found["topic"] == "/default/t"
    assert found["partitions"] == [{"partition": "/default/t", "start": 0, "high_watermark": 1}]


@pytest.mark.parametrize(
    ("words", "name"),
    [(("topics", "delete", "t"), "/default/t"), (("subscriptions", "delete", "t", "s"), "s")],
)
def test_deleting_asks_for_the_name(danube: Line, words: tuple[str, ...], name: str) -> None:
    danube.broker.put("/default/t", b"x")
    danube.broker.subscriptions["/default/t", "s"] = 0
    verb = f"{words[1]}_{words[0].rstrip('s')}"
    assert "add --yes" in danube(*words, exit_code=2).stderr
    danube.can_ask = True
    danube(*words, input="something else\n", exit_code=2)
    danube(*words, input="", exit_code=130)
    assert danube.called(verb) == []
    asked = danube(*words, input=name + "\n")
    assert "will be deleted" in asked.stderr
    assert "will be deleted" not in asked.stdout
    assert len(danube.called(verb)) == 1


def test_yes_deletes_without_asking(danube: Line) -> None:
    danube.broker.put("/default/t", b"x")
    assert danube.json("topics", "rm", "t", "--yes") == {"topic": "/default/t", "deleted": True}


def test_seek_tells_where_it_was(danube: Line) -> None:
    danube.broker.put("/default/t", *[b"x"] * 9)
    danube.broker.subscriptions["/default/t", "s"] = 7
    moved = danube.json("subscriptions", "seek", "t", "s", "--to", "offset:2")
    assert (moved["before"][0]["ack_floor"], moved["after"][0]["ack_floor"]) == (7, 2)
    danube("subscriptions", "seek", "t", "s", "--to", "-1h")
    assert danube.called("seek")[-1][2].tzinfo is not None
    danube("subscriptions", "seek", "t", "absent", "--to", "0", exit_code=3)


def test_subscriptions_are_listed_and_unblocked(danube: Line) -> None:
    danube.broker.put("/default/t", b"x")
    assert danube("subscriptions", "list", "t").stdout == "(none)\n"
    danube.broker.subscriptions["/default/t", "s"] = 0
    assert danube.json("subscriptions", "list", "t")[0]["lag_records"] == 1
    danube("subscriptions", "unblock", "t", "s")
    assert danube.called("unblock") == [("/default/t", "s")]


# -- where the broker is -------------------------------------------------------------------------


def test_an_unreachable_broker_is_told_with_address_and_origin(
    danube: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    danube.broker.reachable = False
    said = danube("topics", "list", exit_code=6).stderr
    assert "cannot reach the broker at danube://127.0.0.1:6660" in said
    assert "the address came from the default" in said
    said = danube("produce", "t", "-m", "x", "-s", "localhost:6650", exit_code=6).stderr
    assert "the address came from --service-addr" in said
    assert "this is a gRPC port" in said
    monkeypatch.setenv("DANUBE_SERVICE_URL", "danube://elsewhere:1")
    assert "the environment variable DANUBE_SERVICE_URL" in danube("topics", "list", exit_code=6).stderr


@pytest.mark.parametrize("address", ["ftp://x:1", "danube://", "danube://x/y", ""])
def test_an_address_that_is_none_is_a_usage_error(danube: Line, address: str) -> None:
    danube("topics", "list", "-s", address, exit_code=2)


# -- the rest ------------------------------------------------------------------------------------


def test_the_version_is_printed(danube: Line) -> None:
    from danube import __version__

    assert danube("--version").stdout == f"danube {__version__}\n"
    assert danube.json("version")["danube"] == __version__


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_completion_scripts_are_printed(danube: Line, shell: str) -> None:
    assert "_DANUBE_COMPLETE" in danube("completion", shell).stdout


def test_completion_offers_commands() -> None:
    environ = {
        "_DANUBE_COMPLETE": "zsh_complete",
        "COMP_WORDS": "danube top",
        "COMP_CWORD": "1",
        "PATH": "/bin",
    }
    result = subprocess.run(
        [sys.executable, "-m", "danube"], cwd=ROOT, env=environ, capture_output=True, text=True
    )
    assert "topics" in result.stdout


def test_a_reader_that_went_away_ends_the_command_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "danube", "config", "show"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()  # type: ignore[union-attr]
        said = process.stderr.read()  # type: ignore[union-attr]
    assert (process.returncode, said) == (failure.EXIT_OUTPUT_CLOSED, b"")
