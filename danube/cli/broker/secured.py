"""``danube security init`` and ``danube start --secure``: keys, certificates, settings, the first token."""

from __future__ import annotations

import secrets
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from danube.cli.broker.here import Here, config_file_option, data_dir_option, pass_here
from danube.cli.terminal.output import line, note
from danube.cli.terminal.private_file import put_file
from danube.errors import ConfigInvalid, InvalidArgument

if TYPE_CHECKING:
    from danube.config.loading import BrokerConfig

FOLDER: Final = "security"
SETTINGS: Final = "danube.yml"
SIGNING_KEY: Final = "signing.key"
ADMIN_TOKEN: Final = "admin.token"  # noqa: S105 - the name of a file
KEY_ID: Final = "1"
_KEY_BYTES: Final = 32


@click.command(short_help="Make keys, certificates, a configuration and the first token.")
@data_dir_option("The broker's; default as for start.")
@click.option(
    "--host", "hosts", multiple=True, help="Name or address of the broker, besides this host's own."
)
@config_file_option
@pass_here
def init(here: Here, hosts: tuple[str, ...]) -> None:
    """Make the folder `security` of a data directory (0700), by which a broker asks everybody who they are.

    \b
    signing.key      signs and checks tokens (0600)
    authority.*      signs certificates; broker.* is the broker's, for TLS on every port
    danube.yml       the configuration that names them
    admin.token      the first token, for 24 hours: it makes an administrator and nothing else (0600)

    The first token is refused once an administrator has come.  What is there is kept; the first token is made
    anew each time, because who reads the folder may sign anyway: so an owner without administrator gets back.
    """
    folder = prepare(here.data_dir, hosts)
    _write_token(folder)
    note("start the broker, make an administrator, and give a service account a right and a token:")
    line(f"danube start --secure --data-dir {shlex.quote(str(here.data_dir))}")
    for text in next_lines(folder, here.config.server.native_port):
        line(text)


def prepare(data_dir: Path, hosts: Sequence[str] = ()) -> Path:
    """Make what is missing of the folder; the first time the first token as well."""
    from danube.cli.terminal.certificate_folder import make_broker

    folder = data_dir / FOLDER
    if any(letter in str(folder) for letter in " ,"):
        raise InvalidArgument(
            f"{folder} cannot hold keys", why="auth.jwt.keys takes no path with blanks or commas",
            hint="choose another --data-dir",
        )  # fmt: skip
    make_broker(folder, hosts)
    settings, key = folder / SETTINGS, folder / SIGNING_KEY
    if not settings.exists():
        put_file(settings, _settings(folder).encode())
    if not key.exists():
        put_file(key, f"{secrets.token_hex(_KEY_BYTES)}\n".encode())
        _write_token(folder)
    return folder


def next_lines(folder: Path, port: int) -> list[str]:
    """Return the commands that make an administrator, and as that one give a service account a right."""
    return [
        f"danube context add here --url danube+tls://localhost:{port}"
        f" --tls-ca {shlex.quote(str(folder / 'authority.pem'))}"
        f" --token-file {shlex.quote(str(folder / ADMIN_TOKEN))} --use",
        "danube security bindings create admins user:ops --role admin --on cluster",
        "danube security tokens issue user:ops --ttl 30d --file ops.token",
        "danube login here < ops.token",
        "danube security roles create writer Produce Lookup",
        "danube security bindings create app-writes service_account:app --role writer --on /default",
        "danube security tokens issue service_account:app --file app.token",
    ]


def _write_token(folder: Path) -> None:
    put_file(folder / ADMIN_TOKEN, f"{_sign(folder)}\n".encode())


def refuse_forgotten(config: BrokerConfig) -> None:
    """Raise ConfigInvalid where a data directory that was secured would be served to everybody."""
    key = config.data_dir / FOLDER / SIGNING_KEY
    if not config.asks_clients and not config.server.insecure and key.exists():
        raise ConfigInvalid(
            f"{config.data_dir} was secured, and nobody would be asked who they are",
            why=f"{key} is there, and auth.mode is none",
            hint="start it with --secure, or say that it is meant: --insecure",
        )


def _quoted(path: Path) -> str:
    """Return a path for YAML, where `: ` and ` #` of plain text have a meaning."""
    return "'" + str(path).replace("'", "''") + "'"


def _settings(folder: Path) -> str:
    return "\n".join(
        (
            "# Every client shows a token, and every port speaks TLS.",
            "auth:",
            "  mode: token",
            "  jwt:",
            "    keys:",
            f"      - {{kid: '{KEY_ID}', alg: HS256, file: {_quoted(folder / 'signing.key')}, use: sign}}",
            "tls:",
            f"  cert_file: {_quoted(folder / 'broker.pem')}",
            f"  key_file: {_quoted(folder / 'broker.key')}",
            "audit:",
            "  mode: on",
            "",
        )
    )


def _sign(folder: Path) -> str:
    """Return a first token: the broker takes it for nothing but making an administrator.

    The key that signs now makes it: that of the first start may have been exchanged.
    """
    from danube.config.auth import keys_of
    from danube.config.loading import load
    from danube.core.security.principals import BOOTSTRAP_TTL_S, Principal
    from danube.host.clock import wall_us
    from danube.host.credentials import Credentials

    auth = load(folder / SETTINGS, {}, {"data_dir": folder.parent}).config.auth
    credentials = Credentials(keys_of(auth, short_allowed=False))
    who, token_id = Principal("user", "bootstrap"), secrets.token_hex(16)
    return credentials.sign(who, BOOTSTRAP_TTL_S, wall_us(), jti=token_id, bootstrap=True)
