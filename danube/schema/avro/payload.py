"""Checks whether one Avro datum is a value of its schema, without building objects.

A decoder builds objects, and a payload of 8 MiB can ask for gigabytes of them: a record of fifty null
fields and one boolean takes one byte.  A walk takes no memory, its time is bounded by the payload's
length, and its depth by ``DEPTH_MAX``.  Source: Avro specification 1.12, "Data Serialization".

A schema becomes a step: a function of (data, position, levels left) that returns the position after the
value.  It raises ``Broken`` if the bytes are no value, IndexError if the data ends inside one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from danube.schema.avro.types import (
    Array,
    Enum,
    Fixed,
    Map,
    Primitive,
    Record,
    Type,
    Union,
    reachable,
    recursive,
    unqualified,
    weightless,
)

DEPTH_MAX: Final = 64

Step = Callable[[bytes, int, int], int]


class Broken(ValueError):
    """Fault of a datum; ``path`` grows from the inside out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.path: list[str] = []

    def __str__(self) -> str:
        return f"{'.'.join(reversed(self.path))}: {self.reason}" if self.path else self.reason


def walk_to_end(step: Step, data: bytes, name: str = "") -> str | None:
    """Return None if ``data`` is exactly one datum, else the fault and its position."""
    try:
        end = walk(step, data, 0)
    except Broken as broken:
        if name:
            broken.path.append(name)
        return str(broken)
    if end != len(data):
        return f"{len(data) - end} bytes follow the value"
    return None


def walk(step: Step, data: bytes, position: int) -> int:
    """The position after one datum; raises Broken."""
    try:
        return step(data, position, DEPTH_MAX)
    except IndexError:
        raise Broken("the payload ends inside a value") from None


def step_for(root: Type) -> Step:
    """The walk over values of ``root``.  Its arrays must not have weightless items."""
    return _Compiler(root).step(root)


class _Compiler:
    def __init__(self, root: Type) -> None:
        self._weightless = weightless(root)
        self._steps: dict[int, Step] = {}
        self._guarded = recursive(root)
        self._root = root

    def step(self, root: Type) -> Step:
        for kind in reachable(root):
            step = self._step(kind)
            if self._guarded and isinstance(kind, Record | Array | Map):
                step = _guard(step)
            self._steps[id(kind)] = step
        return self._steps[id(root)]

    def _step(self, kind: Type) -> Step:
        if id(kind) in self._weightless:
            return _nothing
        if isinstance(kind, Primitive):
            return _PRIMITIVES[kind.kind]
        if isinstance(kind, Fixed):
            return _width(kind.size_bytes)
        if isinstance(kind, Enum):
            return _enum(len(kind.symbols), unqualified(kind.name))
        if isinstance(kind, Union):
            return _union([self._inner(branch) for branch in kind.branches])
        if isinstance(kind, Array):
            return _array(self._inner(kind.items))
        if isinstance(kind, Map):
            return _map(self._inner(kind.values))
        return _record(
            [(one.name, self._inner(one.type)) for one in kind.fields if id(one.type) not in self._weightless]
        )

    def _inner(self, kind: Type) -> Step:
        """The step of an inner type; one that is not made yet contains this one and is looked up later."""
        if (step := self._steps.get(id(kind))) is not None:
            return step
        steps, key = self._steps, id(kind)

        def later(data: bytes, position: int, left: int) -> int:
            return steps[key](data, position, left)

        return later


def _guard(step: Step) -> Step:
    def guarded(data: bytes, position: int, left: int) -> int:
        if not left:
            raise Broken(f"values nest deeper than {DEPTH_MAX} levels")
        return step(data, position, left - 1)

    return guarded


def _nothing(data: bytes, position: int, left: int) -> int:
    return position


def _boolean(data: bytes, position: int, left: int) -> int:
    if data[position] > 1:
        raise Broken(f"a boolean is 0 or 1, not {data[position]}")
    return position + 1


def _long(data: bytes, position: int, left: int) -> int:
    if data[position] < 128:
        return position + 1
    return number(data, position)[1]


def _int(data: bytes, position: int, left: int) -> int:
    if data[position] < 128:
        return position + 1
    value, position = number(data, position)
    if not -(2**31) <= value < 2**31:
        raise Broken(f"{value} is not an int of 32 bits")
    return position


