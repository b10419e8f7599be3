"""The machine against the ``h2`` library as the client, bytes handed over in memory."""

from __future__ import annotations

import random

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    RemoteSettingsChanged,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes

from danube.core.http2.connection import Http2Settings, Stream
from danube.core.http2.headers import RESPONSE_HEAD, trailers_block
from tests.unit.http2_parts import FIELDS, Door

SMALL = Http2Settings(initial_window_bytes=65535, connection_window_bytes=100_000, max_concurrent_streams=5)


class Server(Door):
    """Answers with the body that it got, in pieces, and with trailers of its own."""

    def __init__(self, settings: Http2Settings) -> None:
        super().__init__(settings, echo=True, greeted=False)

    def finish(self, stream: Stream) -> None:
        trailers = trailers_block(0, f"stream {stream.stream_id}")
        body = bytes(stream.context)
        if stream.stream_id % 4 == 1:
            self.machine.answer(stream, RESPONSE_HEAD, body, trailers)
            return
        self.machine.send_headers(stream, RESPONSE_HEAD)
        for start in range(0, len(body), 7000):
            self.machine.send_data(stream, memoryview(body)[start : start + 7000])
        self.machine.send_trailers(stream, trailers)


class Client:
    def __init__(self, server: Server, chance: random.Random) -> None:
        self.server, self.chance = server, chance
        self.h2 = H2Connection(H2Configuration(client_side=True, header_encoding="utf-8"))
        self.h2.initiate_connection()
        self.wanted: dict[int, bytearray] = {}
        self.to_send: dict[int, bytearray] = {}
        self.got: dict[int, bytearray] = {}
        self.told: dict[int, list[str]] = {}
        self.exchange()

    def exchange(self) -> None:
        """Both directions until nothing moves, the client's bytes in random pieces."""
        while True:
            data = self.h2.data_to_send()
            start = 0
            while start < len(data):
                end = start + self.chance.randint(1, 5000)
                self.server.feed(data[start:end])
                start = end
            back = self.server.output()
            assert not self.server.machine.failed
            if not data and not back:
                return
            for event in self.h2.receive_data(back):
                self.take(event)

    def take(self, event: Event) -> None:
        if isinstance(event, DataReceived):
            assert event.stream_id is not None and event.data is not None
            self.got[event.stream_id] += event.data
            self.h2.acknowledge_received_data(event.flow_controlled_length or 0, event.stream_id)
        elif isinstance(event, ResponseReceived | TrailersReceived | StreamEnded | StreamReset):
            assert event.stream_id is not None
            self.told[event.stream_id].append(type(event).__name__)
        assert not isinstance(event, ConnectionTerminated)
        if isinstance(event, RemoteSettingsChanged):
            assert SettingCodes.MAX_CONCURRENT_STREAMS in event.changed_settings

    def open(self, size: int) -> None:
        stream_id = self.h2.get_next_available_stream_id()
        fields = [*FIELDS, ("x-call", str(stream_id % 7)), ("grpc-timeout", f"{stream_id}m")]
        self.h2.send_headers(stream_id, fields, end_stream=size == 0)
        body = self.chance.randbytes(size)
        self.wanted[stream_id], self.got[stream_id] = bytearray(body), bytearray()
        self.told[stream_id] = []
        if body:
            self.to_send[stream_id] = bytearray(body)

    def send_some(self) -> None:
        stream_id = self.chance.choice(list(self.to_send))
        body = self.to_send[stream_id]
        room = min(
            self.h2.local_flow_control_window(stream_id) - 20, self.h2.max_outbound_frame_size - 20, len(body)
        )
        if room <= 0:
            return
        size = self.chance.randint(1, room)
        padding = self.chance.choice([None, None, 0, 19])
        self.h2.send_data(stream_id, bytes(body[:size]), end_stream=size == len(body), pad_length=padding)
        del body[:size]
        if not body:
            del self.to_send[stream_id]


@pytest.mark.parametrize("seed", range(12))
def test_everything_arrives_whole_and_in_order(seed: int) -> None:
    chance = random.Random(seed)
    client = Client(Server(SMALL if seed % 2 else Http2Settings()), chance)
    changes = {
        SettingCodes.INITIAL_WINDOW_SIZE: chance.choice([1000, 65535, 1 << 20]),
        SettingCodes.MAX_FRAME_SIZE: chance.choice([16384, 1 << 18]),
        SettingCodes.HEADER_TABLE_SIZE: chance.choice([0, 100, 4096]),
    }
    for step in range(300):
        if client.h2.open_outbound_streams < 4 and len(client.wanted) < 25:
            client.open(chance.choice([0, 1, 5, 1000, 60_000, 90_000]))
        if client.to_send:
            client.send_some()
        if step == 10:
            client.h2.update_settings(changes)
        if chance.random() < 0.3:
            client.exchange()
    while client.to_send:
        client.send_some()
        client.exchange()
    client.exchange()
    assert len(client.wanted) > 10
    assert client.got == client.wanted
    assert all(
        told == ["ResponseReceived", "TrailersReceived", "StreamEnded"] for told in client.told.values()
    )
    assert not client.server.machine.streams
    assert client.server.machine.queued_bytes == 0


def test_a_cancelled_call_is_over_on_both_sides() -> None:
    client = Client(Server(Http2Settings()), random.Random(1))
    client.open(1000)
    client.exchange()
    client.h2.reset_stream(1, 8)
    client.exchange()
    assert client.server.events[-1] == ("cancelled", 1, 8)
    client.open(0)
    client.exchange()
    assert client.told[3][-1] == "StreamEnded"


def test_an_early_answer_is_read_before_the_reset() -> None:
    client = Client(Server(Http2Settings()), random.Random(1))
    client.open(1000)
    client.exchange()
    client.server.finish(client.server.stream_by_id[1])
    client.exchange()
    assert client.told[1] == ["ResponseReceived", "TrailersReceived", "StreamEnded", "StreamReset"]
