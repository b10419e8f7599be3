"""The transport between members over real sockets: what passes, what is refused, and what a flood costs."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from danube.cluster.links.addresses import join_address, parse_addresses, split_address
from danube.cluster.links.frames import (
    GREETING_BYTES_MAX,
    MAGIC,
    FrameReader,
    Greeting,
    GreetingReader,
    Kind,
    Lane,
    Refused,
    pack_frame,
    pack_greeting,
)
from danube.cluster.links.lane import RETRY_FIRST_S, OutgoingLane
from danube.cluster.links.link import REQUESTS_MAX, Link, LinkTimes
from danube.cluster.links.tls import TlsContexts, TlsFiles, contexts, identity_problem
from danube.cluster.links.transport import GREETING_LINKS_MAX, Identity, Transport, bind
from danube.errors import ConfigInvalid, ConnectionFailed, OperationTimeout
from tests.certificates import Authority

# The nodes of a test share one loop: where it stands still for a moment, each looks slow to the others.
PATIENT = LinkTimes(handshake_s=60.0, ping_s=0.05, silent_s=60.0)
HASTY = LinkTimes(handshake_s=0.5, ping_s=0.05, silent_s=0.4)  # for tests of what these times end
SOON_SILENT = LinkTimes(handshake_s=60.0, ping_s=0.05, silent_s=0.4)
CLUSTER = "c1"


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


async def until(condition: Callable[[], bool], what: str, timeout_s: float = 30.0) -> None:
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not condition():
        if asyncio.get_running_loop().time() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        await asyncio.sleep(0.005)


class Node:
    """A transport that keeps what it receives and echoes requests."""

    def __init__(
        self,
        node_id: str,
        *,
        cluster: str = "test",
        cluster_id: str = CLUSTER,
        tls: TlsContexts | None = None,
        host: str = "127.0.0.1",
        times: LinkTimes = PATIENT,
    ) -> None:
        self.listener = bind(host, 0)
        self.address = join_address(host, self.listener.getsockname()[1])
        identity = Identity(cluster, node_id, self.address, cluster_id)
        self.transport = Transport(identity, self, times=times, tls=tls)
        self.node_id = node_id
        self.messages: list[tuple[str, bytes]] = []
        self.strangers: list[str] = []
        self.moves: list[tuple[str, str]] = []
        self.answer_s = 0.0

    def received(self, node_id: str, message: bytes) -> None:
        self.messages.append((node_id, message))

    async def called(self, caller: Greeting, body: bytes) -> bytes:
        await asyncio.sleep(self.answer_s)
        return caller.node_id.encode() + b":" + body

    def stranger(self, node_id: str) -> None:
        self.strangers.append(node_id)

    def moved(self, node_id: str, address: str) -> None:
        self.moves.append((node_id, address))

    def refused(self, reason: str) -> int:
        return self.transport.statistics().get(f"refused_{reason}", 0)


def acquaint(*nodes: Node) -> None:
    for node in nodes:
        node.transport.set_members({other.node_id: other.address for other in nodes})


@asynccontextmanager
async def started(*nodes: Node) -> AsyncIterator[None]:
    for node in nodes:
        await node.transport.listen(node.listener)
    acquaint(*nodes)
    try:
        yield
    finally:
        for node in nodes:
            node.transport.close()
        await asyncio.sleep(0.01)


async def raw_exchange(address: str, content: bytes, timeout_s: float = 30.0) -> bytes:
    """Send bytes to a node and read until it closes."""
    host, port = split_address(address)
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(content)
        return await asyncio.wait_for(reader.read(), timeout_s)
    except ConnectionResetError:
        return b""
    finally:
        writer.transport.abort()


def test_messages_arrive_in_order_and_large_ones_on_a_lane_of_their_own() -> None:
    async def test() -> None:
        one, two = Node("1"), Node("2")
        async with started(one, two):
            large = bytes(8 * 1024 * 1024)
            for number in range(100):
                one.transport.send("2", b"%d" % number)
            one.transport.send("2", large)
            await until(lambda: len(two.messages) == 101, "all messages")
            small = [message for _, message in two.messages if len(message) < 100]
            assert small == [b"%d" % number for number in range(100)]
            assert ("1", large) in two.messages
            two.transport.send("1", b"back")
            await until(lambda: one.messages == [("2", b"back")], "the way back")

    run(test)


def test_small_frames_leave_at_once_on_both_sides() -> None:
    """Without it an answer waits up to 40 ms for the other side's acknowledgement."""

    async def test() -> None:
        one, two = Node("1"), Node("2")
        async with started(one, two):
            assert await one.transport.call("2", b"x", 5) == b"1:x"
            links = [*two.transport._incoming]
            links += [lane._link for lane in one.transport._lanes.values() if lane._link is not None]
            assert len({link.dialled for link in links}) == 2
            for link in links:
                assert link._transport is not None
                raw = link._transport.get_extra_info("socket")
                assert raw.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), link.dialled

    run(test)


