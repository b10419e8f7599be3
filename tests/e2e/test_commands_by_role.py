"""``danube consume`` with the role `consumer` alone and ``danube produce`` with `producer` alone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from danube import sync
from danube.errors import NotAllowed
from tests import fork_server
from tests.broker_process import BrokerProcess, Brokers, die_with_parent, wait_until
from tests.e2e.authority_site import ENVIRONMENT, root, token

TOPIC, PARTED, LOSSY = "/default/orders", "/default/parted", "/default/ticks"
WITHIN_S = 60.0
NOT_ALLOWED = NotAllowed.exit_code


class Place:
    """A broker with one principal of each role, whose tokens are in files."""

    def __init__(self, folder: Path, broker: BrokerProcess) -> None:
        self.broker = broker
        self._folder = folder
        with sync.connect(broker.address, token=root()) as client:
            client.admin.create_topic(TOPIC)
            client.admin.create_topic(PARTED, partitions=2)
            client.admin.create_topic(LOSSY, reliable=False)
            for name, role in (("maker", "producer"), ("taker", "consumer")):
                self._keep(name, token(name))
                for number, topic in enumerate((TOPIC, PARTED, LOSSY)):
                    who = f"service_account:{name}"
                    client.admin.put_binding(f"{name}-{number}", who, [role], "topic", topic)
        self._keep("root", root())

    def _keep(self, name: str, text: str) -> None:
        file = self._folder / name
        file.touch(0o600)
        file.write_text(text)

    def environment(self, name: str) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith("DANUBE_")}
        return {**kept, "DANUBE_TOKEN_FILE": str(self._folder / name), "PYTHONPATH": str(fork_server.ROOT)}

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "danube", *words, "-s", self.broker.address]

    def run(self, name: str, *words: str, code: int = 0) -> Any:
        """Run a command as this principal; the outcome with its output as text."""
        done = fork_server.run(self.command(*words), environment=self.environment(name), cwd=fork_server.ROOT)
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    def subscriptions(self, topic: str) -> list[str]:
        with sync.connect(self.broker.address, token=root()) as client:
            return [one.subscription for one in client.admin.list_subscriptions(topic)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("roles")
    brokers = Brokers(folder)
    yield Place(folder, brokers.make(workers=1, environment=ENVIRONMENT))
    brokers.kill()


def test_each_role_does_its_part_and_says_nothing_else(place: Place) -> None:
    made = place.run("maker", "produce", TOPIC, "-m", "one", "-k", "eu")
    assert made.stdout == f"sent 1 record to {TOPIC}: partition 0 offset 0 (written)\n" and not made.stderr
    made = place.run("maker", "produce", TOPIC, "-m", "two", "-c", "2", "-o", "json")
    assert [json.loads(line)["offset"] for line in made.stdout.splitlines()] == [1] and not made.stderr

    every = place.run("taker", "consume", TOPIC, "--from", "earliest", "--until-end")
    assert every.stdout == "0:0 key=eu  one\n0:1  two\n0:2  two\n" and not every.stderr
    assert place.subscriptions(TOPIC) == [], "a temporary subscription goes with its command"

    first = place.run(
        "taker", "consume", TOPIC, "-m", "billing", "--from", "earliest", "-c", "2", "-o", "raw"
    )
    assert first.stdout == "one\ntwo\n" and not first.stderr
    rest = place.run("taker", "consume", TOPIC, "-m", "billing", "--from", "latest", "--until-end")
    assert rest.stdout == "0:2  two\n"
    assert "subscription billing exists, so --from is not used" in rest.stderr
    none = place.run("taker", "consume", TOPIC, "-m", "billing", "--until-end")
    assert none.stdout == none.stderr == "", "nothing is left, which the broker tells a consumer"
    assert place.subscriptions(TOPIC) == ["billing"]


def test_partitions_and_topics_without_storage(place: Place) -> None:
    with sync.connect(place.broker.address, token=token("maker")) as client:
        with client.producer(PARTED) as producer:
            names = [str(key) for key in range(8)]
            producer.send_many([name.encode() for name in names], keys=names)
    found = place.run("taker", "consume", PARTED, "--from", "earliest", "--until-end", "-o", "json").stdout
    rows = [json.loads(line) for line in found.splitlines()]
    assert sorted(row["payload"] for row in rows) == [str(key) for key in range(8)]
    assert {row["partition"] for row in rows} == {0, 1}
    refused = place.run("taker", "consume", LOSSY, "--until-end", code=2)
    assert "stores nothing, so it has no end" in refused.stderr
    assert place.run("taker", "consume", LOSSY, "--timeout", "100ms").stdout == ""


def test_the_other_part_is_refused_by_name(place: Place) -> None:
    for name, words in (
        ("maker", ("consume", TOPIC, "--until-end", "--from", "earliest")),
        ("maker", ("consume", TOPIC, "-m", "billing", "--timeout", "100ms")),
        ("taker", ("produce", TOPIC, "-m", "no")),
        ("taker", ("consume", "/default/missing", "--timeout", "100ms")),
        ("maker", ("produce", "/default/missing", "-m", "no")),
    ):
        refused = place.run(name, *words, code=NOT_ALLOWED)
        assert refused.stdout == "" and f"service_account:{name}" in refused.stderr, refused.stderr


def test_names_after_who_consumes_are_kept(place: Place) -> None:
    with sync.connect(place.broker.address, token=root()) as client:
        client.admin.set_namespace_policy("default", subscription_auth="prefix")
    try:
        place.run("taker", "consume", PARTED, "-m", "billing", "--timeout", "100ms", code=NOT_ALLOWED)
        found = place.run("taker", "consume", PARTED, "--from", "earliest", "-c", "3", "-o", "raw")
        assert len(found.stdout.splitlines()) == 3 and not found.stderr
    finally:
        with sync.connect(place.broker.address, token=root()) as client:
            client.admin.set_namespace_policy("default", subscription_auth="")


def test_following_outlives_a_killed_broker(broker: Callable[..., BrokerProcess], tmp_path: Path) -> None:
    place = Place(tmp_path, broker(workers=1, environment=ENVIRONMENT))
    place.run("maker", "produce", TOPIC, "-m", "before")
    printed = tmp_path / "printed"
    with printed.open("wb") as output:
        following = subprocess.Popen(
            place.command("consume", TOPIC, "--from", "earliest", "-o", "raw"),
            env=place.environment("taker"), stdout=output, stderr=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )  # fmt: skip

    def told(*lines: str) -> bool:
        assert following.poll() is None, following.communicate()[1].decode()
        return printed.read_text().splitlines() == list(lines)

    try:
        wait_until(lambda: bool(place.subscriptions(TOPIC)), WITHIN_S, "it follows")
        place.run("maker", "produce", TOPIC, "-m", "first")
        wait_until(lambda: told("before", "first"), WITHIN_S, "the first record is printed")
        place.broker.kill()
        place.broker.start()
        place.run("maker", "produce", TOPIC, "-m", "second")
        wait_until(
            lambda: told("before", "first", "second"), WITHIN_S, "the second record is printed, and no other"
        )
    finally:
        following.kill()
        following.communicate()
    wait_until(lambda: place.subscriptions(TOPIC) == [], WITHIN_S, "its subscription goes with it")
