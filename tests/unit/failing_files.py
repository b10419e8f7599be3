"""A disk that fails at the k-th call: replaces functions of danube.host.files for the length of a test."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from danube.host import files

WRITING = (
    "open_new",
    "pwritev",
    "fallocate",
    "ftruncate",
    "fdatasync",
    "rename",
    "rename_new",
    "unlink",
    "fsync_directory",
)


class Killed(BaseException):
    """The process ends here: nothing after this call runs."""


class FailingFiles:
    """Counts the calls that change the disk; ``arm`` lets one or all from it on fail.

    ``kind`` is an errno, "short" (half of the bytes are written), "killed" (ends before the call) or
    "killed after" (ends right after it).
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...] = WRITING) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.fired = 0
        self._at = -1
        self._kind: int | str = 0
        self._lasting = False
        for name in names:
            monkeypatch.setattr(files, name, self._wrap(name, getattr(files, name)))

    def arm(self, at: int, kind: int | str, *, lasting: bool = False) -> None:
        self.calls.clear()
        self.fired = 0
        self._at, self._kind, self._lasting = at, kind, lasting

    def disarm(self) -> None:
        self._at = -1

    def _wrap(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            number = len(self.calls)
            self.calls.append((name, args))
            due = self._at >= 0 and (number >= self._at if self._lasting else number == self._at)
            if not due:
                return real(*args)
            if self._kind == "short":
                if name != "pwritev":
                    return real(*args)
                self.fired += 1
                data = b"".join(args[1])
                return os.pwritev(args[0], [data[: max(1, len(data) // 2)]], args[2])
            if self._kind == "short and full":
                if name != "pwritev":
                    return real(*args)
                self.fired += 1
                self._kind, self._lasting = errno.ENOSPC, True
                data = b"".join(args[1])
                return os.pwritev(args[0], [data[: max(1, len(data) // 2)]], args[2])
            if self._kind == errno.ENOSPC and name not in ("open_new", "pwritev", "fallocate"):
                return real(*args)
            self.fired += 1
            if self._kind == "killed":
                raise Killed
            if self._kind == "killed after":
                real(*args)
                raise Killed
            raise OSError(self._kind, os.strerror(int(self._kind)), name)

        return call
