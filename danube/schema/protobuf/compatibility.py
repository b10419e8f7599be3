"""Compatibility of Protobuf messages: one walk over reader and writer by field number.

A field, enum value or message counts only as far as the payload reaches it.  Names of packages and of
nested types travel in no payload; what they hold is compared instead.  Each pair of messages is met once,
so recursive messages end, and the walk keeps a queue, so deep ones need no stack.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.descriptor import FieldDescriptor as Field

from danube.errors import SchemaInvalid
from danube.schema.model import Difference
from danube.schema.protobuf.descriptors import Compiled
from danube.schema.protobuf.fields import default_difference, shown_type, type_difference

DIFFERENCES_MAX: Final = 200  # more tell a human nothing new
PAIRS_MAX: Final = 20_000
_PATH_BYTES_MAX: Final = 300  # then a path starts again at the message


def differences(reader: Compiled, writer: Compiled) -> list[Difference]:
    """All differences of the payload messages, at most DIFFERENCES_MAX; raises SchemaInvalid at PAIRS_MAX."""
    found = []
    for difference in _Walk(reader, writer).run():
        found.append(difference)
        if len(found) == DIFFERENCES_MAX:
            break
    return found


class _Walk:
    """The pairs of messages still to be compared, and those that were met."""

    def __init__(self, reader: Compiled, writer: Compiled) -> None:
        self.reader = reader
        self.writer = writer
        self.waiting: deque[tuple[str, Descriptor, Descriptor]] = deque()
        self.met: set[tuple[str, str]] = set()

    def run(self) -> Iterator[Difference]:
        ours, theirs = self.reader.payload, self.writer.payload
        if ours.name != theirs.name:
            yield Difference(
                path=ours.name, rule="payload_message_changed", reader=ours.name, writer=theirs.name,
                message="the first message of the definition is the payload, and it is another one",
                hint="keep the payload's message first and under its name",
            )  # fmt: skip
        self._meet(ours.name, ours, theirs)
        while self.waiting:
            yield from self._messages(*self.waiting.popleft())

    def _meet(self, path: str, reader: Descriptor, writer: Descriptor) -> None:
        pair = (reader.full_name, writer.full_name)
        if pair in self.met:
            return
        if len(self.met) >= PAIRS_MAX:
            raise SchemaInvalid(
                "the Protobuf definitions cost too much to compare",
                why=f"more than {PAIRS_MAX} pairs of messages meet", hint="register it as a new subject",
            )  # fmt: skip
        self.met.add(pair)
        self.waiting.append((path if len(path) <= _PATH_BYTES_MAX else reader.full_name, reader, writer))

    def _messages(self, path: str, reader: Descriptor, writer: Descriptor) -> Iterator[Difference]:
        ours, theirs = self.reader.fields(reader), self.writer.fields(writer)
        yield from _required(path, ours, theirs)
        yield from _moved_into_oneof(path, ours, theirs)
        our_numbers = {_name(field): number for number, field in ours.items()}
        their_numbers = {_name(field): number for number, field in theirs.items()}
        for number, written in sorted(theirs.items()):
            field = ours.get(number)
            if field is None:
                elsewhere = our_numbers.get(_name(written))
                if elsewhere is not None and elsewhere not in theirs:
                    yield _renumbered(path, _name(written), elsewhere, number)
                continue
            swapped = number != our_numbers.get(_name(written), number) or number != their_numbers.get(
                _name(field), number
            )
            yield from self._fields(path, field, written, swapped)

    def _fields(self, path: str, field: Field, written: Field, swapped: bool) -> Iterator[Difference]:
        """Two fields with one number; ``swapped``: one side knows the other's name under another number."""
        place = f"{path}.{_name(field)}"
        other_type = type_difference(place, field, written)
        if not _reads_name(field, written):
            if swapped or other_type:
                yield _reused(place, field, written)
                return
            yield _renamed(place, field, written)
        if other_type:
            yield other_type
            return
        default = default_difference(place, field, written)
        if default:
            yield default
        if field.enum_type is not None and written.enum_type is not None:
            yield from _enums(place, field.enum_type, written.enum_type)
        if field.message_type is not None and written.message_type is not None:
            self._meet(place, field.message_type, written.message_type)


def _name(field: Field) -> str:
    """A field's name inside its message; an extension's is in brackets, as JSON writes it."""
    return f"[{field.full_name}]" if field.is_extension else field.name


def _reads_name(field: Field, written: Field) -> bool:
    """Whether the reader's JSON form takes the name that the writer's JSON form has."""
    if field.is_extension or written.is_extension:
        return _name(field) == _name(written)
    return written.json_name in (field.json_name, field.name)


