"""Two tenants with objects of every kind on one broker, and north's two connections to it.

``ids``: of each kind of object south's, and one that does not exist and looks like it.
"""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any, Final

from google.rpc.status_pb2 import Status

from danube import sync
from danube.core.protocol import native as wire
from danube.core.protocol.native import Admin, Hello, Kind, Lookup, OpenProducer, Subscribe
from danube.server.proto import SchemaRegistry_pb2 as schema_pb
from tests.broker_process import Brokers, wait_until
from tests.e2e.authority_site import Site, token
from tests.e2e.grpc_parts import DanubeCalls
from tests.e2e.test_native_door import RawPeer
from tests.grpc_client import Stream

RECORDS: Final = {"north": 3, "south": 9}
PRODUCER, CONSUMER, NEVER = 71, 72, 79  # handles of south's connection, and one that nobody has
OBJECTS_S: Final = 60.0
Ids = dict[str, tuple[Any, Any]]
Answer = list[Any]


class Native:
    """One native connection of a tenant; what comes for a request, in readable form."""

    def __init__(self, port: int, tenant: str) -> None:
        self.peer = RawPeer(port)
        self._correlation = 1
        (welcome,) = self.ask(Kind.HELLO, Hello(token=token(tenant)))
        assert welcome[0] == "WELCOME"

    def ask(self, kind: Kind, body: Any, handle: int = 0, flags: int = 0) -> Answer:
        """Send a request, and return everything until its answer."""
        self._correlation += 1
        if isinstance(body, bytes):
            head = wire.frame_header(kind, len(body), self._correlation, handle, flags)
            self.peer.send(head + body)
        else:
            self.peer.send(wire.control_frame(kind, body, self._correlation, handle, flags))
        return self._until(lambda correlation: correlation == self._correlation)

    def tell(self, kind: Kind, body: Any, handle: int) -> Answer:
        """Send what has no answer of its own, and return everything that comes for it."""
        if isinstance(body, bytes):
            self.peer.send(wire.frame_header(kind, len(body), 0, handle) + body)
        else:
            self.peer.send(wire.control_frame(kind, body, 0, handle))
        *came, pong = self.ask(Kind.PING, None)
        assert pong[0] == "PONG"
        return came

    def admin(self, op: str, partition: str = "", **args: Any) -> Answer:
        return self.ask(Kind.ADMIN, Admin(op, partition, args))

    def _until(self, last: Any) -> Answer:
        found = []
        while True:
            frame = self.peer.frame()
            assert frame is not None, "the broker has closed the connection"
            kind, correlation, handle, body = frame
            shown: Any = body
            if kind == Kind.ERROR:
                error = wire.decode_error(body)
                shown = (error.code, error.what, error.why, error.hint, sorted(error.facts.items()))
            found.append((Kind(kind).name, handle, shown))
            if last(correlation):
                return found


