"""Contexts: a broker's address and what a client shows it, under a name.

A context is a set of environment variables, those that the client itself reads, so that every command and
every process that a command starts follows it.  What the user said goes before: with another address, by
flag or variable, nothing of a context holds, because its token is for its own broker.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Final

import msgspec

from danube.cli.terminal.private_file import put_file
from danube.errors import ConfigInvalid, InvalidArgument, NotFound

CHOICE: Final = "DANUBE_CONTEXT"
URL: Final = "DANUBE_SERVICE_URL"
VARIABLES: Final = {
    "url": URL,
    "token_file": "DANUBE_TOKEN_FILE",
    "tls_ca": "DANUBE_TLS_CA",
    "tls_cert": "DANUBE_TLS_CERT",
    "tls_key": "DANUBE_TLS_KEY",
    "tls_server_name": "DANUBE_TLS_SERVER_NAME",
}
_BYTES_MAX: Final = 1 << 20
_NAME_CHARACTERS_MAX: Final = 64

_in_use: dict[str, str] = {}  # by variable: what a context has set in this process


class Contexts(msgspec.Struct):
    """The content of the file; ``current`` is "" where none is chosen."""

    current: str
    by_name: dict[str, dict[str, str]] = msgspec.field(name="contexts")

    def get(self, name: str) -> dict[str, str]:
        """Return the fields of a context; NotFound with a near name."""
        if name not in self.by_name:
            from difflib import get_close_matches

            near = get_close_matches(name, self.by_name, 1)
            hint = f"did you mean {near[0]}?" if near else "`danube context add` makes one"
            raise NotFound(f"there is no context {name[:80]!r}", hint=hint)
        return self.by_name[name]


def folder(environ: Mapping[str, str]) -> Path:
    """The folder of contexts: ``$XDG_CONFIG_HOME/danube``, else ``~/.config/danube``."""
    base = environ.get("XDG_CONFIG_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "danube"
    return Path(environ.get("HOME") or os.path.expanduser("~")) / ".config" / "danube"


def file_of(environ: Mapping[str, str]) -> Path:
    return folder(environ) / "contexts.json"


def check_name(name: str) -> None:
    """Raise InvalidArgument for a name that cannot be the name of a file."""
    plain = name.replace("-", "").replace("_", "").replace(".", "").isalnum() and name.isascii()
    if not plain or name.startswith(".") or len(name) > _NAME_CHARACTERS_MAX:
        raise InvalidArgument(
            f"{name[:80]!r} cannot be the name of a context", hint="letters, digits and - _ . are taken"
        )


def read(environ: Mapping[str, str]) -> Contexts:
    """Read all contexts; none where there is no file, or in a home that is not this user's.

    ConfigInvalid for one that cannot be read.
    """
    path = file_of(environ)
    try:
        with path.open("rb") as file:
            found = msgspec.json.decode(file.read(_BYTES_MAX), type=Contexts)
        if any(name not in VARIABLES for one in found.by_name.values() for name in one):
            raise ValueError("it has fields that this version does not know")
        return found
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return Contexts("", {})
    except OSError as error:
        raise ConfigInvalid(f"{path} cannot be read", why=error.strerror or str(error)) from None
    except (ValueError, msgspec.MsgspecError, RecursionError) as error:
        raise ConfigInvalid(f"{path} is no file of contexts", why=str(error), hint="remove it") from None


def write(environ: Mapping[str, str], contexts: Contexts) -> None:
    """Replace the file, for its owner's eyes alone."""
    text = json.dumps({"current": contexts.current, "contexts": contexts.by_name}, indent=2)
    put_file(file_of(environ), f"{text}\n".encode())


def apply(environ: MutableMapping[str, str], name: str | None) -> None:
    """Set the variables of the chosen context, or of the current one; those that are set stay."""
    _in_use.clear()
    chosen = name or environ.get(CHOICE, "")
    contexts = read(environ)
    if not (chosen or contexts.current):
        return
    fields = contexts.get(chosen or contexts.current)
    if not name and environ.get(URL) not in (None, fields["url"]):
        return  # the user names another broker, which this context's token is not for
    told = bool(environ.get("DANUBE_TOKEN"))
    for key, variable in VARIABLES.items():
        value = "" if told and key == "token_file" else fields.get(key, "")
        overridden = key != "url" or not name
        if value and not (overridden and environ.get(variable)):
            environ[variable] = _in_use[variable] = value


def retract(environ: MutableMapping[str, str], url: str) -> None:
    """Take back what a context has set, if the address is not that of its broker."""
    if _in_use and url != _in_use.get(URL, environ.get(URL)):
        for variable, value in _in_use.items():
            if environ.get(variable) == value:
                del environ[variable]
        _in_use.clear()


def in_use() -> bool:
    """Whether the address of this command came from a context."""
    return URL in _in_use
