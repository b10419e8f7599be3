"""``danube-admin topics`` and the schema that a topic keeps to."""

from __future__ import annotations

from typing import Final

import click

from danube.cli.upstream.admin_line import AdminLine, topic_argument
from danube.cli.upstream.root import json_output, say, show_json
from danube.server.proto import SchemaRegistry_pb2 as pb

_POLICIES: Final = click.Choice(["none", "warn", "enforce"], case_sensitive=False)


@click.command("configure-schema")
@topic_argument
@click.option("--subject", required=True)
@click.option("--validation-policy", type=_POLICIES, default="none", show_default=True)
@click.option("--enable-payload-validation", is_flag=True)
@click.pass_obj
def configure_schema(
    line: AdminLine,
    topic: str,
    namespace: str | None,
    subject: str,
    validation_policy: str,
    enable_payload_validation: bool,
) -> None:
    """Set a topic's schema subject and what becomes of messages that break it."""
    request = pb.ConfigureTopicSchemaRequest(
        topic_name=topic,
        schema_subject=subject,
        validation_policy=validation_policy.upper(),
        enable_payload_validation=enable_payload_validation,
    )
    line.ask("SchemaRegistry/ConfigureTopicSchema", request, pb.ConfigureTopicSchemaResponse)
    say(f"Schema configuration set for topic '{topic}'", f"  Subject: {subject}")
    say(*_validation(validation_policy, enable_payload_validation))


@click.command("set-validation-policy")
@topic_argument
@click.option("--policy", type=_POLICIES, required=True)
@click.option("--enable-payload-validation", is_flag=True)
@click.pass_obj
def set_validation_policy(
    line: AdminLine, topic: str, namespace: str | None, policy: str, enable_payload_validation: bool
) -> None:
    """Change what becomes of messages that break the topic's schema."""
    request = pb.UpdateTopicValidationPolicyRequest(
        topic_name=topic,
        validation_policy=policy.upper(),
        enable_payload_validation=enable_payload_validation,
    )
    line.ask("SchemaRegistry/UpdateTopicValidationPolicy", request, pb.UpdateTopicValidationPolicyResponse)
    say(f"Validation policy updated for topic '{topic}'", *_validation(policy, enable_payload_validation))


@click.command("get-schema-config")
@topic_argument
@json_output
@click.pass_obj
def get_schema_config(line: AdminLine, topic: str, namespace: str | None, output: str | None) -> None:
    """Show the schema that a topic keeps to."""
    request = pb.GetTopicSchemaConfigRequest(topic_name=topic)
    found = line.ask("SchemaRegistry/GetTopicSchemaConfig", request, pb.GetTopicSchemaConfigResponse)
    if output:
        show_json(
            {
                "topic": topic,
                "schema_subject": found.schema_subject,
                "validation_policy": found.validation_policy.upper(),
                "enable_payload_validation": found.enable_payload_validation,
                "schema_id": found.schema_id,
            }
        )
        return
    say(f"Topic: {topic}", f"  Schema Subject: {found.schema_subject or 'none'}")
    say(*_validation(found.validation_policy, found.enable_payload_validation))
    say(f"  Schema ID: {found.schema_id}")


def _validation(policy: str, payload: bool) -> list[str]:
    state = "ENABLED" if payload else "DISABLED"
    return [f"  Validation Policy: {policy.upper()}", f"  Payload Validation: {state}"]
