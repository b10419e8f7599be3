"""The os module as a test wants it: counts calls, fails one of them, or dies at it."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any


class Killed(BaseException):
    """The process died: nothing that it would do afterwards happens."""


Fault = Callable[["FaultyOs", str, tuple[Any, ...]], Any]


class FaultyOs(SimpleNamespace):
    """The os module with one fault, at call number ``when`` of ``calls``; after ``die`` all of them fail."""

    def __init__(self, calls: tuple[str, ...] = (), when: int = -1, fault: Fault | None = None) -> None:
        super().__init__(**{name: getattr(os, name) for name in dir(os) if not name.startswith("__")})
        self.count, self.when, self.fault, self.fired, self.dead = 0, when, fault, "", False
        for name in calls:
            setattr(self, name, self._faulty(name))

    def _faulty(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self.dead:
                raise Killed
            self.count += 1
            if self.count == self.when:
                self.fired = name
                return self.fault(self, name, arguments)
            return getattr(os, name)(*arguments, **options)

        return call

    def die(self) -> None:
        self.dead = True
        raise Killed


def fail_with(number: int) -> Fault:
    def fail(faulty: FaultyOs, name: str, arguments: tuple[Any, ...]) -> Any:
        raise OSError(number, os.strerror(number))

    return fail
