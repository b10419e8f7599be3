"""Brokers started as containers are: a command, variables, and a loopback address of their own."""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

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
