"""Certificates for tests of TLS: an authority of one's own, what it signs, and what it revokes."""

from __future__ import annotations

import subprocess
from datetime import timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from danube.cluster.links.tls import TlsContexts, contexts
from danube.host.tls import TlsFiles


class Authority:
    """Signs certificates; all files lie in ``directory``."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self.directory = directory
        self.cert, self.key = directory / f"{name}.pem", directory / f"{name}.key"
        directory.mkdir(parents=True, exist_ok=True)
        _openssl(
            "req", "-x509", *_NEW_KEY, "-keyout", self.key, "-out", self.cert, "-days", "2",
            "-subj", f"/CN={name}", "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        )  # fmt: skip

    def sign(
        self,
        name: str,
        alternative_names: str,
        *extensions: str,
        days: int = 2,
        key: tuple[str, ...] = (),
        digest: str = "-sha256",
    ) -> TlsFiles:
        """A certificate with ``alternative_names`` as openssl takes them: ``IP:127.0.0.1,DNS:a``.

        ``extensions`` are further lines for openssl; with negative ``days`` it has expired.
        """
        cert, key_file = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        request, given = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        lines = [f"subjectAltName={alternative_names}"] if alternative_names else []
        given.write_text("".join(f"{line}\n" for line in [*lines, *extensions]))
        _openssl("req", *(key or _NEW_KEY), "-keyout", key_file, "-out", request, "-subj", f"/CN={name}")
        _openssl(
            "x509", "-req", "-in", request, "-CA", self.cert, "-CAkey", self.key, "-CAcreateserial",
            "-out", cert, "-days", str(days), digest, "-extfile", given,
        )  # fmt: skip
        return TlsFiles(str(cert), str(key_file), str(self.cert))

    def early(self, name: str, alternative_names: str) -> TlsFiles:
        """A certificate that is valid from tomorrow on."""
        files = self.sign(name, alternative_names)
        signed = x509.load_pem_x509_certificate(Path(files.cert_file).read_bytes())
        authority = x509.load_pem_x509_certificate(self.cert.read_bytes())
        key = serialization.load_pem_private_key(self.key.read_bytes(), None)
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        made = x509.CertificateBuilder(
            authority.subject, signed.subject, signed.public_key(), signed.serial_number + 1,
            signed.not_valid_before_utc + timedelta(days=1), signed.not_valid_after_utc + timedelta(days=1),
            list(signed.extensions),
        )  # fmt: skip
        pem = made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
        Path(files.cert_file).write_bytes(pem)
        return files

    def under(self, name: str, *extensions: str) -> Authority:
        """An authority that this one signed."""
        files = self.sign(name, "", *extensions)
        lower = object.__new__(Authority)
        lower.directory = self.directory
        lower.cert, lower.key = Path(files.cert_file), Path(files.key_file)
        return lower

    def revoked(self, *certificates: TlsFiles) -> Path:
        """The list of what this authority has revoked."""
        database, given = self.directory / "index.txt", self.directory / "ca.cnf"
        database.touch()
        given.write_text(f"[ca]\ndefault_ca=d\n[d]\ndatabase={database}\ndefault_md=sha256\n")
        shared = ("ca", "-config", given, "-cert", self.cert, "-keyfile", self.key)
        for one in certificates:
            _openssl(*shared, "-revoke", one.cert_file)
        found = self.directory / "revoked.pem"
        _openssl(*shared, "-gencrl", "-crldays", "2", "-out", found)
        return found

    def contexts(self, name: str, alternative_names: str) -> TlsContexts:
        return contexts(self.sign(name, alternative_names))


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
RSA_1024 = ("-newkey", "rsa:1024", "-nodes")


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
