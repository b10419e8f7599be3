"""Puts the two gRPC ports of a worker together: one session, their halves, their tables of methods."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from danube.core.metadata.commands import KnownConsumer
from danube.errors import TopicNotFound
from danube.limits import KIB, RECORD_BYTES_MAX
from danube.server.grpc.door import DataHalves, GrpcDoor
from danube.server.grpc.guard import GrpcGuard
from danube.server.grpc.methods import Method, MethodKind, method_of, methods_of, services_in
from danube.server.grpc.placing import Placing
from danube.server.messages.consuming import Consuming, Place
from danube.server.messages.publishing import Publishing
from danube.server.messages.session import BrokerSession
from danube.server.messages.settling import Settling
from danube.server.proto import (
    DanubeAdmin_pb2,
    DanubeApi_pb2,
    SchemaRegistry_pb2,
    health_pb2,
    reflection_v1_pb2,
    reflection_v1alpha,
)
from danube.server.services.broker_admin import BrokerAdmin
from danube.server.services.calls import BrokerCalls
from danube.server.services.cluster_admin import ClusterAdmin
from danube.server.services.consumer_service import ConsumerService
from danube.server.services.discovery import Discovery
from danube.server.services.grpc_health import Health
from danube.server.services.health import HealthCheck
from danube.server.services.namespace_admin import NamespaceAdmin
from danube.server.services.naming import find_consumer
from danube.server.services.producer_service import ProducerService
from danube.server.services.reflection import ServerReflection
from danube.server.services.schema_registry import SchemaRegistry
from danube.server.services.security_admin import AuthService, SecurityAdmin
from danube.server.services.segment_storage import StorageService
from danube.server.services.topic_admin import TopicAdmin

if TYPE_CHECKING:
    from collections.abc import Callable

    from danube.broker.routing.passing import ConnectionPassing
    from danube.broker.worker.worker import Worker

MESSAGE_BYTES_MAX = RECORD_BYTES_MAX + 64 * KIB
ADMIN_MESSAGE_BYTES_MAX = 1024 * KIB


def grpc_doors(worker: Worker, passing: ConnectionPassing | None = None) -> dict[str, GrpcDoor]:
    """The doors ``grpc`` and ``admin`` of one worker, each with its share of the connections.

    ``passing``: the way of data connections to other workers; None if there are none, or with TLS.
    """
    session = BrokerSession(worker.router, worker.schedule_turn)
    broker = BrokerCalls(worker, session)
    known = _KnownByMetadata(broker)
    authority, guard = worker.authority, None
    if worker.admission is not None:
        guard = GrpcGuard(worker.admission, authority, lambda: worker.metadata.state)
    publishing = Publishing(session, worker.router, worker.metadata, authority)
    consuming = Consuming(session, known, guard)
    halves = DataHalves(session, publishing, consuming, Settling(session, worker.shard.settle, guard))
    share = -(-worker.config.limits.connections_max // worker.context.workers)

    placing = None
    if passing is not None:
        placing = Placing(passing, worker.router.owner_to_be, known.find, worker.context.workers)

    def door(name: str, message_bytes_max: int, **more: Any) -> GrpcDoor:
        return GrpcDoor(
            name,
            connections_max=share,
            places=worker.places,
            message_bytes_max=message_bytes_max,
            handshake_timeout_ms=worker.config.limits.handshake_timeout_ms,
            turns=worker,
            count=worker.counters.add,
            guard=guard,
            audit=worker.audit,
            **more,
        )

    data_door = door("grpc", MESSAGE_BYTES_MAX, data=halves, placing=placing)
    data_door.methods.update(_data_methods(broker, halves))
    admin_door = door("admin", ADMIN_MESSAGE_BYTES_MAX)
    admin_door.methods.update(_admin_methods(broker))
    for each in (data_door, admin_door):
        _add_common(each.methods, broker, reflects=worker.config.reflects)
    return {"grpc": data_door, "admin": admin_door}


def _services(module: Any) -> Any:
    return module.DESCRIPTOR.services_by_name


def _data_methods(broker: BrokerCalls, halves: DataHalves) -> dict[str, Method]:
    services = _services(DanubeApi_pb2)
    publishing, consuming, settling = halves.publishing, halves.consuming, halves.settling
    consumer_service = ConsumerService(broker, consuming)
    handlers: dict[str, dict[str, tuple[MethodKind, Callable[..., Any]]]] = {
        "ProducerService": {
            "CreateProducer": (MethodKind.UNARY, ProducerService(broker, publishing).create_producer),
            "SendMessage": (MethodKind.DIRECT, publishing.send_message),
        },
        "ConsumerService": {
            "Subscribe": (MethodKind.UNARY, consumer_service.subscribe),
            "ReceiveMessages": (MethodKind.RECEIVE, consumer_service.receive_messages),
            "Ack": (MethodKind.DIRECT, settling.ack),
            "Nack": (MethodKind.DIRECT, settling.nack),
        },
    }
    methods = {
        f"/danube.{service}/{name}": method_of(services[service].methods_by_name[name], kind, handler)
        for service, named in handlers.items()
        for name, (kind, handler) in named.items()
    }
    methods |= methods_of(services["Discovery"], Discovery(broker))
    methods |= methods_of(services["HealthCheck"], HealthCheck(broker, publishing, consuming))
    methods |= methods_of(services["StorageService"], StorageService(broker))
    methods |= methods_of(services["AuthService"], AuthService(broker))
    return methods | methods_of(_services(SchemaRegistry_pb2)["SchemaRegistry"], SchemaRegistry(broker))


def _admin_methods(broker: BrokerCalls) -> dict[str, Method]:
    methods = methods_of(_services(SchemaRegistry_pb2)["SchemaRegistry"], SchemaRegistry(broker))
    for servicer in (BrokerAdmin, ClusterAdmin, NamespaceAdmin, TopicAdmin, SecurityAdmin):
        methods |= methods_of(_services(DanubeAdmin_pb2)[servicer.__name__], servicer(broker))
    return methods


def _add_common(methods: dict[str, Method], broker: BrokerCalls, *, reflects: bool) -> None:
    """Add health and, if it is wanted, reflection, which list the services of their port."""
    names = [*services_in(methods), "grpc.health.v1.Health"]
    methods.update(methods_of(_services(health_pb2)["Health"], Health(broker, names)))
    for module in (reflection_v1_pb2, reflection_v1alpha) if reflects else ():
        service = _services(module)["ServerReflection"]
        methods.update(methods_of(service, ServerReflection(module, names)))


class _KnownByMetadata:
    """Identities of consumers as the metadata keeps them."""

    def __init__(self, broker: BrokerCalls) -> None:
        self._broker = broker

    def find(self, consumer_id: int) -> KnownConsumer | None:
        return find_consumer(self._broker, consumer_id)

    def place(self, identity: KnownConsumer) -> Place:
        record = self._broker.metadata.topic_with_id(identity.topic_id)
        if record is None:
            raise TopicNotFound("the topic of this consumer was deleted", hint="subscribe to another topic")
        return Place(record.physical_name(identity.partition), record.policy.reliable)
