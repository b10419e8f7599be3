"""Where a client takes its token from: a text, a file, a function, or the environment.

It is asked at each greeting and whenever the broker says that the token ends soon.  So a file that is
written anew, or a function that fetches a token, is enough to stay connected.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from danube.errors import ConnectionFailed, DanubeError, InvalidArgument

TOKEN_BYTES_MAX = 8 * 1024
ENVIRONMENT_TEXT = "DANUBE_TOKEN"
ENVIRONMENT_FILE = "DANUBE_TOKEN_FILE"

Token = str | Callable[[], str]
TokenSource = Callable[[], str]


def token_source(token: Token = "", token_file: str | os.PathLike[str] | None = None) -> TokenSource:
    """Return a function that gives the token of now; "" where there is none at all.

    What the program says goes before the environment.
    """
    if token and token_file:
        raise InvalidArgument("token and token_file are both given", hint="give one of them")
    if callable(token):
        return partial(_asked, token)
    if not token and not token_file:
        token_file = os.environ.get(ENVIRONMENT_FILE)
        token = "" if token_file else os.environ.get(ENVIRONMENT_TEXT, "")
    if token or not token_file:
        text = _checked(token.strip(), "the token")
        return lambda: text
    path = Path(token_file)
    return lambda: _read(path)


def _asked(token: Callable[[], str]) -> str:
    """Ask the program's function; what it raises is a reason to try again, as the broker's absence is."""
    try:
        text = token()
    except DanubeError:
        raise
    except Exception as error:
        raise ConnectionFailed("no token could be had", why=repr(error)) from error
    return _checked(text.strip(), "the token")


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(TOKEN_BYTES_MAX + 2)
    except OSError as error:
        raise InvalidArgument(
            f"the token file {path} cannot be read",
            why=error.strerror or str(error),
            hint=f"check token_file, or {ENVIRONMENT_FILE}",
        ) from None
    return _checked(content.decode("ascii", "replace").strip(), str(path))


def _checked(text: str, what: str) -> str:
    """Return the text; InvalidArgument, which does not repeat it, where it can be no token."""
    if len(text) > TOKEN_BYTES_MAX or not text.isascii() or not text.isprintable():
        raise InvalidArgument(
            f"{what} holds no token", why=f"a token is up to {TOKEN_BYTES_MAX} ASCII letters"
        )
    return text
