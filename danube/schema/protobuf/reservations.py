"""Reserved names and numbers of Protobuf: none may come back with another meaning in a newer definition.

Reader and writer alone cannot tell an added field from a removed one: whichever side lacks it sees an
unknown number and skips it.  Here it is known which definition is older.  A removed
number stays reserved, and a reserved one stays so; then two versions that are never compared with each
other cannot disagree either.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.descriptor_pb2 import DescriptorProto, EnumDescriptorProto

from danube.schema.model import Difference
from danube.schema.protobuf.descriptors import Compiled
from danube.schema.protobuf.fields import holds_map


def forgotten(newer: Compiled, older: Compiled) -> list[Difference]:
    """Numbers and names of the older definition that the newer one set free; ``reader`` is the newer one."""
    found: list[Difference] = []
    start = (newer.payload, older.payload)
    waiting = deque([(newer.payload.name, *start)])
    met = {(start[0].full_name, start[1].full_name)}
    while waiting:
        path, new, old = waiting.popleft()
        found.extend(_message(path, new, old))
        for number, old_field in old.fields_by_number.items():
            field = new.fields_by_number.get(number)
            if field is None or holds_map(field) != holds_map(old_field):
                continue
            place = f"{path}.{field.name}"
            if field.enum_type is not None and old_field.enum_type is not None:
                found.extend(_enum(place, field.enum_type, old_field.enum_type))
            if field.message_type is None or old_field.message_type is None:
                continue
            pair = (field.message_type.full_name, old_field.message_type.full_name)
            if pair not in met:
                met.add(pair)
                waiting.append((place, field.message_type, old_field.message_type))
    return found


def _message(path: str, new: Descriptor, old: Descriptor) -> Iterator[Difference]:
    new_proto, old_proto = DescriptorProto(), DescriptorProto()
    new.CopyToProto(new_proto)
    old.CopyToProto(old_proto)
    yield from _numbers(
        path, "field",
        {field.number: field.name for field in new.fields},
        {field.number: field.name for field in old.fields},
        [(one.start, one.end) for one in new_proto.reserved_range],
        [(one.start, one.end) for one in old_proto.reserved_range],
    )  # fmt: skip
    yield from _names(path, {field.name for field in new.fields}, new_proto, old_proto)


def _enum(path: str, new: EnumDescriptor, old: EnumDescriptor) -> Iterator[Difference]:
    new_proto, old_proto = EnumDescriptorProto(), EnumDescriptorProto()
    new.CopyToProto(new_proto)
    old.CopyToProto(old_proto)
    # An enum's reserved ranges include their end, a message's do not.
    yield from _numbers(
        path, "enum_value",
        {value.number: value.name for value in new.values},
        {value.number: value.name for value in old.values},
        [(one.start, one.end + 1) for one in new_proto.reserved_range],
        [(one.start, one.end + 1) for one in old_proto.reserved_range],
    )  # fmt: skip
    yield from _names(path, {value.name for value in new.values}, new_proto, old_proto)


def _numbers(
    path: str, kind: str, new: dict[int, str], old: dict[int, str],
    new_reserved: list[tuple[int, int]], old_reserved: list[tuple[int, int]],
) -> Iterator[Difference]:  # fmt: skip
    """Half-open ranges of reserved numbers, and the names of used ones, of one message or enum."""
    new_reserved, old_reserved = sorted(new_reserved), sorted(old_reserved)
    for number, name in old.items():
        if number not in new and not _inside(number, new_reserved):
            yield Difference(
                path=f"{path}.{name}", rule=f"{kind}_not_reserved", reader=None, writer=number,
                message=f"{name} was removed and its number {number} is free for another meaning",
                hint=f'add: reserved {number}; reserved "{name}";',
            )  # fmt: skip
    for number, name in new.items():
        if _inside(number, old_reserved):
            yield Difference(
                path=f"{path}.{name}", rule="reserved_number_used", reader=number, writer="reserved",
                message=f"number {number} was reserved because earlier versions used it",
                hint="take a number that was never used",
            )  # fmt: skip
    taken = _joined(sorted([*new_reserved, *((number, number + 1) for number in new)]))
    for start, end in old_reserved:
        place = bisect_right(taken, start, key=lambda one: one[0])
        if place == 0 or taken[place - 1][1] < end:
            yield Difference(
                path=path, rule="reservation_removed", reader=None, writer=f"{start} to {end - 1}",
                message=f"numbers {start} to {end - 1} are no longer reserved",
                hint="keep the reserved range",
            )  # fmt: skip


def _inside(number: int, ranges: list[tuple[int, int]]) -> bool:
    """Whether one of the sorted ranges, which never overlap, holds the number."""
    place = bisect_right(ranges, number, key=lambda one: one[0])
    return place > 0 and number < ranges[place - 1][1]


def _joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Sorted half-open ranges with those that touch made one."""
    joined: list[tuple[int, int]] = []
    for start, end in ranges:
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _names(path: str, used: set[str], new: Any, old: Any) -> Iterator[Difference]:
    kept = set(new.reserved_name)
    for name in old.reserved_name:
        if name in used:
            yield Difference(
                path=f"{path}.{name}", rule="reserved_name_used", reader=name, writer="reserved",
                message=f"the name {name} was reserved because earlier versions used it",
                hint="take a name that was never used",
            )  # fmt: skip
        elif name not in kept:
            yield Difference(
                path=path, rule="reservation_removed", reader=None, writer=name,
                message=f"the name {name} is no longer reserved", hint="keep the reserved name",
            )  # fmt: skip
