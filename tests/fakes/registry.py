"""A schema registry in memory behind the registry's operations; what is incompatible is scripted."""

from __future__ import annotations

import json
from typing import Any

from danube.errors import DanubeError, InvalidArgument, SchemaIncompatible, SchemaInvalid, SchemaNotFound

TYPES = ("bytes", "string", "number", "avro", "json_schema", "protobuf")
MODES = ("none", "backward", "forward", "full", "backward_transitive")


class FakeRegistry:
    """Subjects by name; every definition is taken unless ``violations`` is set."""

    def __init__(self) -> None:
        self.subjects: dict[str, dict[str, Any]] = {}
        self.topics: dict[str, dict[str, Any]] = {}
        self.violations: list[dict[str, Any]] = []
        self.failures: list[DanubeError] = []  # raised first, one for each schema.get
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def asked(self, op: str) -> int:
        return sum(one == op for one, _ in self.calls)

    def answer(self, op: str, arguments: dict[str, Any]) -> Any:
        self.calls.append((op, arguments))
        known = {name: value for name, value in arguments.items() if name not in ("after", "limit", "prefix")}
        return getattr(self, "_" + op.removeprefix("schema."))(**known)

    def put(self, subject: str, schema_type: str, *definitions: str | bytes) -> int:
        """Store versions without any check; the subject's id."""
        for one in definitions:
            text = one.encode() if isinstance(one, str) else one
            self._store(subject, schema_type, text)
        return int(self.subjects[subject]["schema_id"])

    def _store(self, subject: str, schema_type: str, definition: bytes, **rest: Any) -> dict[str, Any]:
        found = self.subjects.setdefault(
            subject, {"schema_id": len(self.subjects) + 1, "mode": "backward", "versions": {}}
        )
        version = max(found["versions"], default=0) + 1
        entry = {
            "subject": subject,
            "schema_id": found["schema_id"],
            "version": version,
            "schema_type": schema_type,
            "definition": definition,
            "fingerprint": f"sha256:{hash(definition):x}",
            "description": "",
            "created_by": "",
            "created_us": 1_795_248_000_000_000,
            "tags": [],
            "compatibility": found["mode"],
        }
        found["versions"][version] = entry | rest
        return found["versions"][version]

    def _of(self, subject: str) -> dict[str, Any]:
        if subject not in self.subjects:
            raise SchemaNotFound(f"subject {subject!r} does not exist", subject=subject)
        return self.subjects[subject]

    def _register(self, subject: str, schema_type: str, definition: bytes, **rest: Any) -> Any:
        if schema_type not in TYPES:
            raise InvalidArgument(f"schema type {schema_type!r} is not known")
        if definition.startswith(b"broken"):
            raise SchemaInvalid("the definition does not parse", why="line 1")
        if self.violations:
            raise SchemaIncompatible(
                f"the definition cannot follow version 1 of {subject!r}",
                hint="change it, or the subject's compatibility",
                violations=json.dumps(self.violations),
            )
        versions = self.subjects.get(subject, {"versions": {}})["versions"]
        entry = next((one for one in versions.values() if one["definition"] == definition), None)
        is_new = entry is None
        entry = entry or self._store(subject, schema_type, definition, **rest)
        shown = {name: entry[name] for name in ("subject", "schema_id", "version", "fingerprint")}
        return {**shown, "is_new_version": is_new}

    def _get(self, subject: str = "", schema_id: int = 0, version: int = 0) -> Any:
        if self.failures:
            raise self.failures.pop(0)
        if not subject:
            names = [name for name, one in self.subjects.items() if one["schema_id"] == schema_id]
            if not names:
                raise SchemaNotFound(f"schema id {schema_id} does not exist")
            subject = names[0]
        versions = self._of(subject)["versions"]
        version = version or max(versions)
        if version not in versions:
            raise SchemaNotFound(f"subject {subject!r} has no version {version}")
        return versions[version] | {"compatibility": self.subjects[subject]["mode"]}

    def _versions(self, subject: str) -> Any:
        return [
            {name: value for name, value in one.items() if name != "definition"}
            for one in self._of(subject)["versions"].values()
        ]

    def _subjects(self) -> Any:
        return [
            {
                "subject": name,
                "schema_id": one["schema_id"],
                "schema_type": one["versions"][max(one["versions"])]["schema_type"],
                "latest_version": max(one["versions"]),
                "compatibility": one["mode"],
                "tags": [],
            }
            for name, one in sorted(self.subjects.items())
        ]

    def _check(self, subject: str, schema_type: str, definition: bytes, compatibility: str = "") -> Any:
        self._of(subject)
        return {"is_compatible": not self.violations, "violations": self.violations}

    def _diff(self, subject: str, old: int, new: int) -> Any:
        self._of(subject)
        return {"subject": subject, "old": old, "new": new, "backward": self.violations, "forward": []}

    def _set_compatibility(self, subject: str, compatibility: str) -> Any:
        found = self._of(subject)
        if compatibility not in MODES:
            raise InvalidArgument(f"compatibility mode {compatibility!r} is not known")
        found["mode"] = compatibility
        return {"subject": subject, "compatibility": compatibility}

    def _delete_version(self, subject: str, version: int) -> Any:
        self._get(subject, 0, version)
        del self.subjects[subject]["versions"][version]
        return {}

    def _delete(self, subject: str) -> Any:
        self._of(subject)
        return {"deleted_versions": sorted(self.subjects.pop(subject)["versions"])}

    def _configure_topic(self, topic: str, **given: Any) -> Any:
        present = self._topic(topic)
        if given.get("subject"):
            present["schema_id"] = self._of(given["subject"])["schema_id"]
        self.topics[topic] = present | given
        return self.topics[topic]

    def _topic(self, topic: str) -> Any:
        unset = {"topic": topic, "subject": "", "validation": "warn"}
        return dict(self.topics.get(topic, {**unset, "validate_payload": False, "schema_id": 0}))
