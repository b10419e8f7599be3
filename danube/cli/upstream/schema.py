"""``danube-cli schema``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from danube.cli.upstream.calls import call, fields_of, labelled
from danube.cli.upstream.root import SCHEMA_TYPE, Shown, content_of, say, upstream_command
from danube.cli.upstream.routes import Routes

_VERSION = click.IntRange(1, (1 << 32) - 1)
_WORDS = {"json_schema": "JsonSchema", "avro": "Avro", "protobuf": "Protobuf"}  # as the answer spells them
_subject = click.argument("subject")
_file_option = click.option("-f", "--file", type=click.Path(path_type=Path), required=True)
_output = click.option("-o", "--output", type=click.Choice(["table", "json"]), default="table")
_type_option = click.option("-t", "--schema-type", type=SCHEMA_TYPE, required=True)


@click.group()
@click.option("-s", "--service-addr", default="http://127.0.0.1:6650", show_default=True)
@click.pass_context
def schema(context: click.Context, service_addr: str) -> None:
    """Subjects of the schema registry."""
    context.obj = routes = Routes(context.obj, service_addr)
    context.call_on_close(routes.close)


def _ask(routes: Routes, method: str, **fields: Any) -> Any:
    return call(routes.entry, f"SchemaRegistry/{method}", **fields)


def _note(text: str) -> None:
    """A line on the way; with JSON, standard output holds nothing else than that."""
    if click.get_current_context().params["output"] == "json":
        click.echo(text, err=True)
    else:
        say(text)


@upstream_command(schema, "register", _subject, _type_option, _file_option, _output)
def register(routes: Routes, subject: str, schema_type: str, file: Path) -> Shown:
    """Register a definition as the next version of a subject."""
    _note(f"📝 Registering schema '{subject}'...")
    made = _ask(
        routes,
        "RegisterSchema",
        subject=subject,
        schema_type=schema_type,
        schema_definition=content_of(file),
        created_by="danube-cli",
    )
    kind = _WORDS.get(schema_type, schema_type)
    about = {"success": True, "subject": subject, "schema_id": made.schema_id, "schema_type": kind}
    told = {**about, "version": made.version, "schema_type": schema_type}
    lines = labelled(told, "subject", "schema_id", "version", "schema_type")
    return Shown(about, ["✅ Schema registered successfully", *lines])


@upstream_command(schema, "get")
@_subject
@click.option("-v", "--version", type=_VERSION, help="The latest where left out.")
@_output
def get(routes: Routes, subject: str, version: int | None) -> Shown:
    """Show a version of a subject."""
    found = _ask(routes, "GetLatestSchema", subject=subject)
    if version is not None and version != found.version:
        found = _ask(routes, "GetSchema", schema_id=found.schema_id, version=version)
    text = found.schema_definition.decode("utf-8", "backslashreplace")
    about = {
        **fields_of(found, "subject", "version", "schema_id", "schema_type"),
        "schema_definition": text,
        "fingerprint": found.fingerprint,
    }
    told = labelled(about, "subject", "version", "schema_id", "schema_type", "fingerprint")
    return Shown(about, [*told, "Schema Definition:", *text.splitlines()])


@upstream_command(schema, "versions", _subject, _output)
def versions(routes: Routes, subject: str) -> Shown:
    """List the versions of a subject."""
    numbers = [one.version for one in _ask(routes, "ListVersions", subject=subject).versions]
    lines = [
        f"Versions of '{subject}':",
        *(f"  Version {number}" for number in numbers),
        f"Count: {len(numbers)}",
    ]
    return Shown({"subject": subject, "versions": numbers, "count": len(numbers)}, lines)


@upstream_command(schema, "check", _subject, _file_option, _type_option, _output)
def check(routes: Routes, subject: str, file: Path, schema_type: str) -> Shown:
    """Tell whether a definition could be the next version of a subject."""
    _note(f"🔍 Checking compatibility with '{subject}'...")
    definition = content_of(file)
    found = _ask(
        routes,
        "CheckCompatibility",
        subject=subject,
        new_schema_definition=definition,
        schema_type=schema_type,
    )
    verdict = ["✅ Schema is compatible"]
    if not found.is_compatible:
        verdict = ["❌ Schema is not compatible", *(f"  - {one}" for one in found.errors)]
    return Shown({"subject": subject} | fields_of(found, "is_compatible", "errors"), verdict)


@upstream_command(schema, "list", _output)
def list_subjects(routes: Routes) -> Shown:
    """List the subjects."""
    found = _ask(routes, "ListSubjects").subjects
    names = ("subject", "schema_id", "schema_type", "latest_version", "compatibility_mode")
    lines = [
        f"{one.subject} (type: {one.schema_type}, latest version: {one.latest_version})" for one in found
    ]
    return Shown([fields_of(one, *names) for one in found], lines)


@upstream_command(schema, "delete")
@_subject
@click.option("-v", "--version", type=_VERSION, required=True)
@_output
def delete(routes: Routes, subject: str, version: int) -> Shown:
    """Delete one version of a subject."""
    _ask(routes, "DeleteSchemaVersion", subject=subject, version=version)
    about = {"success": True, "subject": subject, "version": version}
    return Shown(about, [f"✅ Deleted version {version} of subject '{subject}'"])
