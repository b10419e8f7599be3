"""A store behind TLS: used with a good certificate, refused with any other, by each of the libraries."""

from __future__ import annotations

import json
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from danube.broker.mover.health import StoreHealth
from danube.broker.processes.contexts import Pulse
from danube.config.sections import Secret, StorageSettings
from danube.errors import NotFound, StoreRefused
from danube.spark.history.places import open_place
from danube.wal.segments.segment import LogIdentity
from danube.wal.stores import refused_tls
from danube.wal.stores.opening import open_store
from tests.certificates import Authority

BAD = {
    "of another name": ("for another name", "storage.endpoint"),
    "of an unknown authority": ("of an authority that is not trusted here", "SSL_CERT_FILE"),
    "expired": ("has expired", "renew the store's certificate"),
    "of tomorrow": ("is not valid yet", "check this host's clock"),
}
LISTED = b"<ListBucketResult><Name>bucket</Name><IsTruncated>false</IsTruncated></ListBucketResult>"
URLS = {"s3": "s3://bucket/p", "google": "gs://bucket/p", "azure": "az://bucket/p"}


class Empty(BaseHTTPRequestHandler):
    """A store without objects."""

    def do_HEAD(self) -> None:
        self._answer(404, b"")

    def do_GET(self) -> None:
        if "list-type" in self.path:
            self._answer(200, LISTED)
        else:
            self._answer(404, b"<Error><Code>NoSuchKey</Code></Error>")

    def _answer(self, status: int, body: bytes) -> None:
        self.server.asked += 1  # type: ignore[attr-defined]
        self.send_response(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


class Quiet(ThreadingHTTPServer):
    daemon_threads = True
    asked = 0

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Most of these handshakes fail."""


class Store:
    """A server, its certificate, and what tells how it is reached."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.stranger = Authority(folder / "stranger", "stranger")
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.present("good")
        self.server = Quiet(("127.0.0.1", 0), Empty)
        self.server.socket = self.context.wrap_socket(
            self.server.socket, server_side=True, do_handshake_on_connect=False
        )
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def present(self, kind: str) -> None:
        """Show this certificate to whoever connects from now on."""
        signer = self.stranger if kind == "of an unknown authority" else self.authority
        names = "IP:127.0.0.2" if kind == "of another name" else "IP:127.0.0.1"
        if kind == "of tomorrow":
            files = signer.early("store", names)
        else:
            files = signer.sign("store", names, days=-1 if kind == "expired" else 2)
        self.context.load_cert_chain(files.cert_file, files.key_file)

    def settings(self, door: str, **more: Any) -> StorageSettings:
        endpoint = f"https://127.0.0.1:{self.server.server_port}"
        given: dict[str, Any] = {"url": URLS[door], "endpoint": endpoint}
        if door == "google":
            account = {
                "type": "service_account", "disable_oauth": True, "client_email": "danube@test.invalid",
                "private_key": "none", "private_key_id": "1", "gcs_base_url": endpoint,
            }  # fmt: skip
            given["credentials"] = Secret(json.dumps(account))
        else:
            given |= {"access_key": Secret("account"), "secret_key": Secret("c2VjcmV0")}
        return StorageSettings(**(given | more))

    def open(self, door: str, **more: Any) -> Any:
        if door != "s3":
            pytest.importorskip("obstore")
        return open_store(self.settings(door, **more))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    made = Store(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(made.authority.cert))
    monkeypatch.delenv("SSL_CERT_DIR", raising=False)
    yield made
    made.server.shutdown()
    made.server.server_close()


@pytest.mark.parametrize("door", URLS)
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_certificate_is_refused_at_once_and_a_good_one_is_used_then(
    site: Store, door: str, kind: str
) -> None:
    store, (why, hint) = site.open(door), BAD[kind]
    site.present(kind)
    calls: list[Callable[[], Any]] = [
        lambda: store.head("k"), lambda: store.get("k"), lambda: store.put("k", b"x"),
        lambda: list(store.list("k")), lambda: store.delete(["k"]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreRefused) as refused:
            call()
        assert why in refused.value.why and hint in refused.value.hint
        assert store.name in refused.value.what and why in str(refused.value)
    assert site.server.asked == 0, "nothing went to a store that cannot show who it is"
    assert store.retries.budget.retries == 0, "a refusal is no outage"
    site.present("good")
    assert store.head("k") is None and site.server.asked > 0


def test_who_gives_credentials_of_a_role_shows_a_good_certificate_too(site: Store) -> None:
    store = site.open("s3", role_arn="arn:aws:iam::123456789012:role/danube")
    site.present("expired")
    with pytest.raises(StoreRefused) as refused:
        store.head("k")
    assert "has expired" in refused.value.why and site.server.asked == 0


def test_spark_reads_no_history_from_a_store_of_another_name(site: Store) -> None:
    place = open_place(URLS["s3"], site.settings("s3"))
    site.present("of another name")
    for ask in (place.metadata, lambda: place.history(LogIdentity(1, 0))):
        with pytest.raises(StoreRefused) as refused:
            ask()
        assert "for another name" in refused.value.why
    site.present("good")
    with pytest.raises(NotFound, match="holds no metadata"):
        place.metadata()


class Link:
    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.frames.append(fields)


def test_workers_and_the_banner_are_told_of_a_bad_certificate(site: Store) -> None:
    store = site.open("s3")
    site.present("expired")
    with pytest.raises(StoreRefused) as refused:
        store.head("k")
    pulse, link = Pulse(), Link()
    StoreHealth(store, cast(Any, [link]), pulse, lambda: None).failed(refused.value)
    assert link.frames[-1]["hint"] == refused.value.hint
    assert "its certificate has expired (renew the store's certificate" in str(pulse.store_error)
    pulse.close()


def test_what_neither_library_names_is_still_tls() -> None:
    for error in (None, ssl.SSLError(1, "no shared cipher"), SimpleNamespace(verify_code=24)):
        assert refused_tls.openssl_failure(error) == refused_tls.OF_ANY_KIND
    assert refused_tls.rustls_failure("InvalidCertificate(\n   BadSignature,\n)") == refused_tls.OF_ANY_KIND
    assert refused_tls.rustls_failure("status code: 503") is None
