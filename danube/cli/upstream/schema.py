"""``danube-cli schema``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import click

from danube.cli.upstream.root import SCHEMA_TYPE, Command, Outside, content_of, say, show_json
from danube.cli.upstream.routes import Routes, ask_registry
from danube.server.proto import SchemaRegistry_pb2 as pb

Reply = TypeVar("Reply")

_VERSION = click.IntRange(1, (1 << 32) - 1)
_WORDS = {"json_schema": "JsonSchema", "avro": "Avro", "protobuf": "Protobuf"}  # as the answer spells them
_file_option = click.option("-f", "--file", type=click.Path(path_type=Path), required=True)
_type_option = click.option("-t", "--schema-type", type=SCHEMA_TYPE, required=True)


def _output_option(command: Command) -> Command:
    return click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")(command)


class SchemaLine:
    """The registry behind the address that the group was given."""

    def __init__(self, outside: Outside, address: str) -> None:
        self._outside = outside
        self._address = address

    @contextmanager
    def registry(self) -> Iterator[Routes]:
        routes = Routes(self._outside, self._address)
        try:
            yield routes
        finally:
            routes.close()

    def ask(self, method: str, request: object, reply: type[Reply]) -> Reply:
        with self.registry() as routes:
            return ask_registry(routes.entry, method, request, reply)


@click.group()
@click.option("-s", "--service-addr", default="http://127.0.0.1:6650", show_default=True)
@click.pass_context
def schema(context: click.Context, service_addr: str) -> None:
    """Subjects of the schema registry."""
    context.obj = SchemaLine(context.obj, service_addr)


def _note(text: str, output: str) -> None:
    """A line on the way; with JSON, standard output holds nothing else than that."""
    if output == "json":
        click.echo(text, err=True)
    else:
        say(text)


@schema.command("register")
@click.argument("subject")
@_type_option
@_file_option
@_output_option
@click.pass_obj
def register(line: SchemaLine, subject: str, schema_type: str, file: Path, output: str) -> None:
    """Register a definition as the next version of a subject."""
    _note(f"📝 Registering schema '{subject}'...", output)
    request = pb.RegisterSchemaRequest(
        subject=subject, schema_type=schema_type, schema_definition=content_of(file), created_by="danube-cli"
    )
    made = line.ask("RegisterSchema", request, pb.RegisterSchemaResponse)
    if output == "json":
        kind = _WORDS.get(schema_type, schema_type)
        about = {"subject": subject, "schema_id": made.schema_id, "schema_type": kind}
        show_json({"success": True, **about})
        return
    say("✅ Schema registered successfully", f"Subject: {subject}", f"Schema ID: {made.schema_id}")
    say(f"Version: {made.version}", f"Type: {schema_type}")


def _latest(line: SchemaLine, subject: str) -> pb.GetSchemaResponse:
    return line.ask("GetLatestSchema", pb.GetLatestSchemaRequest(subject=subject), pb.GetSchemaResponse)


@schema.command("get")
@click.argument("subject")
@click.option("-v", "--version", type=_VERSION, help="The latest where left out.")
@_output_option
@click.pass_obj
def get(line: SchemaLine, subject: str, version: int | None, output: str) -> None:
    """Show a version of a subject."""
    found = _latest(line, subject)
    if version is not None and version != found.version:
        request = pb.GetSchemaRequest(schema_id=found.schema_id, version=version)
        found = line.ask("GetSchema", request, pb.GetSchemaResponse)
    text = found.schema_definition.decode("utf-8", "backslashreplace")
    if output == "json":
        show_json(
            {
                "subject": found.subject,
                "version": found.version,
                "schema_id": found.schema_id,
                "schema_type": found.schema_type,
                "schema_definition": text,
                "fingerprint": found.fingerprint,
            }
        )
        return
    say(f"Subject: {found.subject}", f"Version: {found.version}", f"Schema ID: {found.schema_id}")
    say(f"Type: {found.schema_type}", f"Fingerprint: {found.fingerprint}")
    say("Schema Definition:", *text.splitlines())


@schema.command("versions")
@click.argument("subject")
@_output_option
@click.pass_obj
def versions(line: SchemaLine, subject: str, output: str) -> None:
    """List the versions of a subject."""
    request = pb.ListVersionsRequest(subject=subject)
    found = line.ask("ListVersions", request, pb.ListVersionsResponse).versions
    numbers = [one.version for one in found]
    if output == "json":
        show_json({"subject": subject, "versions": numbers, "count": len(numbers)})
        return
    say(f"Versions of '{subject}':", *(f"  Version {number}" for number in numbers), f"Count: {len(numbers)}")


@schema.command("check")
@click.argument("subject")
@_file_option
@_type_option
@_output_option
@click.pass_obj
def check(line: SchemaLine, subject: str, file: Path, schema_type: str, output: str) -> None:
    """Tell whether a definition could be the next version of a subject."""
    _note(f"🔍 Checking compatibility with '{subject}'...", output)
    request = pb.CheckCompatibilityRequest(
        subject=subject, new_schema_definition=content_of(file), schema_type=schema_type
    )
    found = line.ask("CheckCompatibility", request, pb.CheckCompatibilityResponse)
    if output == "json":
        show_json({"subject": subject, "is_compatible": found.is_compatible, "errors": list(found.errors)})
    elif found.is_compatible:
        say("✅ Schema is compatible")
    else:
        say("❌ Schema is not compatible", *(f"  - {one}" for one in found.errors))


@schema.command("list")
@_output_option
@click.pass_obj
def list_subjects(line: SchemaLine, output: str) -> None:
    """List the subjects."""
    found = line.ask("ListSubjects", pb.ListSubjectsRequest(), pb.ListSubjectsResponse).subjects
    if output == "json":
        names = ("subject", "schema_id", "schema_type", "latest_version", "compatibility_mode")
        show_json([{name: getattr(one, name) for name in names} for one in found])
        return
    for one in found:
        say(f"{one.subject} (type: {one.schema_type}, latest version: {one.latest_version})")


@schema.command("delete")
@click.argument("subject")
@click.option("-v", "--version", type=_VERSION, required=True)
@_output_option
@click.pass_obj
def delete(line: SchemaLine, subject: str, version: int, output: str) -> None:
    """Delete one version of a subject."""
    request = pb.DeleteSchemaVersionRequest(subject=subject, version=version)
    line.ask("DeleteSchemaVersion", request, pb.DeleteSchemaVersionResponse)
    if output == "json":
        show_json({"success": True, "subject": subject, "version": version})
    else:
        say(f"✅ Deleted version {version} of subject '{subject}'")
