"""Credentials of a store: their sources, and reading them again after a renewal.

The first source that names any wins: the keys of the configuration, their files, the profile that is
asked for, ``AWS_ACCESS_KEY_ID`` and its companions, the default profile.  Files are looked at before
each use and read again when they changed, so credentials that expire are renewed without a restart.

No credential is ever part of an error: a message names the source, never its content.
"""

from __future__ import annotations

import configparser
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from danube import limits
from danube.config.sections import HIDDEN, StorageSettings
from danube.errors import StoreRefused
from danube.host import files

FILE_BYTES_MAX: Final = 64 * limits.KIB
DEFAULT_PROFILE: Final = "default"


@dataclass(frozen=True, slots=True)
class Credentials:
    """A key pair; ``session_token`` comes with temporary ones."""

    access_key: str
    secret_key: str
    session_token: str = ""

    def __repr__(self) -> str:
        return f"Credentials{HIDDEN}"


class CredentialSource:
    """The credentials of one store; ``current()`` is cheap and may be called for every request."""

    def __init__(self, settings: StorageSettings, environ: Mapping[str, str] | None = None) -> None:
        self._settings = settings
        self._environ = os.environ if environ is None else environ
        self._known: dict[Path, tuple[tuple[int, int, int], bytes]] = {}

    def current(self) -> Credentials | None:
        """None when no source has any; StoreRefused when one is asked for and cannot be used."""
        settings = self._settings
        if settings.anonymous:
            return None
        if settings.access_key or settings.access_key_file or settings.secret_key or settings.secret_key_file:
            return self._configured()
        if settings.profile:
            return self._profile(settings.profile, wanted=True)
        return self._from_environment() or self._profile(
            self._environ.get("AWS_PROFILE") or DEFAULT_PROFILE, wanted="AWS_PROFILE" in self._environ
        )

    def region(self) -> str:
        """As configured, else of ``AWS_REGION`` and its like, else of the profile, else empty."""
        names = ("AWS_REGION", "AWS_DEFAULT_REGION")
        given = self._settings.region or next(
            (self._environ[name] for name in names if self._environ.get(name)), ""
        )
        if given:
            return given
        profile = self._settings.profile or self._environ.get("AWS_PROFILE") or DEFAULT_PROFILE
        for path, prefix in ((self._config_file(), "profile "), (self._credentials_file(), "")):
            section = self._sections(path, wanted=False)
            for name in (prefix + profile, profile):
                if name in section and section[name].get("region"):
                    return section[name]["region"]
        return ""

    def text_of(self, key: str) -> str:
        """``access_key``, ``secret_key`` or ``session_token`` as given, else from its file, else empty."""
        given, file = getattr(self._settings, key), getattr(self._settings, f"{key}_file")
        if given or not file:
            return str(given.reveal())
        return (
            self._read(Path(os.path.expanduser(file)), f"storage.{key}_file")
            .decode("utf-8", "replace")
            .strip()
        )

    def _configured(self) -> Credentials:
        access, secret = self.text_of("access_key"), self.text_of("secret_key")
        for key, text in (("access_key", access), ("secret_key", secret)):
            if not text:
                raise StoreRefused(
                    f"storage.{key} is not set",
                    why="an access key and a secret key belong together",
                    hint=f"set storage.{key} or storage.{key}_file",
                )
        return Credentials(access, secret, self.text_of("session_token"))

    def _from_environment(self) -> Credentials | None:
        access, secret = (
            self._environ.get(name, "") for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        )
        if not access or not secret:
            return None
        return Credentials(access, secret, self._environ.get("AWS_SESSION_TOKEN", ""))

    def _profile(self, name: str, *, wanted: bool) -> Credentials | None:
        path = self._credentials_file()
        found = self._sections(path, wanted=wanted).get(name, {})
        access, secret = found.get("aws_access_key_id", ""), found.get("aws_secret_access_key", "")
        if access and secret:
            return Credentials(access, secret, found.get("aws_session_token", ""))
        if wanted:
            raise StoreRefused(
                f"profile {name!r} has no credentials",
                why=f"{path} does not name aws_access_key_id and aws_secret_access_key for it",
                hint="check storage.profile",
            )
        return None

    def _credentials_file(self) -> Path:
        return self._file("AWS_SHARED_CREDENTIALS_FILE", "credentials")

    def _config_file(self) -> Path:
        return self._file("AWS_CONFIG_FILE", "config")

    def _file(self, variable: str, name: str) -> Path:
        """Return the file that the environment names, else the one in the user's home, else an empty one."""
        named = self._environ.get(variable) or files.user_directory("", f".aws/{name}", self._environ)
        return Path(named or os.devnull)

    def _sections(self, path: Path, *, wanted: bool) -> Mapping[str, Mapping[str, str]]:
        if not wanted and not path.is_file():
            return {}
        found = _parse(self._read(path, "profile file").decode("utf-8", "replace"))
        if found is None:
            raise StoreRefused(f"{path} is not a file of profiles", hint="check its syntax")
        return found

    def _read(self, path: Path, what: str) -> bytes:
        """Content of a small file, read once per change of it."""
        try:
            status = path.stat()
            stamp = (status.st_ino, status.st_mtime_ns, status.st_size)
            known = self._known.get(path)
            if known is None or known[0] != stamp:
                known = (stamp, files.read_bounded(path, FILE_BYTES_MAX))
                self._known[path] = known
        except OSError as error:
            raise StoreRefused(
                f"{what} {path} cannot be read",
                why=error.strerror or str(error),
                hint="check its permissions",
            ) from None
        return known[1]


def _parse(text: str) -> Mapping[str, Mapping[str, str]] | None:
    """Sections of an AWS file; None for another syntax, whose complaint would quote the line."""
    parser = configparser.RawConfigParser(default_section="")
    try:
        parser.read_string(text)
    except configparser.Error:
        return None
    return {name: dict(parser[name]) for name in parser.sections()}
