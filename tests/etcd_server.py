"""A real etcd for tests, on loopback: the one on the PATH, or Debian's package in a folder of its own.

``scripts/etcd-server --prepare`` (which ``scripts/test`` runs) finds one, or downloads and unpacks the
package into the folder of ``scripts/s3-server`` outside the repository; nothing is installed.  The fixture
``etcd_server`` starts it once a session; where there is none its tests are skipped aloud.
"""

from __future__ import annotations

import argparse
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.broker_process import free_port
from tests.cloud_servers import CloudServer
from tests.s3_server import NoServer, cache, started

PACKAGE = "etcd-server"
READY_TIMEOUT_S = 30.0
DOWNLOAD_TIMEOUT_S = 120.0

_numbers = itertools.count()


class EtcdServer(CloudServer):
    """One member that is a cluster of its own; ``kill`` and ``start`` are a crash and its recovery."""

    kind = "etcd"

    def __init__(self, host: str = "127.0.0.1") -> None:
        super().__init__()
        self.host = host

    @staticmethod
    def program() -> Path:
        for path in (shutil.which("etcd"), cache() / "etcd" / "usr" / "bin" / "etcd"):
            if path is not None and os.access(path, os.X_OK):
                return Path(path)
        failure = cache() / "etcd.failure"
        why = failure.read_text().strip() if failure.is_file() else "run scripts/etcd-server --prepare"
        raise NoServer(f"no etcd: {why}")

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def command(self) -> list[str]:
        peer = f"http://127.0.0.1:{free_port()}"
        own = ",".join(dict.fromkeys([self.endpoint, f"http://127.0.0.1:{self.port}"]))
        return [
            str(self.program()), "--name", "one", "--data-dir", str(self._folder / "etcd"),
            "--listen-client-urls", own, "--advertise-client-urls", self.endpoint,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer,
            "--initial-cluster", f"one={peer}", "--logger", "zap", "--log-level", "warn",
        ]  # fmt: skip

    def _answers(self) -> bool:
        assert self._process is not None
        give_up = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return True
            except OSError:
                pass
            time.sleep(0.05)
        return False

    def new_prefix(self) -> str:
        """A prefix that no other test has."""
        return f"/danube-{os.getpid()}-{next(_numbers)}/"

    def calls(self, endpoint: str = "", **options: Any) -> Any:
        from danube.cluster.etcd.calls import EtcdCalls

        return EtcdCalls([endpoint or self.endpoint], **options)

    def place(self, prefix: str, **options: Any) -> Any:
        from danube.cluster.etcd.calls import EtcdPlace

        return EtcdPlace(endpoints=(self.endpoint,), prefix=prefix, **options)

    def log(self, prefix: str) -> Any:
        from danube.cluster.etcd.log import EtcdLog

        return EtcdLog(self.calls(), prefix)


def prepare(say: Callable[[str], None]) -> None:
    """Find or unpack one; what cannot be had is told and remembered."""
    failure = cache() / "etcd.failure"
    try:
        EtcdServer.program()
        return
    except NoServer:
        pass
    cache().mkdir(parents=True, exist_ok=True)
    try:
        _unpack_package(say)
        failure.unlink(missing_ok=True)
        say(f"etcd-server: {EtcdServer.program()}")
    except (OSError, subprocess.SubprocessError, NoServer) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        failure.write_text((said[-1][:200] if said else type(error).__name__) + "\n")
        say(f"etcd-server: {failure.read_text().strip()}; its tests will be SKIPPED")


def _unpack_package(say: Callable[[str], None]) -> None:
    for tool in ("apt-get", "dpkg"):
        if shutil.which(tool) is None:
            raise NoServer(f"there is no {tool}; put etcd 3.4 or later on the PATH")
    say(f"etcd-server: downloading Debian's {PACKAGE}")
    with tempfile.TemporaryDirectory(prefix="danube-etcd-") as folder:
        _run(["apt-get", "download", PACKAGE], folder)
        found = sorted(Path(folder).glob("*.deb"))
        if not found:
            raise NoServer("apt-get downloaded nothing")
        made = cache() / f"etcd-{os.getpid()}"
        try:
            _run(["dpkg", "-x", str(found[0]), str(made)], folder)
            shutil.rmtree(cache() / "etcd", ignore_errors=True)
            made.rename(cache() / "etcd")
        finally:
            shutil.rmtree(made, ignore_errors=True)


def _run(command: list[str], folder: str) -> None:
    subprocess.run(
        command, check=True, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, cwd=folder
    )


@pytest.fixture(scope="session")
def etcd_server() -> Iterator[EtcdServer]:
    """One server for the whole session; tests keep apart by their prefixes."""
    try:
        program = EtcdServer.program()
        server = EtcdServer()
        server.start()
    except NoServer as error:
        started.append(str(error))
        pytest.skip(str(error))
    started.append(f"etcd: {program}")
    yield server
    server.stop()


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/etcd-server", description=__doc__)
    parser.add_argument("--prepare", action="store_true", help="find or unpack one, and leave")
    arguments = parser.parse_args()
    prepare(lambda text: print(text, file=sys.stderr, flush=True))
    if arguments.prepare:
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    server = EtcdServer()
    try:
        server.start()
        print(f"endpoint   {server.endpoint}", flush=True)
        signal.pause()
    except NoServer as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
