"""One received record on standard output: a line for people, a JSON line, or its bytes."""

from __future__ import annotations

import base64
from datetime import datetime
from typing import Any

from danube.cli.terminal.output import instant, json_line, line, plain, write
from danube.host.telemetry import escape, fact_text

TEXT_BYTES_MAX = 1_024


class Printer:
    """Prints records and flushes after each one, so that a pipe sees it at once."""

    def __init__(self, topic: str, form: str, delimiter: bytes = b"\n") -> None:
        self._topic = topic
        self._delimiter = delimiter
        self.print = {"json": self._json, "raw": self._raw, "text": self._text}[form]

    def _raw(self, message: Any) -> None:
        write(bytes(message.payload) + self._delimiter)

    def _json(self, message: Any) -> None:
        json_line(record_object(self._topic, message))

    def _text(self, message: Any) -> None:
        words = [f"{message.partition}:{message.offset}"]
        if message.key:
            words.append(f"key={fact_text(message.key)}")
        if message.redelivery_count:
            words.append(f"redelivery={message.redelivery_count}")
        words += [f"{escape(name)}={fact_text(value)}" for name, value in (message.attributes or {}).items()]
        line(" ".join(words) + "  " + _readable(bytes(message.payload)))


def record_object(topic: str, message: Any) -> dict[str, Any]:
    """The documented JSON of a record; ``produce --ndjson`` takes it back."""
    when = message.publish_time
    return {
        "topic": topic,
        "partition": message.partition,
        "offset": message.offset,
        **_text_field("key", message.key),
        "attributes": dict(message.attributes or {}),
        "publish_time": plain(when) if isinstance(when, datetime) else instant(int(when)),
        "producer_name": message.producer_name,
        "redelivery_count": message.redelivery_count,
        **_schema_fields(message),
        **_text_field("payload", bytes(message.payload)),
    }


def _schema_fields(message: Any) -> dict[str, Any]:
    """Which schema the record names; nothing if it names none."""
    if message.schema_id is None:
        return {}
    return {"schema_id": str(message.schema_id), "schema_version": message.schema_version}


def _text_field(name: str, value: str | bytes | None) -> dict[str, str | None]:
    """``name`` as text, or ``name_base64`` where the bytes are no UTF-8."""
    if value is None or isinstance(value, str):
        return {name: value or None}
    try:
        return {name: bytes(value).decode("utf-8")}
    except UnicodeDecodeError:
        return {f"{name}_base64": base64.b64encode(value).decode("ascii")}


def _readable(payload: bytes) -> str:
    """Text for a terminal: cut, and without anything that could steer it."""
    try:
        return escape(payload.decode("utf-8"), TEXT_BYTES_MAX)
    except UnicodeDecodeError:
        return f"[binary data, {len(payload)} bytes]"
