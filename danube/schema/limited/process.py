"""The parent's side of a limited child: start it, talk to it within bounds, make sure that it ends.

Faults of the child are bounded here: it is killed after ``WALL_SECONDS`` (counted from its READY), its answer
and its stderr are cut at fixed sizes, and its exit is always collected.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from danube.errors import DanubeError, OperationTimeout, SchemaInvalid, Unavailable, error_for_code
from danube.schema.limited import child
from danube.schema.verdict import Outcome, Request

START_SECONDS: Final = 15.0
WALL_SECONDS: Final = 5.0
ANSWER_BYTES_MAX: Final = 16 * 1024 * 1024
STDERR_BYTES_MAX: Final = 16 * 1024
_READ_BYTES: Final = 64 * 1024
# All that a child gets; a numeric library starts no threads there.
_ENVIRONMENT: Final = {"LC_ALL": "C.UTF-8", "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def ask(request: Request) -> Outcome:
    """Let one child judge ``request``.  Blocks for up to ``START_SECONDS + WALL_SECONDS``.

    Raises SchemaInvalid when the definition is at fault, Unavailable when the child could not work.
    """
    body = msgspec.msgpack.encode(request)
    if len(body) > child.REQUEST_BYTES_MAX:
        raise SchemaInvalid(f"the definition and the versions to compare it with take {len(body)} bytes")
    try:
        process = subprocess.Popen(  # noqa: S603 - this interpreter and a file of this package
            [sys.executable, "-I", "-S", child.__file__, *_import_paths()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_ENVIRONMENT,
            cwd="/",
            bufsize=0,
        )
    except OSError as error:
        raise Unavailable("the schema child cannot be started", why=str(error)) from None
    with process:
        talk = _Talk(process)
        try:
            talk.run(len(body).to_bytes(4, "little") + body)
        finally:
            talk.close()
    return _outcome(talk, process.returncode)


def _import_paths() -> list[str]:
    """Where this process finds its modules: site packages, and the folder of this package."""
    package = str(Path(__file__).resolve().parents[3])
    return [package, *(path for path in sys.path if os.path.isabs(path) and path != package)]


class _Talk:
    """The three pipes of one child, served until they close, fill up or take too long."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.answer = bytearray()
        self.stderr = bytearray()
        self.ended = ""  # why the child was killed
        self._process = process
        self._selector = selectors.DefaultSelector()

    def run(self, request: bytes) -> None:
        stdin, stdout, stderr = _streams(self._process)
        for stream in (stdin, stdout, stderr):
            os.set_blocking(stream.fileno(), False)
        self._selector.register(stdin, selectors.EVENT_WRITE)
        self._selector.register(stdout, selectors.EVENT_READ, self.answer)
        self._selector.register(stderr, selectors.EVENT_READ, self.stderr)
        unsent = memoryview(request)
        deadline, ready = time.monotonic() + START_SECONDS, False
        while self._selector.get_map():
            if not ready and self.answer:
                deadline, ready = time.monotonic() + WALL_SECONDS, True
            for key, _ in self._selector.select(max(0.0, deadline - time.monotonic())):
                if key.fileobj is stdin:
                    unsent = self._send(stdin, unsent)
                else:
                    self._take(key)
            if time.monotonic() >= deadline:
                self.ended = "time"
            if len(self.answer) > ANSWER_BYTES_MAX:
                self.ended = "answer"
            if self.ended:
                return

    def close(self) -> None:
        """End the child by its id, whatever it is doing, and collect its exit."""
        self._selector.close()
        if self.ended or sys.exc_info()[0] is not None:
            self._process.kill()
        try:
            self._process.wait(WALL_SECONDS)
        except subprocess.TimeoutExpired:
            # It closed its pipes and went on.
            self.ended = "time"
            self._process.kill()
            self._process.wait()

    def _send(self, stdin: IO[bytes], unsent: memoryview) -> memoryview:
        try:
            unsent = unsent[os.write(stdin.fileno(), unsent[:_READ_BYTES]) :]
        except BlockingIOError:
            return unsent
        except BrokenPipeError:
            unsent = unsent[:0]
        if not unsent:
            self._selector.unregister(stdin)
            stdin.close()
        return unsent

    def _take(self, key: selectors.SelectorKey) -> None:
        data = os.read(key.fd, _READ_BYTES)
        if not data:
            self._selector.unregister(key.fileobj)
        elif key.data is self.stderr:
            self.stderr += data[: STDERR_BYTES_MAX - len(self.stderr)]
        else:
            self.answer += data


def _streams(process: subprocess.Popen[bytes]) -> tuple[IO[bytes], IO[bytes], IO[bytes]]:
    if process.stdin is None or process.stdout is None or process.stderr is None:
        raise Unavailable("the schema child has no pipes")
    return process.stdin, process.stdout, process.stderr


def _outcome(talk: _Talk, returncode: int) -> Outcome:
    """Return the child's answer, or raise the error that explains why there is none."""
    last_words = _last_line(bytes(talk.stderr))
    if not talk.answer.startswith(child.READY):
        if talk.ended:
            raise OperationTimeout("the schema child did not start in time")
        raise Unavailable("the schema child cannot work", why=last_words or f"it ended with {returncode}")
    if talk.ended == "answer":
        raise SchemaInvalid("the definition is too complex", why="its examination has too much to say")
    if talk.ended == "time":
        raise OperationTimeout(
            "the definition cannot be compiled in time",
            why=f"it took more than {WALL_SECONDS:.0f} s",
            hint="make the definition smaller or less nested, or try again when the broker is less busy",
        )
    if returncode == -signal.SIGXCPU or returncode == -signal.SIGKILL:
        raise _costs(f"more than {child.CPU_SECONDS} s of processor time")
    if returncode < 0:
        raise _costs("more than it may", why=f"its compiler ended with signal {-returncode}")
    if returncode:
        raise SchemaInvalid("the definition cannot be examined", why=last_words)
    return _decoded(bytes(talk.answer[len(child.READY) :]))


def _decoded(answer: bytes) -> Outcome:
    try:
        said: dict[str, Any] = msgspec.msgpack.decode(answer)
        if "outcome" in said:
            return msgspec.convert(said["outcome"], Outcome)
        if said.get("out_of_memory"):
            raise _costs(f"more than {child.MEMORY_BYTES // (1024 * 1024)} MiB of memory")
        code, what, why, hint, facts = said["error"]
    except (msgspec.MsgspecError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise Unavailable("the schema child answered with nonsense", why=str(error)) from None
    refusal: DanubeError = error_for_code(code, what, why, hint)
    refusal.facts.update(facts)
    raise refusal


def _costs(what: str, *, why: str = "") -> SchemaInvalid:
    return SchemaInvalid(
        f"the definition costs {what} to compile",
        why=why,
        hint="make it smaller, or split recursive and deeply nested parts",
    )


def _last_line(stderr: bytes) -> str:
    lines = stderr.decode("utf-8", "replace").strip().splitlines()
    return lines[-1][:300] if lines else ""
