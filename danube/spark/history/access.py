"""Access of a job to a broker: a token, certificates; from its options, else from the environment.

The driver reads all of it, and tasks get it with their plan, pickled.  So executors need no environment of
their own, but files must be there on each host.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from danube.client.blocking.client import Client, connect
from danube.client.machine.tls import SCHEME, ClientTls, TlsOptions
from danube.client.records.tokens import ENVIRONMENT_FILE, ENVIRONMENT_TEXT, token_source
from danube.errors import InvalidArgument

_TLS: Final = {
    "tlsCa": "ca_file",
    "tlsCert": "cert_file",
    "tlsKey": "key_file",
    "tlsServerName": "server_name",
}
ACCESS_READERS: Final = dict.fromkeys(("token", "tokenFile", *_TLS), str.strip)


class BrokerAccess(msgspec.Struct, frozen=True):
    """``tls`` None: as the URL and the environment say.  The token is never shown."""

    token: str = ""
    token_file: str = ""
    tls: TlsOptions | None = None

    def connect(self, url: str, **more: Any) -> Client:
        """A client that is not open yet; ``more`` as for :func:`danube.sync.connect`."""
        return connect(url, token=self.token, token_file=self.token_file or None, tls=self.tls, **more)

    def __repr__(self) -> str:
        shown = "token=..., " if self.token else ""
        return f"BrokerAccess({shown}token_file={self.token_file!r}, tls={self.tls!r})"


ENVIRONMENT: Final = BrokerAccess()  # whatever the environment of the process says


def access_of(url: str, values: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> BrokerAccess:
    """The access that options ask for; raises InvalidArgument if they contradict each other.

    Without a token among them that of the environment holds, and so do its files where the URL asks for TLS
    and no option names any.
    """
    given = {name: values[name] for name in ACCESS_READERS if values.get(name)}
    if given and not url:
        raise InvalidArgument(f"there is an option {next(iter(given))} and no broker", hint="name the broker")
    token, token_file = given.get("token", ""), given.get("tokenFile", "")
    if token and token_file:
        raise InvalidArgument("options token and tokenFile exclude each other", hint="keep tokenFile")
    token_source(token)  # refuses a text that can be no token
    if not token and not token_file:
        token_file = environ.get(ENVIRONMENT_FILE, "")
        token = "" if token_file else environ.get(ENVIRONMENT_TEXT, "")
    tls = TlsOptions(**{field: given[name] for name, field in _TLS.items() if name in given})
    if tls == TlsOptions() and url.startswith(SCHEME):
        tls = TlsOptions.from_environment(environ)
    elif tls == TlsOptions():
        return BrokerAccess(token, token_file)
    ClientTls(tls)  # refuses a key without its certificate
    return BrokerAccess(token, token_file, tls)
