"""Typed producers and consumers and ``danube schema`` against a real broker, over restarts."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pydantic
import pytest
from click.testing import CliRunner

import danube
from danube.cli.main import root
from danube.errors import DanubeError, PayloadInvalid, SchemaIncompatible, SchemaInvalid, SchemaNotFound
from tests import fork_server
from tests.broker_process import ROOT, BrokerProcess

AVRO_1 = {"type": "record", "name": "P", "fields": [{"name": "x", "type": "int"}]}
AVRO_2 = {
    **AVRO_1,
    "fields": [{"name": "x", "type": "long"}, {"name": "y", "type": "string", "default": "-"}],
}


@dataclass
class Point:
    x: int
    y: str = "-"


@dataclass
class PointThatNeedsMore:
    x: int
    z: int


class Model(pydantic.BaseModel):
    x: int
    note: str | None = None


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker for all tests that keep to a topic, and so to a subject, of their own."""
    with BrokerProcess(tmp_path_factory.mktemp("typed") / "data", workers=2) as process:
        yield process


def process(broker: BrokerProcess, *words: str, stdin: str = "") -> str:
    """A command as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "DANUBE_SERVICE_URL": broker.address}
    command = [sys.executable, "-m", "danube", *words]
    result = fork_server.run(command, environment=environment, given=stdin)
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def command(broker: BrokerProcess, *words: str, exit_code: int = 0) -> str:
    """The same command in this process: an interpreter's start shows nothing more."""
    result = CliRunner(env={"DANUBE_SERVICE_URL": broker.address}).invoke(root, words, prog_name="danube")
    assert result.exit_code == exit_code, result.output
    return result.output


async def values(client: danube.Client, topic: str, schema: Any, count: int) -> list[Any]:
    """The values of a topic's first records, from the earliest."""
    found: list[Any] = []
    async with client.consumer(topic, f"s{os.urandom(4).hex()}", start="earliest", schema=schema) as consumer:
        async with asyncio.timeout(20):
            async for message in consumer:
                async with message:
                    found.append(message.value)
                if len(found) == count:
                    return found
    return found


KINDS: dict[str, tuple[Any, Sequence[Any]]] = {
    "dataclass": (Point, [Point(1), Point(2, "up")]),
    "pydantic": (Model, [Model(x=1), Model(x=2, note="n")]),
    "avro": (AVRO_2, [{"x": 1, "y": "-"}, {"x": 2, "y": "up"}]),
    "str": (str, ["a", "é"]),
    "int": (int, [1, -5]),
    "float": (float, [0.5, -1.0]),
    "bytes": (bytes, [b"", b"\xff"]),
}


@pytest.fixture(scope="module")
def restarted(served: BrokerProcess) -> dict[str, list[tuple[int, int]]]:
    """Id and version of each kind's schema, before a restart and after it: one restart for all kinds.

    The first value of each was sent before, the others after, by the same client.
    """
    found: dict[str, list[tuple[int, int]]] = {kind: [] for kind in KINDS}

    async def main() -> None:
        async with danube.connect(served.address) as client:
            for kind, (schema, sent) in KINDS.items():
                async with client.producer(f"/default/{kind}", schema=schema) as producer:
                    found[kind].append((producer.schema_id, producer.schema_version))
                    await producer.send(sent[0])
            served.stop()
            served.start()
            for kind, (schema, sent) in KINDS.items():
                async with client.producer(f"/default/{kind}", schema=schema) as producer:
                    found[kind].append((producer.schema_id, producer.schema_version))
                    await producer.send_many(sent[1:])

    asyncio.run(main())
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_every_kind_come_back_over_a_restart(
    served: BrokerProcess, restarted: dict[str, list[tuple[int, int]]], kind: str
) -> None:
    topic, (schema, sent) = f"/default/{kind}", KINDS[kind]
    first, again = restarted[kind]
    assert again == first == (first[0], 1)

    async def main() -> None:
        async with danube.connect(served.address) as client:
            assert await values(client, topic, schema, len(sent)) == list(sent)
            assert await values(client, topic, danube.Schema(bytes), len(sent)) is not None

    asyncio.run(main())


