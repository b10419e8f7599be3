"""A scripted broker on the client's host, which maps the memory that it is offered."""

from __future__ import annotations

from danube.broker.routing.shared_memory import attach
from danube.client.machine.publishing import PartitionProducer
from danube.core.batch.columns import BatchView
from danube.core.batch.format import body_intact
from danube.core.protocol import native as wire
from danube.core.protocol.native import Kind, ShareMemory
from danube.errors import InvalidArgument
from danube.limits import SHARED_BODY_BYTES_MIN
from tests.unit.client.machine.test_client_session import Peer, opened_at, send

LARGE = bytes(range(256)) * (SHARED_BODY_BYTES_MIN // 256 + 1)


class NearPeer(Peer):
    """A broker on the client's host, which maps what it is offered."""

    def __init__(self) -> None:
        super().__init__()
        self.memory: memoryview | None = None
        self.offers = 0
        self.inline = 0

    def connect(self, publish_credit_bytes: int = 0) -> None:
        self.session.connected(near=True)
        self.sent()
        self.feed(wire.control_frame(Kind.WELCOME, wire.Welcome()))

    def batches(self, *, accept: bool = True) -> list[tuple[wire.Frame, bytes]]:
        """PUBLISH frames since the last call with a copy of their batches; an offer is answered."""
        found = []
        for frame, body in self.sent():
            if frame.kind == Kind.SHARE_MEMORY:
                self._answer_offer(frame, wire.decode_control(body, ShareMemory), accept)
            elif frame.kind == Kind.SHARED:
                inner, memory = wire.read_shared(body, self.memory)
                found.append((inner, bytes(memory[inner.start : inner.end])))
            elif frame.kind == Kind.PUBLISH:
                self.inline += 1
                found.append((frame, body))
        for _, batch in found:
            assert body_intact(batch, BatchView(batch).header)
        return found

    def _answer_offer(self, frame: wire.Frame, offer: ShareMemory, accept: bool) -> None:
        self.offers += 1
        if accept:
            self.memory = attach(offer)
            self.feed(wire.result_frame(True, frame.correlation))
        else:
            self.refuse(frame, InvalidArgument("not here"))


def near_pair() -> tuple[NearPeer, PartitionProducer]:
    peer = NearPeer()
    return peer, opened_at(peer)


def payload_of(batch: bytes) -> bytes:
    return BatchView(batch).payloads()[0]


def sharing_pair() -> tuple[NearPeer, PartitionProducer]:
    """The offer is accepted and its batch answered."""
    peer, producer = near_pair()
    send(producer, LARGE)
    [(frame, _)] = peer.batches()
    peer.acknowledge(frame, 0)
    assert (peer.offers, peer.inline) == (1, 1), "the first did not wait for the answer"
    return peer, producer
