"""``danube-admin schemas``: subjects and versions of the registry."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from danube.cli.upstream.admin_line import AdminLine
from danube.cli.upstream.root import SCHEMA_TYPE, Wrong, content_of, json_output, say, show_json
from danube.server.proto import SchemaRegistry_pb2 as pb

_MODE: Final = click.Choice(
    ["none", "backward", "forward", "full", "backward_transitive", "forward_transitive", "full_transitive"],
    case_sensitive=False,
)
_PLAIN: Final = ("bytes", "string", "number", "int", "int64", "float", "double")


@click.group()
def schemas() -> None:
    """Subjects of the schema registry."""


def _definition_options(command: Callable[..., Any]) -> Callable[..., Any]:
    file = click.option("--file", type=click.Path(path_type=Path))
    return file(click.option("--schema", help="The definition itself.")(command))


def _definition(schema_type: str, file: Path | None, schema: str | None) -> bytes:
    if file is not None and schema is not None:
        raise click.UsageError("Give --file or --schema, not both.")
    if file is not None:
        return content_of(file)
    if schema is None and schema_type.lower() not in _PLAIN:
        raise Wrong("Give --file or --schema.")
    return (schema or "").encode()


@schemas.command("register")
@click.argument("subject")
@click.option("--schema-type", type=SCHEMA_TYPE, required=True)
@_definition_options
@click.option("--description", default="")
@click.option("--tags", multiple=True)
@json_output
@click.pass_obj
def register(
    line: AdminLine,
    subject: str,
    schema_type: str,
    file: Path | None,
    schema: str | None,
    description: str,
    tags: tuple[str, ...],
    output: str | None,
) -> None:
    """Register a definition as the next version of a subject."""
    request = pb.RegisterSchemaRequest(
        subject=subject,
        schema_type=schema_type,
        schema_definition=_definition(schema_type, file, schema),
        description=description,
        created_by="danube-admin",
        tags=tags,
    )
    made = line.ask("SchemaRegistry/RegisterSchema", request, pb.RegisterSchemaResponse)
    if output:
        names = ("schema_id", "version", "is_new_version", "fingerprint")
        show_json({"subject": subject} | {name: getattr(made, name) for name in names})
        return
    say("Registered new schema version" if made.is_new_version else "Schema already exists")
    say(f"Subject: {subject}", f"Schema ID: {made.schema_id}", f"Version: {made.version}")
    say(f"Fingerprint: {made.fingerprint}")


@schemas.command("get")
@click.option("--subject")
@click.option("--id", "schema_id", type=click.IntRange(0, (1 << 64) - 1))
@click.option("--version", type=click.IntRange(1, (1 << 32) - 1))
@json_output
@click.pass_obj
def get(
    line: AdminLine, subject: str | None, schema_id: int | None, version: int | None, output: str | None
) -> None:
    """Show the latest version of a subject, or a version by schema id."""
    if subject is None and schema_id is None:
        raise Wrong("Give either --subject or --id.")
    if subject is not None and schema_id is not None:
        raise click.UsageError("Give either --subject or --id.")
    found = _latest(line, subject) if subject is not None else None
    if found is None or version is not None:
        number = schema_id if found is None else found.schema_id
        request = pb.GetSchemaRequest(schema_id=number, version=version)
        found = line.ask("SchemaRegistry/GetSchema", request, pb.GetSchemaResponse)
    text = found.schema_definition.decode("utf-8", "backslashreplace")
    about = {
        "schema_id": found.schema_id,
        "version": found.version,
        "subject": found.subject,
        "schema_type": found.schema_type,
        "schema_definition": text,
        "description": found.description,
        "created_at": found.created_at,
        "created_by": found.created_by,
        "tags": list(found.tags),
        "fingerprint": found.fingerprint,
        "compatibility_mode": found.compatibility_mode.upper(),
    }
    if output:
        show_json(about)
        return
    say(f"Subject: {found.subject}", f"Schema ID: {found.schema_id}", f"Version: {found.version}")
    say(f"Type: {found.schema_type}", f"Compatibility Mode: {about['compatibility_mode']}")
    say(
        f"Description: {found.description}",
        f"Created by: {found.created_by}",
        f"Tags: {', '.join(found.tags)}",
    )
    say(f"Fingerprint: {found.fingerprint}", "Schema Definition:", *_pretty(text).splitlines())


def _pretty(text: str) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, indent=2)
    except ValueError:
        return text


def _latest(line: AdminLine, subject: str) -> pb.GetSchemaResponse:
    request = pb.GetLatestSchemaRequest(subject=subject)
    return line.ask("SchemaRegistry/GetLatestSchema", request, pb.GetSchemaResponse)


@schemas.command("versions")
@click.argument("subject")
@json_output
@click.pass_obj
def versions(line: AdminLine, subject: str, output: str | None) -> None:
    """List the versions of a subject."""
    request = pb.ListVersionsRequest(subject=subject)
    found = line.ask("SchemaRegistry/ListVersions", request, pb.ListVersionsResponse).versions
    if output:
        names = ("version", "schema_id", "created_at", "created_by", "description", "fingerprint")
        show_json([{name: getattr(one, name) for name in names} for one in found])
        return
    say(f"Versions of '{subject}':")
    for one in found:
        say(f"  Version {one.version}: schema_id={one.schema_id}, fingerprint={one.fingerprint}")


@schemas.command("check")
@click.argument("subject")
@click.option("--schema-type", type=SCHEMA_TYPE, required=True)
@_definition_options
@click.option("--mode", help="none, backward, forward or full; the subject's where left out.")
@json_output
@click.pass_obj
def check(
    line: AdminLine,
    subject: str,
    schema_type: str,
    file: Path | None,
    schema: str | None,
    mode: str | None,
    output: str | None,
) -> None:
    """Tell whether a definition could be the next version of a subject."""
    request = pb.CheckCompatibilityRequest(
        subject=subject,
        new_schema_definition=_definition(schema_type, file, schema),
        schema_type=schema_type,
        compatibility_mode=mode.upper() if mode is not None else None,
    )
    found = line.ask("SchemaRegistry/CheckCompatibility", request, pb.CheckCompatibilityResponse)
    if output:
        show_json({"subject": subject, "is_compatible": found.is_compatible, "errors": list(found.errors)})
    elif found.is_compatible:
        say(f"✅ Schema is compatible with subject '{subject}'")
    else:
        say(f"❌ Schema is not compatible with subject '{subject}'", *(f"  - {one}" for one in found.errors))


@schemas.command("get-compatibility")
@click.argument("subject")
@json_output
@click.pass_obj
def get_compatibility(line: AdminLine, subject: str, output: str | None) -> None:
    """Show a subject's compatibility mode."""
    mode = _latest(line, subject).compatibility_mode.upper()
    if output:
        show_json({"subject": subject, "compatibility_mode": mode})
    else:
        say(f"Subject: {subject}", f"Compatibility Mode: {mode}")


