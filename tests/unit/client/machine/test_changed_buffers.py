"""Payloads that change after the call: a single send has read them; ``send_many`` owns them until its end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import danube
import danube.sync
from tests.fakes.broker import FakeBroker

TOPIC = "/default/t"
SIZE = 60_000
COUNT = 30  # some four batches
OLD, NEW = b"A" * SIZE, b"Z" * SIZE


@pytest.fixture
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as running:
        yield running


def stored(broker: FakeBroker, count: int) -> list[bytes]:
    with danube.sync.connect(broker.url) as client, client.consumer(TOPIC, "s", start="earliest") as consumer:
        found = [consumer.receive(timeout=60) for _ in range(count)]
        return [bytes(one.payload) for one in found if one is not None]


def change(buffer: Any) -> None:
    view = memoryview(buffer).cast("B")
    view[:] = b"Z" * view.nbytes


def _bytearray() -> Any:
    return bytearray(OLD)


def _memoryview() -> Any:
    return memoryview(bytearray(OLD))


@pytest.mark.parametrize("make", [_bytearray, _memoryview])
def test_a_single_send_reads_its_payload_in_the_call(broker: FakeBroker, make: Callable[[], Any]) -> None:
    async def story() -> None:
        async with danube.connect(broker.url) as client, client.producer(TOPIC) as producer:
            first, second = make(), make()
            sending = asyncio.ensure_future(producer.send(first))
            await asyncio.sleep(0)
            change(first)
            later = producer.send_nowait(second)
            change(second)
            await sending
            await later

    asyncio.run(story())
    with danube.sync.connect(broker.url) as client, client.producer(TOPIC) as producer:
        third = make()
        producer.send_nowait(third)
        change(third)
        producer.flush()
    assert stored(broker, 3) == [OLD] * 3


def _array() -> tuple[Any, Any]:
    array = np.full((COUNT, SIZE), ord("A"), np.uint8)
    return array, array


def _views() -> tuple[Any, Any]:
    whole = bytearray(OLD * COUNT)
    return [memoryview(whole)[at * SIZE : (at + 1) * SIZE] for at in range(COUNT)], whole


def _arrow() -> tuple[Any, Any]:
    whole = bytearray(OLD * COUNT)
    ends = pa.py_buffer(np.arange(COUNT + 1, dtype=np.int32) * SIZE)
    return pa.Array.from_buffers(pa.binary(), COUNT, [None, ends, pa.py_buffer(whole)]), whole


@pytest.mark.parametrize("make", [_array, _views, _arrow])
def test_many_records_that_change_are_stored_old_or_new_and_whole(
    broker: FakeBroker, make: Callable[[], tuple[Any, Any]]
) -> None:
    """The rule of the docstring and of docs/client.md: the buffers belong to the client until the end."""
    payloads, buffer = make()

    async def story() -> None:
        async with danube.connect(broker.url) as client, client.producer(TOPIC) as producer:
            sending = asyncio.ensure_future(producer.send_many(payloads))
            await asyncio.sleep(0)
            change(buffer)
            await sending

    asyncio.run(story())
    found = stored(broker, COUNT)
    assert len(found) == COUNT and set(found) <= {OLD, NEW}
