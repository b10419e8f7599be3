"""A definition in JSON Schema as a table of its sub-schemas, with every reference resolved.

A reference leads to a place in the same document: a JSON pointer, an anchor, or the ``$id`` of a
sub-schema; or to the meta-schema of a draft.  Nothing is ever fetched: any other address is refused.
``$recursiveRef`` and ``$dynamicRef`` mean the same as ``$ref`` as long as the document is one resource;
when it holds several and marks dynamic anchors, the target depends on the way that led there, and the
definition is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import unquote, urljoin

from danube.errors import SchemaInvalid
from danube.schema.json.dialect import DRAFT_4, DRAFT_7, Schema, asserted, draft_of, meta_schema_uri, places

NODES_MAX: Final = 10_000
_NO_BASE: Final = "http://definition.invalid/"
_REFERENCES: Final = ("$ref", "$recursiveRef", "$dynamicRef")
_HERE: Final = ("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "dependentSchemas", "dependencies")
_NOTHING: Final[Mapping[str, Any]] = {}
_DYNAMIC: Final = ("$dynamicAnchor", "$recursiveAnchor")


class Node:
    """One schema of a document.  Compared by identity; ``outside`` names a meta-schema that it stands for."""

    __slots__ = (
        "_below", "_counted", "_here", "base", "children", "document", "outside", "pointer", "references",
        "schema", "signature",
    )  # fmt: skip

    def __init__(
        self, document: Document, pointer: str, schema: Schema, base: str, outside: str = ""
    ) -> None:
        self.document = document
        self.pointer = pointer
        self.schema = schema
        self.base = base
        self.outside = outside
        self.children: list[tuple[str, tuple[str, ...], Node]] = []
        self.references: list[Node] = []
        self.signature = b""
        """What it asserts by itself, for who compares many; empty until then."""
        self._counted: dict[str, Any] | None = None
        self._below: dict[str, dict[str, Node]] | None = None
        self._here: list[Node] | None = None

    def get(self, keyword: str) -> Any:
        """The value of a keyword that counts here; None when it is absent or the draft ignores it."""
        if self._counted is None:
            schema, draft = self.schema, self.document.draft
            words = (
                {} if isinstance(schema, bool) else {word: asserted(schema, word, draft) for word in schema}
            )
            self._counted = {word: value for word, value in words.items() if value is not None}
        return self._counted.get(keyword)

    def below(self, keyword: str) -> Mapping[str, Node]:
        """The sub-schemas of a keyword that counts here: by name, by number, or by "" for a single one."""
        if self._below is None:
            self._below = {}
            for word, tokens, child in self.children:
                if self.get(word) is not None:
                    self._below.setdefault(word, {})[tokens[1] if len(tokens) > 1 else ""] = child
        return self._below.get(keyword, _NOTHING)

    @property
    def here(self) -> list[Node]:
        """The schemas that this one applies to the same value."""
        if self._here is None:
            self._here = list(self.references)
            for keyword in _HERE:
                self._here.extend(self.below(keyword).values())
        return self._here


class Document:
    """A definition whose references all lead somewhere.  Raises SchemaInvalid while it is built."""

    def __init__(self, root: Schema, draft: int) -> None:
        self.draft = draft
        self.nodes: list[Node] = []
        self.extra: list[Node] = []
        """Targets of references that stand where the draft knows no schema; nobody has checked them yet."""
        self._node_by_pointer: dict[str, Node] = {}
        self._resource_by_uri: dict[str, Node] = {}
        self._node_by_anchor: dict[tuple[str, str], Node] = {}
        self._outside: dict[str, Node] = {}
        self._dynamic = False
        self.root = self._walk(root, "", _NO_BASE)
        for node in self.nodes:  # Grows while it runs: a target at an unusual place is walked when found.
            self._resolve_all(node)

    def _walk(self, schema: Schema, pointer: str, base: str, *, named: bool = True) -> Node:
        node = Node(self, pointer, schema, base)
        if len(self.nodes) >= NODES_MAX:
            raise SchemaInvalid(
                "the definition is too large",
                why=f"it holds more than {NODES_MAX:,} schemas",
                hint="split it into subjects of their own",
            )
        self.nodes.append(node)
        self._node_by_pointer[pointer] = node
        if isinstance(schema, dict):
            self._name(node, schema, named)
        if not pointer:
            self._resource_by_uri.setdefault(node.base, node)
        if isinstance(schema, dict):
            for place in places(schema, self.draft):
                tokens = "".join("/" + escape(token) for token in place.tokens)
                child = self._walk(place.schema, pointer + tokens, node.base, named=named)
                node.children.append((place.keyword, place.tokens, child))
        return node

    def _name(self, node: Node, schema: dict[str, Any], named: bool) -> None:
        """Enter ``$id`` and the anchors of a schema."""
        if node.pointer and "$schema" in schema and draft_of(schema) != self.draft:
            raise SchemaInvalid(
                "the definition mixes drafts",
                why=f"{node.pointer}/$schema differs from the draft of the whole",
                hint="write the definition in one draft",
            )
        keyword = "id" if self.draft == DRAFT_4 else "$id"
        identity = schema.get(keyword)
        if isinstance(identity, str) and not ("$ref" in schema and self.draft <= DRAFT_7):
            uri, _, fragment = identity.partition("#")
            if uri:
                node.base = urljoin(node.base, uri)
                self._once(self._resource_by_uri, node.base, node, named)
            if fragment and self.draft <= DRAFT_7:
                self._once(self._node_by_anchor, (node.base, fragment), node, named)
        if self.draft > DRAFT_7:
            for word in ("$anchor", "$dynamicAnchor"):
                if isinstance(schema.get(word), str):
                    self._once(self._node_by_anchor, (node.base, schema[word]), node, named)
            self._dynamic = self._dynamic or any(schema.get(word) for word in _DYNAMIC)

    def _once(self, table: dict[Any, Node], key: Any, node: Node, named: bool) -> None:
        if not named:
            raise SchemaInvalid(
                "the definition names a schema where its draft knows none",
                why=f"{node.pointer} has an identity of its own",
                hint="keep shared schemas under $defs (definitions up to draft 7)",
            )
        if table.get(key, node) is not node:
            raise SchemaInvalid(
                "two schemas of the definition have the same name",
                why=f"{table[key].pointer or '/'} and {node.pointer or '/'} are both {key!r}",
                hint="give every $id and $anchor once",
            )
        table[key] = node

    def _resolve_all(self, node: Node) -> None:
        for keyword in _REFERENCES:
            reference = node.get(keyword)
            if keyword == "$ref" and isinstance(node.schema, dict):
                reference = node.schema.get("$ref")  # Counts even where it silences its neighbours.
            if not isinstance(reference, str):
                continue
            if keyword != "$ref" and self._dynamic and len(self._resource_by_uri) > 1:
                raise SchemaInvalid(
                    "the target of a dynamic reference depends on the way that led there",
                    why=f"{node.pointer}/{keyword} stands in a document of several resources",
                    hint="use $ref, or keep the definition one resource without inner $id",
                )
            node.references.append(self._resolve(node, keyword, reference))

    def _resolve(self, node: Node, keyword: str, reference: str) -> Node:
        where = f"{node.pointer}/{keyword}"
        uri, _, fragment = reference.partition("#")
        absolute = urljoin(node.base, uri) if uri else node.base
        resource = self._resource_by_uri.get(absolute)
        if resource is None:
            return self._beyond(absolute, fragment, where)
        fragment = unquote(fragment)
        if not fragment:
            return resource
        if not fragment.startswith("/"):
            found = self._node_by_anchor.get((absolute, fragment))
            if found is None:
                raise _dangling(where, reference)
            return found
        return self._node_by_pointer.get(resource.pointer + fragment) or self._unusual(
            resource.pointer + fragment, where, reference
        )

    def _beyond(self, absolute: str, fragment: str, where: str) -> Node:
        uri = meta_schema_uri(absolute)
        if uri is None:
            raise SchemaInvalid(
                "the definition refers to another document",
                why=f"{where} leads to {absolute[:100]!r}, and nothing is ever fetched",
                hint="put the schema under $defs and refer to it with #/$defs/NAME",
            )
        if self._dynamic:
            raise SchemaInvalid(
                "a meta-schema cannot be mixed with dynamic anchors",
                why=f"{where} leads to a meta-schema",
                hint="leave $dynamicAnchor and $recursiveAnchor away",
            )
        name = f"{uri}#{fragment}"
        if name not in self._outside:
            self._outside[name] = Node(self, where, True, uri, outside=name)
        return self._outside[name]

    def _unusual(self, pointer: str, where: str, reference: str) -> Node:
        """The target of a pointer that leads to where the draft knows no schema."""
        value: Any = self.root.schema
        base, reached = self.root.base, ""
        for token in pointer.split("/")[1:]:
            reached += "/" + token
            name = token.replace("~1", "/").replace("~0", "~")
            if isinstance(value, dict) and name in value:
                value = value[name]
            elif (
                isinstance(value, list) and token.isdecimal() and token.isascii() and int(token) < len(value)
            ):
                value = value[int(token)]
            else:
                raise _dangling(where, reference)
            if reached in self._node_by_pointer:
                base = self._node_by_pointer[reached].base
        if not isinstance(value, dict | bool):
            raise _dangling(where, reference)
        node = self._walk(value, pointer, base, named=False)
        self.extra.append(node)
        return node


def escape(token: str) -> str:
    """A name as one step of a JSON pointer (RFC 6901)."""
    return token.replace("~", "~0").replace("/", "~1")


def _dangling(where: str, reference: str) -> SchemaInvalid:
    return SchemaInvalid(
        "a reference of the definition leads nowhere",
        why=f"{where} is {reference[:100]!r}",
        hint="refer to a schema of the same document, for example #/$defs/NAME",
    )
