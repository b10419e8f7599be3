"""TLS of a client: its options, the context that follows their files, and its failures in a user's words.

The ssl module is imported when a connection wants it, so that programs without TLS do without.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from danube.errors import ConnectionFailed, InvalidArgument

if TYPE_CHECKING:
    import ssl

    from danube.host.tls import Renewed

SCHEME: Final = "danube+tls://"
_ENVIRONMENT: Final = {
    "ca_file": "DANUBE_TLS_CA",
    "cert_file": "DANUBE_TLS_CERT",
    "key_file": "DANUBE_TLS_KEY",
    "server_name": "DANUBE_TLS_SERVER_NAME",
}
_AUTHORITY: Final = "give the authority that signed it: tls=danube.TlsOptions(ca_file=...), or DANUBE_TLS_CA"
_NAME: Final = (
    "dial a name of the certificate, or give it: TlsOptions(server_name=...), DANUBE_TLS_SERVER_NAME"
)
_DATES: Final = "the broker needs a new certificate; check the clocks of both hosts too"
# Codes of X509_verify_cert_error_string(3).
_VERDICTS: Final = {
    9: ("its certificate is not valid yet", _DATES),
    10: ("its certificate has expired", _DATES),
    23: ("its certificate was revoked", "the broker needs a new certificate"),
    62: ("its certificate is for another name", _NAME),
    64: ("its certificate is for another address", _NAME),
    **dict.fromkeys(
        (2, 18, 19, 20, 21), ("no authority that is known here signed its certificate", _AUTHORITY)
    ),
}
_PLAIN: Final = (
    "that port does not speak TLS",
    "is this the port, and does the broker have tls.cert_file? Without TLS the address is danube://",
)
_CERTIFICATE: Final = (
    "the broker does not accept this client's certificate",
    "it needs one that an authority of the broker's tls.ca_file signed, in date and not revoked",
)
_NONE_SHOWN: Final = (
    "the broker ended it at the TLS handshake, as it does where it requires a client certificate",
    "show one: tls=danube.TlsOptions(cert_file=..., key_file=...), or DANUBE_TLS_CERT and DANUBE_TLS_KEY",
)
_NOT_TAKEN: Final = (
    "the broker ended it at the TLS handshake, as it does where it does not accept a client's certificate",
    _CERTIFICATE[1],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsOptions:
    """Files and name for TLS, all optional.

    ``ca_file``: the authorities that sign brokers; without it those of this system.  ``cert_file`` and
    ``key_file``: a certificate that this client shows.  ``server_name``: the name in the broker's
    certificate, if it is not the one that is dialled.
    """

    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    server_name: str = ""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] | None = None) -> TlsOptions:
        """Return the options of DANUBE_TLS_CA, _CERT, _KEY and _SERVER_NAME."""
        environ = os.environ if environ is None else environ
        return cls(**{field: environ.get(name, "") for field, name in _ENVIRONMENT.items()})


class ClientTls:
    """TLS of one client to any broker of its cluster."""

    def __init__(self, options: TlsOptions) -> None:
        if options.key_file and not options.cert_file:
            raise InvalidArgument("a key without a certificate", hint="give cert_file beside key_file")
        self._options = options
        self._renewed: Renewed | None = None

    def context(self) -> ssl.SSLContext:
        """Return the newest context; raises ConfigInvalid if the files could never be loaded."""
        from danube.host.tls import NATIVE, Renewed, TlsFiles, client_context

        if self._renewed is None:
            options = self._options
            files = TlsFiles(options.cert_file, options.key_file, options.ca_file)
            self._renewed = Renewed(files, lambda files: client_context(files, [NATIVE]))
        else:
            self._renewed.look(at_once=True)
        return self._renewed.context

    def server_name(self, host: str) -> str:
        """Return the name that the certificate of the broker at ``host`` must have."""
        return self._options.server_name or host

    def check(self, ssl_object: ssl.SSLObject | ssl.SSLSocket, host: str) -> None:
        """Check more than OpenSSL did; raises ConnectionFailed."""

    def failed(self, address: object, error: BaseException) -> ConnectionFailed | None:
        """Return the error of a handshake that failed for a reason of TLS, else None."""
        found = explained(error) or (self.ended_early() if _ended(error) else None)
        if found is None:
            return None
        what = f"no TLS connection to the broker at {address}"
        return ConnectionFailed(what, why=found[0], hint=found[1], address=str(address))

    def ended_early(self) -> tuple[str, str]:
        """Return why a broker ends a connection at the handshake, and a hint."""
        return _NOT_TAKEN if self._options.cert_file else _NONE_SHOWN


def _ended(error: BaseException) -> bool:
    """Return whether the other side ended a connection in the handshake."""
    import ssl

    return isinstance(
        error, ssl.SSLEOFError | ConnectionResetError | ConnectionAbortedError | BrokenPipeError
    )


def explained(error: BaseException | None) -> tuple[str, str] | None:
    """Return why a TLS connection failed, and a hint; None if that is none of TLS."""
    if not isinstance(error, OSError) or "ssl" not in sys.modules:
        return None
    import ssl

    if isinstance(error, ssl.SSLCertVerificationError):
        found = _VERDICTS.get(error.verify_code)
        return found or (f"its certificate is not valid: {error.verify_message}", "it needs another one")
    if not isinstance(error, ssl.SSLError) or isinstance(error, ssl.SSLEOFError):
        return None
    reason = str(error.reason or error)
    if reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE", "PACKET_LENGTH_TOO_LONG"):
        return _PLAIN
    if "CERTIFICATE_REQUIRED" in reason:
        return _NONE_SHOWN
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        return _CERTIFICATE
    return f"TLS failed: {reason.lower().replace('_', ' ')}", "both sides speak TLS 1.2 or 1.3"


def tls_of(url: str, options: TlsOptions | None) -> tuple[str, ClientTls | None]:
    """Return the URL with the plain scheme, and the TLS that it or ``options`` ask for.

    Options ask for TLS, whatever the URL says; without them those of the environment hold.
    """
    plain = "danube://" + url.removeprefix(SCHEME) if url.startswith(SCHEME) else url
    if options is None and plain is url:
        return plain, None
    return plain, ClientTls(TlsOptions.from_environment() if options is None else options)
