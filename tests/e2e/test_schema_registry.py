"""The registry through a real broker of two workers: limited children, the gate, kill -9 and restart."""

from __future__ import annotations

import json
from typing import Any

import pytest

import danube
from danube.errors import PayloadInvalid, SchemaIncompatible, SchemaInvalid

ONE = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TWO = {**ONE, "properties": {**ONE["properties"], "age": {"type": "integer"}}}  # type: ignore[dict-item]
BROKEN = {**ONE, "required": ["name", "age"]}
TOPIC = "/default/people"


def text(schema: dict[str, Any]) -> str:
    return json.dumps(schema)


def test_what_was_registered_is_kept_and_enforced_whatever_dies(broker: Any) -> None:
    process = broker(workers=2)
    with danube.sync.connect(process.address) as client:
        client.admin.create_topic(TOPIC, partitions=3)
        first = client.schemas.register("people", "json_schema", text(ONE), tags=["x"])
        assert (first.schema_id, first.version, first.new_version) == (1, 1, True)
        assert client.schemas.register("people", "json_schema", text(TWO)).version == 2
        assert not client.schemas.register("people", "json_schema", text(ONE)).new_version
        with pytest.raises(SchemaIncompatible) as refused:
            client.schemas.register("people", "json_schema", text(BROKEN))
        assert json.loads(refused.value.facts["violations"])
        with pytest.raises(SchemaInvalid):
            client.schemas.register("people", "json_schema", "{")
        client.schemas.configure_topic(TOPIC, subject="people", validation="enforce", validate_payload=True)
    process.kill()
    process.start()
    with danube.sync.connect(process.address) as client:
        assert [one.version for one in client.schemas.versions("people")] == [1, 2]
        assert client.schemas.get("people", 1).tags == ["x"]
        assert client.schemas.topic_schema(TOPIC).validation == "enforce"
        with client.producer(TOPIC) as producer, pytest.raises(PayloadInvalid):
            producer.send(b'{"name": "anna"}')
        client.schemas.configure_topic(TOPIC, validation="warn")
        with client.producer(TOPIC) as producer:
            for _ in range(6):
                producer.send(b"anything")
        workers = client.admin.status()["workers"]
        assert sum(worker["schema_warnings"] for worker in workers) == 6
        assert sum(worker["schema_rejected"] for worker in workers) >= 1
        client.admin.delete_topic(TOPIC)
        assert client.schemas.delete("people") == [1, 2]
