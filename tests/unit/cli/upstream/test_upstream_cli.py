"""danube-cli: the official flags are taken, messages go as official clients send them, lines are theirs."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from danube.cli.upstream.cli import root
from danube.cli.upstream.consume import fill
from danube.cli.upstream.root import Outside
from danube.load.links.grpc_client import status_error
from danube.load.links.inbox import Inbox
from danube.server.proto import DanubeApi_pb2 as pb
from tests.fakes.grpc_line import FakeLine, FakeStream

PRODUCE = ("produce", "-s", "http://127.0.0.1:6650")
CONSUME = ("consume", "-s", "http://127.0.0.1:6650", "-m", "s")


class Line(FakeLine):
    """Runs ``danube-cli`` over the fake line."""

    def __call__(self, *words: str, exit_code: int = 0) -> Result:
        outside = Outside(open=self.open, environ={}, sleep=self.slept.append)
        result = CliRunner().invoke(root, list(words), obj=outside, prog_name="danube-cli")
        assert result.exit_code == exit_code, result.output
        return result

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "-o", "json").stdout)

    def sent(self, topic: str = "/default/test_topic") -> list[Any]:
        return self.topics[topic].messages

    def consumed(self, *messages: Any, exit_code: int = 1) -> Result:
        """Run ``consume`` over these messages; it ends because the next stream is refused."""
        stream = FakeStream()
        for one in messages:
            stream.put(one)
        stream.end()
        self.streams.append(stream)
        return self(*CONSUME, exit_code=exit_code)


@pytest.fixture
def line() -> Line:
    return Line()


# Produce


def test_one_message_with_the_defaults(line: Line) -> None:
    result = line(*PRODUCE, "-m", "hello")
    (message,) = line.sent()
    assert message.payload == b"hello"
    assert message.msg_id == pb.MsgID(
        producer_id=77, topic_name="/default/test_topic", broker_addr="http://127.0.0.1:6650"
    )
    assert message.producer_name == "test_producer"
    assert message.publish_time > 1_600_000_000_000
    for field in ("schema_id", "schema_version", "routing_key"):
        assert not message.HasField(field)
    (made,) = line.requests("CreateProducer")
    assert made.dispatch_strategy == pb.NonReliable
    assert made.producer_access_mode == pb.Shared
    assert not made.HasField("schema_ref")
    assert result.stdout.splitlines() == [
        "✅ Producer 'test_producer' created successfully",
        f"📤 Message 1/1 sent successfully (ID: {message.request_id})",
        "📊 Summary:",
        "   ✅ Success: 1",
    ]
    assert line.slept == []
    assert line.closed == len(line.endpoints) == 1


def test_every_flag_of_produce(line: Line) -> None:
    line(
        *("produce", "--service-addr", "127.0.0.1:6650", "--producer-name", "p", "--topic", "/default/t"),
        *("--message", "x", "--attributes", "a:1,b:2:3", "--count", "3", "--interval", "100", "--reliable"),
    )
    assert [dict(one.attributes) for one in line.sent("/default/t")] == [{"a": "1", "b": "2:3"}] * 3
    assert line.requests("CreateProducer")[0].dispatch_strategy == pb.Reliable
    assert line.slept == [0.1, 0.1]
    assert len({one.request_id for one in line.sent("/default/t")}) == 3


def test_a_file_wins_over_a_message(line: Line, tmp_path: Path) -> None:
    file = tmp_path / "payload"
    file.write_bytes(b"\x00\xff")
    line(*PRODUCE, "-m", "x", "-f", str(file))
    assert line.sent()[0].payload == b"\x00\xff"


def test_partitions_in_turn(line: Line) -> None:
    line(*PRODUCE, "-t", "/default/p", "-n", "me", "-m", "x", "-p", "3", "-c", "4")
    made = line.requests("CreateProducer")
    assert [(one.topic_name, one.producer_name) for one in made] == [
        ("/default/p-part-0", "me-0"),
        ("/default/p-part-1", "me-1"),
        ("/default/p-part-2", "me-2"),
    ]
    assert [len(line.sent(f"/default/p-part-{number}")) for number in range(3)] == [2, 1, 1]


def test_a_redirect_is_followed(line: Line) -> None:
    line.redirect = "http://other:6650"
    line(*PRODUCE, "-m", "x")
    assert [one.target for one in line.endpoints] == ["127.0.0.1:6650", "other:6650"]
    assert line.sent()[0].msg_id.broker_addr == "http://other:6650"
    assert line.closed == 2


@pytest.mark.parametrize("status", ["NOT_FOUND", "UNAVAILABLE"])
def test_a_lookup_that_fails_means_the_given_address(line: Line, status: str) -> None:
    line.failures["TopicLookup"] = [status]
    line(*PRODUCE, "-m", "x")
    assert len(line.sent()) == 1


def test_a_lookup_that_the_broker_cannot_answer_means_the_given_address(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = pb.TopicLookupResponse(response_type=pb.TopicLookupResponse.Failed, connect_url="http://x:1")
    monkeypatch.setattr(line, "_topic_lookup", lambda request: failed)
    line(*PRODUCE, "-m", "x")
    assert [one.target for one in line.endpoints] == ["127.0.0.1:6650"]


@pytest.mark.parametrize("status", ["UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED"])
def test_five_more_tries_with_a_lookup_before_each(line: Line, status: str) -> None:
    line.failures["CreateProducer"] = [status] * 5
    line(*PRODUCE, "-m", "x")
    assert len(line.requests("TopicLookup")) == len(line.requests("CreateProducer")) == 6
    assert len(line.slept) == 5
    for tried, waited in enumerate(line.slept, 1):
        assert 0.1 * tried <= waited <= 0.2 * tried
    line.failures["CreateProducer"] = [status] * 6
    assert f"status {status}" in line(*PRODUCE, "-m", "x", exit_code=1).stderr


@pytest.mark.parametrize(
    "status", ["ALREADY_EXISTS", "INVALID_ARGUMENT", "PERMISSION_DENIED", "UNAUTHENTICATED"]
)
def test_other_statuses_are_told_at_once(line: Line, status: str) -> None:
    line.failures["CreateProducer"] = [status]
    assert f"status {status}" in line(*PRODUCE, "-m", "x", exit_code=1).stderr
    assert line.slept == []


def test_a_send_finds_the_producer_again(line: Line) -> None:
    line.failures["SendMessage"] = ["", "UNAVAILABLE"]
    result = line(*PRODUCE, "-m", "x", "-c", "2", "-i", "100")
    assert "   ✅ Success: 2" in result.stdout
    assert len(line.requests("CreateProducer")) == 2


def test_errors_are_counted_and_do_not_change_the_exit_code(line: Line) -> None:
    line.failures["SendMessage"] = ["", "INVALID_ARGUMENT", ""]
    result = line(*PRODUCE, "-m", "x", "-c", "3", "-i", "100")
    assert result.stdout.splitlines()[-2:] == ["   ✅ Success: 2", "   ❌ Errors: 1"]
    assert "INVALID_ARGUMENT" in result.stderr
    line.failures["SendMessage"] = ["UNAVAILABLE"] * 6
    assert "   ❌ Errors: 1" in line(*PRODUCE, "-m", "x").stdout


@pytest.mark.parametrize(
    "words",
    [
        ("produce", "-m", "x"),
        PRODUCE,
        (*PRODUCE, "-m", "x", "-i", "soon"),
        (*PRODUCE, "-m", "x", "-c", "-1"),
        (*PRODUCE, "-m", "x", "-a", "novalue"),
        ("consume", "-s", "h:1"),
        ("consume", "-m", "s"),
        (*CONSUME, "--sub-type", "failover"),
        ("schema", "register", "s", "-t", "xml", "-f", "pyproject.toml"),
    ],
)
def test_bad_usage_leaves_with_2(line: Line, words: tuple[str, ...]) -> None:
    line(*words, exit_code=2)
    assert not line.requests("SendMessage")


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "x", "-i", "99"),
        ("-f", "no-such-file"),
        ("-m", "x", "--schema-version", "1"),
        ("-m", "x", "--schema-min-version", "1"),
        ("-m", "x", "--schema-subject", "s", "--schema-version", "1", "--schema-min-version", "1"),
        ("-m", "x", "--schema-file", "pyproject.toml"),
        ("-m", "x", "--schema-file", "no-such-file", "--schema-type", "avro"),
    ],
)
def test_what_is_found_wrong_later_leaves_with_1_as_there(line: Line, words: tuple[str, ...]) -> None:
    line(*PRODUCE, *words, exit_code=1)
    assert not line.requests("SendMessage")


def test_no_message_at_all_is_no_error(line: Line) -> None:
    assert "   ✅ Success: 0" in line(*PRODUCE, "-m", "x", "-c", "0").stdout
    assert not line.requests("SendMessage")


# Produce with a schema


@pytest.mark.parametrize(
    ("words", "reference", "version"),
    [
        ((), pb.SchemaReference(subject="orders", use_latest=True), 2),
        (("--schema-version", "1"), pb.SchemaReference(subject="orders", pinned_version=1), 1),
        (("--schema-version", "2"), pb.SchemaReference(subject="orders", pinned_version=2), 2),
        (("--schema-min-version", "1"), pb.SchemaReference(subject="orders", min_version=1), 2),
    ],
)
def test_the_resolved_version_goes_with_every_message(
    line: Line, words: tuple[str, ...], reference: Any, version: int
) -> None:
    line.broker.register("orders", definition=b"1")
    schema_id = line.broker.register("orders", definition=b"22")
    line(*PRODUCE, "-m", "{}", "--schema-subject", "orders", *words)
    assert line.requests("CreateProducer")[0].schema_ref == reference
    (message,) = line.sent()
    assert (message.schema_id, message.schema_version) == (schema_id, version)


@pytest.mark.parametrize(
    ("words", "says"),
    [(("--schema-version", "9"), "NOT_FOUND"), (("--schema-min-version", "9"), "no version 9 or later")],
)
def test_a_version_that_is_not_there(line: Line, words: tuple[str, ...], says: str) -> None:
    line.broker.register("orders")
    assert says in line(*PRODUCE, "-m", "x", "--schema-subject", "orders", *words, exit_code=1).stderr


@pytest.mark.parametrize(
    ("words", "subject"), [((), "default-orders"), (("--schema-subject", "mine"), "mine")]
)
def test_a_schema_file_is_registered_first(
    line: Line, tmp_path: Path, words: tuple[str, ...], subject: str
) -> None:
    file = tmp_path / "orders.avsc"
    file.write_text('{"type":"string"}')
    result = line(
        *PRODUCE,
        "-t",
        "/default/orders",
        "-m",
        "x",
        "--schema-file",
        str(file),
        "--schema-type",
        "avro",
        *words,
    )
    assert result.stdout.splitlines()[:2] == ["Auto-registering schema...", "Schema registered with ID: 1"]
    assert line.broker.schemas[subject][0]["definition"] == b'{"type":"string"}'
    assert line.requests("CreateProducer")[0].schema_ref.subject == subject


# Consume


def message(offset: int, payload: bytes = b"hello", **fields: Any) -> Any:
    topic = fields.pop("topic", "/default/test_topic")
    return pb.StreamMessage(
        request_id=9,
        msg_id=pb.MsgID(producer_id=1, topic_name=topic, broker_addr="b", topic_offset=offset),
        payload=payload,
        producer_name="p",
        **fields,
    )


@pytest.mark.parametrize(
    ("given", "number"), [(None, 1), ("exclusive", 0), ("shared", 1), ("fail-over", 2), ("key-shared", 3)]
)
def test_subscription_types(line: Line, given: str | None, number: int) -> None:
    line(*CONSUME, *(("--sub-type", given) if given else ()), exit_code=1)
    (request,) = line.requests("Subscribe")
    assert request.subscription_type == number
    assert (request.topic_name, request.consumer_name, request.subscription) == (
        "/default/test_topic",
        "consumer_pubsub",
        "s",
    )


def test_lines_of_stored_and_other_messages(line: Line) -> None:
    result = line.consumed(message(0), message(1, b"world", attributes={"k": "v", "a": "b"}), message(1))
    assert result.stdout.splitlines() == [
        "Received message: hello",
        "Size: 5 bytes, Total received: 5 bytes",
        'Received reliable message: "world"',
        "Topic offset: 1, Size: 5 bytes, Total received: 10 bytes",
        "Producer: p, Topic: /default/test_topic",
        "Attributes: a=b, k=v",
        "Received message: hello",
        "Size: 5 bytes, Total received: 15 bytes",
    ]
    acks = line.requests("Ack")
    assert [one.msg_id.topic_offset for one in acks] == [0, 1, 1]
    assert {(one.subscription_name, one.request_id, one.msg_id.broker_addr) for one in acks} == {
        ("s", 9, "b")
    }


def test_long_payloads_are_not_printed(line: Line) -> None:
    result = line.consumed(message(1, b"x" * 1024), message(2, b"x" * 1025))
    assert result.stdout.count("[binary data]") == 1
    assert "x" * 1024 in result.stdout


def test_control_characters_are_made_visible(line: Line) -> None:
    assert "\x1b" not in line.consumed(message(0, b"\x1b[31mred\x00")).stdout


def test_all_partitions_are_received(line: Line) -> None:
    line.partitions = ["/default/test_topic-part-0", "/default/test_topic-part-1"]
    line.consumed(message(1, topic=line.partitions[0]), message(1, topic=line.partitions[1]))
    assert [one.topic_name for one in line.requests("Subscribe")[:2]] == line.partitions
    assert [line.topics[name].acked for name in line.partitions] == [[1], [1]]


def test_schemas_are_loaded_once_and_payloads_read_by_them(line: Line) -> None:
    schema_id = line.broker.register("orders", "avro")
    result = line.consumed(
        message(1, b'{ "a":1 }', schema_id=schema_id, schema_version=1),
        message(2, b"no json", schema_id=schema_id),
        message(3, b'{"a":2}', schema_id=schema_id),
    )
    assert result.stdout.count("✅ Loaded schema: orders") == 1
    assert 'Received reliable message: "{"a": 1}"' in result.stdout
    assert "no json" not in result.stdout
    assert "not JSON" in result.stderr
    assert line.topics["/default/test_topic"].acked == [1, 3], "what breaks its schema is not acked"


def test_a_schema_that_cannot_be_loaded_is_only_told(line: Line) -> None:
    result = line.consumed(message(1, b"text", schema_id=0), message(2, b"text", schema_id=0))
    assert result.stderr.count("cannot be loaded") == 1
    assert line.topics["/default/test_topic"].acked == [1, 2]


def test_an_ack_that_fails_does_not_end_it(line: Line) -> None:
    line.failures["Ack"] = ["UNAVAILABLE"]
    result = line.consumed(message(1), message(2))
    assert "could not ack offset 1" in result.stderr
    assert line.topics["/default/test_topic"].acked == [2]


@pytest.mark.parametrize("status", ["UNAVAILABLE", "NOT_FOUND"])
def test_a_stream_that_breaks_is_opened_again(line: Line, status: str) -> None:
    broken = FakeStream()
    broken.put(message(1))
    broken.put(status_error(status, "moved"))
    line.streams.append(broken)
    line.consumed(message(2))
    assert len(line.requests("Subscribe")) == 2
    assert line.topics["/default/test_topic"].acked == [1, 2]


def test_a_clean_end_is_followed_by_another_call_with_the_same_id(line: Line) -> None:
    ended = FakeStream()
    ended.put(message(1))
    ended.end()
    line.streams.append(ended)
    line.consumed(message(2))
    assert len(line.requests("Subscribe")) == 1
    assert {one.consumer_id for one in line.requests("ReceiveMessages")} == {5}
    assert len(line.requests("ReceiveMessages")) == 3


class Endless:
    """A consumer whose messages never end."""

    def messages(self) -> Any:
        while True:
            yield None, message(1)


def test_a_reader_that_nobody_empties_waits_and_ends() -> None:
    inbox = Inbox(256)
    reader = threading.Thread(target=fill, args=(inbox, Endless()), daemon=True)
    reader.start()
    while not inbox._waiting.full():
        time.sleep(0.001)
    inbox.close()
    reader.join(10)
    assert not reader.is_alive()


def test_a_broker_that_stays_away_ends_it(line: Line) -> None:
    for _ in range(7):
        gone = FakeStream()
        gone.put(status_error("UNAVAILABLE", "gone"))
        line.streams.append(gone)
    result = line(*CONSUME, exit_code=1)
    assert "status UNAVAILABLE" in result.stderr
    assert len(line.requests("ReceiveMessages")) == 6


def test_a_broker_that_comes_back_late_is_found_again(line: Line) -> None:
    gone = FakeStream()
    gone.put(message(1))
    gone.put(status_error("UNAVAILABLE", "gone"))
    line.streams.append(gone)
    line.failures["Subscribe"] = ["", *["UNAVAILABLE"] * 13]  # longer than one round of tries
    line.consumed(message(2))
    assert len(line.requests("Subscribe")) == 15
    assert line.topics["/default/test_topic"].acked == [1, 2]


def test_a_subscription_that_is_refused(line: Line) -> None:
    line.failures["Subscribe"] = ["PERMISSION_DENIED"]
    assert "status PERMISSION_DENIED" in line(*CONSUME, exit_code=1).stderr
    assert line.closed == 1


# Schema


@pytest.fixture
def definition(tmp_path: Path) -> str:
    file = tmp_path / "orders.json"
    file.write_text('{"type":"object"}')
    return str(file)


def test_schema_commands_as_json(line: Line, definition: str) -> None:
    made = line("schema", "register", "orders", "-t", "json_schema", "-f", definition, "-o", "json")
    assert json.loads(made.stdout) == {
        "success": True, "subject": "orders", "schema_id": 1, "schema_type": "JsonSchema"
    }  # fmt: skip
    assert "Registering" in made.stderr
    line.broker.register("orders", definition=b"{ }")
    assert line.json("schema", "get", "orders", "-v", "1") == {
        "subject": "orders", "version": 1, "schema_id": 1, "schema_type": "json_schema",
        "schema_definition": '{"type":"object"}', "fingerprint": f"sha256:{17:064x}",
    }  # fmt: skip
    assert line.json("schema", "get", "orders")["version"] == 2
    assert line.json("schema", "versions", "orders") == {"subject": "orders", "versions": [1, 2], "count": 2}
    checked = line("schema", "check", "orders", "-f", definition, "-t", "json_schema", "-o", "json")
    assert json.loads(checked.stdout) == {"subject": "orders", "is_compatible": True, "errors": []}
    assert [one["subject"] for one in line.json("schema", "list")] == ["orders"]
    assert line.json("schema", "delete", "orders", "-v", "1") == {
        "success": True, "subject": "orders", "version": 1
    }  # fmt: skip
    assert line.json("schema", "versions", "orders")["versions"] == [2]


def test_schema_commands_as_text(line: Line, definition: str, tmp_path: Path) -> None:
    made = line("schema", "register", "orders", "--schema-type", "json_schema", "--file", definition)
    assert "✅ Schema registered successfully" in made.stdout
    assert '{"type":"object"}' in line("schema", "get", "orders").stdout
    assert "  Version 1" in line("schema", "versions", "orders").stdout
    check = ("schema", "check", "orders", "-t", "json_schema", "-f")
    assert "is compatible" in line(*check, definition).stdout
    other = tmp_path / "other"
    other.write_text("incompatible")
    assert "id is gone" in line(*check, str(other)).stdout
    assert "orders (type: json_schema" in line("schema", "list", "--output", "table").stdout
    assert "Deleted version 1" in line("schema", "delete", "orders", "--version", "1").stdout


def test_the_address_of_the_schema_commands(line: Line) -> None:
    line("schema", "list")
    line("schema", "-s", "http://other:1", "list")
    assert [one.target for one in line.endpoints] == ["127.0.0.1:6650", "other:1"]
    assert line.closed == 2
    assert "NOT_FOUND" in line("schema", "get", "none", exit_code=1).stderr
