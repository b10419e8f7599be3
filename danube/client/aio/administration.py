"""``client.admin`` and ``client.schemas`` of the asyncio client: each method runs the plan of its name."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from danube.client.aio.connection import Connection
from danube.client.machine.admin import AdminPlans
from danube.client.machine.reply import Plan, described
from danube.client.machine.schema_plans import SchemaPlans

P = ParamSpec("P")
Plans = TypeVar("Plans")
T = TypeVar("T")


class Running(Generic[Plans]):
    """Plans, and the connection that they run on, which raises when there is none."""

    def __init__(self, plans: Plans, live: Callable[[], Connection]) -> None:
        self._plans = plans
        self._live = live


def awaited(
    plan: Callable[Concatenate[Plans, P], Plan[T]],
) -> Callable[Concatenate[Running[Plans], P], Coroutine[Any, Any, T]]:
    """Return a method that runs the plan and returns its result."""

    async def method(running: Running[Plans], /, *given: P.args, **named: P.kwargs) -> T:
        return await running._live().run(plan(running._plans, *given, **named))

    return described(method, plan)


class Admin(Running[AdminPlans]):
    """Topics, subscriptions, access and the broker's state: ``client.admin``."""

    create_topic = awaited(AdminPlans.create_topic)
    delete_topic = awaited(AdminPlans.delete_topic)
    update_topic = awaited(AdminPlans.update_topic)
    list_topics = awaited(AdminPlans.list_topics)
    topic = awaited(AdminPlans.topic)
    describe_topic = awaited(AdminPlans.describe_topic)
    topic_ends = awaited(AdminPlans.topic_ends)
    list_subscriptions = awaited(AdminPlans.list_subscriptions)
    describe_subscription = awaited(AdminPlans.describe_subscription)
    subscription_progress = awaited(AdminPlans.subscription_progress)
    seek = awaited(AdminPlans.seek)
    delete_subscription = awaited(AdminPlans.delete_subscription)
    unblock = awaited(AdminPlans.unblock)
    set_failure_policy = awaited(AdminPlans.set_failure_policy)
    seal = awaited(AdminPlans.seal)
    open_holes = awaited(AdminPlans.open_holes)
    accept_loss = awaited(AdminPlans.accept_loss)
    storage_status = awaited(AdminPlans.storage_status)
    cluster = awaited(AdminPlans.cluster)
    status = awaited(AdminPlans.status)
    roles = awaited(AdminPlans.roles)
    put_role = awaited(AdminPlans.put_role)
    delete_role = awaited(AdminPlans.delete_role)
    bindings = awaited(AdminPlans.bindings)
    put_binding = awaited(AdminPlans.put_binding)
    delete_binding = awaited(AdminPlans.delete_binding)
    api_keys = awaited(AdminPlans.api_keys)
    create_api_key = awaited(AdminPlans.create_api_key)
    delete_api_key = awaited(AdminPlans.delete_api_key)
    revocations = awaited(AdminPlans.revocations)
    revoke = awaited(AdminPlans.revoke)
    delete_revocation = awaited(AdminPlans.delete_revocation)
    issue_token = awaited(AdminPlans.issue_token)
    can = awaited(AdminPlans.can)
    audit = awaited(AdminPlans.audit)
    namespaces = awaited(AdminPlans.namespaces)
    create_namespace = awaited(AdminPlans.create_namespace)
    delete_namespace = awaited(AdminPlans.delete_namespace)
    namespace_policy = awaited(AdminPlans.namespace_policy)
    set_namespace_policy = awaited(AdminPlans.set_namespace_policy)
    tenants = awaited(AdminPlans.tenants)
    put_tenant = awaited(AdminPlans.put_tenant)
    delete_tenant = awaited(AdminPlans.delete_tenant)
    quotas = awaited(AdminPlans.quotas)


class Schemas(Running[SchemaPlans]):
    """Register, find and compare schemas; bind them to topics."""

    register = awaited(SchemaPlans.register)
    get = awaited(SchemaPlans.get)
    get_by_id = awaited(SchemaPlans.get_by_id)
    versions = awaited(SchemaPlans.versions)
    subjects = awaited(SchemaPlans.subjects)
    check = awaited(SchemaPlans.check)
    diff = awaited(SchemaPlans.diff)
    set_compatibility = awaited(SchemaPlans.set_compatibility)
    delete_version = awaited(SchemaPlans.delete_version)
    delete = awaited(SchemaPlans.delete)
    configure_topic = awaited(SchemaPlans.configure_topic)
    topic_schema = awaited(SchemaPlans.topic_schema)
