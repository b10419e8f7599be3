"""Verdict on one definition: whether it parses, and which promises to older versions it breaks.

This is the work of the limited child (:mod:`danube.schema.limited.child`); the registry asks for it through
:func:`danube.schema.limited.door.run`.

Types use the words reader and writer; callers use old and new.  The promise *backward* is that the new
version reads records of an older one, *forward* that an older one reads records of the new one.  So the
messages and hints of a type say "the reader" and "the writer", and these words are replaced here.
"""

from __future__ import annotations

import msgspec

from danube.schema import kinds
from danube.schema.json.upstream import BACKWARD_ONLY
from danube.schema.model import Checks, Compatibility, Definition, Difference, SchemaType, Violation


class Older(msgspec.Struct, frozen=True):
    """A version that the new definition is compared with."""

    version: int
    definition: Definition


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """A definition to examine, and the versions it must agree with under ``compatibility``."""

    schema_type: SchemaType
    text: bytes
    against: list[Older] = []
    compatibility: Compatibility = Compatibility.NONE
    checks: Checks = Checks.STRICT


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The definition that may be stored when ``violations`` is empty."""

    definition: Definition
    violations: list[Violation] = []


def judge(request: Request) -> Outcome:
    """Examine and compare in this process; raises SchemaInvalid."""
    definition = kinds.examine(request.schema_type, request.text)
    violations = [
        violation
        for older in request.against
        for violation in _broken_promises(definition, older, request.compatibility, request.checks)
    ]
    return Outcome(definition=definition, violations=violations)


def _broken_promises(
    new: Definition, older: Older, compatibility: Compatibility, checks: Checks
) -> list[Violation]:
    found = []
    if compatibility is not Compatibility.NONE:
        # A number that comes back with another meaning breaks both promises in the end; it is told once.
        direction = "backward" if compatibility.backward else "forward"
        freed = kinds.evolution(new, older.definition, checks)
        found += [_violation(one, direction, older.version, reader_new=True) for one in freed]
    if compatibility.backward:
        differences = kinds.compare(new, older.definition, checks)
        found += [_violation(one, "backward", older.version) for one in differences]
    if compatibility.forward:
        differences = kinds.compare(older.definition, new, checks)
        if checks is Checks.UPSTREAM:  # that broker asks about this one in the other direction only
            differences = [one for one in differences if one.rule not in BACKWARD_ONLY]
        found += [_violation(one, "forward", older.version) for one in differences]
    return found


def _violation(
    difference: Difference, direction: str, version: int, *, reader_new: bool = False
) -> Violation:
    new, old = "the new version", f"version {version}"
    backward = reader_new or direction == "backward"
    reader, writer = (new, old) if backward else (old, new)
    return Violation(
        path=difference.path,
        rule=difference.rule,
        message=_named(difference.message, reader, writer),
        direction=direction,
        version=version,
        old=difference.writer if backward else difference.reader,
        new=difference.reader if backward else difference.writer,
        hint=_named(difference.hint, reader, writer),
    )


def _named(sentence: str, reader: str, writer: str) -> str:
    return sentence.replace("the reader", reader).replace("the writer", writer)
