"""Servers of the other clouds for tests, on loopback: Azurite for Azure Blob, fake-gcs-server for Google.

``scripts/cloud-servers --prepare`` (which ``scripts/test`` runs) installs the one with npm and builds the
other with Go, into the folder of ``scripts/s3-server`` outside the repository.  Fixtures start each once a
session; where one cannot be had its tests are skipped aloud.  fake-gcs-server has no XML API, which obstore
speaks: one is put in front (tests.fakes.google_xml).
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import hmac
import http.client
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path
from typing import Any

import pytest

from tests.broker_process import die_with_parent, free_port
from tests.fakes.google_xml import GoogleXml
from tests.s3_server import NoServer, cache, started

AZURITE = "azurite@3.35.0"  # the last that runs on Node 18 and 20, too
GOOGLE = "github.com/fsouza/fake-gcs-server@v1.56.1"
ACCOUNT = "danubetest"
ACCOUNT_KEY = base64.b64encode(b"danube-test-account-key-4be1a7c09d").decode()
GOOGLE_SECRET = "danube-test-private-key-77d2c1"
READY_TIMEOUT_S = 60.0
PREPARE_TIMEOUT_S = 600.0
_numbers = itertools.count()


class CloudServer:
    """A server process with its data in a folder of its own; ``stop`` ends it and removes that."""

    kind = ""
    scheme = ""

    def __init__(self) -> None:
        self.port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = Path(tempfile.mkdtemp(prefix=f"danube-cloud-{os.getpid()}-"))

    # -- of each kind -----------------------------------------------------------------------------

    @staticmethod
    def program() -> Path:
        """What runs; NoServer where it is not there."""
        raise NotImplementedError

    def command(self) -> list[str]:
        raise NotImplementedError

    def make_bucket(self) -> str:
        """A bucket that no other test has."""
        raise NotImplementedError

    def remove_bucket(self, bucket: str) -> None:
        raise NotImplementedError

    @property
    def endpoint(self) -> str:
        raise NotImplementedError

    def credentials(self) -> dict[str, str]:
        """Settings of the section ``storage`` that let somebody in."""
        raise NotImplementedError

    # -- of all -----------------------------------------------------------------------------------

    def start(self) -> CloudServer:
        """Start on the port it had, or on a free one, and wait until it answers."""
        wanted = self.port
        for _ in range(5):  # the free port may be another's by the time the server asks for it
            self.port = wanted or free_port()
            environ = {"PATH": os.environ.get("PATH", ""), "HOME": str(self._folder), **self.server_environ()}
            with (self._folder / "output").open("ab") as output:
                self._process = subprocess.Popen(
                    self.command(), stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    env=environ, cwd=self._folder, preexec_fn=die_with_parent,
                )  # fmt: skip
            if self._answers():
                return self
            self.kill()
        said = (self._folder / "output").read_text("utf-8", "replace")[-500:]
        self.stop()
        raise NoServer(f"{self.kind} does not serve: {said}")

    def server_environ(self) -> dict[str, str]:
        return {}

    def _answers(self) -> bool:
        assert self._process is not None
        give_up = time.monotonic() + READY_TIMEOUT_S
        while time.monotonic() < give_up and self._process.poll() is None:
            try:
                self.ask("GET", "/")
                return True
            except OSError:
                time.sleep(0.05)
        return False

    def ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def settings(self, bucket: str, prefix: str = "", *, endpoint: str = "", **more: Any) -> Any:
        """StorageSettings of a bucket here; ``endpoint`` is that of a proxy before it."""
        from danube.config.sections import Secret, StorageSettings

        given = {name: Secret(text) for name, text in self.credentials().items()}
        url = f"{self.scheme}://{bucket}/{prefix}".rstrip("/")
        return StorageSettings(**{"url": url, "endpoint": endpoint or self.endpoint, **given, **more})

    def environ(self, bucket: str, prefix: str = "", *, endpoint: str = "") -> dict[str, str]:
        """The same for a broker's environment."""
        return {
            "DANUBE_STORAGE__MODE": "object_store",
            "DANUBE_STORAGE__URL": f"{self.scheme}://{bucket}/{prefix}".rstrip("/"),
            "DANUBE_STORAGE__ENDPOINT": endpoint or self.endpoint,
            **{f"DANUBE_STORAGE__{name.upper()}": text for name, text in self.credentials().items()},
        }


