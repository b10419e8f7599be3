"""The blocking client: ``danube.sync.connect`` and the names of the asyncio client without await.

    with danube.sync.connect("danube://127.0.0.1:6660") as client:
        with client.producer("/default/orders") as producer:
            producer.send(b"payload")

Plain sockets; safe to use from several threads; works under gevent's monkey patching.
"""

from __future__ import annotations

from danube.client.blocking.client import Admin, Client, Schemas, connect
from danube.client.blocking.consumer import Batch, Consumer, Message
from danube.client.blocking.producer import Producer
from danube.client.blocking.typed import TypedConsumer, TypedProducer

__all__ = [
    "Admin",
    "Batch",
    "Client",
    "Consumer",
    "Message",
    "Producer",
    "Schemas",
    "TypedConsumer",
    "TypedProducer",
    "connect",
]
