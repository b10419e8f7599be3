"""A refusal takes no longer for a name that exists than for one that does not: time tells nothing either."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

import pytest

from danube.errors import NotAllowed
from danube.server.proto import DanubeApi_pb2 as api
from tests.e2e.authority_site import Site, token
from tests.e2e.grpc_parts import DENIED, DanubeCalls
from tests.grpc_client import GrpcError

TOPICS = 20
PAIRS = 1_000
GRPC_PAIRS = 15  # a denied call is answered 200 ms late


def slower(ask: Callable[[str], None], pairs: int) -> float:
    """Share of pairs in which the name that exists took longer; both come in random order."""

    def took(name: str) -> int:
        began_ns = time.perf_counter_ns()
        ask(name)
        return time.perf_counter_ns() - began_ns

    order, count = random.Random(7), 0
    for number in range(pairs):
        names = [f"/secret/there-{number % TOPICS}", f"/secret/gone-{number % TOPICS}"]
        swapped = order.random() < 0.5
        first, second = (took(name) for name in (reversed(names) if swapped else names))
        count += (second > first) if swapped else (first > second)
    return count / pairs


@pytest.fixture
def site(broker: Any) -> Any:
    made = Site(broker, workers=1)
    made.namespace("secret")
    for number in range(TOPICS):
        made.admin.admin.create_topic(f"/secret/there-{number}")
    yield made
    made.close()


def test_time_does_not_tell_whether_a_topic_exists(site: Site) -> None:
    with site.connect("stranger") as client:

        def ask(name: str) -> None:
            with pytest.raises(NotAllowed):
                client.admin.topic(name)

        slower(ask, 100)  # what happens once
        assert 0.35 < slower(ask, PAIRS) < 0.65


def test_a_denied_call_tells_it_neither(site: Site) -> None:
    request = api.ProducerRequest(request_id=1, producer_name="p")
    with DanubeCalls(site.process.grpc_address) as calls:
        calls.fields = [("authorization", f"Bearer {token('stranger')}")]

        def ask(name: str) -> None:
            request.topic_name = name
            with pytest.raises(GrpcError) as denied:
                calls.unary("ProducerService/CreateProducer", request)
            assert denied.value.code == DENIED

        share = slower(ask, GRPC_PAIRS)
        assert 0 < share < 1, "answers of one kind come later, each time"