def _folder_name() -> str:
    return f"danube-{os.getpid()}-{next(_numbers)}"


class AzureServer(CloudServer):
    """Azurite's blob service."""

    kind = "azurite"
    scheme = "az"

    @staticmethod
    def program() -> Path:
        path = cache() / "azurite" / "node_modules" / "azurite" / "dist" / "src" / "blob" / "main.js"
        if not path.is_file():
            raise NoServer(_why("azurite"))
        if shutil.which("node") is None:
            raise NoServer("no Azurite: there is no node")
        return path

    def command(self) -> list[str]:
        options = ["--silent", "--disableTelemetry", "--skipApiVersionCheck", "--blobHost", "127.0.0.1"]
        place = ["--blobPort", str(self.port), "--location", str(self._folder / "data")]
        return ["node", str(self.program()), *options, *place]

    def server_environ(self) -> dict[str, str]:
        return {"AZURITE_ACCOUNTS": f"{ACCOUNT}:{ACCOUNT_KEY}"}

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}/{ACCOUNT}"

    def credentials(self) -> dict[str, str]:
        return {"access_key": ACCOUNT, "secret_key": ACCOUNT_KEY}

    def make_bucket(self) -> str:
        name = _folder_name()
        self._container("PUT", name)
        return name

    def remove_bucket(self, bucket: str) -> None:
        self._container("DELETE", bucket)

    def _container(self, method: str, name: str) -> None:
        """A request signed with the account's key: the standard library has all that it takes."""
        path = f"/{ACCOUNT}/{name}"
        headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-12-02"}
        signed = "".join(f"{key}:{headers[key]}\n" for key in sorted(headers))
        text = f"{method}\n" + "\n" * 11 + signed + f"/{ACCOUNT}{path}\nrestype:container"
        mac = hmac.new(base64.b64decode(ACCOUNT_KEY), text.encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {ACCOUNT}:{base64.b64encode(mac).decode()}"
        headers["Content-Length"] = "0"
        status, body = self.ask(method, f"{path}?restype=container", headers=headers)
        if status not in (201, 202):
            raise NoServer(f"azurite answered {status} to {method} of a container: {body[:300]!r}")


class GoogleServer(CloudServer):
    """fake-gcs-server, and the XML API in front of it."""

    kind = "fake-gcs-server"
    scheme = "gs"

    def __init__(self) -> None:
        super().__init__()
        self._front: GoogleXml | None = None

    @staticmethod
    def program() -> Path:
        for path in (shutil.which("fake-gcs-server"), cache() / "bin" / "fake-gcs-server"):
            if path is not None and os.access(path, os.X_OK):
                return Path(path)
        raise NoServer(_why("fake-gcs-server"))

    def command(self) -> list[str]:
        place = [
            "-host",
            "127.0.0.1",
            "-port",
            str(self.port),
            "-filesystem-root",
            str(self._folder / "data"),
        ]
        return [str(self.program()), "-scheme", "http", "-backend", "memory", "-log-level", "error", *place]

    def start(self) -> GoogleServer:
        super().start()
        self._front = self._front or GoogleXml(self.port)
        return self

    def stop(self) -> None:
        if self._front is not None:
            self._front.stop()
            self._front = None
        super().stop()

    @property
    def endpoint(self) -> str:
        assert self._front is not None
        return self._front.endpoint

    @property
    def front_port(self) -> int:
        assert self._front is not None
        return self._front.port

    def credentials(self) -> dict[str, str]:
        """A service account that needs no token: what obstore offers for emulators."""
        account = {
            "type": "service_account", "disable_oauth": True, "client_email": "danube@test.invalid",
            "private_key": GOOGLE_SECRET, "private_key_id": "1", "gcs_base_url": self.endpoint,
        }  # fmt: skip
        return {"credentials": json.dumps(account)}

    def make_bucket(self) -> str:
        name = _folder_name()
        body = json.dumps({"name": name}).encode()
        status, said = self.ask(
            "POST", "/storage/v1/b?project=test", body, {"Content-Type": "application/json"}
        )
        if status != 200:
            raise NoServer(f"fake-gcs-server answered {status} to a new bucket: {said[:300]!r}")
        return name

    def remove_bucket(self, bucket: str) -> None:
        self.ask("DELETE", f"/storage/v1/b/{bucket}")


SERVERS: dict[str, type[CloudServer]] = {"azure": AzureServer, "google": GoogleServer}


# -- preparing ----------------------------------------------------------------------------------------


def _why(name: str) -> str:
    failure = cache() / f"{name}.failure"
    why = failure.read_text().strip() if failure.is_file() else "run scripts/cloud-servers --prepare"
    return f"no {name}: {why}"


def prepare(say: Callable[[str], None]) -> None:
    """Install and build what is missing, both at the same time; what cannot be had is told and remembered."""
    cache().mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: _prepare(one, say), (AzureServer, GoogleServer)))


