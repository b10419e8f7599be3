"""The door to the limited child: requests about untrusted definitions, within bounds.

Called in a worker's thread; blocks.  At most ``CHILDREN_MAX`` children of one process run at a time, outcomes
are cached by the hash of the request.  Versions to compare with are sent in portions, so a subject with many
versions needs more children, never a larger one.
"""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from typing import Final

import msgspec

from danube.errors import Overloaded, SchemaInvalid
from danube.limits import SCHEMA_DEFINITION_BYTES_MAX
from danube.schema.limited.process import ask
from danube.schema.plain import PLAIN
from danube.schema.verdict import Older, Outcome, Request, judge

__all__ = ["Older", "Outcome", "Request", "run"]

CHILDREN_MAX: Final = 2
WAIT_SECONDS: Final = 20.0
REMEMBERED_MAX: Final = 256
REMEMBERED_BYTES_MAX: Final = 8 * 1024 * 1024
PORTION_VERSIONS: Final = 64
PORTION_BYTES: Final = 512 * 1024

_children = threading.BoundedSemaphore(CHILDREN_MAX)


def run(request: Request) -> Outcome:
    """Examine ``request.text`` and compare it with ``request.against``.

    Raises SchemaInvalid (it does not parse, or costs too much time or memory), Overloaded (children are
    busy), OperationTimeout and Unavailable (the child did not work; try again).
    """
    if request.schema_type in PLAIN:
        return judge(request)
    if len(request.text) > SCHEMA_DEFINITION_BYTES_MAX:
        raise SchemaInvalid(
            f"a definition of {len(request.text)} bytes is too long",
            hint=f"it may have {SCHEMA_DEFINITION_BYTES_MAX} bytes; leave documentation out or split it",
        )
    found = [_answered(portion) for portion in _portions(request)]
    if len(found) == 1:
        return found[0]
    violations = [violation for outcome in found for violation in outcome.violations]
    return Outcome(definition=found[0].definition, violations=violations)


def _portions(request: Request) -> list[Request]:
    portions: list[list[Older]] = [[]]
    size_bytes = 0
    for older in request.against:
        own = len(older.definition.text) + len(older.definition.compiled)
        if portions[-1] and (len(portions[-1]) >= PORTION_VERSIONS or size_bytes + own > PORTION_BYTES):
            portions.append([])
            size_bytes = 0
        portions[-1].append(older)
        size_bytes += own
    return [msgspec.structs.replace(request, against=against) for against in portions]


def _answered(request: Request) -> Outcome:
    asked = hashlib.sha256(msgspec.msgpack.encode(request)).digest()
    if (remembered := _memory.get(asked)) is None:
        if not _children.acquire(timeout=WAIT_SECONDS):
            raise Overloaded("the broker is busy with other definitions", limit="schema children")
        try:
            # Waiting threads may need the same answer.
            if (remembered := _memory.get(asked)) is None:
                remembered = _asked(request)
                _memory.put(asked, remembered)
        finally:
            _children.release()
    if isinstance(remembered, Outcome):
        return remembered
    raise _again(remembered)


def _asked(request: Request) -> Outcome | SchemaInvalid:
    """The answer, or the refusal that the same definition would get again."""
    try:
        return ask(request)
    except SchemaInvalid as refusal:
        return refusal


def _again(refusal: SchemaInvalid) -> SchemaInvalid:
    """A copy: an exception that is raised twice collects both tracebacks."""
    return SchemaInvalid(refusal.what, why=refusal.why, hint=refusal.hint, **refusal.facts)


class _Memory:
    """Recent answers, the oldest forgotten first; bounded in number and bytes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: OrderedDict[bytes, tuple[Outcome | SchemaInvalid, int]] = OrderedDict()
        self._size_bytes = 0

    def get(self, asked: bytes) -> Outcome | SchemaInvalid | None:
        with self._lock:
            if asked not in self._answers:
                return None
            self._answers.move_to_end(asked)
            return self._answers[asked][0]

    def put(self, asked: bytes, answer: Outcome | SchemaInvalid) -> None:
        own = len(msgspec.msgpack.encode(answer)) if isinstance(answer, Outcome) else 512
        with self._lock:
            self._answers[asked] = (answer, own)
            self._size_bytes += own
            while len(self._answers) > REMEMBERED_MAX or self._size_bytes > REMEMBERED_BYTES_MAX:
                self._size_bytes -= self._answers.popitem(last=False)[1][1]

    def clear(self) -> None:
        """Forget everything (tests)."""
        with self._lock:
            self._answers.clear()
            self._size_bytes = 0


_memory = _Memory()
