"""Danube: a message broker for Python teams."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    import danube.sync as sync
    from danube.client.aio.client import Client as Client
    from danube.client.aio.client import connect as connect
    from danube.client.aio.client import load_kernels as load_kernels
    from danube.client.aio.consumer import Consumer as Consumer
    from danube.client.aio.producer import Producer as Producer
    from danube.client.aio.typed import TypedConsumer as TypedConsumer
    from danube.client.aio.typed import TypedProducer as TypedProducer
    from danube.client.machine.ack import Ack as Ack
    from danube.client.machine.admin import SubscriptionInfo as SubscriptionInfo
    from danube.client.machine.admin import TopicDescription as TopicDescription
    from danube.client.machine.admin import TopicInfo as TopicInfo
    from danube.client.machine.schema_plans import SchemaCheck as SchemaCheck
    from danube.client.machine.schema_plans import SchemaDiff as SchemaDiff
    from danube.client.machine.schema_plans import SchemaVersion as SchemaVersion
    from danube.client.machine.schema_plans import TopicSchema as TopicSchema
    from danube.client.machine.schema_plans import Violation as Violation
    from danube.client.machine.schema_plans import violations_of as violations_of
    from danube.client.machine.tls import TlsOptions as TlsOptions
    from danube.client.records.message import Batch as Batch
    from danube.client.records.message import Message as Message
    from danube.client.typed.models import Schema as Schema
    from danube.core.partition.policy import FailurePolicy as FailurePolicy
    from danube.errors import DanubeError as DanubeError

# Imported on first use: `import danube` alone, as the command line does it, stays cheap.
_NAMES_BY_MODULE = {
    "danube.client.aio.client": ("Client", "connect", "load_kernels"),
    "danube.client.aio.consumer": ("Consumer",),
    "danube.client.aio.producer": ("Producer",),
    "danube.client.aio.typed": ("TypedConsumer", "TypedProducer"),
    "danube.client.machine.ack": ("Ack",),
    "danube.client.machine.admin": ("SubscriptionInfo", "TopicDescription", "TopicInfo"),
    "danube.client.machine.schema_plans": (
        "SchemaCheck", "SchemaDiff", "SchemaVersion", "TopicSchema", "Violation", "violations_of",
    ),
    "danube.client.machine.tls": ("TlsOptions",),
    "danube.client.records.message": ("Batch", "Message"),
    "danube.client.typed.models": ("Schema",),
    "danube.core.partition.policy": ("FailurePolicy",),
    "danube.errors": ("DanubeError",),
}  # fmt: skip
_MODULE_BY_NAME = {name: module for module, names in _NAMES_BY_MODULE.items() for name in names}

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
    "TlsOptions",
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