def _renamed(path: str, field: Field, written: Field) -> Difference:
    if field.name == written.name:
        return Difference(
            path=path, rule="field_json_name_changed", reader=field.json_name, writer=written.json_name,
            message="the JSON form has another name for the field", hint="keep json_name as it was",
        )  # fmt: skip
    return Difference(
        path=path, rule="field_renamed", reader=_name(field), writer=_name(written),
        message=f"field {field.number} has another name, so its JSON form is not read",
        hint=f'keep the JSON name: [json_name = "{written.json_name}"]',
    )  # fmt: skip


def _reused(path: str, field: Field, written: Field) -> Difference:
    return Difference(
        path=path, rule="field_number_reused", reader=f"{shown_type(field)} {_name(field)}",
        writer=f"{shown_type(written)} {_name(written)}",
        message=f"number {field.number} stands for another field",
        hint="give the new field a number that was never used",
    )  # fmt: skip


def _renumbered(path: str, name: str, reader: int, writer: int) -> Difference:
    return Difference(
        path=f"{path}.{name}", rule="field_renumbered", reader=reader, writer=writer,
        message=f"{name} is written under number {writer} and read under {reader}", hint="keep the number",
    )  # fmt: skip


def _required(path: str, ours: dict[int, Field], theirs: dict[int, Field]) -> Iterator[Difference]:
    for number, field in ours.items():
        written = theirs.get(number)
        if field.is_required and not (written is not None and written.is_required):
            yield Difference(
                path=f"{path}.{_name(field)}", rule="field_required", reader="required",
                writer="absent" if written is None else "optional",
                message="the reader refuses messages without this field, and the writer may leave it out",
                hint="make it optional",
            )  # fmt: skip


def _moved_into_oneof(path: str, ours: dict[int, Field], theirs: dict[int, Field]) -> Iterator[Difference]:
    """Fields that were written side by side and of which the reader keeps the last only."""
    members: dict[str, list[int]] = {}
    for number, field in ours.items():
        if field.containing_oneof is not None and number in theirs:
            members.setdefault(field.containing_oneof.name, []).append(number)
    for oneof, numbers in members.items():
        written = [theirs[number].containing_oneof for number in numbers]
        together = written[0] is not None and all(one is written[0] for one in written)
        if len(numbers) > 1 and not together:
            yield Difference(
                path=f"{path}.{oneof}", rule="field_moved_into_oneof",
                reader=[_name(ours[number]) for number in numbers],
                writer=[one.name if one else None for one in written],
                message="fields that may be written together are read as alternatives; only the last stays",
                hint="put only new fields into a oneof",
            )  # fmt: skip


def _enums(path: str, reader: EnumDescriptor, writer: EnumDescriptor) -> Iterator[Difference]:
    """Values by number; the first name of a number is the one that JSON writes."""
    if reader.is_closed and not writer.is_closed:
        yield Difference(
            path=path, rule="enum_closed", reader="closed", writer="open",
            message="the writer may write numbers without a name, and the reader drops them",
            hint="keep the enum open",
        )  # fmt: skip
    known: dict[int, set[str]] = {}
    for value in reader.values:
        known.setdefault(value.number, set()).add(value.name)
    seen: set[int] = set()
    for value in writer.values:
        if value.number in seen:
            continue  # an alias: read, never written
        seen.add(value.number)
        names = known.get(value.number, set())
        if value.name in names:
            continue
        difference = _enum_value(path, reader, value, sorted(names))
        if difference:
            yield difference


def _enum_value(path: str, reader: EnumDescriptor, written: Any, names: list[str]) -> Difference | None:
    """A name and number of the writer that the reader does not have so."""
    place = f"{path}.{written.name}"
    moved = reader.values_by_name.get(written.name)
    if moved is not None:
        return Difference(
            path=place, rule="enum_value_renumbered", reader=moved.number, writer=written.number,
            message=f"{written.name} has another number", hint="keep the number of an enum value",
        )  # fmt: skip
    if names:
        return Difference(
            path=place, rule="enum_value_renamed", reader=names[0], writer=written.name,
            message=f"value {written.number} has another name, so its JSON form is not read",
            hint="keep the old name first and add the new one with allow_alias",
        )  # fmt: skip
    if reader.is_closed:
        return Difference(
            path=place, rule="enum_value_unknown", reader=None, writer=written.number,
            message=f"the reader's enum is closed and has no value {written.number}; it is read as unset",
            hint="keep the value, or make the enum open",
        )  # fmt: skip
    return None
