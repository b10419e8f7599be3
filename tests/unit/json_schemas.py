"""Random JSON Schemas, near relatives of them, and values that may keep to them; all from one seed."""

from __future__ import annotations

import copy
import json
from random import Random
from typing import Any

from danube.schema.json.document import Node
from danube.schema.json.kind import matches
from danube.schema.json.shape import Shape

NAMES = ["a", "b", "c", "x1", "x2", "kind"]
TEXTS = ["", "a", "b", "ab", "x1", "aaaa", "é"]
PATTERNS = ["^x", "^a", "b$", "^[a-c]$", ".*", "[0-9]"]
NUMBERS = [-3, -1, 0, 1, 2, 3, 4, 6, 10, 0.5, 1.5, 1.0, 2.0]
TYPES = ["null", "boolean", "object", "array", "string", "integer", "number"]
ALIKE = (
    "any_of",
    "one_of",
    "not",
    "if",
    "all_of",
    "unevaluated",
    "dependent",
    "contains",
    "names",
    "reference",
)


class Maker:
    """Schemas of one draft."""

    def __init__(self, random: Random, draft: int) -> None:
        self.random = random
        self.draft = draft

    def document(self) -> Any:
        schema = self.schema(3)
        if isinstance(schema, dict):
            word = "$defs" if self.draft >= 19 else "definitions"
            schema[word] = {"node": self.tree(), "leaf": self.schema(1)}
            if self.draft == 7:
                schema["$schema"] = "http://json-schema.org/draft-07/schema#"
            if self.draft == 4:
                schema["$schema"] = "http://json-schema.org/draft-04/schema#"
        return schema

    def tree(self) -> Any:
        pointer = "#/$defs/node" if self.draft >= 19 else "#/definitions/node"
        return {
            "type": "object",
            "properties": {"a": self.schema(0), "c": {"$ref": pointer}},
            **({"required": ["a"]} if self.random.random() < 0.3 else {}),
        }

    def schema(self, depth: int) -> Any:
        chance = self.random
        if chance.random() < 0.06 and self.draft > 4:
            return chance.choice([True, True, False, {}])
        if chance.random() < 0.1:
            word = "$defs" if self.draft >= 19 else "definitions"
            return {"$ref": f"#/{word}/" + chance.choice(["node", "leaf"])} if depth > 1 else {}
        found: dict[str, Any] = {}
        for _ in range(chance.choice([1, 1, 2, 2, 3])):
            found |= self.part(depth)
        return found

    def part(self, depth: int) -> dict[str, Any]:
        choice = self.random.choice
        kinds = ["type", "type", "values", "number", "text"] + (
            ["object"] * 5 + ["array"] * 2 + [choice(ALIKE)] * 3 if depth else []
        )
        found: dict[str, Any] = getattr(self, "_" + choice(kinds))(depth - 1)
        return found

    def some(self, depth: int, least: int = 1, most: int = 3) -> list[Any]:
        return [self.schema(depth) for _ in range(self.random.randint(least, most))]

    def _type(self, depth: int) -> dict[str, Any]:
        if self.random.random() < 0.7:
            return {"type": self.random.choice(TYPES)}
        return {"type": self.random.sample(TYPES, self.random.randint(1, 3))}

    def _values(self, depth: int) -> dict[str, Any]:
        values = [None, True, False, {}, [], {"a": 1}, [1], *TEXTS[:4], *NUMBERS[:9]]
        if self.random.random() < 0.5 and self.draft > 4:
            return {"const": self.random.choice(values)}
        picked = {json.dumps(value): value for value in self.random.sample(values, self.random.randint(1, 4))}
        return {"enum": list(picked.values())}

    def _number(self, depth: int) -> dict[str, Any]:
        word = self.random.choice(
            ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]
        )
        if word == "multipleOf":
            return {word: self.random.choice([1, 2, 3, 4, 0.5])}
        limit = self.random.choice(NUMBERS)
        if self.draft == 4 and word.startswith("exclusive"):
            return {word: self.random.random() < 0.7, word.removeprefix("exclusive").lower(): limit}
        return {word: limit}

    def _text(self, depth: int) -> dict[str, Any]:
        word = self.random.choice(["minLength", "maxLength", "pattern"])
        return {word: self.random.choice(PATTERNS) if word == "pattern" else self.random.randint(0, 3)}

    def _object(self, depth: int) -> dict[str, Any]:
        chance = self.random
        found: dict[str, Any] = {}
        if chance.random() < 0.8:
            names = chance.sample(NAMES, chance.randint(1, 3))
            found["properties"] = {name: self.schema(depth) for name in names}
        if chance.random() < 0.4:
            found["required"] = chance.sample(NAMES, chance.randint(1, 2))
        if chance.random() < 0.3:
            found["additionalProperties"] = chance.choice([False, False, True, self.schema(depth)])
        if chance.random() < 0.25:
            found["patternProperties"] = {chance.choice(PATTERNS): self.schema(depth)}
        if chance.random() < 0.15:
            found[chance.choice(["minProperties", "maxProperties"])] = chance.randint(0, 3)
        return found

    def _array(self, depth: int) -> dict[str, Any]:
        chance = self.random
        found: dict[str, Any] = {}
        if chance.random() < 0.4:
            found["prefixItems" if self.draft >= 20 else "items"] = self.some(depth)
            if chance.random() < 0.5:
                found["items" if self.draft >= 20 else "additionalItems"] = chance.choice(
                    [False, self.schema(depth)]
                )
        elif chance.random() < 0.8:
            found["items"] = self.schema(depth)
        if chance.random() < 0.3:
            found[chance.choice(["minItems", "maxItems"])] = chance.randint(0, 3)
        if chance.random() < 0.15:
            found["uniqueItems"] = chance.choice([True, False])
        return found

    def _any_of(self, depth: int) -> dict[str, Any]:
        return {"anyOf": self.some(depth)}

    def _one_of(self, depth: int) -> dict[str, Any]:
        return {"oneOf": self.some(depth)}

    def _all_of(self, depth: int) -> dict[str, Any]:
        return {"allOf": self.some(depth)}

    def _not(self, depth: int) -> dict[str, Any]:
        return {"not": self.schema(depth)}

    def _if(self, depth: int) -> dict[str, Any]:
        return {"if": self.schema(depth), "then": self.schema(depth), "else": self.schema(depth)}

    def _unevaluated(self, depth: int) -> dict[str, Any]:
        return {self.random.choice(["unevaluatedProperties", "unevaluatedItems"]): self.schema(depth)}

    def _dependent(self, depth: int) -> dict[str, Any]:
        one, two = self.random.sample(NAMES, 2)
        if self.draft < 19:
            return {"dependencies": {one: self.random.choice([[two], self.schema(depth)])}}
        if self.random.random() < 0.5:
            return {"dependentRequired": {one: [two]}}
        return {"dependentSchemas": {one: self.schema(depth)}}

    def _contains(self, depth: int) -> dict[str, Any]:
        found = {"contains": self.schema(depth)}
        if self.random.random() < 0.5:
            found[self.random.choice(["minContains", "maxContains"])] = self.random.randint(0, 2)
        return found

    def _names(self, depth: int) -> dict[str, Any]:
        return {
            "propertyNames": self.random.choice([{"maxLength": 1}, {"pattern": "^x"}, {"enum": NAMES[:3]}])
        }

    def _reference(self, depth: int) -> dict[str, Any]:
        return {"$ref": "#/$defs/leaf" if self.draft >= 19 else "#/definitions/leaf"}

    def relative(self, schema: Any) -> Any:
        """The schema after one to three small changes."""
        changed = copy.deepcopy(schema)
        for _ in range(self.random.randint(1, 3)):
            places = [place for place in _places(changed) if place]
            if not places:
                return changed
            place = self.random.choice(places)
            word = self.random.choice(list(place))
            if word.startswith("$"):
                continue
            act = self.random.random()
            if act < 0.35:
                del place[word]
            elif act < 0.5 and isinstance(place[word], list) and len(place[word]) > 1:
                place[word].pop(self.random.randrange(len(place[word])))
            elif act < 0.6 and isinstance(place[word], list):
                self.random.shuffle(place[word])
            elif act < 0.75 and type(place[word]) in (int, float):
                place[word] += self.random.choice([-1, 1])
            elif act < 0.85:
                place |= self.part(1)
            else:
                place |= getattr(self, "_" + self.random.choice(ALIKE))(1)
        return changed

    def value(self, schema: Any, root: Any, depth: int = 4) -> Any:
        """A value that has a fair chance to keep to a schema."""
        chance = self.random
        if not isinstance(schema, dict) or depth <= 0 or chance.random() < 0.08:
            return self._any(depth)
        if "$ref" in schema:
            target = root
            for token in schema["$ref"].split("/")[1:]:
                target = target.get(token, {})
            if chance.random() < 0.9:
                return self.value(target, root, depth)
        if "const" in schema:
            return copy.deepcopy(schema["const"])
        if "enum" in schema:
            return copy.deepcopy(chance.choice(schema["enum"]))
        inner = [one for word in ("anyOf", "oneOf", "allOf") for one in schema.get(word, [])]
        inner += [schema[word] for word in ("if", "then", "else") if word in schema]
        kind = schema.get("type")
        kind = chance.choice(kind) if isinstance(kind, list) else kind
        if inner and chance.random() < 0.5:
            value = self.value(chance.choice(inner), root, depth)
            if not isinstance(value, dict):
                return value
            return value | self._object_of(schema, root, depth)
        if kind == "object" or (
            kind is None and {"properties", "required", "patternProperties"} & set(schema)
        ):
            return self._object_of(schema, root, depth)
        if kind == "array" or (kind is None and {"items", "prefixItems", "contains"} & set(schema)):
            return self._array_of(schema, root, depth)
        return self._any(depth, kind)

    def _object_of(self, schema: Any, root: Any, depth: int) -> dict[str, Any]:
        chance = self.random
        properties = schema.get("properties", {})
        found = {
            name: self.value(one, root, depth - 1)
            for name, one in properties.items()
            if name in schema.get("required", []) or chance.random() < 0.6
        }
        for name in schema.get("required", []):
            found.setdefault(name, self._any(depth - 1))
        for one in schema.get("patternProperties", {}).values():
            found.setdefault(chance.choice(NAMES), self.value(one, root, depth - 1))
        if chance.random() < 0.25:
            found.setdefault(chance.choice(NAMES), self._any(depth - 1))
        return found

    def _array_of(self, schema: Any, root: Any, depth: int) -> list[Any]:
        first = schema.get("prefixItems") or (
            schema["items"] if isinstance(schema.get("items"), list) else []
        )
        rest = schema.get("items") if isinstance(schema.get("items"), dict) else schema.get("contains", {})
        found = [self.value(one, root, depth - 1) for one in first]
        found += [self.value(rest, root, depth - 1) for _ in range(self.random.randint(0, 2))]
        return found[: self.random.randint(0, 4)] if self.random.random() < 0.3 else found

    def _any(self, depth: int, kind: str | None = None) -> Any:
        chance = self.random
        kind = kind or chance.choice(TYPES)
        if kind == "object" and depth > 0:
            names = chance.sample(NAMES, chance.randint(0, 3))
            return {name: self._any(depth - 2) for name in names}
        if kind == "array" and depth > 0:
            return [self._any(depth - 2) for _ in range(chance.randint(0, 3))]
        if kind in ("integer", "number"):
            return chance.choice([one for one in NUMBERS if kind == "number" or one == int(one)])
        return {"null": None, "boolean": chance.random() < 0.5, "string": chance.choice(TEXTS)}.get(kind)


