"""Whether what an operation answered is what the table says."""

from __future__ import annotations

from typing import Any

import msgspec

from danube.core.security.operations import ADMIN


def fitting(op: str, answer: Any) -> Any:
    """The answer; raises AssertionError unless it, or the page that it is, has the fields of its type."""
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(answer))
    if isinstance(sent, dict) and sent.keys() == {"entries", "after"}:
        sent = sent["entries"]
    try:
        read = msgspec.convert(sent, ADMIN[op].result, builtin_types=(bytes,))
    except msgspec.ValidationError as error:
        raise AssertionError(f"{op} answers another type than its row has: {error}") from None
    more = set(_unknown(read, sent))
    assert not more, f"{op} answers fields that its row does not have: {more}"
    return answer


def _unknown(read: Any, answer: Any) -> list[str]:
    """Names in an answer that its struct does not have."""
    if isinstance(read, msgspec.Struct):
        names = dict(zip(read.__struct_encode_fields__, read.__struct_fields__, strict=True))
        extra = [name for name in answer if name not in names]
        known = [name for name in answer if name in names]
        return extra + [one for name in known for one in _unknown(getattr(read, names[name]), answer[name])]
    if isinstance(read, list | tuple):
        return [name for one, sent in zip(read, answer, strict=True) for name in _unknown(one, sent)]
    return []
