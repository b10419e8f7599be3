"""A thread that listens to etcd for changes of one key, so that nobody has to ask."""

from __future__ import annotations

import threading
from typing import Final

from danube.cluster.etcd.calls import EtcdCalls
from danube.errors import DanubeError

_RETRY_S: Final = 0.5


class EtcdWatch:
    """``count`` grows with every change, and whenever some may have been missed; it says not which.

    Only while ``connected`` does an unchanged count mean that nothing has changed.  Owns ``calls``.
    """

    def __init__(self, calls: EtcdCalls, key: bytes) -> None:
        self._calls = calls
        self._key = key
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="danube-etcd-watch", daemon=True)
        self.count = 0
        self.connected = False

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
                for _ in self._calls.watched(self._key):
                    self.count += 1
                    self.connected = True
                    if self._stopped.is_set():
                        break
            except DanubeError:
                pass  # what it was is told to whoever reads; here it only means to listen again
            self.connected = False
            self.count += 1
            self._stopped.wait(_RETRY_S)
        self._calls.close()
