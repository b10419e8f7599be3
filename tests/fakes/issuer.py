"""A small OpenID Connect issuer on loopback: its configuration, its keys, and tokens that it signs."""

from __future__ import annotations

import json
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

CONFIGURATION = "/.well-known/openid-configuration"
KEYS = "/keys"
AUDIENCE = "danube"


class Page(NamedTuple):
    body: bytes
    status: int = 200
    headers: tuple[tuple[str, str], ...] = ()


class Issuer:
    """Serves ``pages`` by path; ``asked`` has the paths in the order in which they were asked for."""

    def __init__(self, port: int = 0, tls: ssl.SSLContext | None = None, path: str = "") -> None:
        self.pages: dict[str, Page] = {}
        self.asked: list[str] = []
        self.private: dict[str, tuple[str, Any]] = {}
        issuer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                issuer.asked.append(self.path)
                page = issuer.pages.get(self.path, Page(b"nothing here", 404))
                self.send_response(page.status)
                for name, value in page.headers:
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(page.body)))
                self.end_headers()
                self.wfile.write(page.body)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        if tls is not None:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self.port = int(self._server.server_address[1])
        self.name = f"{'https' if tls else 'http'}://127.0.0.1:{self.port}{path}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()
        self.configure()

    def configure(self, **changed: Any) -> None:
        """Serve the configuration, with some of it ``changed``."""
        found = {"issuer": self.name, "jwks_uri": self.name + KEYS, **changed}
        self.pages[CONFIGURATION] = Page(json.dumps(found).encode())

    def use(self, *key_ids: str, algorithm: str = "RS256") -> None:
        """Serve keys of these names, which are made if they are new, and no others."""
        for key_id in key_ids:
            self.private.setdefault(key_id, (algorithm, _private(algorithm)))
        self.serve([self.entry(key_id) for key_id in key_ids])

    def serve(self, entries: list[Any]) -> None:
        self.pages[KEYS] = Page(json.dumps({"keys": entries}).encode())

    def entry(self, key_id: str, **changed: Any) -> dict[str, Any]:
        """A key as it is served."""
        algorithm, private = self.private[key_id]
        made = jwt.get_algorithm_by_name(algorithm).to_jwk(private.public_key(), as_dict=True)
        return {**made, "kid": key_id, "alg": algorithm, "use": "sig", **changed}

    def token(self, name: str, *groups: str, kid: str = "one", typ: str = "JWT", **changed: Any) -> str:
        """A token of an hour; a claim that is changed to None is left out."""
        now_s = int(time.time())
        claims = {
            "iss": self.name, "aud": AUDIENCE, "sub": name, "groups": list(groups),
            "iat": now_s, "exp": now_s + 3_600, **changed,
        }  # fmt: skip
        algorithm, private = self.private[kid]
        given = {name: value for name, value in claims.items() if value is not None}
        headers = {"kid": kid, "typ": typ}
        return jwt.PyJWS().encode(json.dumps(given).encode(), private, algorithm, headers)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _private(algorithm: str) -> Any:
    if algorithm == "RS256":
        return rsa.generate_private_key(65_537, 2_048)
    if algorithm == "ES256":
        return ec.generate_private_key(ec.SECP256R1())
    return ed25519.Ed25519PrivateKey.generate()