def test_requests_are_answered_at_once_each() -> None:
    async def test() -> None:
        one, two = Node("1"), Node("2")
        async with started(one, two):
            answers = await asyncio.gather(*(one.transport.call("2", b"%d" % n, 5) for n in range(200)))
            assert answers == [b"1:%d" % n for n in range(200)]
            with pytest.raises(ConnectionFailed):
                await one.transport.call("3", b"", 1)
            two.answer_s = 5.0
            with pytest.raises(OperationTimeout):
                await one.transport.call("2", b"", 0.1)

    run(test)


def test_a_request_under_way_fails_when_the_connection_does() -> None:
    async def test() -> None:
        one, two = Node("1"), Node("2")
        two.answer_s = 5.0
        async with started(one, two):
            asked = asyncio.create_task(one.transport.call("2", b"x", 5))
            await until(lambda: two.transport.statistics().get("received", 0) == 1, "the request")
            two.transport.close()
            with pytest.raises(ConnectionFailed):
                await asked

    run(test)


def test_a_guest_learns_who_serves_at_an_address() -> None:
    async def test() -> None:
        new, member = Node("9", cluster_id=""), Node("1")
        async with started(member):
            await new.transport.listen(new.listener)
            greeting, answer = await new.transport.call_address(member.address, b"who", 2)
            assert (greeting.node_id, greeting.cluster_id, answer) == ("1", CLUSTER, b"9:who")
            greeting, _ = await new.transport.call_address(new.address, b"me", 2)
            assert greeting.node_id == "9", "a seed may be this node itself"
            new.transport.close()

    run(test)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "garbage"),
        (b"\x16\x03\x01\x02\x00\x01\x00", "garbage"),
        (MAGIC + b"\xff\xff", "oversized"),
        (MAGIC + b"\x04\x00\xc1\xc1\xc1\xc1", "garbage"),
        (MAGIC + b"\x01\x00\x90", "garbage"),
        (pack_greeting(Greeting("test", CLUSTER, "2", "x:1", 77)), "garbage"),
        (pack_greeting(Greeting("other", CLUSTER, "2", "x:1", 1)), "foreign_cluster"),
        (pack_greeting(Greeting("test", "c2", "2", "x:1", 1)), "foreign_cluster"),
        (pack_greeting(Greeting("test", "c2", "2", "x:1", Lane.GUEST)), "foreign_cluster"),
        (pack_greeting(Greeting("test", "", "2", "x:1", 1)), "no_cluster"),
        (pack_greeting(Greeting("test", CLUSTER, "7", "x:1", 1)), "unknown_node"),
        (pack_greeting(Greeting("test", CLUSTER, "", "x:1", 1)), "unknown_node"),
        (pack_greeting(Greeting("test", CLUSTER, "1", "x:1", 1)), "wrong_node"),
        (pack_greeting(Greeting("test", CLUSTER, "2", "x:1", 1, "3")), "wrong_node"),
        (pack_greeting(Greeting("test", CLUSTER, "2", "x:1", 1, version=2)), "version"),
        (MAGIC, "slow"),
        (b"", "slow"),
    ],
)
def test_who_does_not_greet_as_a_member_is_refused_and_counted(content: bytes, reason: str) -> None:
    async def test() -> None:
        one = Node("1", times=HASTY if reason == "slow" else PATIENT)
        two = Node("2")
        two.listener.close()
        async with started(one):
            one.transport.set_members({"2": two.address})
            smuggled = pack_frame(Kind.MESSAGE, b"smuggled")
            answer = await raw_exchange(one.address, content + (smuggled if reason not in ("slow",) else b""))
            assert one.refused(reason) == 1
            assert one.messages == []
            if reason in ("garbage", "oversized") and b"\x01" not in content[6:]:
                assert answer == b"", "what speaks no greeting is told nothing"
            elif answer:
                told = GreetingReader().feed(answer)
                assert told == Greeting(refused=reason), "and who does is told one word"

    run(test)


