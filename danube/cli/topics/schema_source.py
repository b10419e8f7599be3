"""Source and type of a schema's definition on the command line.

``--schema-*`` of ``danube produce``: which registered version the records name.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from danube.cli.terminal.arguments import together

TYPES = ("bytes", "string", "number", "avro", "json_schema", "protobuf")
_ALIASES = {
    "json": "json_schema",
    "jsonschema": "json_schema",
    "json-schema": "json_schema",
    "proto": "protobuf",
}
_WITHOUT_DEFINITION = ("bytes", "string", "number")
_TYPE_BY_SUFFIX = {".avsc": "avro", ".proto": "protobuf", ".json": "json_schema"}


definition_options = together(
    click.option(
        "-t",
        "--type",
        "given_type",
        metavar="TYPE",
        help=f"{', '.join(TYPES)}; by default from the file's name (.avsc, .proto, .json).",
    ),
    click.option("-f", "--file", type=click.Path(), help="The definition; - is standard input."),
    click.option("--schema", "text", metavar="TEXT", help="The definition itself."),
)


def schema_type(given: str | None, file: str | None) -> str:
    """Return the given type, or the one that the file's name tells."""
    if given is not None:
        word = given.strip().lower()
        word = _ALIASES.get(word, word)
        if word not in TYPES:
            raise click.BadParameter(f"{given!r} is no schema type; use {', '.join(TYPES)}")
        return word
    found = _TYPE_BY_SUFFIX.get(Path(file).suffix.lower()) if file else None
    if found is None:
        raise click.UsageError(f"Give --type: {', '.join(TYPES)}.")
    return found


def read_definition(file: str | None, text: str | None, given_type: str | None) -> bytes:
    """The definition's bytes from ``--schema``, ``--file`` or standard input."""
    if file is not None and text is not None:
        raise click.UsageError("Give --file or --schema, not both.")
    if text is not None:
        return text.encode()
    if file is None:
        if schema_type(given_type, file) in _WITHOUT_DEFINITION:
            return b""
        raise click.UsageError("Give the definition with --file or --schema.")
    return read_schema_file(file)


def read_schema_file(file: str) -> bytes:
    """A definition's file, or standard input for ``-``; SchemaInvalid when it is larger than any may be."""
    from danube.errors import SchemaInvalid
    from danube.limits import SCHEMA_DEFINITION_BYTES_MAX  # a larger file need not be sent to be refused

    try:
        if file == "-":
            definition = sys.stdin.buffer.read(SCHEMA_DEFINITION_BYTES_MAX + 1)
        else:
            with Path(file).open("rb") as opened:
                definition = opened.read(SCHEMA_DEFINITION_BYTES_MAX + 1)
    except OSError as error:
        raise click.UsageError(f"{file}: {error.strerror or error}") from None
    if len(definition) > SCHEMA_DEFINITION_BYTES_MAX:
        raise SchemaInvalid(
            f"{file} is larger than {SCHEMA_DEFINITION_BYTES_MAX} bytes",
            why="that is the largest definition",
            hint="split it into several subjects",
        )
    return definition


_version = click.IntRange(min=1)


@dataclass(frozen=True, slots=True)
class SchemaChoice:
    """Schema that the flags name; ``definition`` is registered, the others must be registered."""

    subject: str = ""  # "": named after the topic
    version: int = 0
    version_min: int = 0
    definition: bytes | None = None
    schema_type: str = ""

    async def resolve(self, client: Any) -> Any:
        """Return the client's argument ``schema=``; SchemaNotFound when no version is as wanted."""
        from danube.client.typed.models import Schema
        from danube.errors import SchemaNotFound

        if self.definition is not None:
            return Schema(subject=self.subject, definition=self.definition, schema_type=self.schema_type)
        if self.version_min:
            latest = await client.schemas.get(self.subject)
            if latest.version < self.version_min:
                raise SchemaNotFound(
                    f"subject {self.subject!r} has no version {self.version_min} yet",
                    why=f"its latest is {latest.version}",
                    hint="register it, or lower --schema-min-version",
                )
        return Schema(subject=self.subject, version=self.version)


# They travel as keywords that schema_choice() takes.
schema_options = together(
    click.option("--schema-subject", metavar="SUBJECT", help="Records name this subject's schema."),
    click.option("--schema-version", type=_version, help="This version of it.  [latest]"),
    click.option("--schema-min-version", type=_version, help="The latest, if it is at least this."),
    click.option("--schema-file", type=click.Path(), help="Register this definition first."),
    click.option("--schema-type", metavar="TYPE", help="Its type, if the file's name does not show it."),
)


def schema_choice(
    schema_subject: str | None,
    schema_version: int | None,
    schema_min_version: int | None,
    schema_file: str | None,
    schema_type_given: str | None,
) -> SchemaChoice | None:
    """Return the choice of the flags, None without any; UsageError when they contradict each other."""
    pins = [value for value in (schema_version, schema_min_version, schema_file) if value is not None]
    if len(pins) > 1:
        raise click.UsageError("Give one of --schema-version, --schema-min-version and --schema-file.")
    if schema_file is not None:
        return SchemaChoice(
            subject=schema_subject or "",
            definition=read_schema_file(schema_file),
            schema_type=schema_type(schema_type_given, schema_file),
        )
    if schema_type_given is not None:
        raise click.UsageError("--schema-type belongs to --schema-file.")
    if schema_subject is None:
        if pins:
            raise click.UsageError("Give --schema-subject too.")
        return None
    return SchemaChoice(schema_subject, schema_version or 0, schema_min_version or 0)
