"""The registry as the official client drives it: versions, compatibility, references, validation."""

from __future__ import annotations

import json

import grpc
from official import Failed, connect, expect, producing, receiving, refused, run

from danube import CompatibilityMode, DanubeClient, SchemaType

CODE = grpc.StatusCode
JSON = SchemaType.JSON_SCHEMA


def document(properties: dict[str, str], required: list[str]) -> bytes:
    """A JSON schema of an object with these properties and their types."""
    typed = {name: {"type": kind} for name, kind in properties.items()}
    return json.dumps({"type": "object", "properties": typed, "required": required}).encode()


ONE = document({"id": "integer"}, ["id"])
TWO = document({"id": "integer", "name": "string"}, ["id"])
BROKEN = document({"id": "string", "name": "string"}, ["id", "name"])


async def register(client: DanubeClient, subject: str, text: bytes, kind: SchemaType = JSON) -> int:
    number = await client.schema().register_schema(subject).with_type(kind).with_schema_data(text).execute()
    return int(number)


def subject_of(topic: str) -> str:
    return topic.strip("/").replace("/", "-") + "-value"


async def versions(url: str, topic: str) -> None:
    """All versions of a subject share its id; the same definition again is the same version."""
    client, subject = await connect(url), subject_of(topic)
    registry = client.schema()
    number = await register(client, subject, ONE)
    expect(number >= 1 and await register(client, subject, ONE) == number, "registered twice", number)
    expect(await register(client, subject, TWO) == number, "the id belongs to the subject")
    expect(await registry.list_versions(subject) == [1, 2], "two versions")
    latest = await registry.get_latest_schema(subject)
    expect((latest.version, latest.subject, latest.schema_id) == (2, subject, number), "latest", latest)
    expect(latest.schema_type == "json_schema" and latest.fingerprint.startswith("sha256:"), "facts", latest)
    expect(json.loads(latest.schema_definition) == json.loads(TWO), "the text comes back", latest)
    first = await registry.get_schema_version(number, 1)
    expect((first.version, json.loads(first.schema_definition)) == (1, json.loads(ONE)), "version 1", first)
    expect((await registry.get_schema_by_id(number)).version == 2, "an id alone is the latest")
    await refused(registry.get_latest_schema(subject + "-not"), CODE.NOT_FOUND)
    await refused(registry.get_schema_version(number, 9), CODE.NOT_FOUND)
    await refused(registry.get_schema_by_id(number + 1_000), CODE.NOT_FOUND)
    await refused(registry.list_versions(subject + "-not"), CODE.NOT_FOUND)
    done, message = await registry.delete_schema_version(subject, 1)
    expect(done and await registry.list_versions(subject) == [2], "a deleted version is gone", message)


async def types(url: str, topic: str) -> None:
    """Every type is taken and named by its canonical word."""
    client, subject = await connect(url), subject_of(topic)
    record = {"type": "record", "name": "R", "fields": [{"name": "f", "type": "int"}]}
    proto = b'syntax = "proto3"; message M { int32 f = 1; }'
    for kind, text in (
        (SchemaType.BYTES, b"-"),
        (SchemaType.STRING, b"-"),
        (SchemaType.NUMBER, b"-"),
        (SchemaType.AVRO, json.dumps(record).encode()),
        (SchemaType.JSON_SCHEMA, ONE),
        (SchemaType.PROTOBUF, proto),
    ):
        name = f"{subject}-{kind.value}"
        await register(client, name, text, kind)
        latest = await client.schema().get_latest_schema(name)
        expect(latest.schema_type == kind.value and latest.version == 1, "type", latest)
    for kind in (SchemaType.AVRO, SchemaType.JSON_SCHEMA, SchemaType.PROTOBUF):
        await refused(register(client, f"{subject}-bad", b"{ no", kind), CODE.INVALID_ARGUMENT, CODE.INTERNAL)