def test_a_greeting_one_byte_at_a_time_is_given_up_in_time() -> None:
    async def test() -> None:
        one = Node("1", times=HASTY)
        async with started(one):
            host, port = split_address(one.address)
            _, writer = await asyncio.open_connection(host, port)
            greeting = pack_greeting(Greeting("test", CLUSTER, "2", "x:1", 1))
            assert len(greeting) * 0.05 > 2 * HASTY.handshake_s
            for byte in greeting[:-1]:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.05)
                if one.refused("slow"):
                    break
            assert one.refused("slow") == 1, "before it has ended"
            writer.transport.abort()

    run(test)


def test_a_flood_of_silent_connections_keeps_no_member_out() -> None:
    async def test() -> None:
        one, two = Node("1"), Node("2")
        host, port = split_address(one.address)
        async with started(one):
            silent = [await asyncio.open_connection(host, port) for _ in range(2 * GREETING_LINKS_MAX)]
            await until(lambda: one.refused("crowded") >= GREETING_LINKS_MAX, "the oldest are dropped")
            async with started(two):
                acquaint(one, two)
                two.transport.send("1", b"through")
                await until(lambda: one.messages == [("2", b"through")], "the member")
            for _, writer in silent:
                writer.transport.abort()

    run(test)


@pytest.mark.parametrize("lane", [Lane.GUEST, Lane.CALLS])
def test_requests_that_come_in_one_piece_are_begun_some_at_a_time_and_all_are_answered(lane: Lane) -> None:
    async def test() -> None:
        one, two = Node("1"), Node("2")
        two.listener.close()
        one.answer_s = 0.001
        count, most = 1_000, 0
        async with started(one):
            one.transport.set_members({"2": two.address})
            reader, writer = await asyncio.open_connection(*split_address(one.address))
            writer.write(pack_greeting(Greeting("test", CLUSTER, "2", two.address, lane)))
            writer.write(b"".join(pack_frame(Kind.REQUEST, b"x", number) for number in range(count)))
            answer = pack_frame(Kind.ANSWER, b"2:x", 0)
            greeting = pack_greeting(Greeting("test", CLUSTER, "1", one.address, lane))
            wanted = len(greeting) + count * len(answer)
            reading = asyncio.ensure_future(reader.readexactly(wanted))
            while not reading.done():
                most = max([most, *(link.serving for link in one.transport._incoming)])
                await asyncio.sleep(0)
            answers = list(FrameReader(len(answer)).feed(reading.result()[len(greeting) :]))
            assert sorted(frame.number for frame in answers) == list(range(count))
            assert 1 < most <= REQUESTS_MAX
            writer.transport.abort()

    run(test)


def test_connections_that_come_in_one_turn_of_the_loop_are_bounded_too() -> None:
    async def test() -> None:
        one = Node("1")
        async with started(one):
            links = [one.transport._accept() for _ in range(3 * GREETING_LINKS_MAX)]
            ends = [socket.socketpair() for _ in links]
            loop = asyncio.get_running_loop()
            for link, (near, _) in zip(links, ends, strict=True):
                await loop.connect_accepted_socket(lambda link=link: link, near)  # type: ignore[misc]
            many = [one.transport._accept() for _ in range(GREETING_LINKS_MAX)]
            assert len(one.transport._incoming) <= GREETING_LINKS_MAX
            assert all(link in one.transport._incoming for link in many)
            for _, far in ends:
                far.close()

    run(test)


