"""``scripts/cluster`` for real: three brokers, one killed, one paused, and nothing left at the end."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from danube import sync
from tests.broker_process import ROOT, wait_until
from tests.local_cluster import DIRECTORY_VARIABLE, STATE
from tests.local_cluster_commands import AWAY, main
from tests.process_session import ProcessSession

TOPIC = "/default/orders"


class Script:
    """The verbs, on a directory of the test's own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def __call__(self, *words: str, code: int = 0) -> str:
        """What it printed; of a failure what it said on standard error."""
        done = subprocess.run(
            [sys.executable, "-m", "tests.local_cluster", *words],
            cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stderr if code else done.stdout

    def status(self) -> list[dict[str, Any]]:
        """By the verb, in this process, as it is asked again and again."""
        with redirect_stdout(io.StringIO()) as said:
            assert main(["status", "--json"]) == 0
        brokers: list[dict[str, Any]] = json.loads(said.getvalue())["brokers"]
        return brokers

    def sessions(self) -> list[ProcessSession]:
        kept = json.loads((self.directory / STATE).read_text())
        return [ProcessSession(**one["process"]) for one in kept["brokers"]]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    made = Script(tmp_path / "cluster")
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(made.directory))
    yield made
    if (made.directory / STATE).exists():
        for session in made.sessions():
            session.kill()


def owner_of(script: Script) -> str:
    """The native address of the broker that has the only partition."""
    found: list[str] = []

    def owned() -> bool:
        found[:] = [row["native"] for row in script.status() if row["partitions"] and row["role"] != AWAY]
        return bool(found)

    wait_until(owned, 15, "the partition has an owner")
    return found[0]


def test_a_cluster_is_started_shaken_and_ended(script: Script) -> None:
    assert "broker 3: danube://127.0.0.1:" in script("up", "3")
    rows = script.status()
    assert sorted(row["role"] for row in rows) == ["follower", "follower", "leader"]
    addresses = [f"danube://{row['native']}" for row in rows]
    with sync.connect(addresses[0]) as client:
        client.admin.create_topic(TOPIC)
        with client.producer(TOPIC) as producer:
            producer.send(b"before")
        owner = owner_of(script)
    victim = next(row["number"] for row in rows if row["native"] == owner)
    survivor = next(address for address in addresses if not address.endswith(owner))
    script("kill", str(victim))
    assert not script.sessions()[victim - 1].pids()
    with sync.connect(survivor, timeout=20) as client, client.producer(TOPIC) as producer:
        producer.send(b"after")  # by another owner
    assert owner_of(script) != owner
    assert "not running" in script("pause", str(victim), code=2)
    script("start", str(victim))
    with sync.connect(survivor) as client, client.consumer(TOPIC, "s", start="earliest") as consumer:
        received = set()
        for _ in range(2):
            message = consumer.receive(timeout=30)
            message.ack()
            received.add(bytes(message.payload))
    assert received == {b"before", b"after"}, "the killed broker brought back what only it had"
    other = victim % 3 + 1
    script("pause", str(other))
    away = lambda: script.status()[other - 1]["role"] == AWAY  # noqa: E731
    wait_until(away, 15, "others take it for dead")
    assert script.status()[other - 1]["state"] == "paused"
    script("resume", str(other))
    wait_until(lambda: not away(), 15, "it is back")
    lines = script("logs").splitlines()
    assert {line.partition(" | ")[0] for line in lines} == {"b1", "b2", "b3"}
    times = [line.split(" | ")[1][:24] for line in lines if " | 20" in line]
    assert times == sorted(times) and len(times) > 20
    sessions = script.sessions()
    assert all(session.pids() for session in sessions)
    script("down")
    assert not any(session.pids() for session in sessions)
    assert not script.directory.exists()


def test_a_cluster_that_was_kept_goes_on(script: Script) -> None:
    script("up", "1")
    address = f"danube://{script.status()[0]['native']}"
    with sync.connect(address) as client:
        client.admin.create_topic(TOPIC)
    script("stop", "1")
    assert script.status()[0]["state"] == "stopped"
    script("start", "1")
    assert "runs already" in script("up", code=2)
    assert "of 1 in" in script("up", "3", code=2)
    script("down", "--keep")
    script("up")
    with sync.connect(address) as client:
        assert [topic.topic for topic in client.admin.list_topics()] == [TOPIC]
    script("down")


def test_a_broker_that_does_not_start_is_told_and_nothing_is_left(script: Script) -> None:
    assert "does not serve" in (said := script("up", "2", "--workers", "many", code=1))
    assert "'many'" in said
    assert not any(session.pids() for session in script.sessions())
    script("down")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ((), "required"),
        (("fly",), "invalid choice"),
        (("kill",), "required"),
        (("kill", "x"), "invalid int"),
        (("up", "0"), "1 to 9 brokers"),
        (("up", "10"), "1 to 9 brokers"),
        (("kill", "1"), "no cluster"),
        (("status",), "no cluster"),
        (("logs",), "no cluster"),
        (("down",), "no cluster"),
    ],
)
def test_wrong_requests_are_refused(
    script: Script, capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str
) -> None:
    try:
        code: object = main(words)
    except SystemExit as left:
        code = left.code
    assert code == 2 and says in capsys.readouterr().err
    assert not (script.directory / STATE).exists()


def test_a_directory_of_somebody_else_is_left_alone(script: Script) -> None:
    script.directory.mkdir()
    (script.directory / "letter").write_text("dear")
    assert "holds no cluster" in script("up", "1", code=2)
    (script.directory / STATE).write_text("{")
    assert "not what was written" in script("down", code=2)
    assert (script.directory / "letter").read_text() == "dear"
    (script.directory / STATE).unlink()


def test_only_what_was_started_is_signalled() -> None:
    """A process that got the number later, or after another boot, is not ours."""
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        session = ProcessSession.of(child.pid)
        assert session.pids() == [child.pid]
        later = ProcessSession(child.pid, session.start_ticks - 1, session.boot)
        other_boot = ProcessSession(child.pid, session.start_ticks, "another")
        for one in (later, other_boot):
            assert one.pids() == [] and one.leader_state() == ""
            one.kill()
            one.terminate()
        assert child.poll() is None
        session.kill()
        assert child.wait(5) == -9
    finally:
        child.kill()
        child.wait()
