"""A handle that is closed before its open was answered: frames of one handle are applied in their order."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from danube.broker.clustered.parked import WAIT_NS
from danube.core.metadata.commands import KnownConsumer
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind
from danube.errors import ClosedError, Conflict, Unavailable
from danube.host import clock
from danube.server.proto.DanubeApi_pb2 import ConsumerRequest
from danube.server.services.calls import Call
from danube.server.services.consumer_service import ConsumerService
from tests.unit.broker.clustered.test_cluster_routes import Routes
from tests.unit.broker_parts import TOPIC, Bench, RecordingSession
from tests.unit.server.messages import test_grpc_consuming, test_grpc_publishing

OPENS: list[tuple[Kind, Any, Kind, Kind]] = [
    (Kind.SUBSCRIBE, wire.Subscribe(TOPIC, "s", "c"), Kind.CLOSE_CONSUMER, Kind.SUBSCRIBED),
    (Kind.OPEN_PRODUCER, wire.OpenProducer(TOPIC, "p"), Kind.CLOSE_PRODUCER, Kind.PRODUCER_OPENED),
]


def left(bench: Bench, session: RecordingSession) -> int:
    hosted = bench.hosted
    links = [link for host in hosted.subscriptions.values() for link in host.links]
    return len(links) + len(session.consumers) + len(session.producers) + len(session.opening)


@pytest.mark.parametrize("opens, body, closes, opened", OPENS)
def test_what_is_closed_while_the_partition_opens_is_never_open(
    tmp_path: Path, opens: Kind, body: Any, closes: Kind, opened: Kind
) -> None:
    bench, session = Bench(tmp_path), RecordingSession()
    bench.executor.held = True
    asked = bench.ask(session, opens, body, 5)
    closed = bench.ask(session, closes, None, 5)
    bench.ask(session, opens, body, 5)  # the number may be used again
    bench.executor.held = False
    bench.executor.step()
    bench.syncer.step()
    answers = {frame.correlation: frame.kind for frame in session.take()}
    assert answers == {closed: Kind.RESULT, asked: Kind.ERROR, asked + 2: opened}
    bench.ask(session, closes, None, 5)
    assert left(bench, session) == 0
    bench.shard.close()


@pytest.mark.parametrize("opens, body, closes, opened", OPENS)
def test_what_is_closed_while_it_waits_for_an_owner_is_never_open(
    opens: Kind, body: Any, closes: Kind, opened: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "monotonic_ns", lambda: WAIT_NS)
    routes, session = Routes(), RecordingSession()
    routes.error = Unavailable("nobody owns it")

    def ask(correlation: int, handle: int) -> None:
        buffer = memoryview(bytearray(wire.control_frame(opens, body, correlation, handle)))
        for frame in wire.FrameDecoder().frames(buffer, 0, len(buffer)):
            routes.route(session, frame, buffer)

    ask(7, 1)
    ask(8, 2)
    session.opening.pop(1)  # what a close does
    routes.parked.offer()
    assert session.only(Kind.ERROR).correlation == 7 and len(routes.parked) == 1
    routes.error = None
    routes.full = True
    routes.parked.offer()
    assert len(routes.parked) == 1
    session.opening.pop(2)
    routes.full = False
    routes.parked.offer()
    assert session.only(Kind.ERROR).correlation == 8 and routes.taken == [] and not session.opening


def test_a_grpc_subscribe_that_is_cancelled_leaves_nobody(tmp_path: Path) -> None:
    door = test_grpc_consuming.Door(tmp_path)
    identity = door.identity(mode="exclusive")

    async def cut() -> None:
        door.bench.shard.partitions.clear()  # it is opened for this consumer, which takes its time
        door.bench.executor.held = True
        task = asyncio.ensure_future(door.consuming.subscribe(identity, cast(Any, door.connection)))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        door.bench.executor.held = False
        door.bench.executor.step()
        door.turn()

    asyncio.run(cut())
    assert door.links == [] and door.consuming.find(identity.consumer_id) is None
    assert not door.session.opening


@pytest.mark.parametrize("error", [asyncio.CancelledError, Conflict])
def test_a_grpc_subscribe_that_ends_while_its_consumer_is_made_known_leaves_nobody(
    tmp_path: Path, error: type[BaseException]
) -> None:
    door = test_grpc_consuming.Door(tmp_path)

    class Broker:
        metadata = door.bench.proposals.state

        def refresh(self) -> None: ...

        async def propose(self, command: Any) -> None:
            assert isinstance(command.consumer, KnownConsumer) and door.links == ["c"]
            raise error

    service = ConsumerService(cast(Any, Broker()), door.consuming)
    request = ConsumerRequest(
        request_id=1, topic_name=test_grpc_consuming.TOPIC, consumer_name="c", subscription="s"
    )
    call = Call("", {}, "", "", cast(Any, door.connection))
    with pytest.raises(error):
        door.run(service.subscribe(request, call))
    door.turn()
    assert door.links == []


@pytest.mark.parametrize("known", [False, True])
def test_a_grpc_producer_whose_creation_is_cancelled_is_closed(tmp_path: Path, known: bool) -> None:
    door = test_grpc_publishing.Door(tmp_path)
    user, other = object(), object()
    create = door.publishing.create

    async def cut() -> None:
        if known:
            await create(test_grpc_publishing.TOPIC, "p", False, user)
            door.publishing._close(next(iter(door.publishing.targets.values())))
        door.bench.shard.partitions.clear()
        door.bench.executor.held = True
        task = asyncio.ensure_future(create(test_grpc_publishing.TOPIC, "p", True, user))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        door.bench.executor.held = False
        door.bench.executor.step()

    asyncio.run(cut())
    assert bool(door.publishing.targets) == known
    if not known:
        assert not door.bench.shard.partitions[test_grpc_publishing.TOPIC].producers
        asyncio.run(create(test_grpc_publishing.TOPIC, "q", True, other))


def test_the_refusal_of_a_closed_handle_is_a_closed_error(tmp_path: Path) -> None:
    bench, session = Bench(tmp_path), RecordingSession()
    bench.executor.held = True
    bench.ask(session, Kind.SUBSCRIBE, wire.Subscribe(TOPIC, "s", "c"), 5)
    bench.ask(session, Kind.CLOSE_CONSUMER, None, 5)
    session.take()
    bench.executor.step()
    assert isinstance(wire.decode_error(session.only(Kind.ERROR).body), ClosedError)
    bench.shard.close()