@pytest.mark.parametrize(
    ("lane", "frame"),
    [
        (Lane.RAFT, pack_frame(Kind.MESSAGE, bytes(64 * 1024 + 1))),
        (Lane.RAFT, pack_frame(Kind.REQUEST, b"x", 1)),
        (Lane.CALLS, pack_frame(Kind.MESSAGE, b"x")),
        (Lane.RAFT, b"\x00\x00\x00\x00\x63\x00\x00\x00" + bytes(8)),
        (Lane.GUEST, pack_frame(Kind.MESSAGE, b"x")),
        (Lane.GUEST, pack_frame(Kind.REQUEST, bytes(32 * 1024), 1)),
        (Lane.RAFT, pack_frame(Kind.ANSWER, b"x", 1)),
    ],
)
def test_a_frame_that_has_no_place_ends_the_connection(lane: Lane, frame: bytes) -> None:
    async def test() -> None:
        one, two = Node("1"), Node("2")
        two.listener.close()
        async with started(one):
            one.transport.set_members({"2": two.address})
            greeting = pack_greeting(Greeting("test", CLUSTER, "2", two.address, lane))
            await raw_exchange(one.address, greeting + frame)
            assert one.refused("protocol") == 1
            assert one.messages == []

    run(test)


@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.PING])
def test_who_asks_more_than_it_reads_of_the_answers_costs_a_bounded_amount_of_memory(kind: Kind) -> None:
    """A guest needs no certificate where there is no TLS, so nothing of it may grow."""

    async def test() -> None:
        one = Node("1")
        async with started(one):
            reader = socket.create_connection(split_address(one.address))
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
            reader.setblocking(False)
            reader.sendall(pack_greeting(Greeting("test", CLUSTER, "2", "x:1", Lane.GUEST)))
            await until(lambda: any(link.open for link in one.transport._incoming), "the guest")
            (link,) = one.transport._incoming
            asked = pack_frame(kind, bytes(15_000 if kind is Kind.REQUEST else 0), 1) * 64
            transport, rest = link._transport, b""
            assert transport is not None
            end_s = asyncio.get_running_loop().time() + 1.0
            while asyncio.get_running_loop().time() < end_s and not link.ended:
                for _ in range(4):
                    rest = rest or asked
                    with suppress(BlockingIOError, ConnectionError):
                        rest = rest[reader.send(rest) :]
                with suppress(BlockingIOError, ConnectionError):
                    reader.recv(8_192)  # it is alive, and takes less than it asks for
                await asyncio.sleep(0)
                assert transport.get_write_buffer_size() < 1024 * 1024
            reader.close()

    run(test)


def test_a_half_open_connection_is_closed_within_some_heartbeats() -> None:
    async def test() -> None:
        one, two = Node("1", times=SOON_SILENT), Node("2")
        two.listener.close()
        async with started(one):
            one.transport.set_members({"2": two.address})
            host, port = split_address(one.address)
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(pack_greeting(Greeting("test", CLUSTER, "2", two.address, Lane.RAFT)))
            begun = asyncio.get_running_loop().time()
            with_answer = await asyncio.wait_for(reader.read(), 30)
            assert GreetingReader().feed(with_answer) is not None
            assert one.refused("silent") == 1
            assert SOON_SILENT.silent_s <= asyncio.get_running_loop().time() - begun < 10
            writer.transport.abort()

    run(test)