def _prepare(server: type[CloudServer], say: Callable[[str], None]) -> None:
    failure = cache() / f"{server.kind}.failure"
    try:
        server.program()
        return
    except NoServer:
        pass
    try:
        _install_azurite(say) if server is AzureServer else _build_google(say)
        failure.unlink(missing_ok=True)
        say(f"cloud-servers: {server.kind} ({server.program()})")
    except (OSError, subprocess.SubprocessError, NoServer) as error:
        said = str(getattr(error, "stderr", None) or error).strip().splitlines()
        why = said[-1][:200] if said else type(error).__name__
        failure.write_text(why + "\n")
        say(f"cloud-servers: no {server.kind}: {why}; its tests will be SKIPPED")


def _install_azurite(say: Callable[[str], None]) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NoServer("there is no npm")
    say(f"cloud-servers: installing {AZURITE}; this takes a minute, once")
    folder, made = cache() / "azurite", cache() / f"azurite-{os.getpid()}"
    options = ["--prefix", str(made), "--no-audit", "--no-fund", "--omit=optional", "--ignore-scripts"]
    try:
        _run([npm, "install", *options, "--fetch-retries=1", "--loglevel=error", AZURITE], {})
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _build_google(say: Callable[[str], None]) -> None:
    go = shutil.which("go")
    if go is None:
        raise NoServer("there is no go")
    say(f"cloud-servers: building {GOOGLE}; this takes minutes, once")
    _run([go, "install", "-ldflags=-s -w", GOOGLE], {"GOBIN": str(cache() / "bin"), "CGO_ENABLED": "0"})


def _run(command: list[str], environ: dict[str, str]) -> None:
    subprocess.run(
        command, check=True, capture_output=True, text=True, env=os.environ | environ,
        timeout=PREPARE_TIMEOUT_S, cwd="/",
    )  # fmt: skip


# -- fixtures -----------------------------------------------------------------------------------------


def _serving(server: type[CloudServer]) -> Iterator[CloudServer]:
    pytest.importorskip("obstore")
    try:
        server.program()
        made = server().start()
    except NoServer as error:
        started.append(str(error))
        pytest.skip(str(error))
    started.append(f"{server.scheme}:// server: {server.kind} ({server.program()})")
    yield made
    made.stop()


@pytest.fixture(scope="session")
def azure_server() -> Iterator[CloudServer]:
    """One Azurite for the whole session; tests keep apart by their containers."""
    yield from _serving(AzureServer)


@pytest.fixture(scope="session")
def google_server() -> Iterator[CloudServer]:
    """One fake-gcs-server for the whole session; tests keep apart by their buckets."""
    yield from _serving(GoogleServer)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/cloud-servers", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--prepare", action="store_true", help="install and build them, and leave")
    arguments = parser.parse_args()

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    prepare(say)
    if arguments.prepare:
        return 0
    running = []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        for server in SERVERS.values():
            try:
                server.program()
                running.append(server().start())
            except NoServer as error:
                say(f"cloud-servers: {error}")
                continue
            print(f"# {server.kind}")
            for name, text in running[-1].environ(running[-1].make_bucket(), "try").items():
                print(f"export {name}='{text}'", flush=True)
        if running:
            signal.pause()
    except KeyboardInterrupt:
        pass
    finally:
        for one in running:
            one.stop()
    return 0 if running else 1


if __name__ == "__main__":
    sys.exit(main())
