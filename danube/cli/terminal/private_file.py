"""Small files of keys, tokens and certificates: read, and written in one step with their mode."""

from __future__ import annotations

import os
from pathlib import Path

from danube.errors import NotFound, StorageFailed
from danube.host import files

PRIVATE = 0o600
FILE_BYTES_MAX = 1 << 20


def put_file(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Replace a file, whatever the umask says; missing folders are made for their owner alone.

    Raises StorageFailed, and then the old content is there.
    """
    fresh = path.with_name(path.name + ".new")
    try:
        files.make_directory(path.parent)
        fresh.unlink(missing_ok=True)
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
        with open(fd, "wb") as file:
            os.fchmod(fd, mode)
            file.write(content)
            file.flush()
            os.fsync(fd)
        fresh.replace(path)
    except OSError as error:
        raise StorageFailed(f"{path} cannot be written", why=error.strerror or str(error)) from None


def read_file(path: Path) -> bytes:
    """A PEM file's bytes; NotFound or StorageFailed in the words of a user."""
    try:
        with path.open("rb") as file:
            return file.read(FILE_BYTES_MAX)
    except FileNotFoundError:
        raise NotFound(f"{path} is not there", hint="make certificates with `danube certs dev`") from None
    except OSError as error:
        raise StorageFailed(f"{path} cannot be read", why=error.strerror or str(error)) from None
