"""Helper processes: started with a role and JSON, ready on a line, finished with a line of JSON."""

from __future__ import annotations

import asyncio
import json
import os
import select
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests import fork_server
from tests.fork_server import ROOT

TIMEOUT_S = 300.0


def told() -> asyncio.Event:
    """In a child: an event that is set by a line from the parent, or by its end."""
    event, loop = asyncio.Event(), asyncio.get_running_loop()
    descriptor = sys.stdin.fileno()

    def readable() -> None:
        os.read(descriptor, 4096)
        loop.remove_reader(descriptor)
        event.set()

    loop.add_reader(descriptor, readable)
    return event


def readable(source: Any, timeout_s: float) -> bool:
    """Whether there is something to read, or the end, in time.  select() takes no descriptor above 1023."""
    poll = select.poll()
    poll.register(source, select.POLLIN)
    return bool(poll.poll(1000 * timeout_s))


class ChildFailed(Exception):
    """A child ended early or said nothing in time."""


class Child:
    """One script of this repository in a process of its own; it dies with this one.

    With this Python it finds the repository's modules; another Python may have a danube of its own.
    """

    def __init__(
        self,
        script: str,
        role: str,
        options: dict[str, Any],
        python: Sequence[str] = (sys.executable,),
        *,
        leads_session: bool = False,
    ) -> None:
        command = [*python, str(ROOT / script), role, json.dumps(options)]
        self.role = role
        found = {"PYTHONPATH": str(ROOT)} if python[-1] == sys.executable else {}
        self._process = fork_server.popen(
            command,
            environment={**os.environ, **found},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            start_new_session=leads_session,
        )
        self._pending = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def line(self, timeout_s: float = TIMEOUT_S) -> str:
        """The next line that the child prints."""
        stdout = self._process.stdout
        assert stdout is not None
        while b"\n" not in self._pending:
            if not readable(stdout, timeout_s):
                self.close()
                raise ChildFailed(f"{self.role} said nothing for {timeout_s} s")
            data = stdout.read(65_536)
            if not data:
                self.close()
                raise ChildFailed(f"{self.role} ended with {self._process.returncode}")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode()

    def wait_ready(self) -> Child:
        if (line := self.line()) != "ready":
            raise ChildFailed(f"{self.role} is not ready: {line}")
        return self

    def go(self) -> None:
        """Let a waiting child start, or a reading one stop."""
        stdin = self._process.stdin
        assert stdin is not None
        try:
            stdin.write(b"go\n")
        except BrokenPipeError:
            pass

    def ended(self) -> bool:
        """Whether the result can be read without waiting, or the child is gone."""
        stdout = self._process.stdout
        return bool(self._pending or self._process.poll() is not None or readable(stdout, 0))

    def result(self, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.line(timeout_s))
        self.close()
        return found

    def stop(self) -> None:
        """End a child that serves until it is told."""
        self._process.terminate()
        self.close()

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
