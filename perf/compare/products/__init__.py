"""The products that can be compared, Danube first."""

from __future__ import annotations

from perf.compare.product import Product
from perf.compare.products.danube_broker import Danube
from perf.compare.products.danube_rust import DanubeRust
from perf.compare.products.kafka import Kafka
from perf.compare.products.nats import Nats
from perf.compare.products.rabbitmq import RabbitMQ
from perf.compare.products.redis import Redis


def products(workers: int = 1) -> tuple[Product, ...]:
    """All of them; Danube with this many workers."""
    return (Danube(workers), Nats(), Redis(), RabbitMQ(), Kafka(), DanubeRust())
