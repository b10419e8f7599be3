"""Schemas and typed producers and consumers of both clients over loopback, against a scripted registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

import danube
from danube.core.protocol.native import Kind
from danube.errors import (
    ClosedError,
    ConnectionFailed,
    Overloaded,
    PayloadInvalid,
    ProtocolError,
    SchemaIncompatible,
    SchemaInvalid,
    SchemaNotFound,
)
from tests.fakes.broker import FakeBroker
from tests.unit.asynchronous import asynchronous

TOPIC = "/default/points"
AVRO_1 = '{"type":"record","name":"P","fields":[{"name":"x","type":"int"}]}'
AVRO_2 = (
    '{"type":"record","name":"P","fields":[{"name":"x","type":"long"},'
    '{"name":"y","type":"string","default":"-"}]}'
)
VIOLATION = {
    "path": "/fields/x", "rule": "type_changed", "message": "int cannot be read as string",
    "direction": "backward", "version": 1, "old": "int", "new": "string", "hint": "keep int",
}  # fmt: skip


@dataclass
class Point:
    x: int
    y: str = "-"


# -- client.schemas -----------------------------------------------------------------------------


@asynchronous
async def test_register_look_up_and_delete(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        made = await client.schemas.register("s", "avro", AVRO_1, tags=["a"], description="points")
        assert (made.subject, made.schema_id, made.version, made.new_version) == ("s", 1, 1, True)
        assert (await client.schemas.register("s", "avro", AVRO_1)).new_version is False
        await client.schemas.register("s", "avro", AVRO_2)
        latest = await client.schemas.get("s")
        assert (latest.version, latest.text, latest.compatibility) == (2, AVRO_2, "backward")
        first = await client.schemas.get_by_id(made.schema_id, 1)
        assert (first.text, first.tags, first.description) == (AVRO_1, ["a"], "points")
        assert [one.version for one in await client.schemas.versions("s")] == [1, 2]
        assert [one.latest_version for one in await client.schemas.subjects()] == [2]
        await client.schemas.delete_version("s", 1)
        assert await client.schemas.delete("s") == [2]
        with pytest.raises(SchemaNotFound):
            await client.schemas.get("s")


def test_the_blocking_twin_does_the_same(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client:
        made = client.schemas.register("s", "avro", AVRO_1)
        client.schemas.register("s", "avro", AVRO_2)
        assert client.schemas.get("s", 1).text == client.schemas.get_by_id(made.schema_id, 1).text == AVRO_1
        assert len(client.schemas.versions("s")) == 2
        assert client.schemas.subjects()[0].subject == "s"
        assert client.schemas.set_compatibility("s", "full") == "full"
        assert client.schemas.check("s", "avro", AVRO_2).compatible
        assert client.schemas.diff("s").backward == []
        assert client.schemas.configure_topic(TOPIC, subject="s", validation="enforce").schema_id == 1
        assert client.schemas.topic_schema(TOPIC).validation == "enforce"
        client.schemas.delete_version("s", 1)
        assert client.schemas.delete("s") == [2]


@asynchronous
async def test_every_violation_comes_with_check_diff_and_a_refused_registration(fake: FakeBroker) -> None:
    fake.registry.put("s", "avro", AVRO_1, AVRO_2)
    fake.registry.violations = [VIOLATION, VIOLATION | {"path": "", "old": None, "new": None, "hint": ""}]
    async with danube.connect(fake.url) as client:
        checked = await client.schemas.check("s", "avro", AVRO_1, compatibility="full")
        assert not checked.compatible
        assert fake.registry.calls[-1][1]["compatibility"] == "full"
        assert [str(one) for one in checked.violations] == [
            "/fields/x: type_changed: int cannot be read as string (int -> string); keep int",
            "(root): type_changed: int cannot be read as string",
        ]
        found = await client.schemas.diff("s")
        assert (found.old, found.new, found.backward[0].rule, found.forward) == (1, 2, "type_changed", [])
        with pytest.raises(SchemaIncompatible) as caught:
            await client.schemas.register("s", "avro", AVRO_1 + " ")
        assert danube.violations_of(caught.value) == checked.violations
    assert danube.violations_of(SchemaIncompatible("x", violations="{")) == []
    assert danube.violations_of(SchemaIncompatible("x", violations=[VIOLATION]))[0].path == "/fields/x"
    assert danube.violations_of(ValueError("x")) == []


@asynchronous
async def test_a_diff_without_an_older_version_is_not_found(fake: FakeBroker) -> None:
    fake.registry.put("s", "avro", AVRO_1)
    async with danube.connect(fake.url) as client:
        with pytest.raises(SchemaNotFound, match="no version before 1"):
            await client.schemas.diff("s")


@asynchronous
async def test_the_mode_is_set_before_the_check_and_after_the_first_registration(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        await client.schemas.register("s", "avro", AVRO_1, compatibility="none")
        assert fake.registry.subjects["s"]["mode"] == "none"
        fake.registry.calls.clear()
        await client.schemas.register("s", "avro", AVRO_2, compatibility="full")
        assert [op for op, _ in fake.registry.calls] == ["schema.set_compatibility", "schema.register"]


@asynchronous
async def test_topics_keep_what_is_not_given(fake: FakeBroker) -> None:
    fake.registry.put("s", "avro", AVRO_1)
    async with danube.connect(fake.url) as client:
        await client.schemas.configure_topic(TOPIC, subject="s")
        changed = await client.schemas.configure_topic(TOPIC, validate_payload=True)
        assert fake.registry.calls[-1][1] == {"topic": TOPIC, "validate_payload": True}
        assert (changed.subject, changed.validation, changed.validate_payload) == ("s", "warn", True)
        assert await client.schemas.topic_schema(TOPIC) == changed


@asynchronous
async def test_an_answer_of_another_shape_is_a_protocol_error(fake: FakeBroker) -> None:
    fake.registry._subjects = lambda: [{"subject": 5}]  # type: ignore[method-assign]
    async with danube.connect(fake.url) as client:
        with pytest.raises(ProtocolError, match="about schemas"):
            await client.schemas.subjects()


# -- producers ----------------------------------------------------------------------------------


@asynchronous
async def test_a_typed_producer_registers_and_every_batch_names_the_version(fake: FakeBroker) -> None:
    fake.registry.put("default-points", "json_schema", "{}")
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC, schema=Point) as producer:
            assert (producer.subject, producer.schema_id, producer.schema_version) == ("default-points", 1, 2)
            await producer.send(Point(1))
            await producer.send_many([Point(2), b'{"x":3}'], keys=["a", "b"])
            producer.send_nowait(Point(4, "up"), key="k", attributes={"a": "b"})
            await producer.flush()
        async with client.consumer(TOPIC, "s", start="earliest", schema=Point) as consumer:
            assert consumer.topic == TOPIC
            seen = [await consumer.receive(5) for _ in range(4)]
            assert [one.value for one in seen] == [Point(1), Point(2), Point(3), Point(4, "up")]
            assert {(one.schema_id, one.schema_version) for one in seen} == {(1, 2)}
            assert seen[3].key == "k" and seen[0].payload == b'{"x":1,"y":"-"}'
    assert fake.registry.asked("schema.get") == 0


def test_the_blocking_producer_and_consumer(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client:
        with client.producer(TOPIC, schema=danube.Schema(AVRO_2, subject="p")) as producer:
            assert (producer.subject, producer.schema_id, producer.schema_version) == ("p", 1, 1)
            producer.send({"x": 1})
            producer.send_many([{"x": 2}, {"x": 3}])
            assert producer.send_nowait({"x": 4}).result().offset == 3
        with client.consumer(TOPIC, "s", start="earliest", schema=AVRO_2) as consumer:
            assert consumer.receive(5).value == {"x": 1, "y": "-"}
            with next(iter(consumer)) as message:
                assert message.value == {"x": 2, "y": "-"}
            for batch in consumer.batches(max_records=1):
                assert batch.values == [{"x": 3, "y": "-"}]
                batch.ack()
                break
    assert fake.registry.asked("schema.get") == 1


@asynchronous
async def test_a_value_that_cannot_be_encoded_is_not_sent_nor_are_those_beside_it(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client, client.producer(TOPIC, schema=AVRO_1) as producer:
        for send in (producer.send, producer.send_nowait):
            with pytest.raises(PayloadInvalid):
                await send({"x": "no"})
        with pytest.raises(PayloadInvalid):
            await producer.send_many([{"x": 1}, {}])
        await producer.flush()
    assert fake.payloads(TOPIC) == []


@asynchronous
async def test_what_the_registry_refuses_opens_nothing_and_makes_no_topic(fake: FakeBroker) -> None:
    fake.registry.violations = [VIOLATION]
    async with danube.connect(fake.url) as client:
        producer = client.producer(TOPIC, schema=Point)
        with pytest.raises(SchemaIncompatible):
            await producer.open()
        with pytest.raises(ClosedError, match="not open"):
            producer.schema_id  # noqa: B018
        with pytest.raises(ClosedError, match="not open"):
            await producer.send(Point(1))
    assert fake.topics == {}


def test_blocking_typed_producers_that_are_not_open(fake: FakeBroker) -> None:
    with danube.sync.connect(fake.url) as client:
        producer = client.producer(TOPIC, schema=Point)
        with pytest.raises(ClosedError, match="not open"):
            producer.send(Point(1))
        producer.close()
        with pytest.raises(ClosedError, match="is closed"):
            producer.open()


@asynchronous
async def test_without_registering_the_newest_version_that_says_the_same_is_taken(fake: FakeBroker) -> None:
    spaced = AVRO_1.replace(":", ": ")
    fake.registry.put("p", "avro", spaced, AVRO_2)
    async with danube.connect(fake.url) as client:
        schema: Any = danube.Schema(AVRO_1, subject="p", register=False)
        async with client.producer(TOPIC, schema=schema) as producer:
            assert producer.schema_version == 1
        other: Any = danube.Schema(AVRO_1.replace("int", "string"), subject="p", register=False)
        with pytest.raises(SchemaNotFound, match="no version of subject 'p'"):
            await client.producer(TOPIC, schema=other).open()
        absent: Any = danube.Schema(AVRO_1, subject="absent", register=False)
        with pytest.raises(SchemaNotFound, match="absent"):
            await client.producer(TOPIC, schema=absent).open()
        with pytest.raises(SchemaInvalid, match="holds avro, and the model is json_schema"):
            await client.producer(TOPIC, schema=danube.Schema(Point, subject="p", register=False)).open()
    assert fake.registry.asked("schema.register") == 0


@asynchronous
async def test_a_version_can_be_pinned(fake: FakeBroker) -> None:
    fake.registry.put("p", "json_schema", "{}", '{"a":1}')
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC, schema=danube.Schema(Point, subject="p", version=1)) as producer:
            assert (producer.schema_version, producer.schema_id) == (1, 1)
        with pytest.raises(SchemaNotFound):
            await client.producer(TOPIC, schema=danube.Schema(Point, subject="p", version=9)).open()
        with pytest.raises(SchemaInvalid, match="the model is number"):
            await client.producer(TOPIC, schema=danube.Schema(int, subject="p", version=1)).open()
    assert fake.registry.asked("schema.register") == 0


@asynchronous
async def test_a_subject_without_a_model_takes_values_of_its_type(fake: FakeBroker) -> None:
    fake.registry.put("p", "avro", AVRO_2)
    fake.registry.put("j", "json_schema", "{}")
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC, schema=danube.Schema(subject="p")) as producer:
            await producer.send({"x": 5})
            await producer.send(b"\x02\x00")
        async with client.producer(TOPIC, schema=danube.Schema(subject="j")) as producer:
            await producer.send({"free": True})
        async with client.consumer(
            TOPIC, "s", start="earliest", schema=danube.Schema(subject="p")
        ) as consumer:
            values = [(await consumer.receive(5)).value for _ in range(3)]
            assert values == [{"x": 5, "y": "-"}, {"x": 1, "y": ""}, {"free": True}]
        with pytest.raises(SchemaNotFound):
            await client.consumer(TOPIC, "s", schema=danube.Schema(subject="absent")).open()


# -- consumers ----------------------------------------------------------------------------------


@asynchronous
async def test_each_version_is_asked_for_once_and_read_as_the_consumers(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        for definition in (AVRO_1, AVRO_2):
            schema: Any = danube.Schema(definition, subject="p")
            async with client.producer(TOPIC, schema=schema) as producer:
                for x in range(3):
                    await producer.send({"x": x})
        async with client.consumer(TOPIC, "s", start="earliest", schema=AVRO_2) as consumer:
            seen = []
            async for message in consumer:
                async with message:
                    seen.append(message.value)
                if len(seen) == 6:
                    break
        assert seen == [{"x": x, "y": "-"} for x in (0, 1, 2)] * 2
        assert fake.registry.asked("schema.get") == 2
        pinned: Any = danube.Schema(subject="p", version=2)
        async with client.consumer(TOPIC, "pinned", start="earliest", schema=pinned) as consumer:
            assert (await consumer.receive(5)).value == {"x": 0, "y": "-"}
        loose: Any = danube.Schema(subject="p")
        async with client.consumer(TOPIC, "loose", start="earliest", schema=loose) as consumer:
            assert (await consumer.receive(5)).value == {"x": 0}


@asynchronous
async def test_batches_have_values_across_versions(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        for definition in (AVRO_1, AVRO_2):
            schema: Any = danube.Schema(definition, subject="p")
            async with client.producer(TOPIC, schema=schema) as producer:
                await producer.send_many([{"x": x} for x in range(5)])
        async with client.consumer(TOPIC, "s", start="earliest", schema=AVRO_2) as consumer:
            async for batch in consumer.batches(max_records=10, max_wait=1):
                assert batch.values == [{"x": x, "y": "-"} for x in range(5)] * 2
                await batch.ack()
                break


@asynchronous
async def test_what_cannot_be_decoded_says_where_and_keeps_its_bytes(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC) as producer:
            await producer.send_many([b'{"x":1}', b"\xff\xfe"])
        async with client.consumer(TOPIC, "s", start="earliest", schema=Point) as consumer:
            good, bad = [await consumer.receive(5) for _ in range(2)]
            assert good.value == Point(1)
            assert (good.schema_id, good.schema_version) == (None, None)
            with pytest.raises(PayloadInvalid) as caught:
                bad.value  # noqa: B018
            assert caught.value.facts == {"topic": TOPIC, "offset": 1}
            assert bad.payload == b"\xff\xfe"
        async with client.consumer(TOPIC, "b", start="earliest", schema=Point) as consumer:
            async for batch in consumer.batches():
                with pytest.raises(PayloadInvalid):
                    batch.values  # noqa: B018
                assert batch.payloads == [b'{"x":1}', b"\xff\xfe"]
                break


@asynchronous
async def test_records_without_a_schema_id_are_read_as_the_consumers_own(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC) as producer:
            await producer.send(b"\x02")
        async with client.consumer(TOPIC, "s", start="earliest", schema=AVRO_1) as consumer:
            assert (await consumer.receive(5)).value == {"x": 1}
    assert fake.registry.asked("schema.get") == 0


@asynchronous
async def test_a_version_that_is_gone_is_told_by_the_value_and_asked_for_once(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC, schema=AVRO_1) as producer:
            for x in range(3):
                await producer.send({"x": x})
        fake.registry.subjects.clear()
        async with client.consumer(TOPIC, "s", start="earliest", schema=AVRO_2) as consumer:
            for _ in range(3):
                message = await consumer.receive(5)
                with pytest.raises(SchemaNotFound):
                    message.value  # noqa: B018
                assert message.payload
    assert fake.registry.asked("schema.get") == 1


@asynchronous
async def test_a_version_that_cannot_be_had_now_is_asked_for_again(fake: FakeBroker) -> None:
    fake.registry.failures = [Overloaded("later")]
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC, schema=AVRO_1) as producer:
            for x in range(2):
                await producer.send({"x": x})
        async with client.consumer(TOPIC, "s", start="earliest", schema=AVRO_2) as consumer:
            first = await consumer.receive(5)
            with pytest.raises(Overloaded):
                first.value  # noqa: B018
            assert (await consumer.receive(5)).value == {"x": 1, "y": "-"}
            assert first.value == {"x": 0, "y": "-"}


@asynchronous
async def test_a_schema_of_another_kind_is_told_by_the_value(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC, schema=Point) as producer:
            await producer.send(Point(1))
        async with client.consumer(TOPIC, "s", start="earliest", schema=AVRO_1) as consumer:
            with pytest.raises(PayloadInvalid, match="is json_schema, not avro"):
                (await consumer.receive(5)).value  # noqa: B018


@asynchronous
async def test_versions_beyond_the_bound_are_forgotten(
    fake: FakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("danube.client.typed.binding.VERSIONS_KEPT_MAX", 1)
    async with danube.connect(fake.url) as client:
        for definition in (AVRO_1, AVRO_2):
            schema: Any = danube.Schema(definition, subject="p")
            async with client.producer(TOPIC, schema=schema) as producer:
                await producer.send({"x": 1})
        async with client.consumer(TOPIC, "s", start="earliest", schema=AVRO_2) as consumer:
            first, second = [await consumer.receive(5) for _ in range(2)]
            assert second.value == {"x": 1, "y": "-"}
            with pytest.raises(SchemaNotFound, match="not at hand"):
                first.value  # noqa: B018


@asynchronous
async def test_a_lost_connection_while_a_version_is_asked_for_is_made_good(fake: FakeBroker) -> None:
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC, schema=AVRO_1) as producer:
            await producer.send({"x": 1})
        async with client.consumer(TOPIC, "s", start="earliest", schema=AVRO_2) as consumer:
            dropped = False

            def drop(connection: Any, frame: Any) -> None:
                nonlocal dropped
                if frame.kind == Kind.ADMIN and not dropped:
                    dropped = True
                    connection.close()

            fake.when_frame = drop
            assert (await consumer.receive(5)).value == {"x": 1, "y": "-"}
            assert dropped


@asynchronous
async def test_a_consumer_that_was_closed_is_not_opened_again(fake: FakeBroker) -> None:
    fake.registry.put("p", "avro", AVRO_1)
    async with danube.connect(fake.url) as client:
        async with client.producer(TOPIC):
            pass
        consumer = client.consumer(TOPIC, "s", schema=danube.Schema(subject="p"))
        await consumer.close()
        with pytest.raises(ClosedError):
            await consumer.open()
    with danube.sync.connect(fake.url) as blocking:
        closed = blocking.consumer(TOPIC, "s", schema=danube.Schema(subject="p"))
        closed.close()
        with pytest.raises(ClosedError):
            closed.open()
    with pytest.raises((ClosedError, ConnectionFailed)):
        blocking.schemas.get("p")
