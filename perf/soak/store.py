"""Where tiered storage goes: an S3 server behind a proxy that can fail, or a directory.

What is stored lies in the run's own directory, so that a run which was stopped finds it again; for that
reason the server is MinIO and never one that keeps its objects in memory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.crash import nemesis
from tests.crash.storage_run import TIERED
from tests.crash.store_faults import for_nemesis
from tests.fakes.s3_proxy import S3Proxy
from tests.s3_server import NoServer, S3Server, find

KINDS = ("auto", "s3", "directory")
BUCKET = "soak"
# As small as in the crash check and nearly as hasty: every part of tiering happens within a minute.
SETTINGS = TIERED | {
    "DANUBE_STORAGE__SEAL_AFTER": "5s",
    "DANUBE_STORAGE__LOCAL_RETENTION_TIME": "20s",
    "DANUBE_STORAGE__ORPHAN_AGE": "5m",
}


class Store:
    """The store of a run; ``kind`` is what was chosen: s3 or directory."""

    def __init__(self, kind: str, directory: Path, seed: int) -> None:
        """Raise NoServer when ``s3`` is asked for and there is no server that keeps its objects."""
        self.kind, self.directory, self._seed = "directory", directory, seed
        self._server: S3Server | None = None
        self._proxy: S3Proxy | None = None
        if kind == "directory":
            return
        try:
            program = find()
            if program.kind != "minio":
                raise NoServer(f"{program.kind} keeps its objects in memory, and a run must outlive it")
        except NoServer:
            if kind == "s3":
                raise
            return
        self.kind, self._server = "s3", S3Server(program, folder=directory)

    def open(self) -> dict[str, str]:
        """Start what must run; the broker's environment."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self._server is None:
            return SETTINGS | {"DANUBE_STORAGE__MODE": "shared_fs", "DANUBE_STORAGE__URL": self._url}
        self._server.start()
        client = self.client()
        if not client.bucket_exists(BUCKET):
            self._server.make_bucket(BUCKET)
        self._proxy = S3Proxy("127.0.0.1", self._server.port, client=client, seed=self._seed).start()
        return SETTINGS | self._server.environ(BUCKET, "run", endpoint=self._proxy.endpoint)

    @property
    def _url(self) -> str:
        return f"file://{self.directory.absolute()}"

    def location(self) -> tuple[list[str], dict[str, str]]:
        """Arguments and environment with which a command of Danube reads the store."""
        if self._server is None:
            return [self._url], {}
        environment = self._server.environ(BUCKET, "run")
        url = environment["DANUBE_STORAGE__URL"]
        return [url, "--s3-endpoint", self._server.endpoint], environment

    def client(self) -> Any:
        """A bare client of the server, past the proxy."""
        assert self._server is not None, "only an S3 store has a server"
        return self._server.client()

    def close(self) -> None:
        """End the server; what it stored stays."""
        if self._proxy is not None:
            self._proxy.refuse()
        if self._server is not None:
            self._server.kill()

    def faults(self) -> dict[str, nemesis.Fault]:
        """Faults of this store, for a nemesis."""
        return for_nemesis(self._proxy) if self._proxy is not None else {}

    def forget_requests(self) -> None:
        """Drop the proxy's memory of its requests, which no long run could keep."""
        if self._proxy is not None:
            self._proxy.requests.clear()
