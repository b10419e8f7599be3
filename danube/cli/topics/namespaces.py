"""``danube namespaces``, ``danube tenants`` and ``danube quotas``: who may have how much."""

from __future__ import annotations

from typing import Any

import click

from danube.cli.terminal import arguments
from danube.cli.terminal.addressing import page_options
from danube.cli.terminal.asking import Broker, broker_command
from danube.cli.terminal.confirming import yes_option
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import note, plain, show

TENANT_COLUMNS = ("name", "namespaces", "topics", "partitions", "subjects")
QUOTA_COLUMNS = ("of", "name", "quota", "used", "limit", "percent")
_namespace = click.argument("namespace")
_tenant = click.argument("tenant")
_COUNTS = (
    "max_topics", "max_partitions", "max_subjects", "max_producers_per_topic", "max_subscriptions_per_topic",
    "max_consumers_per_topic", "max_consumers_per_subscription", "max_subscription_dispatch_rate",
    "max_publish_rate_per_topic", "max_publish_rate", "max_dispatch_rate", "max_unacked",
)  # fmt: skip


@click.group(cls=LazyGroup, aliases={"ls": "list", "rm": "delete"})
def namespaces() -> None:
    """List, create and delete namespaces, and set what their topics may have.

    \b
    danube namespaces create payments
    danube namespaces set payments --max-topics 20 --durability-min fsync
    danube namespaces policy payments
    """


@click.group(cls=LazyGroup, aliases={"ls": "list", "rm": "delete"})
def tenants() -> None:
    """Tenants: named sets of namespaces, with a quota for all of them together.

    \b
    danube tenants set acme --namespace payments --namespace orders --max-partitions 100
    danube tenants list
    """


@click.group(cls=LazyGroup)
def quotas() -> None:
    """Show how much of their quotas namespaces and tenants use."""


# Of a policy; one left out keeps the present value, 0 takes the limit away.
_limits = arguments.together(
    click.option("--max-message-size", type=arguments.size_bytes, help="Of a record's payload."),
    click.option("--max-publish-bytes-per-topic", type=arguments.size_bytes, help="A second."),
    click.option("--max-storage-bytes-per-topic", type=arguments.size_bytes),
    click.option("--max-publish-bytes", type=arguments.size_bytes, help="A second, of all topics."),
    click.option("--max-storage-bytes", type=arguments.size_bytes, help="Of all topics."),
    click.option("--max-dispatch-bytes", type=arguments.size_bytes, help="A second, of all topics."),
    click.option("--durability-min", type=click.Choice(["none", "written", "fsync"])),
    click.option("--retention-max", "retention_max_ms", type=arguments.duration_ms),
    click.option("--auto-create/--no-auto-create", default=None, help="Make topics that are used."),
    click.option("--schema-required/--no-schema-required", default=None, help="For producers."),
    click.option(
        "--subscription-auth",
        type=click.Choice(["none", "prefix"]),
        help="prefix: subscriptions are named after who consumes.",
    ),
    click.option(
        "--dead-letter-within",
        type=click.Choice(["none", "tenant", "namespace"]),
        help="Where dead letters may go to.",
    ),
    *(click.option(f"--{name.replace('_', '-')}", type=click.IntRange(min=0)) for name in _COUNTS),
)


def _given(options: dict[str, Any]) -> dict[str, Any]:
    chosen = {name: value for name, value in options.items() if value is not None}
    for name in ("durability_min", "subscription_auth", "dead_letter_within"):
        if chosen.get(name) == "none":
            chosen[name] = ""
    return chosen


@broker_command(namespaces, "list", "List namespaces.", page_options, columns=("namespace",))
def list_namespaces(broker: Broker, **page: Any) -> Any:
    """List namespaces by name."""
    return [{"namespace": name} for name in broker.admin.namespaces(**page)]


