"""A thread that watches some keys of etcd for changes, so that nothing has to poll."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from danube.cluster.etcd.calls import EtcdCalls
from danube.errors import DanubeError

_RETRY_S: Final = 0.5


class EtcdWatch:
    """``told`` is called in the thread at every change, and whenever some may have been missed.

    It says not which.  Owns ``calls``.
    """

    def __init__(self, calls: EtcdCalls, start: bytes, end: bytes, told: Callable[[], None]) -> None:
        self._calls = calls
        self._range = start, end
        self._told = told
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="danube-etcd-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread.  May be called twice."""
        self._stopped.set()
        while self._thread.is_alive():
            self._calls.interrupt()
            self._thread.join(0.05)

    def _run(self) -> None:
        while not self._stopped.is_set():
            try:
                for _ in self._calls.watched(*self._range):
                    self._told()
                    if self._stopped.is_set():
                        break
            except DanubeError:
                pass  # readers get the error; here it only means to watch again
            self._told()
            self._stopped.wait(_RETRY_S)
        self._calls.close()
