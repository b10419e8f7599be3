"""``danube schema``: register, get, versions, check, diff, set-compatibility, list, delete and topics."""

from __future__ import annotations

from typing import Any

import click

from danube.cli.terminal.addressing import Address, address_option, explaining, page_options, topic_name
from danube.cli.terminal.confirming import confirm, yes_option
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import line, output_option, plain, show, write
from danube.cli.terminal.services import Services
from danube.cli.topics.schema_source import COMPATIBILITIES, definition_options, read_definition, schema_type
from danube.cli.topics.topics import suggesting

SUBJECT_COLUMNS = ("subject", "schema_id", "schema_type", "latest_version", "compatibility", "tags")
VERSION_COLUMNS = ("version", "created_at", "schema_type", "fingerprint", "created_by", "description", "tags")
EXIT_INVALID = 8
_subject_argument = click.argument("subject", metavar="SUBJECT")
_version = click.IntRange(min=1)


@click.group(cls=LazyGroup, aliases={"ls": "list", "rm": "delete", "show": "get"})
def schema() -> None:
    """Register, compare and look up schemas, and say which topic asks for which.

    \b
    danube schema register orders --file order.avsc
    danube schema check orders --file order-2.avsc
    danube schema set-topic /default/orders --subject orders --validation enforce --validate-payload
    """


@schema.command(short_help="Register a definition.")
@_subject_argument
@address_option()
@definition_options
@click.option("--description", default="", help="What it is for.")
@click.option("--created-by", default="", help="Who registers it.")
@click.option("--tag", "tags", multiple=True, help="A word to find it by; may be given several times.")
@click.option("--compatibility", type=COMPATIBILITIES, help="Set the subject's mode first.")
@output_option()
@click.pass_obj
def register(
    services: Services,
    /,
    subject: str,
    service_addr: Address,
    file: str | None,
    text: str | None,
    given_type: str | None,
    compatibility: str | None,
    output: str,
    **rest: Any,
) -> None:
    """Register a definition as the subject's next version; the same one again gives its version.

    Exit code 8 when it does not parse or breaks the subject's compatibility: every violation is told.
    """
    definition = read_definition(file, text, given_type)
    kind = schema_type(given_type, file)
    with explaining(service_addr), services.connect(service_addr.url) as client:
        made = client.schemas.register(subject, kind, definition, compatibility=compatibility or "", **rest)
    shown = plain(made)
    shown["is_new_version"] = shown.pop("new_version")
    show(shown, output)


@schema.command(short_help="Show a version and its definition.")
@click.argument("subject", metavar="[SUBJECT]", required=False)
@address_option()
@click.option("--id", "schema_id", type=_version, help="By the schema id instead of the subject.")
@click.option("-v", "--version", type=_version, help="This version.  [latest]")
@output_option("table", "json", "raw", default="table")
@click.pass_obj
def get(
    services: Services,
    /,
    subject: str | None,
    service_addr: Address,
    schema_id: int | None,
    version: int | None,
    output: str,
) -> None:
    """Show one version of a subject; `-o raw` prints the definition alone."""
    if (subject is None) == (schema_id is None):
        raise click.UsageError("Give either SUBJECT or --id.")
    with explaining(service_addr), services.connect(service_addr.url) as client:
        schemas = client.schemas
        found = (
            schemas.get_by_id(schema_id, version or 0) if schema_id else schemas.get(subject, version or 0)
        )
    if output == "raw":
        write(found.definition)
        return
    shown = version_object(found)
    definition = shown.pop("definition")
    if output == "json":
        show({**shown, "definition": definition}, output)
        return
    show(shown, output)
    line(f"definition\n{definition}")


@schema.command(short_help="List the versions of a subject.")
@_subject_argument
@address_option()
@output_option()
@click.pass_obj
def versions(services: Services, /, subject: str, service_addr: Address, output: str) -> None:
    """List the versions of a subject, oldest first."""
    with explaining(service_addr), services.connect(service_addr.url) as client:
        found = [version_object(one) for one in client.schemas.versions(subject)]
    for one in found:
        del one["definition"]
    show(found, output, VERSION_COLUMNS)


@schema.command(short_help="Say whether a definition may come next.")
@_subject_argument
@address_option()
@definition_options
@click.option("--compatibility", type=COMPATIBILITIES, help="By this mode.  [the subject's]")
@output_option()
@click.pass_obj
def check(
    services: Services,
    /,
    subject: str,
    service_addr: Address,
    file: str | None,
    text: str | None,
    given_type: str | None,
    compatibility: str | None,
    output: str,
) -> int:
    """Say whether a definition may be the subject's next version; nothing is registered.

    Exit code 8 when it may not; every violation is printed as path, rule, message and hint.
    """
    definition = read_definition(file, text, given_type)
    kind = schema_type(given_type, file)
    with explaining(service_addr), services.connect(service_addr.url) as client:
        found = client.schemas.check(subject, kind, definition, compatibility=compatibility or "")
    if output == "json":
        violations = plain(found.violations)
        show({"subject": subject, "is_compatible": found.compatible, "violations": violations}, output)
    elif found.compatible:
        line(f"{subject}: compatible")
    else:
        line(f"{subject}: not compatible")
        _print_violations(found.violations)
    return 0 if found.compatible else EXIT_INVALID


