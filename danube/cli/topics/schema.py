"""``danube schema``: register, get, versions, check, diff, set-compatibility, list, delete and topics."""

from __future__ import annotations

from typing import Any

import click

from danube.cli.terminal.addressing import page_options, topic_name
from danube.cli.terminal.arguments import COMPATIBILITIES
from danube.cli.terminal.asking import Broker, broker_command
from danube.cli.terminal.confirming import yes_option
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import line, plain, show, write
from danube.cli.topics.schema_source import definition_options, read_definition, schema_type

SUBJECT_COLUMNS = ("subject", "schema_id", "schema_type", "latest_version", "compatibility", "tags")
VERSION_COLUMNS = ("version", "created_at", "schema_type", "fingerprint", "created_by", "description", "tags")
EXIT_INVALID = 8
_subject = click.argument("subject", metavar="SUBJECT")
_topic = click.argument("topic", type=topic_name, metavar="TOPIC")
_version = click.IntRange(min=1)


@click.group(cls=LazyGroup, aliases={"ls": "list", "rm": "delete", "show": "get"})
def schema() -> None:
    """Register, compare and look up schemas, and set the schema of a topic.

    \b
    danube schema register orders --file order.avsc
    danube schema check orders --file order-2.avsc
    danube schema set-topic /default/orders --subject orders --validation enforce --validate-payload
    """


@broker_command(schema, "register", "Register a definition.")
@_subject
@definition_options
@click.option("--description", default="", help="What it is for.")
@click.option("--created-by", default="", help="Who registers it.")
@click.option("--tag", "tags", multiple=True, help="A search word; may be given several times.")
@click.option("--compatibility", type=COMPATIBILITIES, help="Set the subject's mode first.")
def register(
    broker: Broker,
    subject: str,
    file: str | None,
    text: str | None,
    given_type: str | None,
    compatibility: str | None,
    **rest: Any,
) -> Any:
    """Register a definition as the subject's next version; the same one again gives its version.

    Exit code 8 if it does not parse or breaks the subject's compatibility; every violation is printed.
    """
    definition = read_definition(file, text, given_type)
    kind = schema_type(given_type, file)
    rest["compatibility"] = compatibility or ""
    shown = plain(broker.client.schemas.register(subject, kind, definition, **rest))
    shown["is_new_version"] = shown.pop("new_version")
    return shown


@broker_command(schema, "get", "Show a version and its definition.", forms=("table", "json", "raw"))
@click.argument("subject", metavar="[SUBJECT]", required=False)
@click.option("--id", "schema_id", type=_version, help="By the schema id instead of the subject.")
@click.option("-v", "--version", type=_version, help="This version.  [latest]")
def get(broker: Broker, subject: str | None, schema_id: int | None, version: int | None) -> Any:
    """Show one version of a subject; `-o raw` prints the definition alone."""
    if (subject is None) == (schema_id is None):
        raise click.UsageError("Give either SUBJECT or --id.")
    schemas = broker.client.schemas
    found = schemas.get_by_id(schema_id, version or 0) if schema_id else schemas.get(subject, version or 0)
    if broker.output == "raw":
        write(found.definition)
        return None
    shown = version_object(found)
    definition = shown.pop("definition")
    if broker.output == "json":
        return {**shown, "definition": definition}
    show(shown, broker.output)
    line(f"definition\n{definition}")
    return None


@broker_command(schema, "versions", "List the versions of a subject.", _subject, columns=VERSION_COLUMNS)
def versions(broker: Broker, subject: str) -> Any:
    """List the versions of a subject, oldest first."""
    found = [version_object(one) for one in broker.client.schemas.versions(subject)]
    return [{name: value for name, value in one.items() if name != "definition"} for one in found]


@broker_command(schema, "check", "Check whether a definition may be the next version.")
@_subject
@definition_options
@click.option("--compatibility", type=COMPATIBILITIES, help="By this mode.  [the subject's]")
def check(
    broker: Broker,
    subject: str,
    file: str | None,
    text: str | None,
    given_type: str | None,
    compatibility: str | None,
) -> int:
    """Check whether a definition may be the subject's next version, without registering it.

    Exit code 8 if it may not; every violation is printed as path, rule, message and hint.
    """
    definition = read_definition(file, text, given_type)
    kind = schema_type(given_type, file)
    found = broker.client.schemas.check(subject, kind, definition, compatibility=compatibility or "")
    if broker.output == "json":
        violations = plain(found.violations)
        show({"subject": subject, "is_compatible": found.compatible, "violations": violations}, "json")
    else:
        line(f"{subject}: {'compatible' if found.compatible else 'not compatible'}")
        _print_violations(found.violations)
    return 0 if found.compatible else EXIT_INVALID


