"""``client.admin`` and ``client.schemas`` of the blocking client: each method runs the plan of its name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Concatenate, Generic, ParamSpec, TypeVar

from danube.client.blocking.connection import BlockingConnection
from danube.client.machine.admin import AdminPlans
from danube.client.machine.reply import Plan, described
from danube.client.machine.schema_plans import SchemaPlans

P = ParamSpec("P")
Plans = TypeVar("Plans")
T = TypeVar("T")


class Running(Generic[Plans]):
    """Plans, and the connection that they run on, which raises when there is none."""

    def __init__(self, plans: Plans, live: Callable[[], BlockingConnection]) -> None:
        self._plans = plans
        self._live = live


def waited(
    plan: Callable[Concatenate[Plans, P], Plan[T]],
) -> Callable[Concatenate[Running[Plans], P], T]:
    """Return a method that runs the plan and returns its result."""

    def method(running: Running[Plans], /, *given: P.args, **named: P.kwargs) -> T:
        return running._live().run(plan(running._plans, *given, **named))

    return described(method, plan)


class Admin(Running[AdminPlans]):
    """Topics, subscriptions, access and the broker's state: ``client.admin``."""

    create_topic = waited(AdminPlans.create_topic)
    delete_topic = waited(AdminPlans.delete_topic)
    update_topic = waited(AdminPlans.update_topic)
    list_topics = waited(AdminPlans.list_topics)
    topic = waited(AdminPlans.topic)
    describe_topic = waited(AdminPlans.describe_topic)
    topic_ends = waited(AdminPlans.topic_ends)
    list_subscriptions = waited(AdminPlans.list_subscriptions)
    describe_subscription = waited(AdminPlans.describe_subscription)
    subscription_progress = waited(AdminPlans.subscription_progress)
    seek = waited(AdminPlans.seek)
    delete_subscription = waited(AdminPlans.delete_subscription)
    unblock = waited(AdminPlans.unblock)
    set_failure_policy = waited(AdminPlans.set_failure_policy)
    seal = waited(AdminPlans.seal)
    open_holes = waited(AdminPlans.open_holes)
    accept_loss = waited(AdminPlans.accept_loss)
    storage_status = waited(AdminPlans.storage_status)
    cluster = waited(AdminPlans.cluster)
    status = waited(AdminPlans.status)
    roles = waited(AdminPlans.roles)
    put_role = waited(AdminPlans.put_role)
    delete_role = waited(AdminPlans.delete_role)
    bindings = waited(AdminPlans.bindings)
    put_binding = waited(AdminPlans.put_binding)
    delete_binding = waited(AdminPlans.delete_binding)
    api_keys = waited(AdminPlans.api_keys)
    create_api_key = waited(AdminPlans.create_api_key)
    delete_api_key = waited(AdminPlans.delete_api_key)
    revocations = waited(AdminPlans.revocations)
    revoke = waited(AdminPlans.revoke)
    delete_revocation = waited(AdminPlans.delete_revocation)
    issue_token = waited(AdminPlans.issue_token)
    can = waited(AdminPlans.can)
    audit = waited(AdminPlans.audit)
    namespaces = waited(AdminPlans.namespaces)
    create_namespace = waited(AdminPlans.create_namespace)
    delete_namespace = waited(AdminPlans.delete_namespace)
    namespace_policy = waited(AdminPlans.namespace_policy)
    set_namespace_policy = waited(AdminPlans.set_namespace_policy)
    tenants = waited(AdminPlans.tenants)
    put_tenant = waited(AdminPlans.put_tenant)
    delete_tenant = waited(AdminPlans.delete_tenant)
    quotas = waited(AdminPlans.quotas)


class Schemas(Running[SchemaPlans]):
    """Register, find and compare schemas; bind them to topics."""

    register = waited(SchemaPlans.register)
    get = waited(SchemaPlans.get)
    get_by_id = waited(SchemaPlans.get_by_id)
    versions = waited(SchemaPlans.versions)
    subjects = waited(SchemaPlans.subjects)
    check = waited(SchemaPlans.check)
    diff = waited(SchemaPlans.diff)
    set_compatibility = waited(SchemaPlans.set_compatibility)
    delete_version = waited(SchemaPlans.delete_version)
    delete = waited(SchemaPlans.delete)
    configure_topic = waited(SchemaPlans.configure_topic)
    topic_schema = waited(SchemaPlans.topic_schema)
