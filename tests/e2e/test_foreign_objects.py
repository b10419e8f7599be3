"""Ids of another tenant's objects are answered as ids that nobody has, at both doors.

North names an object of south's, and then one that does not exist.  Codes, texts, facts and results are equal
but for the id itself, and south keeps what it has.  In a line of the tables ``own`` is a name of north's that
is right, so that the foreign id beside it is what the answer is about.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import pytest
from google.protobuf.message_factory import GetMessageClass

from danube.core.batch.columns import encode
from danube.core.protocol.native import Kind, Lookup, Nack, OpenProducer, Subscribe
from danube.core.security.operations import ADMIN_ROWS, GRPC_ROWS, Row
from danube.server.proto import DanubeApi_pb2 as pb
from danube.server.proto.pool import POOL
from danube.wal.tier.staged import Staged, encode_staged
from tests.e2e.authority_matrix import answer_of
from tests.e2e.foreign_site import Answer, Native, World, of_stream, without
from tests.golden.authority_cases import Target, admin_request, grpc_request
from tests.grpc_client import Stream

OWN, TYPED, SOUTHS = "/north/orders", "/north/typed", "/south/orders"
FREE_HANDLE: Final = 5
Ask = Callable[[World, Any], Answer]
Call = Callable[[World, Any], Stream]  # refusals of gRPC are held back: two calls wait at the same time


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    made = World(tmp_path_factory.mktemp("foreign"))
    try:
        made.build()
        yield made
    finally:
        made.close()


# -- how an id is used ------------------------------------------------------------------------------


def operation(op: str, partition: str = "", **args: Any) -> Ask:
    """An operation of the native door; the argument that is ``...`` is the id, and so is such a partition."""

    def ask(world: World, id_: Any) -> Answer:
        given = {name: id_ if value is ... else value for name, value in args.items()}
        return world.native["north"].admin(op, id_ if partition == "..." else partition, **given)

    return ask


def letters(world: World, id_: Any) -> Answer:
    failure = {"poison": "dead_letter", "dead_letter_topic": id_}
    args = {"topic": OWN, "subscription": "north-readers", "failure": failure}
    return world.native["north"].admin("set_subscription_settings", **args)


def opening(make: Callable[[Any], Any]) -> Ask:
    """A request that opens a handle, which is closed again."""

    def ask(world: World, id_: Any) -> Answer:
        native, body = world.native["north"], make(id_)
        producer = isinstance(body, OpenProducer)
        answer = native.ask(Kind.OPEN_PRODUCER if producer else Kind.SUBSCRIBE, body, FREE_HANDLE)
        native.ask(Kind.CLOSE_PRODUCER if producer else Kind.CLOSE_CONSUMER, None, FREE_HANDLE)
        return answer

    return ask


def lookup(**more: Any) -> Ask:
    return lambda world, id_: world.native["north"].ask(Kind.LOOKUP, Lookup(id_, **more))


def by_handle(kind: Kind, body: Any, *, answered: bool) -> Ask:
    """A frame on a handle of another connection."""

    def ask(world: World, id_: Any) -> Answer:
        native: Native = world.native["north"]
        return native.ask(kind, body, id_) if answered else native.tell(kind, body, id_)

    return ask


def published(topic: str, **fields: Any) -> Ask:
    """A batch whose head names the id."""

    def ask(world: World, id_: Any) -> Answer:
        native = world.native["north"]
        native.ask(Kind.OPEN_PRODUCER, OpenProducer(topic, "p"), FREE_HANDLE)
        given = {name: id_ if value is ... else value for name, value in fields.items()}
        batch = encode([b"x"], publish_time_us=1, **given).to_bytes()
        answer = native.ask(Kind.PUBLISH, batch, FREE_HANDLE)
        native.ask(Kind.CLOSE_PRODUCER, None, FREE_HANDLE)
        return answer if answer[-1][0] == "ERROR" else [answer[-1][0]]  # without its offset

    return ask


def installed(made: str, source: str) -> Ask:
    """Staged objects of north's own topic that are said to be another's, or made of another's."""

    def ask(world: World, id_: Any) -> Answer:
        (own,) = world.segments("north")
        hashes = {"id": bytes.fromhex(id_), "own": bytes.fromhex(own["content_hash"])}
        row = (
            own["start_offset"], own["end_offset"], own["record_count"], 1, own["size_bytes"],
            own["size_bytes"], own["first_append_us"], own["last_append_us"], 0, 1, 1,
            hashes[made], bytes(16), hashes["own"],
        )  # fmt: skip
        objects = encode_staged([Staged(row, [hashes[source]])])
        topic_id = world.facts["north"]["topic_id"]
        return world.native["north"].admin("install_staged", OWN, topic_id=topic_id, objects=objects)

    return ask