class World:
    """The two tenants."""

    def __init__(self, place: Path) -> None:
        self.brokers = Brokers(place)
        (place / "store").mkdir()
        make = partial(self.brokers.make, arguments=["--storage", f"file://{place}/store"])
        self.site = Site(make, workers=1)  # a right that was given is known at once
        self.clients: dict[str, sync.Client] = {}
        self.calls: dict[str, DanubeCalls] = {}
        self.admin_calls: dict[str, DanubeCalls] = {}
        self.native: dict[str, Native] = {}
        self.facts: dict[str, dict[str, Any]] = {"north": {}, "south": {}}
        self.ids: Ids = {}
        self.kept: Any = None

    def build(self) -> None:
        self.site.put_role("installer", "Replicate")
        for tenant in RECORDS:
            self._build(tenant)
        for tenant in RECORDS:
            wait_until(lambda tenant=tenant: bool(self.segments(tenant)), OBJECTS_S, "an object is listed")
        self.ids = self._ids()
        self.kept = self.state()

    def _build(self, tenant: str) -> None:
        site, process = self.site, self.site.process
        site.namespace(tenant)
        for role in ("namespace-admin", "installer"):
            site.bind(tenant, role, "namespace", tenant)
        key = site.ask("create_api_key", principal=f"service_account:{tenant}", id=f"{tenant}-key")
        assert key
        self.clients[tenant] = client = site.connect(tenant).open()
        topic, subject = f"/{tenant}/orders", f"/{tenant}/value"
        for name in (topic, f"/{tenant}/typed"):
            client.admin.create_topic(name)
        ask = partial(site.ask, client=client)
        schema = ask("schema.register", subject=subject, schema_type="string", definition=b"")
        ask("schema.configure_topic", topic=f"/{tenant}/typed", subject=subject, validation="enforce")
        for calls, address in ((self.calls, process.grpc_address), (self.admin_calls, process.admin_address)):
            calls[tenant] = DanubeCalls(address)
            calls[tenant].fields = [("authorization", f"Bearer {token(tenant)}")]
        calls = self.calls[tenant]
        facts = self.facts[tenant]
        facts["consumer"] = calls.subscribe(topic, f"{tenant}-readers")
        facts["producer"] = calls.create(topic)
        for number in range(RECORDS[tenant]):
            calls.send(topic, facts["producer"], b"%s %d" % (tenant.encode(), number))
        stream = calls.receive(facts["consumer"])
        facts["messages"] = [stream.next(OBJECTS_S) for _ in range(RECORDS[tenant])]
        facts["schema"] = schema["schema_id"]
        client.admin.seal(topic)
        self.native[tenant] = native = Native(process.port, tenant)
        (found,) = native.ask(Kind.LOOKUP, Lookup(topic))
        facts["topic_id"] = wire.decode_result(found[2])["topic_id"]
        (opened,) = native.ask(Kind.OPEN_PRODUCER, OpenProducer(topic, f"{tenant}-native"), PRODUCER)
        facts["native_producer"] = wire.decode_control(opened[2], wire.ProducerOpened).producer_id
        if tenant == "south":  # north's connection has no handle of these numbers
            native.ask(Kind.SUBSCRIBE, Subscribe(topic, f"{tenant}-natives", "c"), CONSUMER)
        else:
            native.ask(Kind.CLOSE_PRODUCER, None, PRODUCER)

    def segments(self, tenant: str) -> list[dict[str, Any]]:
        kind, _, body = self.native[tenant].admin("list_segments", f"/{tenant}/orders")[-1]
        return list(wire.decode_result(body)) if kind == "RESULT" else []  # the manifest is not read yet

    def _ids(self) -> Ids:
        south, (segment,) = self.facts["south"], self.segments("south")
        return {
            "topic": ("/south/orders", "/sooth/orders"),
            "subject": ("/south/value", "/sooth/value"),
            "namespace": ("south", "sooth"),
            "topic id": (south["topic_id"], south["topic_id"] + 90),
            "schema id": (south["schema"], south["schema"] + 90),
            "producer id": (south["producer"], south["producer"] ^ 1),
            "producer id of a name": (south["native_producer"], south["native_producer"] ^ 1),
            "consumer id": (south["consumer"], south["consumer"] ^ 1),
            "subscription": ("south-readers", "sooth-readers"),
            "offset": (RECORDS["south"] - 1, RECORDS["south"] + 90),
            "segment key": (segment["key"], segment["key"].replace(".seg", "0.seg")),
            "hash": (segment["content_hash"], segment["content_hash"][::-1]),
            "producer handle": (PRODUCER, NEVER),
            "consumer handle": (CONSUMER, NEVER),
            "memory": (1, 91),
            "key id": ("south-key", "sooth-key"),
            "binding": ("south-installer-south", "sooth-installer-south"),
            "principal": ("service_account:south", "service_account:sooth"),
        }

    def state(self) -> Any:
        """What south has, without what moves by itself."""
        native, topic = self.native["south"], "/south/orders"
        subscriptions = wire.decode_result(native.admin("list_subscriptions", topic)[-1][2])
        names = ("subscription", "ack_floor", "lag", "in_flight", "consumers", "failure")
        return (
            [{name: one.get(name) for name in names} for one in subscriptions],
            wire.decode_result(native.admin("partition_ends", topic)[-1][2]),
            self.segments("south"),
            self.calls["south"].schema("ListVersions", schema_pb.ListVersionsRequest(subject="/south/value")),
            self.site.ask("topic", topic=topic),
            [one for one in self.site.ask("api_keys") if one["id"] == "south-key"],
            self.site.ask("bindings", scope="namespace", resource="south"),
        )

    def close(self) -> None:
        for native in self.native.values():
            native.peer.socket.close()
        for calls in (*self.calls.values(), *self.admin_calls.values()):
            calls.close()
        for client in self.clients.values():
            client.close()
        self.site.close()
        self.brokers.kill()


def of_stream(stream: Stream) -> Answer:
    """How a gRPC call ends: messages, status, sentence and the details that tools read."""
    error = stream.wait_ended(OBJECTS_S)
    details = str(Status.FromString(error.details)) if error.details else ""
    return [[str(one) for one in stream.messages], error.code, error.message, details]


def without(answer: Answer, *ids: Any) -> str:
    """The answer as text, without the ids that were asked for."""
    text = repr(answer)
    for one in ids:
        text = re.sub(rf"(?<!\w){re.escape(str(one))}(?!\w)", "ID", text)
    return text