def test_a_generated_message_class_registers_and_comes_back(served: BrokerProcess) -> None:
    from tests.unit.client.typed.test_typed import PROTO3, message_class

    topic = "/default/generated"
    order: Any = message_class(PROTO3, "shop.v1.Order")
    with danube.sync.connect(served.address) as client:
        with client.producer(topic, schema=order) as producer:
            producer.send(order(number=5, deltas=[1, -1], card="x"))
        client.schemas.configure_topic(
            topic, subject="default-generated", validation="enforce", validate_payload=True
        )
        with client.producer(topic, schema=order) as producer:
            assert producer.schema_version == 1
            producer.send(order(number=6))
            with pytest.raises(DanubeError):
                producer.send(b"\x08")
        with client.consumer(topic, "s", start="earliest", schema=order) as consumer:
            seen = [consumer.receive(20).value for _ in range(2)]
        assert [one.number for one in seen] == [5, 6]
        text = client.schemas.get("default-generated").text
        assert client.schemas.register("default-generated", "protobuf", text).new_version is False


def test_an_older_producer_and_a_newer_consumer_meet(served: BrokerProcess) -> None:
    topic = "/default/older"

    async def main() -> None:
        async with danube.connect(served.address) as client:
            for schema in (AVRO_1, AVRO_2):
                async with client.producer(topic, schema=schema) as producer:
                    await producer.send({"x": 1})
            assert [one.version for one in await client.schemas.versions("default-older")] == [1, 2]
            assert await values(client, topic, AVRO_2, 2) == [{"x": 1, "y": "-"}] * 2
            assert await values(client, topic, danube.Schema(subject="default-older"), 2) == [
                {"x": 1},
                {"x": 1, "y": "-"},
            ]
            held: Any = danube.Schema(AVRO_1, register=False)
            async with client.producer(topic, schema=held) as producer:
                assert producer.schema_version == 1

    asyncio.run(main())


def test_what_the_registry_refuses(served: BrokerProcess) -> None:
    topic = "/default/refused"

    async def main() -> None:
        async with danube.connect(served.address) as client:
            async with client.producer(topic, schema=Point):
                pass
            with pytest.raises(SchemaIncompatible) as caught:
                await client.producer(topic, schema=PointThatNeedsMore).open()
            found = danube.violations_of(caught.value)
            assert any("z" in one.path for one in found), found
            with pytest.raises(SchemaNotFound):
                absent = danube.Schema(Point, subject="absent", register=False)
                await client.producer(topic, schema=absent).open()
            with pytest.raises((SchemaInvalid, SchemaIncompatible)):
                await client.producer(topic, schema=AVRO_1).open()
            checked = await client.schemas.check("default-refused", "json_schema", {"type": "string"})
            assert not checked.compatible and checked.violations

    asyncio.run(main())


def test_a_topic_that_enforces_its_schema_refuses_what_breaks_it(served: BrokerProcess) -> None:
    topic = "/default/enforced"

    async def main() -> None:
        async with danube.connect(served.address) as client:
            async with client.producer(topic, schema=Point) as producer:
                configured = await client.schemas.configure_topic(
                    topic, subject="default-enforced", validation="enforce", validate_payload=True
                )
                assert configured.schema_id == producer.schema_id
                await producer.send(Point(1))
                with pytest.raises(DanubeError):
                    await producer.send(b'{"x": "no"}')
                await producer.send(Point(2))
            async with client.producer(topic) as untyped:
                with pytest.raises(DanubeError):
                    await untyped.send(b'{"x": 3}')
            assert await values(client, topic, Point, 2) == [Point(1), Point(2)]

    asyncio.run(main())