def call(path: str, make: Callable[[World, Any], Any]) -> Call:
    """A call of gRPC with the request that ``make`` returns for an id."""
    row = next(row for row in GRPC_ROWS if row.name == path)
    return lambda world, id_: started(world, row, make(world, id_))


def started(world: World, row: Row, request: Any) -> Stream:
    of = world.admin_calls if row.name.startswith("/danube_admin.") else world.calls
    return of["north"].start(row.name, request, answer_of(row))


def settling(method: str, own: str = "", **place: Any) -> Call:
    """Ack or Nack with the msg_id of a message; ``place`` are fields of it that change, ``...`` is the id."""

    def make(world: World, id_: Any) -> Any:
        message = world.facts[own or "south"]["messages"][0]
        request = getattr(pb, f"{method}Request")(request_id=1, subscription_name="north-readers")
        request.msg_id.CopyFrom(message.msg_id)
        for name, value in place.items():
            given = id_ if value is ... else value
            setattr(request if name == "subscription_name" else request.msg_id, name, given)
        return request

    return call(f"/danube.ConsumerService/{method}", make)


def sent(topic: str = OWN, **fields: Any) -> Call:
    """A message that names the id, in itself or in its msg_id."""

    def make(world: World, id_: Any) -> Any:
        place = {"producer_id": world.facts["north"]["producer"], "topic_name": topic}
        message = pb.StreamMessage(request_id=7, payload=b"x", producer_name="p")
        if topic == TYPED:
            place["producer_id"] = world.calls["north"].create(TYPED)
        for name, value in fields.items():
            given = id_ if value is ... else value
            if name in ("producer_id", "topic_name"):
                place[name] = given
            else:
                setattr(message, name, given)
        message.msg_id.CopyFrom(pb.MsgID(**place))
        return message

    return call("/danube.ProducerService/SendMessage", make)


def request(path: str, **fields: Any) -> Call:
    """A call of gRPC whose fields are told; the one that is ``...`` is the id."""
    service, _, method = path.partition("/")
    described = POOL.FindServiceByName(service).methods_by_name[method].input_type
    message = GetMessageClass(described)
    return call(
        f"/{path}",
        lambda world, id_: message(**{name: id_ if one is ... else one for name, one in fields.items()}),
    )


# -- the tables -------------------------------------------------------------------------------------

BATCH: Final = encode([b"x"], publish_time_us=1).to_bytes()
RANGE: Final = struct.pack("<QQ", 0, 1)
CREDIT: Final = struct.pack("<QQ", 100, 1 << 20)
REGISTRY: Final = "danube_schema.SchemaRegistry"
TOPICS: Final = "danube_admin.TopicAdmin"
SECURITY: Final = "danube_admin.SecurityAdmin"
NAME: Final = "south-readers"  # a subscription that south has on its own topic