async def compatibility(url: str, topic: str) -> None:
    """A version that breaks the mode is refused and explained; another mode takes it."""
    client, subject = await connect(url), subject_of(topic)
    registry = client.schema()
    await register(client, subject, ONE)
    await register(client, subject, TWO)
    held, errors = await registry.check_compatibility(subject, BROKEN, JSON)
    expect(not held and errors, "incompatible is an answer", errors)
    held, errors = await registry.check_compatibility(subject, TWO, JSON)
    expect(held and not errors, "compatible with itself", errors)
    held, errors = await registry.check_compatibility(subject, BROKEN, JSON, CompatibilityMode.NONE)
    expect(held, "mode none of this check alone", errors)
    text = await refused(register(client, subject, BROKEN), CODE.FAILED_PRECONDITION, CODE.INTERNAL)
    expect("id" in text or "name" in text, "the refusal names what breaks", text)
    expect(await registry.list_versions(subject) == [1, 2], "nothing was stored")
    done, message = await registry.set_compatibility_mode(subject, CompatibilityMode.NONE)
    expect(done, "mode set", message)
    await register(client, subject, BROKEN)
    expect(await registry.list_versions(subject) == [1, 2, 3], "mode none takes it")
    await refused(
        registry.set_compatibility_mode(subject + "-not", CompatibilityMode.FULL),
        CODE.NOT_FOUND,
        CODE.INTERNAL,
    )


async def references(url: str, topic: str) -> None:
    """Latest, pinned and minimum versions end up on every message; what does not exist is refused."""
    client, subject = await connect(url), subject_of(topic)
    await register(client, subject, ONE)
    number = await register(client, subject, TWO)
    async with producing(client, topic, "plain"), receiving(client, topic, "consumer") as inbox:
        for name, version, schema in (
            ("latest", 2, lambda builder: builder.with_schema_subject(subject)),
            ("pinned", 1, lambda builder: builder.with_schema_version(subject, 1)),
            ("pinned-latest", 2, lambda builder: builder.with_schema_version(subject, 2)),
            ("at-least", 2, lambda builder: builder.with_schema_min_version(subject, 1)),
        ):
            async with producing(client, topic, name, schema=schema) as producer:
                await producer.send(b'{"id": 1}')
                [message] = await inbox.take(1)
                expect((message.schema_id, message.schema_version) == (number, version), name, message)
        for schema in (
            lambda builder: builder.with_schema_version(subject, 9),
            lambda builder: builder.with_schema_min_version(subject, 3),
        ):
            try:
                async with producing(client, topic, "too-new", schema=schema):
                    raise Failed("a version that does not exist was taken")
            except ValueError:
                pass

        async def create(name: str) -> None:
            async with producing(
                client, topic, "other", schema=lambda builder: builder.with_schema_subject(name)
            ):
                pass

        text = await refused(create(subject + "-unknown"), CODE.FAILED_PRECONDITION)
        expect("not found" in text or "validation failed" in text, "the words that clients look for", text)
        await register(client, subject + "-another", ONE)
        await refused(create(subject + "-another"), CODE.FAILED_PRECONDITION)


async def enforced(url: str, topic: str) -> None:
    """With policy enforce and payload validation only messages that follow the schema are taken."""
    client, subject = await connect(url), subject_of(topic)
    registry = client.schema()
    number = await register(client, subject, ONE)
    async with producing(client, topic, "plain") as plain, receiving(client, topic, "consumer") as inbox:
        done, message = await registry.configure_topic_schema(topic, subject, "enforce", True)
        expect(done, "configured", message)
        config = await registry.get_topic_schema_config(topic)
        expect(
            (config.schema_subject, config.validation_policy, config.enable_payload_validation)
            == (subject, "enforce", True),
            "told as it was set",
            config,
        )
        refusals = (CODE.INVALID_ARGUMENT, CODE.FAILED_PRECONDITION)
        await refused(plain.send(b'{"id": 1}'), *refusals)
        async with producing(
            client, topic, "typed", schema=lambda builder: builder.with_schema_subject(subject)
        ) as typed:
            await typed.send(b'{"id": 2}')
            for payload in (b'{"id": "two"}', b"{}", b"no json", b""):
                await refused(typed.send(payload), *refusals)
            await typed.send(b'{"id": 3}')
            first, second = await inbox.take(2)
            expect((first.payload, second.payload) == (b'{"id": 2}', b'{"id": 3}'), "only the good ones")
            expect(first.schema_id == number, "with their schema", first)
            done, message = await registry.update_topic_validation_policy(topic, "warn", True)
            expect(done, "changed", message)
            await typed.send(b"no json")
            await plain.send(b"bare")
            expect(await inbox.payloads(2) == [b"no json", b"bare"], "warn lets them pass")
        await refused(registry.configure_topic_schema(topic, subject, "sometimes"), CODE.INVALID_ARGUMENT)
        await refused(registry.configure_topic_schema(topic, subject + "-not", "warn"), CODE.NOT_FOUND)
        await refused(registry.configure_topic_schema(topic + "-not", subject, "warn"), CODE.NOT_FOUND)


if __name__ == "__main__":
    run("__main__")