@schema.command(short_help="Compare two versions in both directions.")
@_subject_argument
@click.argument("old", type=_version, required=False)
@click.argument("new", type=_version, required=False)
@address_option()
@output_option()
@click.pass_obj
def diff(
    services: Services,
    /,
    subject: str,
    old: int | None,
    new: int | None,
    service_addr: Address,
    output: str,
) -> None:
    """Compare version OLD with NEW: by default the latest with the one before it.

    What differs is told by what it means: backward, the new version cannot read what the old one wrote;
    forward, the old version cannot read what the new one writes.
    """
    with explaining(service_addr), services.connect(service_addr.url) as client:
        found = client.schemas.diff(subject, old or 0, new or 0)
    if output == "json":
        show(plain(found), output)
        return
    line(f"{found.subject}: version {found.old} -> {found.new}")
    directions = (
        ("backward", f"{found.new} reads {found.old}", found.backward),
        ("forward", f"{found.old} reads {found.new}", found.forward),
    )
    for name, meaning, violations in directions:
        verdict = f"{len(violations)} violations" if violations else "compatible"
        line(f"{name.ljust(8)}  {meaning}: {verdict}")
        _print_violations(violations)


@schema.command("set-compatibility", short_help="Set a subject's compatibility mode.")
@_subject_argument
@click.argument("compatibility", type=COMPATIBILITIES)
@address_option()
@output_option()
@click.pass_obj
def set_compatibility(
    services: Services, /, subject: str, compatibility: str, service_addr: Address, output: str
) -> None:
    """Set what a new version of the subject must keep to."""
    with explaining(service_addr), services.connect(service_addr.url) as client:
        mode = client.schemas.set_compatibility(subject, compatibility)
    show({"subject": subject, "compatibility": mode}, output)


@schema.command("list", short_help="List subjects.")
@address_option()
@page_options
@output_option()
@click.pass_obj
def list_subjects(services: Services, /, service_addr: Address, output: str, **page: Any) -> None:
    """List all subjects with their latest version and mode."""
    with explaining(service_addr), services.connect(service_addr.url) as client:
        found = plain(client.schemas.subjects(**page))
    show(found, output, SUBJECT_COLUMNS)


@schema.command(short_help="Delete a subject or one of its versions.")
@_subject_argument
@address_option()
@click.option("-v", "--version", type=_version, help="Only this version.")
@yes_option
@output_option()
@click.pass_obj
def delete(
    services: Services,
    /,
    subject: str,
    service_addr: Address,
    version: int | None,
    yes: bool,
    output: str,
) -> None:
    """Delete a subject with all versions, or one version; records that name it cannot be read by it."""
    what = f"version {version} of schema subject" if version else "schema subject"
    confirm(services, subject, f"{what} {subject} will be deleted; records that name it stay", yes)
    with explaining(service_addr), services.connect(service_addr.url) as client:
        if version:
            client.schemas.delete_version(subject, version)
            deleted = [version]
        else:
            deleted = client.schemas.delete(subject)
    show({"subject": subject, "deleted_versions": deleted}, output)


@schema.command("set-topic", short_help="Say which schema a topic asks for.")
@click.argument("topic", type=topic_name, metavar="TOPIC")
@address_option()
@click.option("--subject", help='The subject; "" takes it away.')
@click.option("--validation", type=click.Choice(["none", "warn", "enforce"], case_sensitive=False))
@click.option("--validate-payload/--no-validate-payload", default=None, help="Check every record's bytes.")
@output_option()
@click.pass_obj
def set_topic(
    services: Services,
    /,
    topic: str,
    service_addr: Address,
    subject: str | None,
    validation: str | None,
    validate_payload: bool | None,
    output: str,
) -> None:
    """Change what a topic asks of its records; what is not given stays as it is."""
    if subject is None and validation is None and validate_payload is None:
        raise click.UsageError("Give --subject, --validation or --validate-payload.")
    with explaining(service_addr), services.connect(service_addr.url) as client, suggesting(client):
        changed = client.schemas.configure_topic(
            topic, subject=subject, validation=validation, validate_payload=validate_payload
        )
    show(plain(changed), output)


@schema.command(short_help="Show which schema a topic asks for.")
@click.argument("topic", type=topic_name, metavar="TOPIC")
@address_option()
@output_option()
@click.pass_obj
def topic(services: Services, /, topic: str, service_addr: Address, output: str) -> None:
    """Show a topic's subject and what becomes of records that do not follow it."""
    with explaining(service_addr), services.connect(service_addr.url) as client, suggesting(client):
        found = client.schemas.topic_schema(topic)
    show(plain(found), output)


def version_object(found: Any) -> dict[str, Any]:
    """Return a version as it is printed: its time is an instant, its definition text."""
    shown: dict[str, Any] = plain(found)
    shown["created_at"] = plain(shown.pop("created_us"), "created_at")
    return shown


def _print_violations(violations: list[Any]) -> None:
    from danube.host.telemetry import escape

    for one in violations:
        line(f"  {escape(str(one))}")