@schemas.command("set-compatibility")
@click.argument("subject")
@click.option("--mode", type=_MODE, required=True)
@json_output
@click.pass_obj
def set_compatibility(line: AdminLine, subject: str, mode: str, output: str | None) -> None:
    """Set a subject's compatibility mode."""
    request = pb.SetCompatibilityModeRequest(subject=subject, compatibility_mode=mode.upper())
    line.ask("SchemaRegistry/SetCompatibilityMode", request, pb.SetCompatibilityModeResponse)
    if output:
        show_json({"subject": subject, "compatibility_mode": mode.upper()})
    else:
        say(f"Compatibility mode set for subject '{subject}'", f"Mode: {mode.upper()}")


@schemas.command("delete")
@click.argument("subject")
@click.option("--version", type=click.IntRange(1, (1 << 32) - 1), required=True)
@click.option("--confirm", is_flag=True, help="Yes, delete it.")
@click.pass_obj
def delete(line: AdminLine, subject: str, version: int, confirm: bool) -> None:
    """Delete one version of a subject."""
    if not confirm:
        raise Wrong(f"Deleting version {version} of '{subject}' needs --confirm.")
    request = pb.DeleteSchemaVersionRequest(subject=subject, version=version)
    line.ask("SchemaRegistry/DeleteSchemaVersion", request, pb.DeleteSchemaVersionResponse)
    say(f"Deleted version {version} of subject '{subject}'")


@schemas.command("list-subjects")
@json_output
@click.pass_obj
def list_subjects(line: AdminLine, output: str | None) -> None:
    """List the subjects."""
    found = line.ask(
        "SchemaRegistry/ListSubjects", pb.ListSubjectsRequest(), pb.ListSubjectsResponse
    ).subjects
    if output:
        show_json(
            [
                {
                    "subject": one.subject,
                    "schema_type": one.schema_type,
                    "latest_version": one.latest_version,
                    "compatibility_mode": one.compatibility_mode,
                    "schema_id": one.schema_id,
                    "tags": list(one.tags),
                }
                for one in found
            ]
        )
        return
    for one in found:
        mode = one.compatibility_mode.upper()
        say(f"{one.subject} (type: {one.schema_type}, latest version: {one.latest_version}, mode: {mode})")