@broker_command(namespaces, "create", "Create a namespace.", _namespace)
def create(broker: Broker, namespace: str) -> Any:
    """Create a namespace; exit code 4 when it exists."""
    broker.admin.create_namespace(namespace)
    return {"namespace": namespace, "created": True}


@broker_command(namespaces, "delete", "Delete a namespace that holds no topics.", _namespace, yes_option)
def delete(broker: Broker, namespace: str, yes: bool) -> Any:
    """Delete a namespace that holds no topics, and its policy."""
    broker.confirm(namespace, f"namespace {namespace} and its policy will be deleted", yes)
    broker.admin.delete_namespace(namespace)
    return {"namespace": namespace, "deleted": True}


@broker_command(namespaces, "policy", "Show what the topics of a namespace may have.", _namespace)
def policy(broker: Broker, namespace: str) -> Any:
    """Show a namespace's own policy, and what holds with the quota of its tenant; 0 is no limit."""
    found = broker.admin.namespace_policy(namespace)
    if broker.output == "json":
        return found
    own, effective = found["policy"], found["effective"]
    rows = [{"limit": name, "own": own[name], "effective": effective[name]} for name in own]
    show(rows, broker.output, ("limit", "own", "effective"))
    note(f"tenant: {found['tenant'] or 'none'}; used: " + _used(found["usage"]))
    return None


@broker_command(namespaces, "set", "Change the policy of a namespace.", _namespace, _limits)
def set_policy(broker: Broker, namespace: str, **options: Any) -> Any:
    """Change the given limits of a namespace.

    What is there stays, also above a limit; new topics, producers and consumers are refused.
    """
    fields = _given(options)
    if not fields:
        raise click.UsageError("Give at least one option to change.")
    return {"namespace": namespace, **plain(broker.admin.set_namespace_policy(namespace, **fields))}


@broker_command(tenants, "list", "List tenants.", page_options, columns=TENANT_COLUMNS)
def list_tenants(broker: Broker, **page: Any) -> Any:
    """List tenants with their namespaces and what they use."""
    found = broker.admin.tenants(**page)
    if broker.output == "json":
        return found
    return [{**one, **one["usage"], "namespaces": ", ".join(one["namespaces"])} for one in found]


@broker_command(tenants, "set", "Make a tenant or change it.")
@_tenant
@click.option("--namespace", "named", multiple=True, help="One of its namespaces; all that it has then.")
@_limits
def set_tenant(broker: Broker, tenant: str, named: tuple[str, ...], **options: Any) -> Any:
    """Make a tenant, or change its namespaces and the given limits of its quota.

    Limits of numbers of topics, partitions and subjects hold for all its namespaces together; all others for
    each topic.  Without --namespace a tenant keeps those that it has.
    """
    broker.admin.put_tenant(tenant, list(named) or None, **_given(options))
    return next(one for one in broker.admin.tenants(prefix=tenant) if one["name"] == tenant)


@broker_command(tenants, "delete", "Forget a tenant.", _tenant, yes_option)
def delete_tenant(broker: Broker, tenant: str, yes: bool) -> Any:
    """Forget a tenant and its quota; its namespaces and topics stay."""
    broker.confirm(tenant, f"tenant {tenant} and its quota will be forgotten", yes)
    broker.admin.delete_tenant(tenant)
    return {"tenant": tenant, "deleted": True}


@broker_command(quotas, "top", "Show the quotas that are used most.", columns=QUOTA_COLUMNS)
@click.option("-n", "--count", type=click.IntRange(min=1), default=20, show_default=True)
def top(broker: Broker, count: int) -> Any:
    """Show the quotas of namespaces and tenants by the share that is used.

    Rates are records and bytes a second, of the last seconds, over all brokers.
    """
    rows = broker.admin.quotas()[:count]
    return [{**one, "percent": round(100 * one["used"] / one["limit"])} for one in rows]


def _used(usage: dict[str, int]) -> str:
    return ", ".join(f"{count} {what}" for what, count in usage.items())