NATIVE: Final[list[tuple[str, str, Ask]]] = [
    ("producer id of a name", "resumes", opening(lambda id_: OpenProducer(OWN, "p", id_, 1))),
    ("producer id of a name", "in a batch", published(OWN, producer_id=..., producer_epoch=1)),
    ("topic id", "opens a producer", opening(lambda id_: OpenProducer(OWN, "p", topic_id=id_))),
    ("topic id", "subscribes", opening(lambda id_: Subscribe(OWN, "t", "c", topic_id=id_))),
    ("topic id", "deletes", operation("delete_topic", topic=SOUTHS, topic_id=...)),
    ("topic id", "installs", operation("install_staged", OWN, topic_id=..., objects=b"\x90")),
    ("topic", "looks up", lookup()),
    ("topic", "looks up and makes", lookup(create=True)),
    ("topic", "opens a producer", opening(lambda id_: OpenProducer(id_, "p"))),
    ("topic", "subscribes", opening(lambda id_: Subscribe(id_, NAME, "c"))),
    ("topic", "settles", operation("settle", "...", subscription=NAME, acks=RANGE)),
    ("topic", "nacks", operation("settle", "...", subscription=NAME, nacks=[(0, 0, "x")])),
    ("topic", "seeks", operation("seek", "...", subscription=NAME, kind="latest")),
    ("topic", "asks for progress", operation("subscription_progress", "...", subscription=NAME)),
    ("topic", "asks for its ends", operation("partition_ends", "...")),
    ("topic", "asks for a place", operation("offset_at", "...", kind="earliest")),
    ("topic", "lists segments", operation("list_segments", "...")),
    ("topic", "seals", operation("seal", "...")),
    ("topic", "gives records up", operation("accept_loss", "...")),
    ("topic", "installs", operation("install_staged", "...", topic_id=2, objects=b"\x90")),
    ("topic", "has letters", letters),
    ("subscription", "is joined", opening(lambda id_: Subscribe(OWN, id_, "c", temporary=True))),
    ("subscription", "is joined there", opening(lambda id_: Subscribe(SOUTHS, id_, "c"))),
    ("subscription", "settles", operation("settle", OWN, subscription=..., acks=RANGE)),
    ("subscription", "settles there", operation("settle", SOUTHS, subscription=..., acks=RANGE)),
    ("subscription", "is described", operation("describe_subscription", OWN, subscription=...)),
    ("subscription", "is described there", operation("describe_subscription", SOUTHS, subscription=...)),
    ("subscription", "tells its progress", operation("subscription_progress", OWN, subscription=...)),
    ("subscription", "is moved", operation("seek", OWN, subscription=..., kind="latest")),
    ("subscription", "is moved there", operation("seek", SOUTHS, subscription=..., kind="latest")),
    ("subscription", "is unblocked", operation("unblock", OWN, subscription=...)),
    ("subscription", "gets a policy", operation("set_failure_policy", OWN, subscription=...)),
    ("subscription", "is deleted", operation("delete_subscription", OWN, subscription=...)),
    ("subscription", "is deleted there", operation("delete_subscription", SOUTHS, subscription=...)),
    ("subscription", "shows settings", operation("subscription_settings", topic=OWN, subscription=...)),
    ("subscription", "shows settings there", operation("subscription_settings", topic=SOUTHS,
     subscription=...)),
    ("subscription", "forgets settings", operation("forget_subscription", topic=OWN, subscription=...)),
    ("offset", "is a row mark", operation("row_mark", OWN, offset=...)),
    ("offset", "is a row mark there", operation("row_mark", SOUTHS, offset=...)),
    ("offset", "is a place", operation("offset_at", OWN, kind="offset", value=...)),
    ("offset", "is a cursor there", operation("seek", SOUTHS, subscription=NAME, kind="offset", value=...)),
    ("offset", "is behind segments", operation("list_segments", OWN, after_offset=...)),
    ("segment key", "is an after", operation("list_segments", OWN, after=...)),
    ("segment key", "is a prefix", operation("list_segments", OWN, prefix=...)),
    ("segment key", "is a prefix there", operation("list_segments", SOUTHS, prefix=...)),
    ("hash", "is staged", installed("id", "own")),
    ("hash", "is a source", installed("own", "id")),
    ("hash", "is both", installed("id", "id")),
    ("schema id", "is read", operation("schema.get", schema_id=...)),
    ("schema id", "is read in a version", operation("schema.get", schema_id=..., version=1)),
    ("schema id", "is read in no version", operation("schema.get", schema_id=..., version=7)),
    ("schema id", "lists versions", operation("schema.versions", schema_id=...)),
    ("schema id", "is compared with", operation("schema.check", schema_id=..., schema_type="string")),
    ("schema id", "is compared", operation("schema.diff", schema_id=..., old=1, new=1)),
    ("schema id", "is deleted", operation("schema.delete", schema_id=...)),
    ("schema id", "in a batch", published(TYPED, schema_id=...)),
    ("schema id", "in a batch, with a version", published(TYPED, schema_id=..., schema_version=1)),
    ("schema id", "in a batch of a free topic", published(OWN, schema_id=...)),
    ("subject", "is read", operation("schema.get", subject=...)),
    ("subject", "is followed", operation("schema.configure_topic", topic=TYPED, subject=...)),
    ("subject", "gets a version", operation("schema.register", subject=..., schema_type="string")),
    ("subject", "loses a version", operation("schema.delete_version", subject=..., version=1)),
    ("memory", "is offered", lambda world, id_: world.native["north"].ask(Kind.SHARE_MEMORY, None, id_)),
    ("memory", "is named", lambda world, id_: world.native["north"].ask(
        Kind.SHARE_MEMORY, {"memory": id_, "ring": id_, "size_bytes": 1 << 20})),
    ("producer handle", "publishes", by_handle(Kind.PUBLISH, BATCH, answered=True)),
    ("producer handle", "closes", by_handle(Kind.CLOSE_PRODUCER, None, answered=True)),
    ("consumer handle", "acks", by_handle(Kind.ACK, RANGE, answered=False)),
    ("consumer handle", "nacks", by_handle(Kind.NACK, Nack([(0, 1)]), answered=False)),
    ("consumer handle", "gives credit", by_handle(Kind.CREDIT, CREDIT, answered=False)),
    ("consumer handle", "publishes", by_handle(Kind.PUBLISH, BATCH, answered=True)),
    ("consumer handle", "closes", by_handle(Kind.CLOSE_CONSUMER, None, answered=True)),
    ("key id", "is deleted", operation("delete_api_key", id=...)),
    ("key id", "is revoked", operation("revoke", kind="key", value=...)),
    ("principal", "is asked about", operation("can", permission="Produce", principal=...,
     resource_name=SOUTHS)),
    ("principal", "gets a token", operation("issue_token", principal=...)),
    ("binding", "is deleted there", operation("delete_binding", scope="namespace", resource_name="south",
     id=...)),
    ("binding", "is deleted", operation("delete_binding", scope="namespace", resource_name="north", id=...)),
    ("namespace", "has bindings", operation("bindings", scope="namespace", resource=...)),
    ("namespace", "has topics", operation("list_topics", namespace=...)),
]  # fmt: skip

