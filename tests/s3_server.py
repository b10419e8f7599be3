"""A real S3 server for tests, on loopback: MinIO where there is one or Go can build it, else moto's.

``scripts/s3-server --prepare`` (which ``scripts/test`` runs) finds, builds or installs one outside the
repository; the fixture ``s3_server`` starts it once a session, and a run that has none skips its tests
aloud.  ``python -m tests.s3_server`` is what ``scripts/s3-server`` runs.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.broker_process import die_with_parent, free_port

ACCESS_KEY = "danube-test"
SECRET_KEY = "danube-test-secret-3f9a71"
REGION = "us-east-1"
READY_TIMEOUT_S = 30.0
BUILD_TIMEOUT_S = 900.0
MINIO_SOURCE = "github.com/minio/minio@latest"
MOTO = "moto[server]>=5,<6"

_bucket_numbers = itertools.count()
started: list[str] = []


def cache() -> Path:
    """Where servers are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".cache") / "danube"


class NoServer(Exception):
    """There is no S3 server here; the text says why."""


@dataclass(frozen=True)
class Program:
    """A server that can be started: ``kind`` is minio or moto."""

    kind: str
    path: Path

    def command(self, port: int, data: Path) -> list[str]:
        if self.kind == "minio":
            address = f"127.0.0.1:{port}"
            return [str(self.path), "server", "--quiet", "--address", address, str(data)]
        return [str(self.path), "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]


def find() -> Program:
    """The server that is here already, the better one first; NoServer when there is none."""
    for path in (shutil.which("minio"), cache() / "bin" / "minio"):
        if path is not None and os.access(path, os.X_OK):
            return Program("minio", Path(path))
    python = cache() / "moto" / "bin" / "python"
    if python.exists():
        return Program("moto", python)
    failure = cache() / "s3-server.failure"
    why = failure.read_text().strip() if failure.is_file() else "run scripts/s3-server --prepare"
    raise NoServer(f"no S3 server: {why}")


def prepare(say: Callable[[str], None]) -> Program:
    """As :func:`find`, but build or install one if there is none."""
    try:
        return find()
    except NoServer:
        pass
    cache().mkdir(parents=True, exist_ok=True)
    reasons = []
    for make in (_build_minio, _install_moto):
        try:
            make(say)
            return find()
        except (OSError, subprocess.SubprocessError, NoServer) as error:
            reasons.append(f"{make.__name__.strip('_').replace('_', ' ')}: {_last_line(error)}")
            say(f"s3-server: {reasons[-1]}")
    (cache() / "s3-server.failure").write_text("; ".join(reasons) + "\n")
    raise NoServer("; ".join(reasons))


def _build_minio(say: Callable[[str], None]) -> None:
    go = shutil.which("go")
    if go is None:
        raise NoServer("there is no go")
    say(f"s3-server: building {MINIO_SOURCE}; this takes minutes, once")
    environ = os.environ | {"GOBIN": str(cache() / "bin"), "CGO_ENABLED": "0"}
    _run([go, "install", MINIO_SOURCE], environ)


def _install_moto(say: Callable[[str], None]) -> None:
    say(f"s3-server: installing {MOTO}")
    folder = cache() / "moto"
    try:
        _run([sys.executable, "-m", "venv", str(folder)], dict(os.environ))
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--retries", "2"]
        _run([*pip, "--timeout", "10", "--disable-pip-version-check", MOTO], dict(os.environ))
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run(command: list[str], environ: dict[str, str]) -> None:
    subprocess.run(
        command, check=True, capture_output=True, text=True, env=environ, timeout=BUILD_TIMEOUT_S, cwd="/"
    )


def _last_line(error: Exception) -> str:
    said = getattr(error, "stderr", None) or str(error)
    lines = str(said).strip().splitlines()
    return lines[-1][:200] if lines else type(error).__name__


def new_folder(parent: Path | None = None) -> Path:
    """A folder for one server; those of processes that were killed are removed."""
    for old in (parent or Path(tempfile.gettempdir())).glob("danube-s3-*-*"):
        pid = old.name.split("-")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"danube-s3-{os.getpid()}-", dir=parent))


