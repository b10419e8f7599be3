"""``client.admin`` and ``client.schemas``: a table of operations, whose plans each client runs in its way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine
from functools import update_wrapper
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, overload

from danube.client.machine.admin import AdminPlans
from danube.client.machine.reply import Plan
from danube.client.machine.schema_plans import SchemaPlans

P = ParamSpec("P")
T = TypeVar("T")


class Running:
    """Plans, and the connection that they run on, which raises when there is none."""

    def __init__(self, plans: Any, live: Callable[[], Any]) -> None:
        self._plans = plans
        self._live = live


class Awaiting(Running):
    """Operations of the asyncio client."""

    def __init_subclass__(cls) -> None:
        _add_methods(cls, _awaited)


class Waiting(Running):
    """Operations of the blocking client."""

    def __init_subclass__(cls) -> None:
        _add_methods(cls, _waited)


class Operation(Generic[P, T]):
    """A place in the table; a client's class has a method in it that runs the plan and returns its result."""

    def __init__(self, plan: Callable[Concatenate[Any, P], Plan[T]]) -> None:
        self.plan = plan

    @overload
    def __get__(self, running: Awaiting, owner: Any) -> Callable[P, Coroutine[Any, Any, T]]: ...

    @overload
    def __get__(self, running: Waiting, owner: Any) -> Callable[P, T]: ...

    def __get__(self, running: Any, owner: Any) -> Any:
        return self.plan


def _add_methods(cls: type, running: Callable[[Callable[..., Plan[Any]]], Callable[..., Any]]) -> None:
    for table in cls.__mro__:
        for name, operation in vars(table).items():
            if isinstance(operation, Operation):
                setattr(cls, name, _described(running(operation.plan), operation.plan))


def _awaited(plan: Callable[..., Plan[Any]]) -> Callable[..., Any]:
    async def method(running: Running, /, *given: Any, **named: Any) -> Any:
        return await running._live().run(plan(running._plans, *given, **named))

    return method


def _waited(plan: Callable[..., Plan[Any]]) -> Callable[..., Any]:
    def method(running: Running, /, *given: Any, **named: Any) -> Any:
        return running._live().run(plan(running._plans, *given, **named))

    return method


def _described(method: Callable[..., Any], plan: Callable[..., Any]) -> Callable[..., Any]:
    """Give a method that runs a plan the plan's name, text and signature; it returns the plan's result."""
    update_wrapper(method, plan)
    signature = inspect.signature(plan)
    result = str(signature.return_annotation).removeprefix("Plan[").removesuffix("]")
    method.__signature__ = signature.replace(return_annotation=result)  # type: ignore[attr-defined]
    return method


class AdminOperations:
    """Topics, subscriptions, access and the broker's state: ``client.admin``."""

    create_topic = Operation(AdminPlans.create_topic)
    delete_topic = Operation(AdminPlans.delete_topic)
    update_topic = Operation(AdminPlans.update_topic)
    list_topics = Operation(AdminPlans.list_topics)
    topic = Operation(AdminPlans.topic)
    describe_topic = Operation(AdminPlans.describe_topic)
    topic_ends = Operation(AdminPlans.topic_ends)
    list_subscriptions = Operation(AdminPlans.list_subscriptions)
    describe_subscription = Operation(AdminPlans.describe_subscription)
    subscription_progress = Operation(AdminPlans.subscription_progress)
    seek = Operation(AdminPlans.seek)
    delete_subscription = Operation(AdminPlans.delete_subscription)
    unblock = Operation(AdminPlans.unblock)
    set_failure_policy = Operation(AdminPlans.set_failure_policy)
    seal = Operation(AdminPlans.seal)
    open_holes = Operation(AdminPlans.open_holes)
    accept_loss = Operation(AdminPlans.accept_loss)
    storage_status = Operation(AdminPlans.storage_status)
    cluster = Operation(AdminPlans.cluster)
    status = Operation(AdminPlans.status)
    roles = Operation(AdminPlans.roles)
    put_role = Operation(AdminPlans.put_role)
    delete_role = Operation(AdminPlans.delete_role)
    bindings = Operation(AdminPlans.bindings)
    put_binding = Operation(AdminPlans.put_binding)
    delete_binding = Operation(AdminPlans.delete_binding)
    api_keys = Operation(AdminPlans.api_keys)
    create_api_key = Operation(AdminPlans.create_api_key)
    delete_api_key = Operation(AdminPlans.delete_api_key)
    revocations = Operation(AdminPlans.revocations)
    revoke = Operation(AdminPlans.revoke)
    delete_revocation = Operation(AdminPlans.delete_revocation)
    issue_token = Operation(AdminPlans.issue_token)
    can = Operation(AdminPlans.can)
    audit = Operation(AdminPlans.audit)
    namespaces = Operation(AdminPlans.namespaces)
    create_namespace = Operation(AdminPlans.create_namespace)
    delete_namespace = Operation(AdminPlans.delete_namespace)
    namespace_policy = Operation(AdminPlans.namespace_policy)
    set_namespace_policy = Operation(AdminPlans.set_namespace_policy)
    tenants = Operation(AdminPlans.tenants)
    put_tenant = Operation(AdminPlans.put_tenant)
    delete_tenant = Operation(AdminPlans.delete_tenant)
    quotas = Operation(AdminPlans.quotas)


class SchemaOperations:
    """Register, find and compare schemas; bind them to topics: ``client.schemas``."""

    register = Operation(SchemaPlans.register)
    get = Operation(SchemaPlans.get)
    get_by_id = Operation(SchemaPlans.get_by_id)
    versions = Operation(SchemaPlans.versions)
    subjects = Operation(SchemaPlans.subjects)
    check = Operation(SchemaPlans.check)
    diff = Operation(SchemaPlans.diff)
    set_compatibility = Operation(SchemaPlans.set_compatibility)
    delete_version = Operation(SchemaPlans.delete_version)
    delete = Operation(SchemaPlans.delete)
    configure_topic = Operation(SchemaPlans.configure_topic)
    topic_schema = Operation(SchemaPlans.topic_schema)
