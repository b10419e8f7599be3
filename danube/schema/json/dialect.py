"""The drafts of JSON Schema: which keywords each one asserts and where its sub-schemas stand.

Sources: the meta-schemas of draft 4, 6, 7, 2019-09 and 2020-12 at json-schema.org.  ``dependencies``
left the last two but is asserted in all of them, because writers of definitions still use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import msgspec

from danube.errors import SchemaInvalid

DRAFT_4: Final = 4
DRAFT_6: Final = 6
DRAFT_7: Final = 7
DRAFT_2019: Final = 19
DRAFT_2020: Final = 20

URI_BY_DRAFT: Final = {
    DRAFT_4: "http://json-schema.org/draft-04/schema",
    DRAFT_6: "http://json-schema.org/draft-06/schema",
    DRAFT_7: "http://json-schema.org/draft-07/schema",
    DRAFT_2019: "https://json-schema.org/draft/2019-09/schema",
    DRAFT_2020: "https://json-schema.org/draft/2020-12/schema",
}
DRAFT_BY_URI: Final = {uri: draft for draft, uri in URI_BY_DRAFT.items()}

# Keyword -> (first draft, last draft) that knows it as one sub-schema, a list or a map of them.
_ONE: Final = {
    "additionalProperties": (DRAFT_4, DRAFT_2020), "additionalItems": (DRAFT_4, DRAFT_2019),
    "items": (DRAFT_4, DRAFT_2020), "not": (DRAFT_4, DRAFT_2020), "contains": (DRAFT_6, DRAFT_2020),
    "propertyNames": (DRAFT_6, DRAFT_2020), "if": (DRAFT_7, DRAFT_2020), "then": (DRAFT_7, DRAFT_2020),
    "else": (DRAFT_7, DRAFT_2020), "unevaluatedItems": (DRAFT_2019, DRAFT_2020),
    "unevaluatedProperties": (DRAFT_2019, DRAFT_2020),
}  # fmt: skip
_LIST: Final = {
    "allOf": (DRAFT_4, DRAFT_2020), "anyOf": (DRAFT_4, DRAFT_2020), "oneOf": (DRAFT_4, DRAFT_2020),
    "items": (DRAFT_4, DRAFT_2019), "prefixItems": (DRAFT_2020, DRAFT_2020),
}  # fmt: skip
_MAP: Final = {
    "properties": (DRAFT_4, DRAFT_2020), "patternProperties": (DRAFT_4, DRAFT_2020),
    "dependencies": (DRAFT_4, DRAFT_2020), "dependentSchemas": (DRAFT_2019, DRAFT_2020),
    "definitions": (DRAFT_4, DRAFT_2020), "$defs": (DRAFT_2019, DRAFT_2020),
}  # fmt: skip
_FIRST_DRAFT: Final = {
    "const": DRAFT_6, "minContains": DRAFT_2019, "maxContains": DRAFT_2019, "dependentRequired": DRAFT_2019,
    "$recursiveRef": DRAFT_2019, "$dynamicRef": DRAFT_2020,
}  # fmt: skip

Schema = dict[str, Any] | bool


class Place(msgspec.Struct, frozen=True):
    """A sub-schema of a schema: its keyword, the tokens that lead there, and itself."""

    keyword: str
    tokens: tuple[str, ...]
    schema: Schema


def draft_of(value: Any) -> int:
    """The draft that a definition names by ``$schema``; 2020-12 when it names none.  Raises SchemaInvalid."""
    if not isinstance(value, dict) or "$schema" not in value:
        return DRAFT_2020
    uri = value["$schema"]
    draft = DRAFT_BY_URI.get(_secure(uri.removesuffix("#"))) if isinstance(uri, str) else None
    if draft is None:
        raise SchemaInvalid(
            "the draft of the definition is not known",
            why=f"/$schema names {str(uri)[:100]!r}",
            hint="use one of " + ", ".join(URI_BY_DRAFT.values()) + ", or leave $schema away for 2020-12",
        )
    return draft


def meta_schema_uri(uri: str) -> str | None:
    """The known spelling of a meta-schema's address; None for every other address."""
    known = _secure(uri)
    return known if known in DRAFT_BY_URI else None


def asserted(schema: dict[str, Any], keyword: str, draft: int) -> Any:
    """The value of a keyword when the draft asserts it, else None."""
    if "$ref" in schema and draft <= DRAFT_7:
        return None  # Up to draft 7, keywords beside $ref are ignored.
    for table in (_ONE, _LIST, _MAP):
        if keyword in table:
            first, last = table[keyword]
            return schema.get(keyword) if first <= draft <= last else None
    return schema.get(keyword) if _FIRST_DRAFT.get(keyword, DRAFT_4) <= draft else None


def places(schema: dict[str, Any], draft: int) -> Iterator[Place]:
    """Every sub-schema that stands in a schema, definitions included, in the order of the text."""
    for keyword, value in schema.items():
        if isinstance(value, list):
            if _known(_LIST, keyword, draft):
                for number, one in enumerate(value):
                    if isinstance(one, dict | bool):
                        yield Place(keyword, (keyword, str(number)), one)
        elif _known(_ONE, keyword, draft) and isinstance(value, dict | bool):
            yield Place(keyword, (keyword,), value)
        elif _known(_MAP, keyword, draft) and isinstance(value, dict):
            for name, one in value.items():
                if isinstance(one, dict | bool):
                    yield Place(keyword, (keyword, name), one)


def _known(table: dict[str, tuple[int, int]], keyword: str, draft: int) -> bool:
    first, last = table.get(keyword, (1, 0))
    return first <= draft <= last


def _secure(uri: str) -> str:
    """Meta-schemas are named with http and with https; each draft has one name here."""
    rest = uri.removesuffix("#").partition("://")[2]
    for known in DRAFT_BY_URI:
        if known.partition("://")[2] == rest:
            return known
    return uri