def test_the_dialling_side_notices_a_peer_that_says_nothing_any_more() -> None:
    async def test() -> None:
        one = Node("1", times=SOON_SILENT)

        async def mute(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await reader.read(GREETING_BYTES_MAX)
                writer.write(pack_greeting(Greeting("test", CLUSTER, "2", "x:1", Lane.RAFT)))
                await reader.read()
            finally:
                writer.transport.abort()

        server = await asyncio.start_server(mute, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        async with started(one):
            one.transport.set_members({"2": f"127.0.0.1:{port}"})
            await until(lambda: one.transport.connected("2"), "connected")
            await until(lambda: one.refused("silent") >= 1, "half open")
        server.close()

    run(test)


def test_what_waits_for_a_node_that_is_away_is_bounded_and_the_newest() -> None:
    async def test() -> None:
        one, two = Node("1"), Node("2")
        async with started(one):
            one.transport.set_members({"2": two.address})
            for number in range(2_000):
                one.transport.send("2", b"%d" % number)
            for _ in range(40):
                one.transport.send("2", bytes(1024 * 1024))
            assert one.transport.statistics()["dropped"] >= 1_700
            async with started(two):
                acquaint(one, two)
                await until(lambda: ("1", b"1999") in two.messages, "the newest")
                assert ("1", b"0") not in two.messages

    run(test)


def test_heartbeats_pass_a_large_message_to_a_peer_that_reads_slowly() -> None:
    """The bulk lane is stuck: its reader takes nothing; the other lane is as fast as ever."""

    async def test() -> None:
        one = Node("1")
        beats = 0
        stuck = asyncio.Event()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal beats
            try:
                head = await reader.readexactly(6)
                body = await reader.readexactly(int.from_bytes(head[4:6], "little"))
                greeting = GreetingReader().feed(head + body)
                assert greeting is not None
                writer.write(pack_greeting(Greeting("test", CLUSTER, "2", "x:1", greeting.lane)))
                if greeting.lane == Lane.BULK:
                    await stuck.wait()
                while data := await reader.read(1 << 16):
                    writer.write(pack_frame(Kind.PONG))
                    beats += data.count(b"beat")
            finally:
                writer.transport.abort()

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        async with started(one):
            one.transport.set_members({"2": f"127.0.0.1:{server.sockets[0].getsockname()[1]}"})
            await until(lambda: one.transport.connected("2"), "connected")
            for _ in range(4):
                one.transport.send("2", bytes(8 * 1024 * 1024))
            for number in range(1, 21):
                one.transport.send("2", b"beat")
                await until(lambda number=number: beats == number, f"heartbeat {number}")  # type: ignore[misc]
        server.close()

    run(test)


def test_a_connection_that_ends_as_soon_as_it_is_made_is_not_made_without_a_pause() -> None:
    async def test() -> None:
        one, two = Node("1"), Node("2")
        async with started(one, two):
            dialled = 0

            def opened(link: Link) -> None:
                nonlocal dialled
                if not link.dialled:
                    dialled += 1
                    link.abort()

            two.transport.opened = opened  # type: ignore[method-assign]
            one.transport.set_members({})
            one.transport.set_members({"2": two.address})
            await asyncio.sleep(1.0)
            assert dialled <= 8
            await until(lambda: dialled >= 2, "it is dialled again")

    run(test)


def test_a_bug_while_dialling_is_told_to_the_loop() -> None:
    """Else the lane would wait for that dialling for ever, and nobody would know."""

    async def test() -> None:
        async def dial() -> Link:
            raise RuntimeError("a bug")

        loop = asyncio.get_running_loop()
        told: list[object] = []
        loop.set_exception_handler(lambda _, context: told.append(context["exception"]))
        lane = OutgoingLane(loop, "2", Lane.RAFT, dial)
        lane.connect()
        await until(lambda: bool(told), "the bug")
        assert isinstance(told[0], RuntimeError)
        lane.close()

    run(test)


def test_a_node_that_comes_back_or_moves_is_found() -> None:
    async def test() -> None:
        one, two = Node("1"), Node("2")
        async with started(one):
            await two.transport.listen(two.listener)
            acquaint(one, two)
            await until(lambda: one.transport.connected("2") and two.transport.connected("1"), "both")
            two.transport.close()
            await until(lambda: not one.transport.connected("2"), "gone")
            again = Node("2")
            async with started(again):
                again.transport.set_members({"1": one.address})
                await until(lambda: ("2", again.address) in one.moves, "it says where it is")
                one.transport.set_members({"2": again.address})
                one.transport.send("2", b"hello again")
                await until(lambda: ("1", b"hello again") in again.messages, "found")

    run(test)


def test_a_member_that_was_removed_is_shut_out_at_once() -> None:
    async def test() -> None:
        one, two = Node("1"), Node("2")
        async with started(one, two):
            await until(lambda: one.transport.connected("2") and two.transport.connected("1"), "both")
            one.transport.set_members({})
            await until(lambda: one.refused("unknown_node") >= 1, "it knocks again, in vain")
            assert one.strangers[0] == "2"
            two.transport.send("1", b"from outside")
            await asyncio.sleep(0.2)
            assert one.messages == []

    run(test)


def test_whoever_answers_for_another_node_gets_nothing() -> None:
    async def test() -> None:
        one, two, three = Node("1"), Node("2"), Node("3")
        async with started(one, two, three):
            one.transport.set_members({"2": three.address})  # a stale address: another node is there
            one.transport.send("2", b"secret")
            await until(lambda: three.refused("wrong_node") >= 1, "refused there")
            await until(lambda: one.refused("refused_there") >= 1, "and known here")
            assert three.messages == []

    run(test)


def test_ipv6_and_names() -> None:
    async def test() -> None:
        one, two = Node("1"), Node("2", host="::1")
        async with started(one, two):
            _, port = split_address(one.address)
            two.transport.set_members({"1": f"localhost:{port}"})
            two.transport.send("1", b"by name")
            one.transport.send("2", b"by v6")
            await until(lambda: bool(one.messages and two.messages), "both ways")

    run(test)


@pytest.mark.parametrize(
    "address",
    [
        "",
        "a",
        "a:",
        ":1",
        "a:x",
        "a:0",
        "a:65536",
        "::1:7",
        "[::1]",
        "[::1]:",
        "a..b:1",
        ".a:1",
        "x" * 64 + ":1",
        "a:" + "9" * 5_000,
        "a:\u0661",
        "a\0b:1",
        "a b:1",
        "a." * 200 + "a:1",
        "\udcff:1",
    ],
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigInvalid):
        split_address(address)


def test_an_address_that_cannot_be_looked_up_is_a_connection_that_fails() -> None:
    async def test() -> None:
        one = Node("1")
        async with started(one):
            with pytest.raises(ConnectionFailed):
                await one.transport.call_address("a..b:1", b"who", 1)
            one.transport.set_members({"2": "a..b:1"})
            lane = one.transport._lanes["2", Lane.RAFT]
            await until(lambda: lane._retry is not None, "it is dialled again later")

    run(test)


def test_addresses_read_as_they_are_written() -> None:
    assert split_address("[::1]:7650") == ("::1", 7650)
    assert parse_addresses(" a:1, [::1]:2 ,a:1,") == ["a:1", "[::1]:2"]


# -- TLS ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("foreign"))


async def knock(one: Node, two: Node, over: Callable[[], bool], what: str) -> None:
    """Have ``one`` send to ``two`` until that is over."""

    def sent() -> bool:
        one.transport.send("2", b"x")
        return over()

    async with started(one, two):
        await until(sent, what)


@pytest.mark.parametrize(
    ("one_names", "two_names", "passes"),
    [
        ("IP:127.0.0.1", "IP:127.0.0.1", True),
        ("URI:danube:node:1", "URI:danube:node:2", True),
        ("URI:danube:node:1,IP:127.0.0.1", "URI:danube:node:2", True),
        ("URI:danube:node:7,IP:127.0.0.1", "IP:127.0.0.1", False),
        ("IP:127.0.0.1", "URI:danube:node:3", False),
        ("DNS:elsewhere", "IP:127.0.0.1", False),
        ("IP:127.0.0.1", "DNS:elsewhere", False),
    ],
)
def test_a_certificate_stands_for_one_node(
    authority: Authority, one_names: str, two_names: str, passes: bool
) -> None:
    async def test() -> None:
        one = Node("1", tls=authority.contexts("one", one_names))
        two = Node("2", tls=authority.contexts("two", two_names))

        def refused() -> int:
            return one.refused("certificate") + two.refused("certificate")

        await knock(one, two, lambda: bool(two.messages or refused()), "it passes or is refused")
        assert bool(two.messages) is passes and (refused() > 0) is not passes

    run(test)


@pytest.mark.parametrize("side", ["one", "two", "plain one", "plain two"])
def test_without_a_certificate_of_the_authority_nothing_passes(
    authority: Authority, foreign: Authority, side: str
) -> None:
    async def test() -> None:
        right = authority.contexts("right", "IP:127.0.0.1")
        wrong = None if side.startswith("plain") else foreign.contexts("wrong", "IP:127.0.0.1")
        one = Node("1", tls=wrong if side.endswith("one") else right)
        two = Node("2", tls=wrong if side.endswith("two") else right)

        def tried_again() -> bool:
            return one.transport._lanes["2", Lane.RAFT]._retry_s > 2 * RETRY_FIRST_S

        await knock(one, two, lambda: bool(two.messages) or tried_again(), "it is dialled again")
        assert not two.messages

    run(test)


def test_a_client_without_a_certificate_is_refused(authority: Authority) -> None:
    async def test() -> None:
        one = Node("1", times=HASTY, tls=authority.contexts("one", "IP:127.0.0.1"))
        async with started(one):
            context = ssl.create_default_context(cafile=str(authority.cert))
            host, port = split_address(one.address)
            with pytest.raises((ssl.SSLError, ConnectionError, AssertionError)):
                reader, writer = await asyncio.open_connection(host, port, ssl=context)
                writer.write(pack_greeting(Greeting("test", CLUSTER, "2", "x:1", Lane.GUEST)))
                data = await reader.read()
                writer.transport.abort()
                assert data
            await until(lambda: one.refused("no_tls") >= 1, "counted")

    run(test)


def test_half_done_tls_handshakes_are_given_up(authority: Authority) -> None:
    async def test() -> None:
        one = Node("1", times=HASTY, tls=authority.contexts("one", "IP:127.0.0.1"))
        async with started(one):
            assert await raw_exchange(one.address, b"\x16\x03\x01\x02\x00\x01") == b""
            await until(lambda: one.refused("no_tls") == 1, "counted")

    run(test)


def test_an_authority_is_exchanged_while_members_are_connected(
    authority: Authority, foreign: Authority, tmp_path: Path
) -> None:
    """A connection that exists goes on; who dials with the former authority is refused."""

    async def test() -> None:
        former, new = authority.sign("former", "IP:127.0.0.1"), foreign.sign("new", "IP:127.0.0.1")
        files = TlsFiles(*(str(tmp_path / name) for name in ("cert", "key", "ca")))
        for source, place in zip(former, files, strict=False):
            if source:
                shutil.copy(source, place)
        one, two = Node("1", tls=contexts(former)), Node("2", tls=(served := contexts(files)))
        three = Node("3", tls=contexts(new))
        async with started(one, two, three):
            one.transport.set_members({"2": two.address})
            two.transport.set_members({"1": one.address, "3": three.address})
            await until(lambda: one.transport.connected("2"), "connected")
            for source, place in zip(new, files, strict=False):
                if source:
                    shutil.copy(source, place)
            for one_of_both in served.all:
                one_of_both.look(at_once=True)
                assert not one_of_both.failed
            one.transport.send("2", b"by the former connection")
            await until(lambda: len(two.messages) == 1, "it goes on")
            three.transport.set_members({"2": two.address})
            three.transport.send("2", b"by the new authority")
            await until(lambda: len(two.messages) == 2, "accepted")
            one.transport._lanes["2", Lane.RAFT].renew()
            await until(lambda: one.transport._lanes["2", Lane.RAFT]._retry_s > RETRY_FIRST_S, "refused")
            assert not one.transport.connected("2")

    run(test)


def test_names_in_certificates() -> None:
    certificate = {"subjectAltName": (("DNS", "*.danube.test"), ("IP Address", "0:0:0:0:0:0:0:1"))}
    assert identity_problem(certificate, "1", "a.danube.test") == ""
    assert identity_problem(certificate, "1", "A.Danube.Test.") == ""
    assert identity_problem(certificate, "1", "::1") == ""
    for host in ("danube.test", "b.a.danube.test", "xdanube.test", "127.0.0.1", ""):
        assert identity_problem(certificate, "1", host)
    assert identity_problem(None, "1", "a")


def test_tls_files_that_cannot_be_used_are_named(authority: Authority, tmp_path: Path) -> None:
    files = authority.sign("files", "IP:127.0.0.1")
    for wrong in (
        TlsFiles(str(tmp_path / "none"), files.key_file, files.ca_file),
        TlsFiles(files.cert_file, files.ca_file, files.ca_file),
        TlsFiles(files.cert_file, files.key_file, files.key_file),
    ):
        with pytest.raises(ConfigInvalid):
            contexts(wrong)


def test_a_port_that_is_taken_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(ConfigInvalid):
        bind("127.0.0.1", taken.getsockname()[1])


def test_a_greeting_that_does_not_fit_is_not_sent() -> None:
    with pytest.raises(Exception, match="too large"):
        pack_greeting(Greeting("x" * 2_000))
    with pytest.raises(Refused):
        GreetingReader().feed(b"XXXX")