def number(data: bytes, position: int) -> tuple[int, int]:
    """(value, position after it) of a zigzag number of up to 64 bits.  Raises Broken and IndexError."""
    byte = data[position]
    value, shift = byte & 127, 7
    while byte > 127:
        position += 1
        byte = data[position]
        value |= (byte & 127) << shift
        shift += 7
        if shift > 70:
            raise Broken("a number has more than 10 bytes")
    if value >> 64:
        raise Broken("a number has more than 64 bits")
    return (value >> 1) ^ -(value & 1), position + 1


def _width(size_bytes: int) -> Step:
    def fixed(data: bytes, position: int, left: int) -> int:
        end = position + size_bytes
        if end > len(data):
            raise Broken(f"{size_bytes} bytes are expected and {len(data) - position} are left")
        return end

    return fixed


def _bytes(data: bytes, position: int, left: int) -> int:
    size = data[position]
    if size < 128 and not size & 1:
        end = position + 1 + (size >> 1)
    else:
        size, position = number(data, position)
        if size < 0:
            raise Broken(f"a length is {size}")
        end = position + size
    if end > len(data):
        raise Broken(f"a length claims {end - len(data)} bytes more than there are")
    return end


def _string(data: bytes, position: int, left: int) -> int:
    end = _bytes(data, position, left)
    # The length's own bytes: continued ones are above 127, so they must not be looked at as text.
    while data[position] > 127:
        position += 1
    text = data[position + 1 : end]
    if not text.isascii():
        try:
            str(text, "utf-8")
        except UnicodeDecodeError as error:
            raise Broken(f"a string is not UTF-8: byte {error.start}: {error.reason}") from None
    return end


def _enum(count: int, name: str) -> Step:
    def enum(data: bytes, position: int, left: int) -> int:
        index, position = number(data, position)
        if not 0 <= index < count:
            raise Broken(f"enum {name} has {count} symbols, and the value is number {index}")
        return position

    return enum


def _union(branches: list[Step]) -> Step:
    count = len(branches)

    def union(data: bytes, position: int, left: int) -> int:
        first = data[position]
        if first < 128 and not first & 1:
            index, position = first >> 1, position + 1
        else:
            index, position = number(data, position)
        if not 0 <= index < count:
            raise Broken(f"a union has {count} branches, and the value is of number {index}")
        return branches[index](data, position, left)

    return union


def _record(fields: list[tuple[str, Step]]) -> Step:
    def record(data: bytes, position: int, left: int) -> int:
        name = ""
        try:
            for name, step in fields:  # noqa: B007 - the name tells where the walk stopped
                position = step(data, position, left)
        except Broken as broken:
            broken.path.append(name)
            raise
        except IndexError:
            ended = Broken("the payload ends inside a value")
            ended.path.append(name)
            raise ended from None
        return position

    return record


def _block(data: bytes, position: int) -> tuple[int, int, int]:
    """(count of values, position of the first, end of the block or -1) of an array's or map's next block."""
    count, position = number(data, position)
    end = -1
    if count < 0:
        count = -count
        size, position = number(data, position)
        end = position + size
        if size < 0 or end > len(data):
            raise Broken(f"a block claims {size} bytes, and {len(data) - position} are left")
    if count > len(data) - position:
        raise Broken(f"a block claims {count} values, and {len(data) - position} bytes are left")
    return count, position, end


def _array(item: Step) -> Step:
    def array(data: bytes, position: int, left: int) -> int:
        while True:
            count, position, end = _block(data, position)
            if not count:
                return position
            for _ in range(count):
                position = item(data, position, left)
            if end not in (-1, position):
                raise Broken(f"a block of an array is {position - end} bytes longer than it claims")

    return array


def _map(value: Step) -> Step:
    def walk_map(data: bytes, position: int, left: int) -> int:
        while True:
            count, position, end = _block(data, position)
            if not count:
                return position
            for _ in range(count):
                position = value(data, _string(data, position, left), left)
            if end not in (-1, position):
                raise Broken(f"a block of a map is {position - end} bytes longer than it claims")

    return walk_map


_PRIMITIVES: Final[dict[str, Step]] = {
    "null": _nothing,
    "boolean": _boolean,
    "int": _int,
    "long": _long,
    "float": _width(4),
    "double": _width(8),
    "bytes": _bytes,
    "string": _string,
}
