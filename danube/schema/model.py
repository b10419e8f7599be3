"""The words of the registry: types, compatibility modes, validation policies, violations."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Final

import msgspec

from danube.errors import InvalidArgument


class SchemaType(StrEnum):
    """Canonical names of the types, as every answer spells them."""

    BYTES = "bytes"
    STRING = "string"
    NUMBER = "number"
    AVRO = "avro"
    JSON_SCHEMA = "json_schema"
    PROTOBUF = "protobuf"

    @classmethod
    def parse(cls, text: str) -> SchemaType:
        """The type of a name or an alias, in any case; raises InvalidArgument."""
        word = text.strip().lower()
        try:
            return cls(_ALIASES.get(word, word))
        except ValueError:
            raise InvalidArgument(
                f"schema type {text[:40]!r} is not known", hint=f"use one of {', '.join(cls)}"
            ) from None


_ALIASES: Final = {
    "int64": "number", "int": "number", "float": "number", "double": "number", "json": "json_schema",
    "jsonschema": "json_schema", "json-schema": "json_schema", "proto": "protobuf",
}  # fmt: skip


class Compatibility(StrEnum):
    """Versions that a new one is compared with, and in which direction; ``*_transitive``: all of them."""

    NONE = "none"
    BACKWARD = "backward"
    FORWARD = "forward"
    FULL = "full"
    BACKWARD_TRANSITIVE = "backward_transitive"
    FORWARD_TRANSITIVE = "forward_transitive"
    FULL_TRANSITIVE = "full_transitive"

    @classmethod
    def parse(cls, text: str) -> Compatibility:
        try:
            return cls(text.strip().lower().replace("-", "_"))
        except ValueError:
            raise InvalidArgument(
                f"compatibility mode {text[:40]!r} is not known", hint=f"use one of {', '.join(cls)}"
            ) from None

    @property
    def transitive(self) -> bool:
        return self.value.endswith("_transitive")

    @property
    def backward(self) -> bool:
        """Whether the new version must read records of older ones."""
        return self.value.startswith(("backward", "full"))

    @property
    def forward(self) -> bool:
        """Whether older versions must read records of the new one."""
        return self.value.startswith(("forward", "full"))


class ValidationPolicy(StrEnum):
    """Treatment of a record that breaks its topic's schema."""

    NONE = "none"
    WARN = "warn"
    ENFORCE = "enforce"

    @classmethod
    def parse(cls, text: str) -> ValidationPolicy:
        try:
            return cls(text.strip().lower())
        except ValueError:
            raise InvalidArgument(
                f"validation policy {text[:40]!r} is not known", hint="use none, warn or enforce"
            ) from None


class Checks(StrEnum):
    """How deep compatibility looks: wholly, or as the broker that the official clients were written for."""

    STRICT = "strict"
    UPSTREAM = "upstream"


class Difference(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One reason why ``reader`` cannot read all that ``writer`` wrote."""

    path: str  # JSON pointer, or the dotted name of a message or record field; "" is the whole schema
    rule: str  # stable lower_case word, for example "field_removed"
    message: str  # a sentence for a human
    reader: Any = None  # what stands at the path on each side, as short JSON values
    writer: Any = None
    hint: str = ""


class Violation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A difference in words of old and new, for the caller of a check."""

    path: str
    rule: str
    message: str
    direction: str = "backward"  # which promise it breaks: "backward" or "forward"
    version: int = 0  # the older version that the new one was compared with
    old: Any = None
    new: Any = None
    hint: str = ""

    def __str__(self) -> str:
        return f"{self.path or '(root)'}: {self.rule}: {self.message}"


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """A definition that was examined once.  ``compiled`` is its type's data besides the text."""

    schema_type: SchemaType
    text: bytes
    fingerprint: str = ""  # "sha256:" and hex of the canonical form; the type's name for the plain types
    compiled: bytes = b""  # protobuf: a FileDescriptorSet; json_schema: its bounds; else empty
