"""``danube schema`` and ``danube produce --schema-*`` with the real client against a scripted registry."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result

from danube.cli.main import root
from danube.cli.terminal.services import Services
from danube.cli.topics.schema_source import schema_type
from danube.limits import SCHEMA_DEFINITION_BYTES_MAX
from tests.fakes.broker import FakeBroker

AVRO = '{"type":"record","name":"P","fields":[{"name":"x","type":"int"}]}'
VIOLATION = {
    "path": "/fields/x", "rule": "type_changed", "message": "int cannot be read as string",
    "direction": "backward", "version": 1, "old": "int", "new": "string", "hint": "keep int",
}  # fmt: skip
TOLD = "/fields/x: type_changed: int cannot be read as string (int -> string); keep int"


class Line:
    """Runs ``danube`` with the real client against the fake broker."""

    def __init__(self, fake: FakeBroker) -> None:
        self.fake = fake
        self.registry = fake.registry

    def __call__(self, *words: str, input: str | bytes | None = None, exit_code: int = 0) -> Result:
        services = Services(can_ask=lambda: False, shows_progress=lambda: False)
        environment = {"DANUBE_SERVICE_URL": self.fake.url}
        result = CliRunner(env=environment).invoke(
            root, list(words), input=input, obj=services, prog_name="danube"
        )
        assert result.exit_code == exit_code, result.output
        return result

    def json(self, *words: str, **options: Any) -> Any:
        return json.loads(self(*words, "-o", "json", **options).stdout)


@pytest.fixture
def danube() -> Iterator[Line]:
    with FakeBroker() as fake:
        yield Line(fake)
        assert fake.violations == []


# -- register -----------------------------------------------------------------------------------


def test_register_from_a_file_whose_name_tells_the_type(danube: Line, tmp_path: Path) -> None:
    file = tmp_path / "point.avsc"
    file.write_text(AVRO)
    words = ["schema", "register", "points", "-f", str(file), "--tag", "a", "--tag", "b"]
    made = danube.json(*words, "--description", "d", "--created-by", "me", "--compatibility", "FULL")
    assert made["subject"] == "points" and made["version"] == 1
    assert made["schema_id"] == "1" and made["is_new_version"] is True
    assert danube.json(*words)["is_new_version"] is False
    stored = danube.registry.subjects["points"]["versions"][1]
    assert (stored["schema_type"], stored["definition"]) == ("avro", AVRO.encode())
    assert (stored["tags"], stored["description"], stored["created_by"]) == (["a", "b"], "d", "me")
    assert danube.registry.subjects["points"]["mode"] == "full"
    assert "points" in danube(*words).stdout


def test_register_from_standard_input_and_from_the_command_line(danube: Line) -> None:
    danube("schema", "register", "a", "--type", "avro", "-f", "-", input=AVRO)
    danube("schema", "register", "b", "--type", "JSON", "--schema", "{}")
    danube("schema", "register", "c", "--type", "string")
    stored = {name: one["versions"][1] for name, one in danube.registry.subjects.items()}
    assert stored["a"]["definition"] == AVRO.encode()
    assert (stored["b"]["schema_type"], stored["b"]["definition"]) == ("json_schema", b"{}")
    assert (stored["c"]["schema_type"], stored["c"]["definition"]) == ("string", b"")


def test_a_refused_registration_tells_every_violation(danube: Line) -> None:
    danube.registry.violations = [VIOLATION, VIOLATION | {"path": "/fields/y"}]
    words = ["schema", "register", "points", "-t", "avro", "--schema", AVRO]
    said = danube(*words, exit_code=8).stderr
    assert f"  {TOLD}\n" in said and "  /fields/y: type_changed" in said
    body = json.loads(danube(*words, "-o", "json", exit_code=8).stderr)["error"]
    assert body["reason"] == "SchemaIncompatible"
    assert body["details"][0] == VIOLATION


def test_a_definition_that_does_not_parse_is_exit_code_8(danube: Line) -> None:
    assert (
        "line 1" in danube("schema", "register", "p", "-t", "avro", "--schema", "broken", exit_code=8).stderr
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["-t", "avro"], "--file or --schema"),
        (["--schema", "{}"], "Give --type"),
        (["-f", "x.txt"], "Give --type"),
        (["-t", "xml", "--schema", "{}"], "no schema type"),
        (["-t", "avro", "-f", "absent.avsc"], "absent.avsc: No such file"),
        (["-t", "avro", "-f", "a", "--schema", "b"], "not both"),
        (["-t", "avro", "--schema", "{}", "--compatibility", "some"], "Invalid value"),
    ],
)
def test_usage_of_register(danube: Line, words: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("{}")
    words = [str(tmp_path / one) if one.startswith("x.") else one for one in words]
    assert message in danube("schema", "register", "p", *words, exit_code=2).stderr


def test_a_file_that_no_registry_would_take_is_not_sent(danube: Line, tmp_path: Path) -> None:
    file = tmp_path / "large.avsc"
    file.write_bytes(b" " * (SCHEMA_DEFINITION_BYTES_MAX + 1))
    assert "is larger than" in danube("schema", "register", "p", "-f", str(file), exit_code=8).stderr
    assert danube.registry.calls == []


def test_types_by_name() -> None:
    assert schema_type("Proto", None) == "protobuf"
    assert schema_type(None, "a/B.PROTO") == "protobuf"
    with pytest.raises(click.BadParameter):
        schema_type("xml", "a.json")


# -- get, versions, list ------------------------------------------------------------------------


def test_get_shows_the_definition_and_raw_nothing_else(danube: Line) -> None:
    schema_id = danube.registry.put("points", "avro", AVRO, AVRO + " ")
    shown = danube.json("schema", "get", "points", "--version", "1")
    assert (shown["version"], shown["definition"], shown["schema_id"]) == (1, AVRO, str(schema_id))
    assert shown["created_at"] == "2026-11-21T08:00:00.000000Z"
    assert "created_us" not in shown
    assert danube.json("schema", "show", "--id", str(schema_id))["version"] == 2
    assert danube("schema", "get", "points", "-o", "raw").stdout_bytes == AVRO.encode() + b" "
    table = danube("schema", "get", "points").stdout
    assert "schema_type    avro" in table and table.endswith(f"definition\n{AVRO} \n")


def test_get_wants_a_subject_or_an_id(danube: Line) -> None:
    assert "either SUBJECT or --id" in danube("schema", "get", exit_code=2).stderr
    assert "either SUBJECT or --id" in danube("schema", "get", "p", "--id", "1", exit_code=2).stderr


@pytest.mark.parametrize(
    "words",
    [
        ["get", "absent"],
        ["get", "--id", "9"],
        ["get", "points", "-v", "9"],
        ["versions", "absent"],
        ["diff", "points"],
        ["set-compatibility", "absent", "full"],
        ["delete", "absent", "--yes"],
        ["check", "absent", "-t", "avro", "--schema", AVRO],
    ],
)
def test_what_does_not_exist_is_exit_code_3(danube: Line, words: list[str]) -> None:
    danube.registry.put("points", "avro", AVRO)
    assert danube("schema", *words, exit_code=3).stderr.startswith("error: ")


def test_versions_and_subjects_are_listed(danube: Line) -> None:
    danube.registry.put("points", "avro", AVRO, AVRO + " ")
    assert [one["version"] for one in danube.json("schema", "versions", "points")] == [1, 2]
    assert "definition" not in danube.json("schema", "versions", "points")[0]
    assert danube("schema", "versions", "points").stdout.startswith("VERSION  CREATED_AT")
    assert danube.json("schemas", "ls") == [
        {
            "subject": "points",
            "schema_id": "1",
            "schema_type": "avro",
            "latest_version": 2,
            "compatibility": "backward",
            "tags": [],
        }
    ]
    assert danube("schema", "list").stdout.startswith("SUBJECT")


# -- check, diff, compatibility -----------------------------------------------------------------


def test_check_prints_every_violation_and_leaves_with_8(danube: Line) -> None:
    danube.registry.put("points", "avro", AVRO)
    words = ["schema", "check", "points", "-t", "avro", "--schema", AVRO]
    assert danube(*words).stdout == "points: compatible\n"
    assert danube.json(*words) == {"subject": "points", "is_compatible": True, "violations": []}
    danube.registry.violations = [VIOLATION]
    found = danube(*words, "--compatibility", "full", exit_code=8)
    assert found.stdout == f"points: not compatible\n  {TOLD}\n"
    assert danube.registry.calls[-1][1]["compatibility"] == "full"
    assert danube.json(*words, exit_code=8)["violations"] == [VIOLATION]


def test_diff_tells_both_directions(danube: Line) -> None:
    danube.registry.put("points", "avro", AVRO, AVRO + " ", AVRO + "  ")
    danube.registry.violations = [VIOLATION]
    assert danube("schema", "diff", "points").stdout.splitlines() == [
        "points: version 2 -> 3",
        "backward  3 reads 2: 1 violations",
        f"  {TOLD}",
        "forward   2 reads 3: compatible",
    ]
    found = danube.json("schema", "diff", "points", "1", "3")
    assert (found["old"], found["new"], found["backward"], found["forward"]) == (1, 3, [VIOLATION], [])


def test_control_characters_of_a_schema_do_not_reach_the_terminal(danube: Line) -> None:
    danube.registry.put("points", "avro", AVRO)
    danube.registry.violations = [VIOLATION | {"message": "a\x1b[31mb"}]
    words = ["schema", "check", "points", "-t", "avro", "--schema", AVRO]
    assert "\x1b" not in danube(*words, exit_code=8).stdout


def test_set_compatibility(danube: Line) -> None:
    danube.registry.put("points", "avro", AVRO)
    made = danube.json("schema", "set-compatibility", "points", "FULL")
    assert made == {"subject": "points", "compatibility": "full"}


# -- delete, topics -----------------------------------------------------------------------------


def test_delete_asks_and_tells_what_went(danube: Line) -> None:
    danube.registry.put("points", "avro", AVRO, AVRO + " ", AVRO + "  ")
    danube("schema", "delete", "points", exit_code=2)
    assert danube.registry.subjects
    assert danube.json("schema", "rm", "points", "-v", "1", "--yes")["deleted_versions"] == [1]
    assert danube.json("schema", "delete", "points", "--yes")["deleted_versions"] == [2, 3]


def test_a_topic_asks_for_a_schema(danube: Line) -> None:
    danube.registry.put("points", "avro", AVRO)
    words = ["--subject", "points", "--validation", "ENFORCE", "--validate-payload"]
    changed = danube.json("schema", "set-topic", "orders", *words)
    assert changed == {
        "topic": "/default/orders",
        "subject": "points",
        "validation": "enforce",
        "validate_payload": True,
        "schema_id": "1",
    }
    danube("schema", "set-topic", "orders", "--no-validate-payload")
    assert danube.registry.calls[-1][1] == {"topic": "/default/orders", "validate_payload": False}
    assert danube.json("schema", "topic", "orders")["validate_payload"] is False
    assert "Give --subject" in danube("schema", "set-topic", "orders", exit_code=2).stderr


# -- produce ------------------------------------------------------------------------------------


def schemas_of(fake: FakeBroker, topic: str) -> list[tuple[int, int]]:
    from danube.core.batch.columns import BatchView

    views = [BatchView(batch) for _, batch in fake.partitions[topic].log]
    return [(one.schema_id or 0, one.schema_version or 0) for one in views]


def test_produce_registers_a_file_and_sends_the_bytes_as_they_are(danube: Line, tmp_path: Path) -> None:
    file = tmp_path / "point.json"
    file.write_text('{"type":"object"}')
    danube("produce", "orders", "-m", "{}", "--schema-file", str(file))
    assert list(danube.registry.subjects) == ["default-orders"]
    danube("produce", "orders", "--schema-subject", "s", "--schema-file", str(file), input="a\nb\n")
    assert danube.registry.subjects["s"]["versions"][1]["schema_type"] == "json_schema"
    assert danube.fake.payloads("/default/orders") == [b"{}", b"a", b"b"]
    assert schemas_of(danube.fake, "/default/orders") == [(1, 1), (2, 1)]


def test_produce_names_a_registered_version(danube: Line) -> None:
    danube.registry.put("points", "avro", AVRO, AVRO + " ")
    for pin in ([], ["--schema-version", "1"], ["--schema-min-version", "2"]):
        danube("produce", "orders", "-m", "x", "--schema-subject", "points", *pin)
    assert schemas_of(danube.fake, "/default/orders") == [(1, 2), (1, 1), (1, 2)]
    first = danube.json("consume", "orders", "-m", "s", "--from", "earliest", "-c", "1", "--timeout", "10s")
    assert (first["schema_id"], first["schema_version"]) == ("1", 2)
    assert danube.registry.asked("schema.register") == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schema-subject", "absent"], "absent"),
        (["--schema-subject", "points", "--schema-version", "7"], "no version 7"),
        (["--schema-subject", "points", "--schema-min-version", "7"], "no version 7 yet"),
    ],
)
def test_produce_with_a_schema_that_is_not_there_sends_nothing(
    danube: Line, words: list[str], message: str
) -> None:
    danube.registry.put("points", "avro", AVRO)
    assert message in danube("produce", "orders", "-m", "x", *words, exit_code=3).stderr
    assert danube.fake.topics == {}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--schema-version", "1"], "Give --schema-subject too"),
        (["--schema-type", "avro"], "belongs to --schema-file"),
        (["--schema-subject", "s", "--schema-version", "1", "--schema-min-version", "1"], "Give one of"),
        (["--schema-file", "a.avsc", "--schema-version", "1"], "Give one of"),
    ],
)
def test_flags_that_contradict_each_other(danube: Line, words: list[str], message: str) -> None:
    assert message in danube("produce", "orders", "-m", "x", *words, exit_code=2).stderr
