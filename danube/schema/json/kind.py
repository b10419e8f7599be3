"""JSON Schema, drafts 4, 6, 7, 2019-09 and 2020-12: the one door to the validator's library.

Nothing is fetched and nothing is remembered between payloads.  Patterns run in linear time: the engine
knows neither look-around nor back references, and a definition that needs them is refused.  ``format``
is an annotation and is not asserted, as the newer drafts have it by default.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any, Final
from urllib.parse import quote

import jsonschema_rs
import msgspec

from danube.errors import DanubeError, PayloadInvalid, SchemaInvalid
from danube.schema.json.comparison import Definitions
from danube.schema.json.compatibility import strict_differences
from danube.schema.json.cost import Cost, cost_of
from danube.schema.json.dialect import URI_BY_DRAFT, draft_of
from danube.schema.json.document import Document, Node, escape
from danube.schema.json.upstream import upstream_differences
from danube.schema.json_text import decode, fingerprint
from danube.schema.model import Checks, Definition, Difference, SchemaType

PATTERN_AUTOMATON_BYTES_MAX: Final = 256 * 1024
_REASON_BYTES_MAX: Final = 500
_DOCUMENT_URI: Final = "urn:danube:document"


def examine(text: bytes) -> Definition:
    """Parse a definition; raises SchemaInvalid with the JSON pointer of the fault."""
    value = decode(text, "definition")
    if not isinstance(value, dict | bool):
        raise SchemaInvalid(
            "the definition is not a schema", why="it is neither an object nor true or false",
            hint='begin with {"type": "object"}',
        )  # fmt: skip
    draft = draft_of(value)
    _check_meta(value, draft, "")
    document = Document(value, draft)
    for node in document.extra:
        _check_meta(node.schema, draft, node.pointer)
    _check_patterns(document)
    cost = cost_of(document, matches)
    _compile(value)
    return Definition(
        schema_type=SchemaType.JSON_SCHEMA,
        text=text,
        fingerprint=fingerprint(value),
        compiled=msgspec.json.encode(cost),
    )


def compare(reader: Definition, writer: Definition, checks: Checks) -> list[Difference]:
    """Why ``reader`` refuses something that ``writer`` allows; see docs/schemas.md for the rules."""
    reader_value = decode(reader.text, "reader's definition")
    writer_value = decode(writer.text, "writer's definition")
    if checks is Checks.UPSTREAM:
        return upstream_differences(reader_value, writer_value)
    with_reader = Document(reader_value, draft_of(reader_value))
    with_writer = Document(writer_value, draft_of(writer_value))
    return strict_differences(Definitions(with_reader, with_writer, _Judge().accepts, matches))


def validator(definition: Definition) -> Callable[[bytes], str | None]:
    """Return the check of payloads: it returns None, or the fault and its JSON pointer in the payload."""
    value = decode(definition.text, "definition")
    if definition.compiled:
        cost = msgspec.json.decode(definition.compiled, type=Cost)
    else:
        cost = cost_of(Document(value, draft_of(value)), matches)
    compiled = _compile(value)
    bytes_max = cost.payload_bytes_max

    def check(payload: bytes) -> str | None:
        if len(payload) > bytes_max:
            return (
                f"the payload has {len(payload):,} bytes; a schema of this cost checks {bytes_max:,} at most"
            )
        try:
            instance = decode(payload, "payload", depth_max=cost.depth_max, error=PayloadInvalid)
        except DanubeError as error:
            return str(error)
        try:
            if compiled.is_valid(instance):
                return None
            compiled.validate(instance)
        except jsonschema_rs.ValidationError as error:
            return _reason(error)
        except ValueError as error:
            return f"the payload cannot be checked: {str(error)[:_REASON_BYTES_MAX]}"
        return "the payload does not keep to the schema"

    return check


@lru_cache(maxsize=4096)
def matches(pattern: str, text: str) -> bool:
    """Whether the validator finds a pattern in a text."""
    return _pattern(pattern).is_valid(text)


@lru_cache(maxsize=1024)
def _pattern(pattern: str) -> jsonschema_rs.Validator:
    return _compile({"pattern": pattern})


@cache
def _options() -> jsonschema_rs.RegexOptions:
    return jsonschema_rs.RegexOptions(size_limit=PATTERN_AUTOMATON_BYTES_MAX)


def _compile(value: Any, registry: jsonschema_rs.Registry | None = None) -> jsonschema_rs.Validator:
    try:
        return jsonschema_rs.validator_for(
            value, validate_formats=False, mask="the value", pattern_options=_options(), offline=True,
            registry=registry,
        )  # fmt: skip
    except jsonschema_rs.ValidationError as error:
        raise SchemaInvalid(
            "the definition is not a valid JSON Schema", why=_reason(error), hint="check it against its draft"
        ) from None
    except ValueError as error:
        raise SchemaInvalid("the definition is not a valid JSON Schema", why=str(error)[:300]) from None


def _check_meta(schema: Any, draft: int, pointer: str) -> None:
    """Hold a schema against the meta-schema of its draft."""
    if isinstance(schema, bool):
        return
    try:
        _meta(draft).validate(schema)
    except jsonschema_rs.ValidationError as error:
        raise SchemaInvalid(
            "the definition is not a valid JSON Schema",
            why=_reason(error, pointer, "the definition"),
            hint="check it against the meta-schema of its draft",
        ) from None


@cache
def _meta(draft: int) -> jsonschema_rs.Validator:
    uri = URI_BY_DRAFT[draft]
    return jsonschema_rs.validator_for({"$schema": uri, "$ref": uri}, validate_formats=False, offline=True)


def _check_patterns(document: Document) -> None:
    for node in document.nodes:
        if isinstance(node.schema, bool):
            continue
        for keyword, pattern in [("pattern", node.get("pattern"))] + [
            ("patternProperties", one) for one in node.below("patternProperties")
        ]:
            if isinstance(pattern, str):
                _check_pattern(f"{node.pointer}/{keyword}", pattern)


def _check_pattern(where: str, pattern: str) -> None:
    try:
        _pattern(pattern)
    except SchemaInvalid:
        raise SchemaInvalid(
            "a pattern of the definition is not taken",
            why=f"{where} {pattern[:80]!r} cannot run in linear time and little memory",
            hint="use no look-around, no back reference, no large counted repetition (maxLength counts)",
        ) from None


def _reason(error: jsonschema_rs.ValidationError, pointer: str = "", whole: str = "the payload") -> str:
    path = pointer + "".join("/" + escape(str(step)) for step in error.instance_path)
    message = (
        error.message if len(error.message) <= _REASON_BYTES_MAX else error.message[:_REASON_BYTES_MAX] + "…"
    )
    return f"{path or whole}: {message}"


class _Judge:
    """Asks the validator about one value and one schema of a document, and keeps the validators."""

    def __init__(self) -> None:
        self._registry_by_document: dict[Document, jsonschema_rs.Registry] = {}
        self._validator_by_node: dict[Node, jsonschema_rs.Validator] = {}

    def accepts(self, node: Node, value: Any) -> bool:
        """Whether a schema of an examined document accepts a value."""
        if isinstance(node.schema, bool) and not node.outside:
            return node.schema
        if node not in self._validator_by_node:
            self._validator_by_node[node] = self._validator(node)
        return self._validator_by_node[node].is_valid(value)

    def _validator(self, node: Node) -> jsonschema_rs.Validator:
        document = node.document
        meta = URI_BY_DRAFT[document.draft]
        if node.outside:
            return _compile({"$schema": meta, "$ref": node.outside})
        if document not in self._registry_by_document:
            self._registry_by_document[document] = jsonschema_rs.Registry(
                [(_DOCUMENT_URI, document.root.schema)], draft=document.draft
            )
        reference = f"{_DOCUMENT_URI}#{quote(node.pointer, safe='/')}"
        return _compile({"$schema": meta, "$ref": reference}, self._registry_by_document[document])
