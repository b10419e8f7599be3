"""Programs that only use the client: without the broker's libraries, and on systems that are not Linux."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_process import ROOT, BrokerProcess

# What other systems lack, and the libraries of a broker, are taken away before the client is imported.
PROGRAM = """
import asyncio, os, select, shutil, signal, socket, subprocess, sys

system, url, topic = sys.argv[1:]
asyncio.new_event_loop().close()  # Python 3.14 looks for a loop of the system when the first is made
for name in (
    "fcntl", "grp", "pwd", "resource", "syslog", "termios", "uvloop",
    "click", "fastavro", "google.protobuf", "grpc", "grpc_tools", "hpack", "jsonschema_rs", "llvmlite", "lz4",
    "minio", "numba", "obstore", "prometheus_client", "pyarrow", "raftos", "yaml", "zstandard",
):
    sys.modules[name] = None
for library, names in (
    (os, "eventfd eventfd_read eventfd_write fdatasync fork geteuid getuid memfd_create nice pipe2 preadv"
         " pwritev readv register_at_fork sched_getaffinity sendfile sysconf writev"),
    (select, "POLLIN POLLOUT epoll poll"),
    (signal, "SIGHUP SIGKILL pthread_sigmask"),
    (socket, "MSG_DONTWAIT SO_PEERCRED SO_REUSEPORT TCP_CONGESTION TCP_QUICKACK TCP_USER_TIMEOUT"),
):
    for name in names.split():
        delattr(library, name)
if system == "win32":
    pair, unix = socket.socketpair, socket.AF_UNIX
    socket.socketpair = lambda *rest: pair(unix)  # a loop of this system needs one
    del socket.AF_UNIX
sys.platform = system

import danube

assert all(hasattr(danube, name) for name in danube.__all__)
assert danube.load_kernels() is False


async def main():
    async with danube.connect(url) as client:
        async with client.producer(topic) as producer:
            await producer.send(b"one", key="k", attributes={"a": "b"})
            await producer.send_many([b"two", b"three"])
        async with client.consumer(topic, "all", start="earliest") as consumer:
            found = []
            while len(found) < 3:
                message = await consumer.receive(timeout=30)
                found.append(bytes(message.payload))
                await message.ack()
    print(*found)


asyncio.run(main())

import danube.sync

with danube.sync.connect(url) as client, client.producer(topic) as producer:
    print(producer.send(b"four").offset)
print(*sorted({name.split(".")[0] for name in sys.modules} & {"google_crc32c", "msgspec", "numpy", "xxhash"}))
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    with BrokerProcess(tmp_path_factory.mktemp("broker") / "data") as made:
        yield made


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_the_client_needs_four_libraries_and_no_linux(
    process: BrokerProcess, system: str, tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, system, process.address, f"/default/{system}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)}, cwd=tmp_path, capture_output=True, text=True, timeout=99,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["b'one' b'two' b'three'", "3", "google_crc32c msgspec numpy xxhash"]
