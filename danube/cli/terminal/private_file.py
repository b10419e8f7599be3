"""Writing a small file in one step, with its mode from the beginning: keys, tokens, certificates."""

from __future__ import annotations

import os
from pathlib import Path

from danube.errors import StorageFailed

PRIVATE = 0o600
_FOLDER = 0o700


def put_file(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Replace a file, whatever the umask says; a missing folder is made for its owner alone.

    Raises StorageFailed, and then the old content is there.
    """
    fresh = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(mode=_FOLDER, parents=True, exist_ok=True)
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