def _places(schema: Any) -> list[dict[str, Any]]:
    """Every schema inside a schema."""
    if isinstance(schema, list):
        return [place for one in schema for place in _places(one)]
    if not isinstance(schema, dict):
        return []
    found = [schema]
    for word, value in schema.items():
        if word in (
            "properties",
            "patternProperties",
            "dependentSchemas",
            "$defs",
            "definitions",
            "dependencies",
        ):
            found += [place for one in value.values() for place in _places(one)]
        elif word not in ("enum", "const", "required", "type", "dependentRequired"):
            found += _places(value)
    return found


def written(value: Any, schemas: list[Node]) -> bool:
    """Whether a writer that keeps to the schemas writes only names that some of them lists.

    What docs/schemas.md says of writers, put down a second time: it looks at every schema that may apply.
    """
    applied: dict[Node, None] = {}
    waiting = list(schemas)
    while waiting:
        node = waiting.pop()
        if node not in applied:
            applied[node] = None
            waiting += node.here
    if isinstance(value, list):
        return all(written(item, _items(list(applied), place)) for place, item in enumerate(value))
    if not isinstance(value, dict):
        return True
    free = not any(node.below("properties") or node.below("patternProperties") for node in applied)
    for name, inner in value.items():
        found: list[Node] = []
        listed = free
        for node in applied:
            own = [one for other, one in node.below("properties").items() if other == name]
            own += [one for pattern, one in node.below("patternProperties").items() if matches(pattern, name)]
            rest = list(node.below("additionalProperties").values()) if not own else []
            rest += node.below("unevaluatedProperties").values()
            listed = (
                listed or bool(own) or any(one.schema is not False for one in rest) or name in _named(node)
            )
            found += own + rest
        if not listed or not written(inner, found):
            return False
    return True


def _named(node: Node) -> set[str]:
    names = set(node.get("required") or ())
    for word in ("dependentRequired", "dependencies", "dependentSchemas"):
        for name, others in (node.get(word) or {}).items():
            names.add(name)
            names.update(others if isinstance(others, list) else ())
    return names


def _items(applied: list[Node], place: int) -> list[Node]:
    found: list[Node] = []
    for node in applied:
        shape = Shape(node)
        prefix, rest = shape.prefix(), shape.rest()
        found += [prefix[place]] if place < len(prefix) else [] if rest is None else [rest]
        found += [*node.below("contains").values(), *node.below("unevaluatedItems").values()]
    return found
