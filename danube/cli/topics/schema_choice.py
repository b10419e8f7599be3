"""``--schema-*`` of ``danube produce``: which registered version the records name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import click

from danube.cli.topics.schema_source import read_schema_file, schema_type

_version = click.IntRange(min=1)


@dataclass(frozen=True, slots=True)
class SchemaChoice:
    """What the flags say; ``definition`` is registered, the others must be registered."""

    subject: str = ""  # "": named after the topic
    version: int = 0
    version_min: int = 0
    definition: bytes | None = None
    schema_type: str = ""

    async def resolve(self, client: Any) -> Any:
        """What the client takes as ``schema=``; SchemaNotFound when no version is as wanted."""
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


def schema_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The flags, which travel as keywords that :func:`schema_choice` takes."""
    options = [
        click.option("--schema-subject", metavar="SUBJECT", help="Records name this subject's schema."),
        click.option("--schema-version", type=_version, help="This version of it.  [latest]"),
        click.option("--schema-min-version", type=_version, help="The latest, if it is at least this."),
        click.option("--schema-file", type=click.Path(), help="Register this definition first."),
        click.option(
            "--schema-type", metavar="TYPE", help="Its type, where the file's name does not tell it."
        ),
    ]
    for option in reversed(options):
        command = option(command)
    return command


def schema_choice(
    schema_subject: str | None,
    schema_version: int | None,
    schema_min_version: int | None,
    schema_file: str | None,
    schema_type_given: str | None,
) -> SchemaChoice | None:
    """What the flags say, or None where there are none; UsageError when they contradict each other."""
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