@broker_command(schema, "diff", "Compare two versions in both directions.")
@_subject
@click.argument("old", type=_version, required=False)
@click.argument("new", type=_version, required=False)
def diff(broker: Broker, subject: str, old: int | None, new: int | None) -> Any:
    """Compare version OLD with NEW: by default the latest with the one before it.

    Differences are marked backward if the new version cannot read records of the old one, and forward if the
    old version cannot read records of the new one.
    """
    found = broker.client.schemas.diff(subject, old or 0, new or 0)
    if broker.output == "json":
        return plain(found)
    line(f"{found.subject}: version {found.old} -> {found.new}")
    directions = (
        ("backward", f"{found.new} reads {found.old}", found.backward),
        ("forward", f"{found.old} reads {found.new}", found.forward),
    )
    for name, meaning, violations in directions:
        verdict = f"{len(violations)} violations" if violations else "compatible"
        line(f"{name.ljust(8)}  {meaning}: {verdict}")
        _print_violations(violations)
    return None


@broker_command(schema, "set-compatibility", "Set a subject's compatibility mode.")
@_subject
@click.argument("compatibility", type=COMPATIBILITIES)
def set_compatibility(broker: Broker, subject: str, compatibility: str) -> Any:
    """Set the compatibility rule for new versions of the subject."""
    mode = broker.client.schemas.set_compatibility(subject, compatibility)
    return {"subject": subject, "compatibility": mode}


@broker_command(schema, "list", "List subjects.", page_options, columns=SUBJECT_COLUMNS)
def list_subjects(broker: Broker, **page: Any) -> Any:
    """List all subjects with their latest version and mode."""
    return plain(broker.client.schemas.subjects(**page))


@broker_command(schema, "delete", "Delete a subject or one of its versions.")
@_subject
@click.option("-v", "--version", type=_version, help="Only this version.")
@yes_option
def delete(broker: Broker, subject: str, version: int | None, yes: bool) -> Any:
    """Delete a subject with all versions, or one version; records that name it lose their schema."""
    what = f"version {version} of schema subject" if version else "schema subject"
    broker.confirm(subject, f"{what} {subject} will be deleted; records that name it stay", yes)
    schemas = broker.client.schemas
    if version:
        schemas.delete_version(subject, version)
    deleted = [version] if version else schemas.delete(subject)
    return {"subject": subject, "deleted_versions": deleted}


@broker_command(schema, "set-topic", "Set the schema of a topic.")
@_topic
@click.option("--subject", help='The subject; "" removes it.')
@click.option("--validation", type=click.Choice(["none", "warn", "enforce"], case_sensitive=False))
@click.option("--validate-payload/--no-validate-payload", default=None, help="Check every record's bytes.")
def set_topic(broker: Broker, topic: str, **asked: Any) -> Any:
    """Change the schema rules of a topic; options that are not given stay unchanged."""
    if all(value is None for value in asked.values()):
        raise click.UsageError("Give --subject, --validation or --validate-payload.")
    return plain(broker.client.schemas.configure_topic(topic, **asked))


@broker_command(schema, "topic", "Show the schema of a topic.", _topic)
def topic_schema(broker: Broker, topic: str) -> Any:
    """Show a topic's subject and the treatment of records that do not fit it."""
    return plain(broker.client.schemas.topic_schema(topic))


def version_object(found: Any) -> dict[str, Any]:
    """Return a version as it is printed: its time is an instant, its definition text."""
    shown: dict[str, Any] = plain(found)
    shown["created_at"] = plain(shown.pop("created_us"), "created_at")
    return shown


def _print_violations(violations: list[Any]) -> None:
    from danube.host.telemetry import escape

    for one in violations:
        line(f"  {escape(str(one))}")
