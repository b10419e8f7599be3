"""Danube: a message broker for Python teams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    import danube.sync as sync
    from danube.client.ack import Ack as Ack
    from danube.client.admin import SubscriptionInfo as SubscriptionInfo
    from danube.client.admin import TopicDescription as TopicDescription
    from danube.client.admin import TopicInfo as TopicInfo
    from danube.client.client import Client as Client
    from danube.client.client import connect as connect
    from danube.client.client import load_kernels as load_kernels
    from danube.client.consumer import Consumer as Consumer
    from danube.client.message import Batch as Batch
    from danube.client.message import Message as Message
    from danube.client.producer import Producer as Producer
    from danube.client.schema_plans import SchemaCheck as SchemaCheck
    from danube.client.schema_plans import SchemaDiff as SchemaDiff
    from danube.client.schema_plans import SchemaVersion as SchemaVersion
    from danube.client.schema_plans import TopicSchema as TopicSchema
    from danube.client.schema_plans import Violation as Violation
    from danube.client.schema_plans import violations_of as violations_of
    from danube.client.typed import Schema as Schema
    from danube.client.typed_consumer import TypedConsumer as TypedConsumer
    from danube.client.typed_producer import TypedProducer as TypedProducer
    from danube.core.policy import FailurePolicy as FailurePolicy
    from danube.errors import DanubeError as DanubeError

# Imported on first use: `import danube` alone, as the command line does it, stays cheap.
_MODULE_BY_NAME = {
    "Ack": "danube.client.ack",
    "Batch": "danube.client.message",
    "Client": "danube.client.client",
    "Consumer": "danube.client.consumer",
    "DanubeError": "danube.errors",
    "FailurePolicy": "danube.core.policy",
    "Message": "danube.client.message",
    "Producer": "danube.client.producer",
    "Schema": "danube.client.typed",
    "SchemaCheck": "danube.client.schema_plans",
    "SchemaDiff": "danube.client.schema_plans",
    "SchemaVersion": "danube.client.schema_plans",
    "SubscriptionInfo": "danube.client.admin",
    "TopicDescription": "danube.client.admin",
    "TopicInfo": "danube.client.admin",
    "TopicSchema": "danube.client.schema_plans",
    "TypedConsumer": "danube.client.typed_consumer",
    "TypedProducer": "danube.client.typed_producer",
    "Violation": "danube.client.schema_plans",
    "connect": "danube.client.client",
    "load_kernels": "danube.client.client",
    "violations_of": "danube.client.schema_plans",
}

__all__ = [
    "Ack",
    "Batch",
    "Client",
    "Consumer",
    "DanubeError",
    "FailurePolicy",
    "Message",
    "Producer",
    "Schema",
    "SchemaCheck",
    "SchemaDiff",
    "SchemaVersion",
    "SubscriptionInfo",
    "TopicDescription",
    "TopicInfo",
    "TopicSchema",
    "TypedConsumer",
    "TypedProducer",
    "Violation",
    "__version__",
    "connect",
    "load_kernels",
    "sync",
    "violations_of",
]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "sync":
        return import_module("danube.sync")
    module = _MODULE_BY_NAME.get(name)
    if module is None:
        raise AttributeError(f"module 'danube' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(module), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
