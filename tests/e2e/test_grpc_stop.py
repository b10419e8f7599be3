"""What a gRPC client sees when the broker stops: its next call is answered before the connection goes."""

from __future__ import annotations

from collections.abc import Callable

from tests.broker_process import BrokerProcess
from tests.e2e.grpc_parts import EXCLUSIVE, UNAVAILABLE, DanubeCalls

TOPIC = "/default/stopping"


def test_a_call_at_once_after_the_stream_ended_is_answered_and_then_the_connection_goes(
    broker: Callable[..., BrokerProcess],
) -> None:
    # Clients call ReceiveMessages again at once; tonic takes a connection that closes under that call for
    # a fault that cannot be mended, where UNAVAILABLE makes it wait and connect anew.
    process = broker(workers=1)
    with DanubeCalls(process.grpc_address) as calls:
        calls.create(TOPIC)
        consumer = calls.subscribe(TOPIC, kind=EXCLUSIVE)
        stream = calls.receive(consumer)
        process.terminate()
        assert stream.wait_ended().code == UNAVAILABLE
        assert calls.went_away is None
        again = calls.receive(consumer).wait_ended()
        assert again.code == UNAVAILABLE and "stopping" in again.message
        calls.wait(lambda: calls.went_away is not None)
    assert process.stop() == 0
