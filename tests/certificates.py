"""Certificates for tests of mutual TLS: an authority of one's own, and what it signs."""

from __future__ import annotations

import subprocess
from pathlib import Path

from danube.cluster.links.tls import TlsContexts, TlsFiles, contexts


class Authority:
    """Signs certificates; all files lie in ``directory``."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self.directory = directory
        self.cert, self.key = directory / f"{name}.pem", directory / f"{name}.key"
        directory.mkdir(parents=True, exist_ok=True)
        _openssl(
            "req", "-x509", *_NEW_KEY, "-keyout", self.key, "-out", self.cert, "-days", "2",
            "-subj", f"/CN={name}",
        )  # fmt: skip

    def sign(self, name: str, alternative_names: str) -> TlsFiles:
        """A certificate with ``alternative_names`` as openssl takes them: ``IP:127.0.0.1,DNS:a``."""
        cert, key = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        request, extensions = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternative_names}\n")
        _openssl("req", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self.key, "-CAcreateserial",
            "-out", cert, "-days", "2", "-extfile", extensions,
        )  # fmt: skip
        return TlsFiles(str(cert), str(key), str(self.cert))

    def contexts(self, name: str, alternative_names: str) -> TlsContexts:
        return contexts(self.sign(name, alternative_names))


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