GRPC: Final[list[tuple[str, str, Call]]] = [
    ("producer id", "sends", sent(producer_id=...)),
    ("producer id", "sends there", sent(SOUTHS, producer_id=...)),
    ("producer id", "is alive", call("/danube.HealthCheck/HealthCheck",
     lambda world, id_: pb.HealthCheckRequest(request_id=6, client=0, id=id_))),
    ("producer id", "in the msg_id of an Ack", settling("Ack", "north", producer_id=...)),
    ("consumer id", "receives", call("/danube.ConsumerService/ReceiveMessages",
     lambda world, id_: pb.ReceiveRequest(request_id=3, consumer_id=id_))),
    ("consumer id", "is alive", call("/danube.HealthCheck/HealthCheck",
     lambda world, id_: pb.HealthCheckRequest(request_id=6, client=1, id=id_))),
    ("consumer id", "of no kind", call("/danube.HealthCheck/HealthCheck",
     lambda world, id_: pb.HealthCheckRequest(request_id=6, client=7, id=id_))),
    ("topic", "sends", sent(topic_name=...)),
    ("topic", "in the msg_id of an Ack", settling("Ack", topic_name=..., subscription_name=NAME)),
    ("topic", "in the msg_id of a Nack", settling("Nack", topic_name=..., subscription_name=NAME)),
    ("topic", "is looked up", call("/danube.Discovery/TopicLookup",
     lambda world, id_: pb.TopicLookupRequest(request_id=1, topic=id_))),
    ("topic", "lists segments", call("/danube.StorageService/ListSegmentDescriptors",
     lambda world, id_: pb.ListSegmentDescriptorsRequest(topic=id_))),
    ("topic", "is unsubscribed", request(f"{TOPICS}/Unsubscribe", topic=...,
     subscription=NAME)),
    ("subscription", "acks", settling("Ack", "north", subscription_name=...)),
    ("subscription", "nacks", settling("Nack", "north", subscription_name=...)),
    ("subscription", "acks there", settling("Ack", subscription_name=...)),
    ("subscription", "nacks there", settling("Nack", subscription_name=...)),
    ("subscription", "is deleted", request(f"{TOPICS}/Unsubscribe", topic=OWN,
     subscription=...)),
    ("subscription", "is deleted there", request(f"{TOPICS}/Unsubscribe",
     topic=SOUTHS, subscription=...)),
    ("offset", "acks", settling("Ack", "north", topic_offset=...)),
    ("offset", "nacks", settling("Nack", "north", topic_offset=...)),
    ("offset", "acks there", settling("Ack", topic_offset=..., subscription_name=NAME)),
    ("offset", "is behind segments", call("/danube.StorageService/ListSegmentDescriptors",
     lambda world, id_: pb.ListSegmentDescriptorsRequest(topic=OWN, after_offset=id_))),
    ("schema id", "is read", request(f"{REGISTRY}/GetSchema", schema_id=...)),
    ("schema id", "is read in a version", request(f"{REGISTRY}/GetSchema", schema_id=..., version=1)),
    ("schema id", "is read in no version", request(f"{REGISTRY}/GetSchema", schema_id=..., version=7)),
    ("schema id", "in a message", sent(TYPED, schema_id=...)),
    ("schema id", "in a message, with a version", sent(TYPED, schema_id=..., schema_version=1)),
    ("subject", "is read", request(f"{REGISTRY}/GetLatestSchema", subject=...)),
    ("subject", "lists versions", request(f"{REGISTRY}/ListVersions", subject=...)),
    ("subject", "loses a version", request(f"{REGISTRY}/DeleteSchemaVersion", subject=..., version=1)),
    ("subject", "is followed", request(f"{REGISTRY}/ConfigureTopicSchema", topic_name=TYPED,
     schema_subject=..., validation_policy="enforce")),
    ("subject", "is a producer's", call("/danube.ProducerService/CreateProducer",
     lambda world, id_: pb.ProducerRequest(request_id=1, producer_name="p", topic_name=OWN,
     dispatch_strategy=1, schema_ref=pb.SchemaReference(subject=id_)))),
    ("key id", "is exchanged", call("/danube.AuthService/Authenticate",
     lambda world, id_: pb.AuthRequest(api_key=f"dnb_{id_}_{'a' * 43}"))),
    ("binding", "is read there", request(f"{SECURITY}/GetBinding",
     scope="namespace", resource_name="south", binding_id=...)),
    ("binding", "is read", request(f"{SECURITY}/GetBinding", scope="namespace",
     resource_name="north", binding_id=...)),
]  # fmt: skip