def test_what_is_not_json_says_where_and_keeps_its_bytes(served: BrokerProcess) -> None:
    topic = "/default/damaged"
    with danube.sync.connect(served.address) as client:
        with client.producer(topic) as producer:
            producer.send_many([b'{"x":1}', b"\xff"])
        with client.consumer(topic, "s", start="earliest", schema=Point) as consumer:
            assert consumer.receive(20).value == Point(1)
            bad = consumer.receive(20)
            with pytest.raises(PayloadInvalid) as caught:
                bad.value  # noqa: B018
            assert caught.value.facts["offset"] == 1 and bad.payload == b"\xff"


def test_a_tombstone_of_a_compacted_topic_has_no_value(served: BrokerProcess) -> None:
    """Both shells, a topic that enforces its schema, and one whose empty payloads are values."""
    points, texts = "/default/points-by-key", "/default/texts-by-key"

    async def awaited(topic: str, schema: Any, count: int) -> list[Any]:
        async with danube.connect(served.address) as client:
            return await values(client, topic, schema, count)

    with danube.sync.connect(served.address) as client:
        client.admin.create_topic(points, cleanup="compact")
        client.admin.create_topic(texts)
        with client.producer(points, schema=Point) as producer:
            client.schemas.configure_topic(
                points, subject=producer.subject, validation="enforce", validate_payload=True
            )
            producer.send(Point(1), key="k")
            producer.send_many([b"", Point(2)], keys=["k", "l"])
            with pytest.raises(PayloadInvalid):
                producer.send(b"")
        with client.producer(points) as untyped:
            untyped.send(b"", key="m")
        wanted = [Point(1), None, Point(2), None]
        with client.consumer(points, "s", start="earliest", schema=Point) as consumer:
            assert [consumer.receive(20).value for _ in wanted] == wanted
        with client.consumer(points, "batches", start="earliest", schema=Point) as consumer:
            found: list[Any] = []
            for batch in consumer.batches(max_wait=0.2):
                found += batch.values
                if len(found) == len(wanted):
                    break
            assert found == wanted
        assert asyncio.run(awaited(points, Point, 4)) == wanted

        with client.producer(texts, schema=str) as producer:
            producer.send("", key="k")
            with client.consumer(texts, "s", start="earliest", schema=str) as consumer:
                assert consumer.receive(20).value == ""
                client.admin.update_topic(texts, cleanup="compact")
                producer.send("", key="k")
                assert consumer.receive(20).value is None, "the policy counts as it is at the delivery"


def test_the_command_line_registers_compares_and_produces(broker: Callable[..., BrokerProcess]) -> None:
    served = broker(workers=2)  # of its own: the list of subjects is all that it holds

    def said(*words: str) -> Any:
        return json.loads(command(served, *words, "-o", "json"))

    words = ("schema", "register", "points", "-t", "avro", "-f", "-", "-o", "json")
    assert json.loads(process(served, *words, stdin=json.dumps(AVRO_1)))["version"] == 1
    assert said("schema", "register", "points", "-t", "avro", "--schema", json.dumps(AVRO_2))["version"] == 2
    worse = json.dumps({**AVRO_1, "fields": [{"name": "x", "type": "string"}]})
    refused = command(served, "schema", "register", "points", "-t", "avro", "--schema", worse, exit_code=8)
    assert "x" in refused and "->" in refused
    assert "not compatible" in command(
        served, "schema", "check", "points", "-t", "avro", "--schema", worse, exit_code=8
    )
    assert said("schema", "diff", "points")["backward"] == []
    assert said("schema", "set-compatibility", "points", "none")["compatibility"] == "none"
    assert [one["subject"] for one in said("schema", "list")] == ["points"]
    command(served, "schema", "get", "absent", exit_code=3)
    command(served, "produce", "points", "-m", "x", "--schema-subject", "points", "--schema-version", "1")
    topic = said("schema", "set-topic", "points", "--subject", "points", "--validation", "enforce")
    assert topic == said("schema", "topic", "points")
    assert (topic["subject"], topic["validation"]) == ("points", "enforce")
    command(served, "produce", "points", "-m", "x", exit_code=8)
    assert said("schema", "set-topic", "points", "--subject", "")["subject"] == ""
    assert said("schema", "delete", "points", "--yes")["deleted_versions"] == [1, 2]
    assert said("schema", "list") == []
