"""One TLS socket of the blocking client, which is used like a plain one that does not block."""

from __future__ import annotations

import socket
import ssl
import time
from typing import TYPE_CHECKING, Final

from danube.host.polling import READABLE, WRITABLE, make_poller

if TYPE_CHECKING:
    from danube.client.machine.tls import ClientTls

_AGAIN: Final = (ssl.SSLWantReadError, ssl.SSLWantWriteError)


def encrypted(plain: socket.socket, tls: ClientTls, host: str, timeout_s: float) -> EncryptedSocket:
    """Do the handshake on a connected socket that does not block; raises OSError and TimeoutError."""
    deadline = time.monotonic() + timeout_s
    secure = tls.context().wrap_socket(
        plain, server_hostname=tls.server_name(host), do_handshake_on_connect=False
    )
    try:
        while True:
            try:
                secure.do_handshake()
                break
            except _AGAIN as error:
                reading = isinstance(error, ssl.SSLWantReadError)
            poller = make_poller()
            poller.register(secure, READABLE if reading else WRITABLE)
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not poller.poll(int(left_s * 1000) + 1):
                raise TimeoutError("the TLS handshake took too long")
        tls.check(secure, host)
    except BaseException:
        secure.close()
        raise
    return EncryptedSocket(secure)


class EncryptedSocket:
    """Calls that would block raise BlockingIOError, as those of a plain socket do."""

    def __init__(self, secure: ssl.SSLSocket) -> None:
        self._secure = secure
        self.fileno = secure.fileno
        self.pending = secure.pending  # bytes that are decrypted and not read
        self.shutdown = secure.shutdown
        self.close = secure.close

    def recv_into(self, room: memoryview) -> int:
        """Read as many records as are there and fit; 0 at the end."""
        count = 0
        while count < len(room):
            try:
                got = self._secure.recv_into(room[count:])
            except _AGAIN:
                if count:
                    break
                raise BlockingIOError from None
            except OSError:
                if count:  # the next call raises it
                    break
                raise
            if not got:
                break
            count += got
        return count

    def send(self, data: memoryview) -> int:
        """Send a part; BlockingIOError if none is taken now."""
        try:
            return self._secure.send(data)
        except _AGAIN:
            raise BlockingIOError from None
