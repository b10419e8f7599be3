"""Why a store's certificate was refused, in words: from OpenSSL's codes (S3) and rustls' names (obstore)."""

from __future__ import annotations

import re
from typing import Final, NamedTuple


class TlsFailure(NamedTuple):
    """Reason of a failure, and an operator's way out of it."""

    why: str
    hint: str


OF_ANY_KIND: Final = TlsFailure("TLS failed", "check storage.endpoint and SSL_CERT_FILE")
_NAME: Final = TlsFailure(
    "its certificate is for another name", "name the store in storage.endpoint as its certificate does"
)
_AUTHORITY: Final = TlsFailure(
    "its certificate is of an authority that is not trusted here",
    "name the file of the store's authority in SSL_CERT_FILE, and start again",
)
_TIME: Final = "renew the store's certificate, and check this host's clock"
_EXPIRED: Final = TlsFailure("its certificate has expired", _TIME)
_EARLY: Final = TlsFailure("its certificate is not valid yet", _TIME)

# X509_V_ERR_... of OpenSSL's x509_vfy.h
_BY_OPENSSL_CODE: Final = {
    9: _EARLY, 10: _EXPIRED, 62: _NAME, 64: _NAME,
    18: _AUTHORITY, 19: _AUTHORITY, 20: _AUTHORITY, 21: _AUTHORITY,
}  # fmt: skip
_RUSTLS: Final = re.compile(r"InvalidCertificate\(\s*(\w+)")
_BY_RUSTLS_WORD: Final = {
    "NotValidForName": _NAME, "NotValidForNameContext": _NAME, "UnknownIssuer": _AUTHORITY,
    "Expired": _EXPIRED, "ExpiredContext": _EXPIRED, "NotValidYet": _EARLY, "NotValidYetContext": _EARLY,
}  # fmt: skip


def openssl_failure(error: object) -> TlsFailure:
    """The failure that an exception of a handshake stands for."""
    return _BY_OPENSSL_CODE.get(getattr(error, "verify_code", 0), OF_ANY_KIND)


def rustls_failure(text: str) -> TlsFailure | None:
    """The failure that a text of obstore tells of; None if it tells of no certificate."""
    found = _RUSTLS.search(text)
    return None if found is None else _BY_RUSTLS_WORD.get(found[1], OF_ANY_KIND)
