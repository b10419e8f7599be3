"""``danube context`` and ``danube login``: brokers by name, and the tokens that they are shown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Final

import click

from danube.cli.terminal import contexts
from danube.cli.terminal.addressing import Address, explaining, read_address
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import line, note, output_option, show
from danube.cli.terminal.private_file import put_file
from danube.cli.terminal.services import Services
from danube.errors import InvalidArgument

COLUMNS: Final = ("current", "name", "url", "token_file", "tls_ca", "tls_cert")
_FILES: Final = ("token_file", "tls_ca", "tls_cert", "tls_key")
_TOKEN_BYTES_MAX: Final = 8 * 1024
_name = click.argument("name", metavar="NAME")


@click.group(cls=LazyGroup)
def context() -> None:
    """Keep the addresses of brokers, and the files that they are shown, under names.

    \b
    danube context add prod --url danube+tls://broker.example:6660 --tls-ca authority.pem
    danube topics list                     asks the broker of the context in use
    danube --context test topics list      another one, for one command

    --service-addr and DANUBE_SERVICE_URL go before; with another address nothing of a context holds.
    """


@context.command("add", short_help="Add a context, or change one.")
@_name
@click.option("--url", required=True, metavar="ADDRESS", help="danube://host:port or danube+tls://host:port.")
@click.option("--token-file", type=click.Path(path_type=Path), help="Holds a token; read at each connection.")
@click.option("--tls-ca", type=click.Path(path_type=Path), help="The authority that signed the broker.")
@click.option("--tls-cert", type=click.Path(path_type=Path), help="A certificate to show.")
@click.option("--tls-key", type=click.Path(path_type=Path), help="Its key.")
@click.option("--tls-server-name", help="The name in the broker's certificate, if it is not the one dialled.")
@click.option("--use", "chosen", is_flag=True, help="Use it from now on, as the first one is anyway.")
@click.pass_obj
def add(services: Services, /, name: str, url: str, chosen: bool, **given: Any) -> None:
    """Store where a broker is and which files belong to it.  The files stay where they are."""
    contexts.check_name(name)
    if bool(given["tls_cert"]) != bool(given["tls_key"]):
        raise InvalidArgument("a certificate goes with its key", hint="give --tls-cert and --tls-key")
    known = contexts.read(services.environ)
    fields = {"url": read_address(url)}
    for key, value in given.items():
        if value:
            fields[key] = str(Path(value).absolute()) if key in _FILES else str(value)
    known.by_name[name] = fields
    if chosen or not known.current:
        known.current = name
    contexts.write(services.environ, known)
    for key in _FILES:
        if key in fields and not Path(fields[key]).exists():
            note(f"{fields[key]} is not there yet")
    line(f"context {name}{' is in use' if known.current == name else ''}")


@context.command("use", short_help="Use a context from now on.")
@_name
@click.pass_obj
def use(services: Services, /, name: str) -> None:
    """Use this context wherever no address is given."""
    known = contexts.read(services.environ)
    known.get(name)
    known.current = name
    contexts.write(services.environ, known)
    line(f"context {name} is in use")


@context.command("list", short_help="List the contexts.")
@output_option()
@click.pass_obj
def list_contexts(services: Services, /, output: str) -> None:
    """List names, addresses and files."""
    known = contexts.read(services.environ)
    rows = [
        {"current": name == known.current, "name": name, **one} for name, one in sorted(known.by_name.items())
    ]
    show(rows, output, COLUMNS)


@context.command("delete", short_help="Delete a context.")
@_name
@click.pass_obj
def delete(services: Services, /, name: str) -> None:
    """Forget a context, and the token that `danube login` stored for it."""
    known = contexts.read(services.environ)
    known.get(name)
    del known.by_name[name]
    known.current = "" if known.current == name else known.current
    contexts.write(services.environ, known)
    _token_file(services, name).unlink(missing_ok=True)
    line(f"context {name} deleted")


def _token_file(services: Services, name: str) -> Path:
    return contexts.folder(services.environ) / "tokens" / name


@click.command(short_help="Store a token for the broker of a context.")
@click.argument("name", metavar="[CONTEXT]", required=False)
@click.option("--unchecked", is_flag=True, help="Store it without asking the broker.")
@click.pass_obj
def login(services: Services, /, name: str | None, unchecked: bool) -> None:
    """Read a token from standard input or a prompt, try it at the broker, and store it (mode 0600).

    \b
    danube login                           the context in use
    danube login prod < token

    A token or an API key will do.  It is given in no flag, because every process of a host can read flags.
    """
    known = contexts.read(services.environ)
    name = name or known.current
    if not name:
        raise InvalidArgument("no context is in use", hint="name one, or make it with `danube context add`")
    fields = known.get(name)
    token = _read_token(services)
    if not unchecked:
        _try(services, fields, token)
    path = _token_file(services, name)
    put_file(path, f"{token}\n".encode())
    fields["token_file"] = str(path)
    contexts.write(services.environ, known)
    line(f"the token for context {name} is in {path}")


def _read_token(services: Services) -> str:
    if services.can_ask():
        text = click.prompt("Token", hide_input=True, err=True)
    else:
        text = sys.stdin.read(_TOKEN_BYTES_MAX + 2)
    token = str(text).strip()
    if not token or len(token) > _TOKEN_BYTES_MAX or not token.isascii() or not token.isprintable():
        raise InvalidArgument(
            "that is no token", why=f"a token is up to {_TOKEN_BYTES_MAX} ASCII letters on one line"
        )
    return token


def _try(services: Services, fields: dict[str, str], token: str) -> None:
    """Connect with the token; its refusal is raised, and nothing is stored."""
    from danube.client.machine.tls import TlsOptions

    tls = TlsOptions(
        ca_file=fields.get("tls_ca", ""), cert_file=fields.get("tls_cert", ""),
        key_file=fields.get("tls_key", ""), server_name=fields.get("tls_server_name", ""),
    )  # fmt: skip
    options: dict[str, Any] = {"tls": tls} if fields["url"].startswith("danube+tls:") else {}
    with (
        explaining(Address(fields["url"], "the context")),
        services.connect(fields["url"], token=token, **options),
    ):
        pass
