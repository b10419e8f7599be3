"""Brokers started as containers are: a command, variables, and a loopback address of their own."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from danube import sync
from tests.broker_process import ROOT, BrokerFailed, die_with_parent, wait_until

READY_S: Final = 120.0
_NETWORK: Final = f"127.{random.SystemRandom().randrange(20, 250)}.{os.getpid() % 250}"
_hosts: Final = itertools.count(2)


def loopback_address() -> str:
    """Return an address of its own for each container, so that ports stay as the file names them."""
    return f"{_NETWORK}.{next(_hosts)}"


class Container:
    """One started command; its output lies beside its data."""

    def __init__(
        self, name: str, address: str, data: Path, command: Sequence[str], environ: Mapping[str, str]
    ):
        self.name = name
        self.address = address
        self.data = data
        self.log = data.with_suffix(".log")
        # `danube` of a command is this checkout's.
        path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}"
        with self.log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                # The home directory of the tests holds compiled kernels, as the image does.
                env={"PATH": path, "HOME": os.environ["HOME"], "PYTHONPATH": str(ROOT), **environ},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def wait_until_healthy(self, port: int = 6660) -> None:
        """Poll what the image's health check runs."""
        url = f"danube://{self.address}:{port}"
        try:
            wait_until(lambda: self._answers(url), READY_S, f"{self.name} healthy")
        except BrokerFailed as error:
            raise BrokerFailed(f"{error}\n{self.tail()}") from None

    def _answers(self, url: str) -> bool:
        if self._process.poll() is not None:
            raise BrokerFailed(f"{self.name} ended with {self._process.returncode}")
        return danube("status", "-s", url, "-o", "json") is not None

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-2_000:]

    def kill(self) -> None:
        """End the command and all its children at once, as a host that is lost."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> int:
        """End the command by SIGTERM, as `docker stop` does."""
        if self._process.poll() is None:
            self._process.terminate()
        try:
            return self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


@contextmanager
def ended(containers: list[Container]) -> Iterator[list[Container]]:
    """End all that the list holds at the end, the last first."""
    try:
        yield containers
    finally:
        for container in reversed(containers):
            container.stop()


def danube(*words: str) -> str | None:
    """Return the output of one `danube` command, or None if it failed."""
    done = subprocess.run(
        [sys.executable, "-P", "-m", "danube", *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
        check=False,
    )
    return done.stdout if done.returncode == 0 else None


def sends_and_receives(url: str, topic: str) -> None:
    """Publish one record through the command line and receive it again."""
    assert danube("produce", topic, "-s", url, "-m", "first record") is not None
    received = danube("consume", topic, "-s", url, "--from", "earliest", "--count", "1", "-o", "json")
    assert received is not None
    assert json.loads(received)["payload"] == "first record"


class Front:
    """One address in front of several: each connection goes to the next one that takes it, byte for byte."""

    def __init__(self, address: str, port: int, targets: Sequence[tuple[str, int]]) -> None:
        self._targets = itertools.cycle(targets)
        self._count = len(targets)
        self._listener = socket.create_server((address, port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                client, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        for target in itertools.islice(self._targets, self._count):
            with suppress(OSError):
                broker = socket.create_connection(target, 5)
                threading.Thread(target=_copy, args=(client, broker), daemon=True).start()
                _copy(broker, client)
                return
        client.close()

    def __enter__(self) -> Front:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError), source:
        while data := source.recv(65_536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def everything_is_reached(url: str, brokers: int) -> None:
    """A client that knows one address publishes to topics of all brokers, and receives from them."""
    topics = [f"/default/front-{number}" for number in range(2 * brokers)]
    with sync.connect(url) as client:
        for topic in topics:
            with client.producer(topic) as producer:
                producer.send_many([b"%d" % number for number in range(10)])
        owning = [one for one in client.admin.cluster("brokers") if one["partitions"]]
        assert len(owning) == brokers
        for topic in topics:
            with client.consumer(topic, "behind", start="earliest") as consumer:
                for number in range(10):
                    message = consumer.receive(timeout=30)
                    assert message is not None
                    assert message.payload == b"%d" % number
                    message.ack()


def sources() -> str:
    """The name that git gives to the sources, as scripts/image labels an image."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD:danube"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def built_of_these_sources() -> bool:
    label = '{{index .Labels "danube.sources"}}'
    command = ["podman", "image", "inspect", "--format", label, "localhost/danube"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.returncode == 0 and asked.stdout.strip() == sources()
