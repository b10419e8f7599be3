"""Address of the broker and name of the topic, as a user writes them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click

from danube.cli.terminal import contexts
from danube.cli.terminal.arguments import Decorator, together
from danube.client.records.tokens import ENVIRONMENT_FILE
from danube.errors import ConnectionFailed, TopicNotFound

DEFAULT_URL = "danube://127.0.0.1:6660"
ENVIRONMENT_NAME = "DANUBE_SERVICE_URL"
_CONNECTING_OPTIONS = {
    "--tls-ca": (
        "DANUBE_TLS_CA",
        "FILE",
        "Authorities that sign the broker; by default those of this system.",
    ),
    "--tls-cert": ("DANUBE_TLS_CERT", "FILE", "Certificate to show to the broker."),
    "--tls-key": ("DANUBE_TLS_KEY", "FILE", "Key of that certificate."),
    "--tls-server-name": ("DANUBE_TLS_SERVER_NAME", "NAME", "Name in the broker's certificate."),
    "--token-file": (ENVIRONMENT_FILE, "FILE", "File with the token to show to the broker."),
}
_GRPC_PORTS = ("6650", "50051")
_SCHEMES = {"danube": "danube", "http": "danube", "danube+tls": "danube+tls", "https": "danube+tls"}
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://(.*)\Z", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Address:
    """A broker's URL, and where it was read from: error messages say both."""

    url: str
    origin: str


def read_address(value: str) -> str:
    """The URL meant by ``danube://host:port``, ``http://host:port`` (upstream's scripts) or ``host:port``.

    ``danube+tls://`` and ``https://`` are the same with TLS.
    """
    match = _SCHEME.match(value)
    scheme, rest = (match[1].lower(), match[2].rstrip("/")) if match else ("danube", value)
    if scheme not in _SCHEMES or not rest or "/" in rest:
        raise click.BadParameter(f"{value!r}: write danube://host:port, or danube+tls://host:port")
    return f"{_SCHEMES[scheme]}://{rest}"


def _with_origin(context: click.Context, param: click.Parameter, value: str | None) -> Address | None:
    if value is None:
        return None
    url = read_address(value)
    source = context.get_parameter_source(param.name or "")
    if source is click.core.ParameterSource.ENVIRONMENT:
        named = f"the environment variable {ENVIRONMENT_NAME}"
        return Address(url, "the context in use (`danube context list`)" if contexts.in_use() else named)
    contexts.retract(os.environ, url)
    return Address(url, "the default" if source is click.core.ParameterSource.DEFAULT else "--service-addr")


def address_option(default: str | None = DEFAULT_URL) -> Decorator:
    """Where the broker is, with which files it is reached by TLS, and which token is shown."""
    return together(
        click.option(
            "-s",
            "--service-addr",
            callback=_with_origin,
            metavar="ADDRESS",
            default=default,
            show_default=default is not None,
            envvar=ENVIRONMENT_NAME,
            help="The broker's address; danube+tls://HOST:PORT for TLS.",
        ),
        *(
            click.option(
                name,
                callback=_to_environment,
                metavar=metavar,
                envvar=variable,
                expose_value=False,
                help=text,
            )
            for name, (variable, metavar, text) in _CONNECTING_OPTIONS.items()
        ),
    )


def _to_environment(context: click.Context, param: click.Parameter, value: str | None) -> None:
    """Give an option to the client, and to the processes of this command, as its variable."""
    variable = str(param.envvar)
    former = os.environ.get(variable)
    if value is None or value == former:
        return

    def restore() -> None:
        if former is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = former

    os.environ[variable] = value
    context.find_root().call_on_close(restore)


# Which part of a list is wanted.
page_options = together(
    click.option("--prefix", default="", help="Only names that begin with it."),
    click.option("--after", default="", metavar="NAME", help="Only names behind this one."),
    click.option("--limit", type=click.IntRange(min=1), help="At most this many."),
)


def topic_name(value: str) -> str:
    """``/namespace/name``; a bare ``name`` is in /default."""
    return value if "/" in value else f"/default/{value}"


@contextmanager
def explaining(address: Address) -> Iterator[None]:
    """Add to connection errors the address that was tried, its source, and what to check."""
    try:
        yield
    except ConnectionFailed as error:
        origin = f"the address came from {address.origin}"
        error.why = f"{error.why}; {origin}" if error.why else origin
        if address.url.rpartition(":")[2] in _GRPC_PORTS:
            error.hint = "this is a gRPC port; the native protocol's is 6660"
        elif not error.hint:
            error.hint = "is the broker running? `danube status`, `danube start`"
        error.what = f"cannot reach the broker at {address.url}"
        raise


def suggest_topic(error: TopicNotFound, names: list[str]) -> None:
    """Put the topic that was probably meant into the error's hint."""
    from difflib import get_close_matches

    words = (word.strip("'\",:;.") for word in error.what.split())
    asked = str(error.facts.get("topic") or next((word for word in words if word.startswith("/")), ""))
    near = get_close_matches(asked, names, n=1, cutoff=0.6) if asked else []
    if near:
        error.hint = f"did you mean {near[0]}?"
