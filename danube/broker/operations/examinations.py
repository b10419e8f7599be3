"""Examination of schema definitions beside the loop: a few threads that wait for limited children."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from danube.errors import DanubeError, Overloaded

if TYPE_CHECKING:
    from danube.schema.verdict import Outcome, Request

EXAMINATIONS_WAITING_MAX: Final = 64
_THREADS: Final = 2

Examined = Callable[["Outcome | DanubeError"], None]


def in_child(request: Request) -> Outcome:
    """Let a limited child process examine a definition; blocks."""
    from danube.schema.limited import door as limited

    return limited.run(request)


class Examinations:
    """Takes requests on the loop and gives their outcomes back on the loop.

    The threads are started with the first request; ``run`` blocks one of them.
    """

    def __init__(
        self, call_on_loop: Callable[..., object], run: Callable[[Request], Outcome] = in_child
    ) -> None:
        self._call_on_loop = call_on_loop
        self._run = run
        self._threads: ThreadPoolExecutor | None = None
        self._waiting_count = 0

    def submit(self, request: Request, then: Examined) -> None:
        """Examine; raises Overloaded when too many wait."""
        if self._waiting_count >= EXAMINATIONS_WAITING_MAX:
            raise Overloaded(
                "too many schemas wait to be examined",
                hint="send them more slowly",
                limit=EXAMINATIONS_WAITING_MAX,
            )
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="danube-schema")
        self._waiting_count += 1
        future = self._threads.submit(self._run, request)
        future.add_done_callback(lambda done: self._call_on_loop(self._examined, done, then))

    def _examined(self, done: Future[Any], then: Examined) -> None:
        self._waiting_count -= 1
        error = done.exception()
        if error is not None and not isinstance(error, DanubeError):
            raise error
        then(done.result() if error is None else error)

    def close(self) -> None:
        """Release the threads without waiting for their examinations."""
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None
