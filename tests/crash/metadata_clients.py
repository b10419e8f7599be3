"""Clients of the metadata at one member's host, which write down every operation; run as a script.

Several threads ask through this host's controller for what must be linearizable: keys that are read behind
a barrier, set, deleted and compared, and counters that give numbers.  Keys change every few seconds, the
same for all hosts, so that each has a history of its own that can be judged.

    meta   client, key, operation, argument, known, answer, called_ns, returned_ns

A call that fails for another reason than its answer may have had its effect, once, at any later moment.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = str(Path(__file__).resolve().parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

from danube.cluster.control.cluster_log import ClusterLog  # noqa: E402
from danube.core.cluster.commands import (  # noqa: E402
    Allocated,
    AllocateId,
    CompareAndSet,
    DeleteKey,
    KeyRecord,
    PutKey,
)
from danube.core.metadata.commands import Command  # noqa: E402
from danube.errors import DanubeError, WrongState  # noqa: E402
from tests.crash.journal import Journal  # noqa: E402

KEYS = 2
KEY_LIFE_S = 4
TIMEOUT_S = 2.0
WEIGHTS = {"get": 8, "put": 4, "compare": 5, "delete": 1, "take": 3}


class Asker(threading.Thread):
    """One client: an operation after the other, through one member."""

    def __init__(self, options: dict[str, Any], number: int, stopped: threading.Event) -> None:
        super().__init__(name=f"{options['name']}-{number}", daemon=True)
        self.data_dir = Path(options["data_dir"])
        self.pause_s: float = options["pause_s"]
        self.random = random.Random(f"{options['seed']} {self.name}")
        self.journal = Journal(Path(options["journals"]) / f"metadata-{self.name}.jsonl")
        self.stopped = stopped
        self.known: dict[str, str | None] = {}  # the value that this client saw last, to compare with
        self.count = 0
        self.error = ""

    def run(self) -> None:
        try:
            while not self.stopped.is_set():
                try:
                    self.work()
                except (DanubeError, OSError, KeyError, ValueError):
                    self.stopped.wait(0.1)  # the broker is away; ValueError: its file is being written
        except BaseException as error:
            self.error = f"{self.name}: {type(error).__name__}: {error}"
            raise
        finally:
            self.journal.close()

    def work(self) -> None:
        """Operations until one has no answer: then the member may be another process."""
        state = json.loads((self.data_dir / "danube.json").read_text())
        address = "\0" + state["controller"]
        with ClusterLog(self.data_dir / "metadata", address, propose_timeout_s=TIMEOUT_S) as log:
            log.read_barrier(TIMEOUT_S)
            while not self.stopped.is_set():
                self.operate(log)
                self.stopped.wait(self.random.random() * self.pause_s)

    def operate(self, log: ClusterLog) -> None:
        (name,) = self.random.choices(list(WEIGHTS), list(WEIGHTS.values()))
        life = time.monotonic_ns() // (KEY_LIFE_S * 1_000_000_000)
        key = f"/crash/{life}/" + ("numbers" if name == "take" else str(self.random.randrange(KEYS)))
        value = f"{self.name}-{self.count}"
        self.count += 1
        if name == "get":
            self.call(key, name, None, lambda: self.read(log, key))
        elif name == "put":
            self.call(key, name, value, lambda: self.propose(log, PutKey(key=key, value=value.encode())))
        elif name == "delete":
            self.call(key, name, None, lambda: self.propose(log, DeleteKey(key=key)))
        elif name == "take":
            self.call(key, name, None, lambda: self.propose(log, AllocateId(counter=key)))
        else:
            expected = self.known.get(key)
            command = CompareAndSet(
                key=key,
                value=value.encode(),
                revision=0 if expected is None else -1,
                expected=(expected or "").encode(),
            )
            self.call(key, name, [expected, value], lambda: self.compare(log, command))

    def call(self, key: str, name: str, argument: Any, ask: Callable[[], Any]) -> None:
        """Ask and write down what came of it; raises what says nothing about the operation."""
        called_ns = time.monotonic_ns()
        try:
            answer = ask()
        except DanubeError:
            self.journal.write("meta", self.name, key, name, argument, False, None, called_ns, 0)
            raise
        returned_ns = time.monotonic_ns()
        self.journal.write("meta", self.name, key, name, argument, True, answer, called_ns, returned_ns)

    def read(self, log: ClusterLog, key: str) -> str | None:
        log.read_barrier(TIMEOUT_S)
        record = log.state.cluster.keys.find(key)
        self.known[key] = None if record is None else record.value.decode()
        return self.known[key]

    def propose(self, log: ClusterLog, command: Command) -> Any:
        """What the operation answers: a deletion the former value, a counter its number, a put nothing."""
        outcome = log.propose(command)
        if isinstance(command, DeleteKey):
            return outcome.value.decode() if isinstance(outcome, KeyRecord) else None
        return outcome.number if isinstance(outcome, Allocated) else None

    def compare(self, log: ClusterLog, command: CompareAndSet) -> bool:
        try:
            log.propose(command)
        except WrongState:
            return False
        return True


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # from the terminal it is for who started this process
    options = json.loads(sys.argv[2])
    stopped = threading.Event()
    askers = [Asker(options, number, stopped) for number in range(options["threads"])]
    for asker in askers:
        asker.start()
    print("ready", flush=True)
    sys.stdin.readline()
    stopped.set()
    for asker in askers:
        asker.join(30)
    errors = [asker.error for asker in askers if asker.error]
    print(json.dumps({"operations": sum(asker.count for asker in askers), "errors": errors}), flush=True)


if __name__ == "__main__":
    main()
