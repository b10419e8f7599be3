"""A broker that may open few files: connections that are idle never keep the log from its own."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from danube import sync
from danube.errors import LimitExceeded
from tests.broker_process import BrokerProcess

FILES_MAX = 640
PLACES = FILES_MAX // 2 - 128  # half are the log's, a few are for all else
TOPICS = 10


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="prlimit is not there")
def test_connections_beyond_the_limit_are_refused_and_segments_roll(
    broker: Callable[..., BrokerProcess],
) -> None:
    process = broker(prefix=["prlimit", f"--nofile={FILES_MAX}:{FILES_MAX}"])
    address = (process.host, process.port)
    with ExitStack() as stack:
        client = stack.enter_context(sync.connect(process.address))
        names = [f"/default/t{number}" for number in range(TOPICS)]
        producers = []
        for name in names:
            client.admin.create_topic(name, durability="fsync")
            producers.append(stack.enter_context(client.producer(name)))
        idle = [stack.enter_context(socket.create_connection(address)) for _ in range(PLACES + 50)]
        idle[-1].settimeout(60)
        assert idle[-1].recv(1), (
            "it is told that there is no place: the ones before it have all been looked at"
        )
        with pytest.raises(LimitExceeded, match=r"descriptors for \d+ connections") as refused:
            with sync.connect(process.address, timeout=5) as other:
                other.admin.list_topics()
        assert "ulimit -n" in refused.value.hint
        for offset in range(4):  # each seal ends a segment, and the next record makes a file
            for name, producer in zip(names, producers, strict=True):
                assert producer.send(b"x").offset == offset
                client.admin.seal(name)
        assert len(list((process.data_dir / "partitions").glob("*/*.seg"))) >= 4 * TOPICS
        for one in idle:
            one.close()
        with sync.connect(process.address) as other:
            assert len(other.admin.list_topics()) == TOPICS
