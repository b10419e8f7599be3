"""``danube-admin schemas``: subjects and versions of the registry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import click

from danube.cli.terminal.arguments import COMPATIBILITIES, together
from danube.cli.upstream.admin_line import AdminLine
from danube.cli.upstream.calls import fields_of, labelled
from danube.cli.upstream.root import SCHEMA_TYPE, Shown, Wrong, content_of, json_output, upstream_command

_U32 = click.IntRange(1, (1 << 32) - 1)
_PLAIN: Final = ("bytes", "string", "number", "int", "int64", "float", "double")


_subject = click.argument("subject")
_schema_type = click.option("--schema-type", type=SCHEMA_TYPE, required=True)
_definition_options = together(
    click.option("--file", type=click.Path(path_type=Path)),
    click.option("--schema", help="The definition itself."),
)


@click.group()
def schemas() -> None:
    """Subjects of the schema registry."""


def _definition(schema_type: str, file: Path | None, schema: str | None) -> bytes:
    if file is not None and schema is not None:
        raise click.UsageError("Give --file or --schema, not both.")
    if file is not None:
        return content_of(file)
    if schema is None and schema_type.lower() not in _PLAIN:
        raise Wrong("Give --file or --schema.")
    return (schema or "").encode()


@upstream_command(schemas, "register")
@_subject
@_schema_type
@_definition_options
@click.option("--description", default="")
@click.option("--tags", multiple=True)
@json_output
def register(
    line: AdminLine, subject: str, schema_type: str, file: Path | None, schema: str | None, **told: Any
) -> Shown:
    """Register a definition as the next version of a subject."""
    made = line.ask(
        "SchemaRegistry/RegisterSchema",
        subject=subject,
        schema_type=schema_type,
        schema_definition=_definition(schema_type, file, schema),
        created_by="danube-admin",
        **told,
    )
    about = {"subject": subject} | fields_of(made, "schema_id", "version", "is_new_version", "fingerprint")
    state = "Registered new schema version" if made.is_new_version else "Schema already exists"
    return Shown(about, [state, *labelled(about, "subject", "schema_id", "version", "fingerprint")])


@upstream_command(schemas, "get")
@click.option("--subject")
@click.option("--id", "schema_id", type=click.IntRange(0, (1 << 64) - 1))
@click.option("--version", type=_U32)
@json_output
def get(line: AdminLine, subject: str | None, schema_id: int | None, version: int | None) -> Shown:
    """Show the latest version of a subject, or a version by schema id."""
    if subject is None and schema_id is None:
        raise Wrong("Give either --subject or --id.")
    if subject is not None and schema_id is not None:
        raise click.UsageError("Give either --subject or --id.")
    found = _latest(line, subject) if subject is not None else None
    if found is None or version is not None:
        number = schema_id if found is None else found.schema_id
        found = line.ask("SchemaRegistry/GetSchema", schema_id=number, version=version)
    text = found.schema_definition.decode("utf-8", "backslashreplace")
    about = {
        **fields_of(found, "schema_id", "version", "subject", "schema_type"),
        "schema_definition": text,
        **fields_of(found, "description", "created_at", "created_by", "tags", "fingerprint"),
        "compatibility_mode": found.compatibility_mode.upper(),
    }
    told = labelled(
        about, "subject", "schema_id", "version", "schema_type", "compatibility_mode", "description",
        "created_by", "tags", "fingerprint",
    )  # fmt: skip
    return Shown(about, [*told, "Schema Definition:", *_pretty(text).splitlines()])


def _pretty(text: str) -> str:
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, indent=2)
    except ValueError:
        return text


def _latest(line: AdminLine, subject: str) -> Any:
    return line.ask("SchemaRegistry/GetLatestSchema", subject=subject)


@upstream_command(schemas, "versions", _subject, json_output)
def versions(line: AdminLine, subject: str) -> Shown:
    """List the versions of a subject."""
    found = line.ask("SchemaRegistry/ListVersions", subject=subject).versions
    names = ("version", "schema_id", "created_at", "created_by", "description", "fingerprint")
    lines = [
        f"  Version {one.version}: schema_id={one.schema_id}, fingerprint={one.fingerprint}" for one in found
    ]
    return Shown([fields_of(one, *names) for one in found], [f"Versions of '{subject}':", *lines])


@upstream_command(schemas, "check")
@_subject
@_schema_type
@_definition_options
@click.option("--mode", help="none, backward, forward or full; the subject's where left out.")
@json_output
def check(
    line: AdminLine,
    subject: str,
    schema_type: str,
    file: Path | None,
    schema: str | None,
    mode: str | None,
) -> Shown:
    """Tell whether a definition could be the next version of a subject."""
    found = line.ask(
        "SchemaRegistry/CheckCompatibility",
        subject=subject,
        new_schema_definition=_definition(schema_type, file, schema),
        schema_type=schema_type,
        compatibility_mode=mode.upper() if mode is not None else None,
    )
    verdict = "✅ Schema is compatible" if found.is_compatible else "❌ Schema is not compatible"
    errors = [] if found.is_compatible else [f"  - {one}" for one in found.errors]
    return Shown(
        {"subject": subject} | fields_of(found, "is_compatible", "errors"),
        [f"{verdict} with subject '{subject}'", *errors],
    )


@upstream_command(schemas, "get-compatibility", _subject, json_output)
def get_compatibility(line: AdminLine, subject: str) -> Shown:
    """Show a subject's compatibility mode."""
    mode = _latest(line, subject).compatibility_mode.upper()
    about = {"subject": subject, "compatibility_mode": mode}
    return Shown(about, labelled(about, *about))


@upstream_command(schemas, "set-compatibility")
@_subject
@click.option("--mode", type=COMPATIBILITIES, required=True)
@json_output
def set_compatibility(line: AdminLine, subject: str, mode: str) -> Shown:
    """Set a subject's compatibility mode."""
    about = {"subject": subject, "compatibility_mode": mode.upper()}
    line.ask("SchemaRegistry/SetCompatibilityMode", **about)
    return Shown(about, [f"Compatibility mode set for subject '{subject}'", f"Mode: {mode.upper()}"])


@upstream_command(schemas, "delete")
@_subject
@click.option("--version", type=_U32, required=True)
@click.option("--confirm", is_flag=True, help="Yes, delete it.")
def delete(line: AdminLine, subject: str, version: int, confirm: bool) -> list[str]:
    """Delete one version of a subject."""
    if not confirm:
        raise Wrong(f"Deleting version {version} of '{subject}' needs --confirm.")
    line.ask("SchemaRegistry/DeleteSchemaVersion", subject=subject, version=version)
    return [f"Deleted version {version} of subject '{subject}'"]


@upstream_command(schemas, "list-subjects", json_output)
def list_subjects(line: AdminLine) -> Shown:
    """List the subjects."""
    found = line.ask("SchemaRegistry/ListSubjects").subjects
    names = ("subject", "schema_type", "latest_version", "compatibility_mode", "schema_id", "tags")
    lines = [
        f"{one.subject} (type: {one.schema_type}, latest version: {one.latest_version},"
        f" mode: {one.compatibility_mode.upper()})"
        for one in found
    ]
    return Shown([fields_of(one, *names) for one in found], lines)