@dataclass
class S3Server:
    """A running server; ``stop`` ends it by its pid and removes what it stored."""

    program: Program
    port: int = 0
    access_key: str = ACCESS_KEY
    secret_key: str = SECRET_KEY
    folder: Path = field(default_factory=new_folder)
    _process: subprocess.Popen[bytes] | None = None

    @property
    def kind(self) -> str:
        return self.program.kind

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid if self._process is not None else 0

    def start(self) -> S3Server:
        """Start on a free port, or on the one it had, and wait until it answers."""
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        environ = {
            "PATH": os.environ.get("PATH", ""),
            "HOME": str(self.folder),
            "MINIO_ROOT_USER": self.access_key,
            "MINIO_ROOT_PASSWORD": self.secret_key,
            "MINIO_BROWSER": "off",
            "MINIO_UPDATE": "off",
        }
        wanted = self.port
        for _ in range(5):  # the free port may be another's by the time the server asks for it
            self.port = wanted or free_port()
            with (self.folder / "output").open("ab") as output:
                self._process = subprocess.Popen(
                    self.program.command(self.port, data),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environ,
                    cwd=self.folder,
                    start_new_session=True,  # an interrupt from the terminal is for who started it
                    preexec_fn=die_with_parent,
                )
            if self._answers():
                return self
            self.kill()
        said = (self.folder / "output").read_text("utf-8", "replace")[-500:]
        self.stop()
        raise NoServer(f"{self.program.path} does not serve: {said}")

    def _answers(self) -> bool:
        assert self._process is not None
        give_up = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < give_up and self._process.poll() is None:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
            try:
                path = "/minio/health/cluster" if self.kind == "minio" else "/"
                connection.request("GET", path)
                if connection.getresponse().status == 200:
                    return True
            except OSError:
                pass
            finally:
                connection.close()
            time.sleep(0.05)
        return False

    def kill(self) -> None:
        """End the process at once; its data stays for another start()."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def client(self, *, endpoint: str = "") -> Any:
        """A bare ``minio`` client of this server; ``endpoint`` is that of a proxy before it."""
        import minio

        host = (endpoint or self.endpoint).removeprefix("http://")
        return minio.Minio(host, self.access_key, self.secret_key, secure=False, region=REGION)

    def make_bucket(self, name: str = "") -> str:
        """A bucket that no other test has."""
        name = name or f"danube-{os.getpid()}-{next(_bucket_numbers)}"
        self.client().make_bucket(name)
        return name

    def settings(self, bucket: str, prefix: str = "", *, endpoint: str = "", **more: Any) -> Any:
        """StorageSettings of a bucket here; ``endpoint`` is that of a proxy before it."""
        from danube.config.sections import Secret, StorageSettings

        given = {
            "url": f"s3://{bucket}/{prefix}".rstrip("/"),
            "endpoint": endpoint or self.endpoint,
            "access_key": Secret(self.access_key),
            "secret_key": Secret(self.secret_key),
        }
        return StorageSettings(**(given | more))

    def environ(self, bucket: str, prefix: str = "", *, endpoint: str = "") -> dict[str, str]:
        """The same for a broker's environment."""
        return {
            "DANUBE_STORAGE__MODE": "object_store",
            "DANUBE_STORAGE__URL": f"s3://{bucket}/{prefix}".rstrip("/"),
            "DANUBE_STORAGE__ENDPOINT": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
        }


@pytest.fixture(scope="session")
def s3_server() -> Iterator[S3Server]:
    """One server for the whole session; tests keep apart by their buckets."""
    try:
        server = S3Server(find()).start()
    except NoServer as error:
        started.append(str(error))
        pytest.skip(str(error))
    started.append(f"S3 server: {server.kind} ({server.program.path})")
    yield server
    server.stop()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a process of a run of several: hand on what was started."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["servers"] = started


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    started.extend(getattr(node, "workeroutput", {}).get("servers", []))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for text in dict.fromkeys(started):
        terminalreporter.write_line(text)


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/s3-server", description=__doc__)
    parser.add_argument("--prepare", action="store_true", help="find, build or install one, and leave")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1; 0 takes a free one")
    parser.add_argument("--bucket", default="danube", help="a bucket to make")
    arguments = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    try:
        program = prepare(say)
        if arguments.prepare:
            say(f"s3-server: {program.kind} ({program.path})")
            return 0
        server = S3Server(program, port=arguments.port).start()
    except NoServer as error:
        say(f"s3-server: {error}; tests that need one will be SKIPPED")
        return 0 if arguments.prepare else 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        server.make_bucket(arguments.bucket)
        print(f"server     {server.kind} ({program.path})")
        print(f"endpoint   {server.endpoint}")
        print(f"access_key {server.access_key}")
        print(f"secret_key {server.secret_key}")
        print(f"bucket     {arguments.bucket}")
        print(
            f"try        AWS_ACCESS_KEY_ID={server.access_key} AWS_SECRET_ACCESS_KEY={server.secret_key}"
            f" danube start --storage s3://{arguments.bucket}/try --s3-endpoint {server.endpoint}",
            flush=True,
        )
        signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
