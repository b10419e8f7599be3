"""A folder of certificates: an authority and what it signs; what is there is kept."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from danube.cli.terminal.private_file import put_file, read_file
from danube.errors import InvalidArgument, NotFound, StorageFailed
from danube.host import files

if TYPE_CHECKING:
    from danube.host.certificates import Facts, Pair, Wanted

AUTHORITY_DAYS: Final = 3_650
LEAF_DAYS: Final = 365
LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
_OPEN_MODE: Final = 0o644


def own_hosts(hosts: Sequence[str]) -> list[str]:
    """Return the names and addresses of this host, and ``hosts``."""
    return [*dict.fromkeys([*LOOPBACK, socket.gethostname(), *hosts])]


def make_broker(directory: Path, hosts: Sequence[str]) -> None:
    """Make the certificate of a broker and its authority, where they are missing."""
    from danube.host.certificates import SERVER, Wanted

    wanted = Wanted("broker", (SERVER,), hosts=own_hosts(hosts))
    CertificateFolder(directory, LEAF_DAYS, replace=False).signed("authority", [wanted])


class CertificateFolder:
    """Files of one folder: what was made and what was there."""

    def __init__(self, directory: Path, days: int, replace: bool) -> None:
        from danube.host import certificates
        from danube.host.clock import wall_us

        self.rows: list[dict[str, Any]] = []
        self._directory = directory
        self._days = days
        self._replace = replace
        self._now = certificates.now_utc(wall_us())
        self._authorities: dict[str, Pair] = {}
        try:
            files.make_directory(directory)
        except OSError as error:
            raise StorageFailed(f"{directory} cannot be made", why=error.strerror or str(error)) from None

    def signed(self, authority: str, wanted: Sequence[Wanted]) -> None:
        """Make the certificates of ``wanted`` that are not there; the authority too, if it is missing."""
        from danube.host import certificates

        for one in wanted:
            signer = self._authority(authority)
            if (self._directory / f"{one.name}.pem").exists() and not self._replace:
                self._note(one.name, "kept")
                continue
            self._write(one.name, certificates.sign(signer, one, self._days, self._now))

    def _authority(self, name: str) -> Pair:
        """The authority of this folder.  It is kept, because its clients trust it."""
        from danube.host import certificates

        if name in self._authorities:
            return self._authorities[name]
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        if certificate.exists():
            if not key.exists():
                raise NotFound(
                    f"{key} is not there",
                    why=f"{certificate} is, and without its key nothing more can be signed",
                    hint="bring the key back, or choose another --dir",
                )
            pair = certificates.Pair(read_file(certificate), read_file(key))
            self._check_living(certificate, certificates.describe(pair.certificate)[0])
            self._note(name, "kept")
        else:
            title = f"Danube {name} of {socket.gethostname()}"
            pair = certificates.make_authority(title[:64], AUTHORITY_DAYS, self._now)
            self._write(name, pair)
        self._authorities[name] = pair
        return pair

    def _check_living(self, path: Path, facts: Facts) -> None:
        if self._now > facts.not_after:
            raise InvalidArgument(
                f"the authority {path} expired on {facts.not_after:%Y-%m-%d}",
                hint="choose another --dir; its certificates must be replaced as well",
            )

    def _write(self, name: str, pair: Pair) -> None:
        """The key first: a certificate without its key would be taken for whole."""
        certificate, key = self._directory / f"{name}.pem", self._directory / f"{name}.key"
        put_file(key, pair.key)
        put_file(certificate, pair.certificate, _OPEN_MODE)
        self._note(name, "made")

    def _note(self, name: str, done: str) -> None:
        self.rows.append({"file": self._directory / f"{name}.pem", "done": done})