def titles(table: Sequence[tuple[str, str, Any]]) -> list[str]:
    return [f"{kind}-{says}".replace(" ", "-") for kind, says, _ in table]


@pytest.mark.parametrize(("kind", "says", "ask"), NATIVE, ids=titles(NATIVE))
def test_the_native_door_answers_as_for_nobody_s(world: World, kind: str, says: str, ask: Ask) -> None:
    of_south, of_nobody = world.ids[kind]
    assert without(ask(world, of_south), of_south) == without(ask(world, of_nobody), of_nobody)
    assert world.state() == world.kept


@pytest.mark.parametrize(("kind", "says", "ask"), GRPC, ids=titles(GRPC))
def test_the_grpc_doors_answer_as_for_nobody_s(world: World, kind: str, says: str, ask: Call) -> None:
    streams = [(ask(world, id_), id_) for id_ in world.ids[kind]]
    of_south, of_nobody = (without(of_stream(stream), id_) for stream, id_ in streams)
    assert of_south == of_nobody
    assert world.state() == world.kept


def test_the_tables_have_every_kind_of_id(world: World) -> None:
    assert {kind for kind, _, _ in (*NATIVE, *GRPC)} == set(world.ids)


def targets(world: World) -> list[Target]:
    """South's names and id, and those of nobody, for requests that are made from their rows."""
    kinds = ("namespace", "topic", "subject", "schema id")
    return [Target("", *(world.ids[kind][place] for kind in kinds)) for place in (0, 1)]


def names_in(target: Target) -> tuple[Any, ...]:
    return target.topic, target.subject, target.namespace, target.schema_id


def test_every_operation_that_names_something_answers_as_for_nobody_s(world: World) -> None:
    rows = [row for row in ADMIN_ROWS if row.name != "issue_token"]  # another one each time
    native, different, refused = world.native["north"], [], 0
    for row in rows:
        answers = []
        for target in targets(world):
            request = admin_request(row, target, {})
            reply = native.admin(request.op, request.partition, **request.args)
            answers.append(without(reply, *names_in(target)))
        refused += "ERROR" in answers[0]
        if answers[0] != answers[1]:
            different.append((row.name, *answers))
    assert not different
    assert refused > 55, "nothing of what north may ask for hides what it names"
    assert world.state() == world.kept


def test_every_grpc_call_that_names_something_answers_as_for_nobody_s(world: World) -> None:
    asked = []
    for row in GRPC_ROWS:
        requests = [(target, grpc_request(row, target, {})) for target in targets(world)]
        if requests[0][1] is not None and "Receive" not in row.name:
            asked.append((row.name, [(started(world, row, one), target) for target, one in requests]))
    different = []
    for name, streams in asked:
        of_south, of_nobody = (without(of_stream(one), *names_in(target)) for one, target in streams)
        if of_south != of_nobody:
            different.append((name, of_south, of_nobody))
    assert not different
    assert len(asked) > 45 and world.state() == world.kept
