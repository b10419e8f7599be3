"""Numbers that are too wide are refused by name, at every public argument of both clients and of commands."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from click.testing import CliRunner

import danube
import danube.sync
from danube.cli.main import root
from danube.cli.terminal.services import Services
from danube.client.machine.admin import AdminPlans, LimitKeywords, PolicyKeywords
from danube.client.machine.schema_plans import SchemaPlans
from danube.errors import InvalidArgument
from tests.fakes.broker import FakeBroker

TOO_WIDE = [1 << 64, -(1 << 63) - 1]
TOPIC = "/default/t"
GIVEN: dict[str, Any] = {"topic": TOPIC, "scope": "cluster", "definition": "{}", "ends": {}, "start": 0}
Place = tuple[str, str, str]  # admin or schemas, method, argument


def numbers_of(plans: type, door: str) -> Iterator[Place]:
    """Name every argument of a public method that takes a number; ``limit`` may be any number from 1 up."""
    for method, plan in inspect.getmembers(plans, inspect.isfunction):
        for argument in inspect.signature(plan).parameters.values():
            if method.startswith("_") or argument.name in ("limit", "ends"):
                continue
            annotation = str(argument.annotation)
            if re.search(r"\bint\b", annotation):
                yield door, method, argument.name
            elif "Keywords" in annotation:
                fields = PolicyKeywords if "Policy" in annotation else LimitKeywords
                for name, kind in fields.__annotations__.items():
                    if re.search(r"\bint\b", str(getattr(kind, "__forward_arg__", kind))):
                        yield door, method, name


LOWER = ("schemas", "diff", "new")  # below zero no version lies before it, which it is told

PLACES = [*numbers_of(AdminPlans, "admin"), *numbers_of(SchemaPlans, "schemas")]


def arguments_of(place: Place, number: int) -> dict[str, Any]:
    door, method, name = place
    plan = getattr(AdminPlans if door == "admin" else SchemaPlans, method)
    needed = [
        one.name
        for one in list(inspect.signature(plan).parameters.values())[1:]
        if one.default is one.empty and one.kind is not one.VAR_KEYWORD
    ]
    return {one: GIVEN.get(one, "x") for one in needed} | {name: number}


def places_of(number: int) -> list[Place]:
    return [one for one in PLACES if number > 0 or one != LOWER]


@pytest.fixture(scope="module")
def broker() -> Iterator[FakeBroker]:
    with FakeBroker() as running:
        with danube.sync.connect(running.url) as client:
            client.schemas.register("x", "string", "")  # a difference reads one version before the other
            client.admin.create_topic(TOPIC)
        yield running


def refused(name: str, call: Callable[[], Any]) -> None:
    with pytest.raises(InvalidArgument) as told:
        call()
    assert re.search(rf"\b{name}\b", str(told.value)), told.value
    assert re.search(r"must be|must not be|from -?[\d,]+ to", str(told.value)), told.value


def test_the_numbers_of_all_calls_are_found() -> None:
    """The places that reports named are among them."""
    assert len(PLACES) > 40
    assert {
        ("admin", "create_topic", "partitions"),
        ("admin", "create_topic", "retention_ms"),
        ("admin", "update_topic", "max_unacked"),
        ("schemas", "get", "version"),
    } <= set(PLACES)


@pytest.mark.parametrize("number", TOO_WIDE)
def test_no_number_of_a_call_is_too_wide_for_its_frame(broker: FakeBroker, number: int) -> None:
    with danube.sync.connect(broker.url) as client:
        for place in places_of(number):
            door, method, name = place
            call = getattr(getattr(client, door), method)
            refused(name, lambda call=call, place=place: call(**arguments_of(place, number)))  # type: ignore[misc]


@pytest.mark.parametrize("number", TOO_WIDE)
def test_it_is_the_same_for_the_asyncio_client(broker: FakeBroker, number: int) -> None:
    async def story() -> None:
        async with danube.connect(broker.url) as client:
            for place in places_of(number):
                door, method, name = place
                with pytest.raises(InvalidArgument, match=rf"\b{name}\b"):
                    await getattr(getattr(client, door), method)(**arguments_of(place, number))
            for options in ({"start": number}, {"max_unacked": number}):
                with pytest.raises(InvalidArgument, match=next(iter(options))):
                    async with client.consumer(TOPIC, "s", **options):  # type: ignore[arg-type]
                        pass

    asyncio.run(story())


@pytest.mark.parametrize("number", [*TOO_WIDE, -1])
def test_a_start_names_its_range(broker: FakeBroker, number: int) -> None:
    with danube.sync.connect(broker.url) as client:
        refused("start", lambda: client.admin.seek(TOPIC, "s", number))

        def subscribe() -> None:
            with client.consumer(TOPIC, "s", start=number):
                pass

        refused("start", subscribe)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("topics", "create", "q", "--partitions"), "partitions"),
        (("topics", "create", "q", "--max-unacked"), "max_unacked"),
        (("topics", "create", "q", "--retention-segments"), "retention_segments"),
        (("schema", "get", "s", "--version"), "version"),
        (("consume", "t", "--count", "1", "--from"), "--from"),
        (("subscriptions", "seek", "t", "s", "--to"), "--to"),
    ],
)
@pytest.mark.parametrize("number", [1 << 64, -1])
def test_commands_name_the_option_or_the_field(
    broker: FakeBroker, words: tuple[str, ...], name: str, number: int
) -> None:
    given = [*words, str(number), "-s", broker.url]
    ended = CliRunner().invoke(root, given, obj=Services(), prog_name="danube")
    told = f"{ended.output}{ended.exception}"
    assert ended.exit_code == 2 or isinstance(ended.exception, InvalidArgument), told
    assert name in told or name.replace("_", "-") in told, told
