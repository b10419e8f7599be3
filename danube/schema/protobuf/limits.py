"""Bounds of a Protobuf definition, checked on its text before any compiler sees it.

The scan is one pass of a regular expression without backtracking.  It follows the lexical rules of the
Protobuf language (https://protobuf.dev/reference/protobuf/proto3-spec/): comments, strings, words, numbers
and single signs.  It does not judge grammar; the compiler does that with line and column.
"""

from __future__ import annotations

import re
from typing import Final

from danube.errors import SchemaInvalid
from danube.limits import SCHEMA_DEFINITION_BYTES_MAX

DEPTH_MAX: Final = 32  # braces and brackets inside each other
TOKENS_MAX: Final = 60_000
NUMBERS_MAX: Final = 10_000  # each field, enum value and reserved range has at least one
WORD_BYTES_MAX: Final = 255
PACKAGE_BYTES_MAX: Final = 255
IMPORTS_MAX: Final = 16
CHAIN_LEVELS_MAX: Final = 150  # messages in each other's fields; the library recurses once for each

# The types that every Protobuf library carries; nothing else is on this broker to be imported.
IMPORTABLE: Final = frozenset(
    f"google/protobuf/{name}.proto"
    for name in (
        "any", "api", "descriptor", "duration", "empty", "field_mask", "source_context", "struct",
        "timestamp", "type", "wrappers",
    )
)  # fmt: skip

_TOKEN: Final = re.compile(
    r"(?P<space>\s+|//[^\n]*|/\*(?:[^*]|\*(?!/))*\*/)"
    r"|(?P<word>[A-Za-z_][A-Za-z0-9_.]*)"
    r"|(?P<number>[0-9][A-Za-z0-9_.]*)"
    r"""|(?P<string>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')"""
    r"|(?P<sign>.)",
    re.DOTALL,
)


def scan(text: bytes) -> None:
    """Refuse definitions that are too large, too deep, or import other files; raises SchemaInvalid."""
    if len(text) > SCHEMA_DEFINITION_BYTES_MAX:
        raise _too_much("it has", len(text), SCHEMA_DEFINITION_BYTES_MAX, "bytes")
    try:
        source = text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise SchemaInvalid("the Protobuf definition is not UTF-8", why=f"line {line}", line=line) from None
    if "\0" in source:
        raise SchemaInvalid("the Protobuf definition holds a NUL character", hint="send the source text")
    _Scan().run(source)


class _Scan:
    """Counts of one definition while its tokens go by."""

    def __init__(self) -> None:
        self.depth = self.tokens = self.numbers = self.imports = self.line = 0
        self.statement: list[str] = []  # the first words and strings of an open statement outside braces

    def run(self, source: str) -> None:
        self.line = 1
        for found in _TOKEN.finditer(source):
            kind, token = found.lastgroup, found.group()
            if kind != "space":
                self._count(kind or "", token)
            self.line += token.count("\n")

    def _count(self, kind: str, token: str) -> None:
        self.tokens += 1
        self.numbers += kind == "number"
        if self.tokens > TOKENS_MAX:
            raise _too_much("it has more than", TOKENS_MAX, TOKENS_MAX, "words and signs", self.line)
        if self.numbers > NUMBERS_MAX:
            raise _too_much("it has more than", NUMBERS_MAX, NUMBERS_MAX, "numbers", self.line)
        if kind == "word" and len(token) > WORD_BYTES_MAX:
            raise _too_much("a name has", len(token), WORD_BYTES_MAX, "characters", self.line)
        if kind == "sign":
            self._sign(token)
        elif self.depth == 0:
            self.statement.append(token)

    def _sign(self, sign: str) -> None:
        if sign in "{[<":
            self.depth += 1
            if self.depth > DEPTH_MAX:
                raise _too_much("it nests", self.depth, DEPTH_MAX, "levels", self.line)
        elif sign in "}]>":
            self.depth = max(0, self.depth - 1)
        if self.depth == 0 and sign in ";}":
            self._statement_ends()
            self.statement = []

    def _statement_ends(self) -> None:
        words = self.statement
        if words[:1] == ["package"] and sum(map(len, words[1:])) > PACKAGE_BYTES_MAX:
            raise _too_much(
                "the package name has", sum(map(len, words[1:])), PACKAGE_BYTES_MAX, "characters", self.line
            )
        if words[:1] != ["import"]:
            return
        self.imports += 1
        if self.imports > IMPORTS_MAX:
            raise _too_much("it has more than", IMPORTS_MAX, IMPORTS_MAX, "imports", self.line)
        # Adjacent strings are one string to the compiler; an escape is never part of an allowed name.
        name = "".join(word[1:-1] for word in words if word[0] in "\"'")
        if name not in IMPORTABLE:
            raise SchemaInvalid(
                f"the Protobuf definition imports {name[:80]!r}",
                why=f"line {self.line}: only the well-known types can be imported",
                hint="put the imported messages into the definition itself; "
                "importable are google/protobuf/timestamp.proto, wrappers.proto, struct.proto and their like",
                line=self.line,
            )


def _too_much(what: str, count: int, count_max: int, unit: str, line: int = 0) -> SchemaInvalid:
    place = f"line {line}: " if line else ""
    return SchemaInvalid(
        "the Protobuf definition costs too much",
        why=f"{place}{what} {count} {unit}; at most {count_max} are allowed",
        hint="split the definition into several subjects, or shorten it",
        line=line,
    )
