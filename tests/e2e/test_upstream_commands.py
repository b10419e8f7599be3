"""danube-admin and danube-cli as processes, against a real broker with two workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.broker_process import ROOT, BrokerProcess, free_port

TIMEOUT_S = 60.0
MAIN = "import danube.cli.upstream.{0} as command; command.main()"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("commands")
    with BrokerProcess(directory / "data", workers=2) as process:
        yield process


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DANUBE_")}
    return {**kept, "PYTHONPATH": str(ROOT), **more}


class Commands:
    """Runs both commands; each returns standard output, or the error's text where one is expected."""

    def __init__(self, process: BrokerProcess) -> None:
        self.process = process

    def run(self, module: str, *words: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
        done = run_with(module, words, DANUBE_ADMIN_ENDPOINT=f"http://{self.process.admin_address}")
        assert done.returncode == exit_code, f"{words}: {done.returncode}\n{done.stdout}{done.stderr}"
        return done

    def admin(self, *words: str) -> str:
        return self.run("admin", *words).stdout

    def refused(self, *words: str) -> str:
        return self.run("admin", *words, exit_code=1).stderr

    def json(self, *words: str) -> Any:
        return json.loads(self.admin(*words, "--output", "json"))

    def produce(self, *words: str, exit_code: int = 0) -> subprocess.CompletedProcess[str]:
        address = ("-s", f"http://{self.process.grpc_address}")
        return self.run("cli", "produce", *address, *words, exit_code=exit_code)

    def schema(self, *words: str) -> str:
        address = ("-s", f"http://{self.process.grpc_address}")
        return self.run("cli", "schema", *address, *words).stdout


class Consumer:
    """``danube-cli consume`` in the background; ``until`` reads its lines."""

    def __init__(self, process: BrokerProcess, *words: str) -> None:
        command = [sys.executable, "-c", MAIN.format("cli"), "consume"]
        self._process = fork_server.popen(
            [*command, "-s", f"http://{process.grpc_address}", *words],
            stdout=subprocess.PIPE,
            environment=environment(),
        )
        self.lines: list[str] = []
        self._came = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._came:
                self.lines.append(line.decode().rstrip("\n"))
                self._came.notify_all()

    def until(self, wanted: str, count: int = 1) -> None:
        """Wait until ``count`` lines hold the text."""
        with self._came:
            came = self._came.wait_for(lambda: sum(wanted in one for one in self.lines) >= count, TIMEOUT_S)
            assert came, f"no {count} lines with {wanted!r} in {self.lines}"

    def stop(self) -> int:
        """Interrupt it and return the exit code."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(TIMEOUT_S)
        return self.close()

    def close(self) -> int:
        """Leave nothing of it behind; its exit code."""
        if self._process.poll() is None:
            self._process.kill()
        code = self._process.wait(TIMEOUT_S)
        self._reader.join(TIMEOUT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        return code


@pytest.fixture
def commands(served: BrokerProcess) -> Commands:
    return Commands(served)


@pytest.fixture
def consumers() -> Iterator[list[Consumer]]:
    started: list[Consumer] = []
    yield started
    for one in started:
        one.close()


def wait_subscribed(commands: Commands, topic: str, subscription: str) -> None:
    """Until the subscription is on every partition; a new one gets only what is sent afterwards."""
    deadline = time.monotonic() + TIMEOUT_S
    names = [one["name"] for one in commands.json("topics", "list", "--namespace", "default")]
    parts = [name for name in names if name == topic or name.startswith(f"{topic}-part-")]
    for part in parts:
        while subscription not in commands.json("topics", "subscriptions", part):
            assert time.monotonic() < deadline, f"{subscription} did not come to {part}"


def test_brokers_and_namespaces(commands: Commands) -> None:
    (one,) = commands.json("brokers", "list")
    assert one["broker_status"] == "active"
    assert one["admin_addr"] == f"http://{commands.process.admin_address}"
    assert one["broker_addr"].startswith("http://127.0.0.1:")
    assert commands.admin("brokers", "leader-broker") == f'Leader Broker: "{one["broker_id"]}"\n'
    assert commands.admin("brokers", "activate", "--broker-id", one["broker_id"]) == (
        "ActivateBroker success=true\n"
    )
    assert "FAILED_PRECONDITION" in commands.refused("brokers", "unload", "--broker-id", one["broker_id"])
    assert commands.json("brokers", "balance")["brokers"][0]["broker_id"] == int(one["broker_id"])
    assert f"Leader: {one['broker_id']}" in commands.admin("cluster", "status")
    commands.admin("namespaces", "create", "cmd")
    assert "ALREADY_EXISTS" in commands.refused("namespaces", "create", "cmd")
    assert "cmd" in commands.json("brokers", "namespaces")
    commands.admin("topics", "create", "/cmd/t")
    assert commands.json("namespaces", "topics", "cmd") == ["/cmd/t"]
    assert len(commands.json("namespaces", "policies", "cmd")) == 7
    assert "FAILED_PRECONDITION" in commands.refused("namespaces", "delete", "cmd")
    commands.admin("topics", "delete", "/cmd/t")
    assert commands.admin("namespaces", "delete", "cmd") == "Namespace Deleted: true\n"


def test_partitioned_topics_are_listed_described_and_deleted(commands: Commands) -> None:
    commands.admin(
        "topics", "create", "/default/cmd-p", "--partitions", "5", "--dispatch-strategy", "reliable"
    )
    names = [one["name"] for one in commands.json("topics", "list", "--namespace", "default")]
    assert [f"/default/cmd-p-part-{number}" for number in range(5)] == [
        name for name in names if name.startswith("/default/cmd-p-part-")
    ]
    assert "ALREADY_EXISTS" in commands.refused("topics", "create", "/default/cmd-p")
    assert "Cannot delete individual partition" in commands.refused(
        "topics", "delete", "/default/cmd-p-part-3"
    )
    described = commands.json("topics", "describe", "/default/cmd-p-part-4")
    assert (described["delivery"], described["subscriptions"]) == ("Reliable", [])
    assert "NOT_FOUND" in commands.refused("topics", "describe", "/default/cmd-none")
    commands.admin("topics", "delete", "/default/cmd-p")
    names = [one["name"] for one in commands.json("topics", "list", "--namespace", "default")]
    assert not [name for name in names if name.startswith("/default/cmd-p")]


def test_reliable_messages_through_partitions(commands: Commands, consumers: list[Consumer]) -> None:
    topic = "/default/cmd-reliable"
    commands.admin("topics", "create", topic, "--partitions", "3", "--dispatch-strategy", "reliable")
    consumers.append(Consumer(commands.process, "-t", topic, "-m", "s", "--sub-type", "shared"))
    wait_subscribed(commands, topic, "s")
    sent = commands.produce(
        *("-t", topic, "-m", "hello", "-p", "3", "-c", "6", "-i", "100", "-a", "k:v", "--reliable")
    )
    assert sent.stdout.count("sent successfully") == 6
    assert "   ✅ Success: 6" in sent.stdout
    consumer = consumers[0]
    consumer.until("hello", 6)
    consumer.until("Attributes: k=v", 6)
    assert sum('Received reliable message: "hello"' in one for one in consumer.lines) == 3, "offsets 1"
    assert sum("Received message: hello" in one for one in consumer.lines) == 3, "offsets 0"
    assert "FAILED_PRECONDITION" in commands.refused("topics", "unsubscribe", topic, "-s", "s")
    assert consumer.stop() == 130
    assert commands.json("topics", "subscriptions", topic) == ["s"]
    assert commands.admin("topics", "unsubscribe", topic, "-s", "s") == "Unsubscribed: true\n"
    assert commands.json("topics", "subscriptions", topic) == []
    assert "NOT_FOUND" in commands.refused("topics", "unsubscribe", topic, "-s", "s")


def test_what_was_not_acked_comes_again(commands: Commands, consumers: list[Consumer]) -> None:
    """Acked messages do not come back to the same subscription; new ones continue where it stopped."""
    topic = "/default/cmd-resume"
    commands.admin("topics", "create", topic, "--dispatch-strategy", "reliable")
    consumers.append(Consumer(commands.process, "-t", topic, "-m", "s", "--sub-type", "exclusive"))
    wait_subscribed(commands, topic, "s")
    commands.produce("-t", topic, "-m", "first", "--reliable")
    consumers[0].until("first")
    assert consumers[0].stop() == 130
    commands.produce("-t", topic, "-m", "second", "--reliable")
    consumers.append(Consumer(commands.process, "-t", topic, "-m", "s", "--sub-type", "exclusive"))
    consumers[1].until("second")
    assert not [one for one in consumers[1].lines if "first" in one]
    consumers[1].stop()


def test_non_reliable_messages(commands: Commands, consumers: list[Consumer]) -> None:
    topic = "/default/cmd-plain"
    commands.admin("topics", "create", topic)
    consumers.append(Consumer(commands.process, "-t", topic, "-m", "s"))
    wait_subscribed(commands, topic, "s")
    commands.produce("-t", topic, "-m", "hello", "-c", "3", "-i", "100")
    consumers[0].until("hello", 3)
    consumers[0].stop()
    mismatch = commands.produce("-t", topic, "-m", "x", "--reliable", exit_code=1)
    assert "FAILED_PRECONDITION" in mismatch.stderr


def test_policies_of_subscriptions(commands: Commands) -> None:
    topic = "/default/cmd-policy"
    commands.admin("topics", "create", topic, "--partitions", "2", "--dispatch-strategy", "reliable")
    words = [
        *("--max-redelivery-count", "2", "--ack-timeout-ms", "1500", "--base-redelivery-delay-ms", "10"),
        *("--max-redelivery-delay-ms", "20", "--poison-policy", "dead_letter"),
        *("--dead-letter-topic", "/default/cmd-dead"),
    ]
    commands.admin("topics", "set-failure-policy", topic, "-s", "before", *words)
    found = commands.json("topics", "get-failure-policy", topic, "-s", "before")
    assert (found["max_redelivery_count"], found["ack_timeout_ms"]) == (2, 1500)
    assert (found["backoff_strategy"], found["poison_policy"]) == ("fixed", "dead_letter")
    assert "no failure policy" in commands.refused("topics", "get-failure-policy", topic, "-s", "other")
    commands.admin("topics", "create", "/default/cmd-lossy")
    assert "FAILED_PRECONDITION" in commands.refused(
        "topics", "set-failure-policy", "/default/cmd-lossy", "-s", "s", *words
    )


def test_schemas(commands: Commands, consumers: list[Consumer], tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}')
    topic = "/default/cmd-schema"
    commands.admin("topics", "create", topic, "--dispatch-strategy", "reliable")
    consumers.append(Consumer(commands.process, "-t", topic, "-m", "s"))
    wait_subscribed(commands, topic, "s")
    with_file = ("--schema-file", str(file), "--schema-type", "json_schema")
    sent = commands.produce("-t", topic, "-m", '{"id":1}', "--reliable", *with_file, "-c", "2", "-i", "100")
    assert "Auto-registering schema..." in sent.stdout
    consumers[0].until("✅ Loaded schema: default-cmd-schema")
    consumers[0].until('{"id": 1}', 2)
    consumers[0].stop()
    described = commands.json("topics", "describe", topic)
    assert (described["schema_subject"], described["schema_version"]) == ("default-cmd-schema", 1)
    assert described["compatibility_mode"] == "BACKWARD"
    found = json.loads(commands.schema("get", "default-cmd-schema", "-o", "json"))
    assert found["schema_definition"] == file.read_text()
    assert found["fingerprint"].startswith("sha256:")
    # A field that becomes required, and another one of another type, cannot be read backward.
    worse = '{"type": "object", "properties": {"id": {"type": "string"}}, "required": ["id", "name"]}'
    words = ("schemas", "check", "default-cmd-schema", "--schema-type", "json_schema", "--schema", worse)
    checked = commands.json(*words)
    assert not checked["is_compatible"]
    assert checked["errors"]
    register = ("schemas", "register", "default-cmd-schema", "--schema-type", "json_schema")
    assert "FAILED_PRECONDITION" in commands.refused(*register, "--schema", worse)
    assert "INVALID_ARGUMENT" in commands.refused(*register, "--schema", "{")
    commands.admin("schemas", "set-compatibility", "default-cmd-schema", "--mode", "NONE")
    made = commands.json(*register, "--schema", worse)
    assert (made["version"], made["is_new_version"]) == (2, True)
    assert json.loads(commands.schema("versions", "default-cmd-schema", "-o", "json"))["versions"] == [1, 2]
    commands.admin("schemas", "delete", "default-cmd-schema", "--version", "2", "--confirm")
    assert json.loads(commands.schema("versions", "default-cmd-schema", "-o", "json"))["versions"] == [1]
    assert "default-cmd-schema" in commands.schema("list")


def test_a_topic_that_enforces_its_schema(commands: Commands) -> None:
    topic = "/default/cmd-enforce"
    words = ("--schema-type", "json_schema", "--schema", '{"type": "object", "required": ["id"]}')
    commands.admin("schemas", "register", "cmd-enforce", *words)
    commands.admin(
        "topics", "create", topic, "--dispatch-strategy", "reliable", "--schema-subject", "cmd-enforce"
    )
    commands.admin(
        *("topics", "configure-schema", topic, "--subject", "cmd-enforce"),
        *("--validation-policy", "enforce", "--enable-payload-validation"),
    )
    config = commands.json("topics", "get-schema-config", topic)
    assert (config["validation_policy"], config["enable_payload_validation"]) == ("ENFORCE", True)
    assert config["schema_id"] > 0
    subject = ("--schema-subject", "cmd-enforce", "--reliable")
    assert "Success: 1" in commands.produce("-t", topic, "-m", '{"id":1}', *subject).stdout
    broken = commands.produce("-t", topic, "-m", "{}", *subject)
    assert "Errors: 1" in broken.stdout
    assert "INVALID_ARGUMENT" in broken.stderr
    assert "NOT_FOUND" in commands.refused(
        "topics", "create", "/default/cmd-x", "--schema-subject", "cmd-none"
    )


def test_roles_and_bindings(commands: Commands) -> None:
    commands.admin("security", "roles", "create", "cmd-role", "--permissions", "Produce,Lookup")
    assert commands.json("security", "roles", "get", "cmd-role")["permissions"] == ["Produce", "Lookup"]
    place = ("--scope", "namespace", "--resource", "/default")
    who = ("--principal-type", "user", "--principal-name", "alice", "--roles", "cmd-role")
    commands.admin("security", "bindings", "create", "cmd-b", *who, *place)
    (one,) = commands.json("security", "bindings", "list", "--scope", "namespace", "--resource", "default")
    assert (one["id"], one["resource_name"]) == ("cmd-b", "default")
    commands.admin("security", "bindings", "delete", "cmd-b", *place)
    commands.admin("security", "roles", "delete", "cmd-role")
    assert "NOT_FOUND" in commands.refused("security", "roles", "get", "cmd-role")
    assert "INVALID_ARGUMENT" in commands.refused("security", "roles", "create", "r", "--permissions", "Fly")


def test_a_consumer_goes_on_after_the_broker_started_again(tmp_path: Path, consumers: list[Consumer]) -> None:
    with BrokerProcess(tmp_path / "data") as process:
        commands = Commands(process)
        topic = "/default/cmd-restart"
        commands.admin("topics", "create", topic, "--dispatch-strategy", "reliable")
        consumers.append(Consumer(process, "-t", topic, "-m", "s"))
        wait_subscribed(commands, topic, "s")
        commands.produce("-t", topic, "-m", "before", "--reliable")
        consumers[0].until("before")
        process.restart()
        commands.produce("-t", topic, "-m", "after", "--reliable")
        consumers[0].until("after")
        assert consumers[0].stop() == 130


def run_with(module: str, words: Sequence[str], **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", MAIN.format(module), *words]
    return fork_server.run(command, environment=environment(**more))


def test_over_tls(tmp_path: Path) -> None:
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-keyout", key, "-out", cert, "-days", "2", "-subj", "/CN=localhost",
         "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"],
        check=True, capture_output=True,
    )  # fmt: skip
    told = {"DANUBE_GRPC__CERT_FILE": cert, "DANUBE_GRPC__KEY_FILE": key, "DANUBE_ADMIN__TLS": "true"}
    with BrokerProcess(tmp_path / "data", environment=told) as process:
        listing = ["--endpoint", f"http://{process.admin_address}", "brokers", "list"]
        trusted = {"DANUBE_ADMIN_TLS": "true", "DANUBE_ADMIN_CA": cert, "DANUBE_ADMIN_TOKEN": "any"}
        listed = run_with("admin", listing, **trusted)
        assert listed.returncode == 0, listed.stderr
        assert f"https://{process.admin_address}" in listed.stdout
        assert run_with("admin", listing, DANUBE_ADMIN_TLS="true").returncode == 1
        assert run_with("admin", listing).returncode == 1
        producing = ["produce", "-s", f"https://{process.grpc_address}", "-m", "hello"]
        sent = run_with("cli", producing, GRPC_DEFAULT_SSL_ROOTS_FILE_PATH=cert)
        assert "Success: 1" in sent.stdout, sent.stderr


def test_nobody_answers() -> None:
    words = ["--endpoint", f"http://127.0.0.1:{free_port()}", "brokers", "list"]
    done = run_with("admin", words)
    assert done.returncode == 1
    assert "status UNAVAILABLE" in done.stderr
    assert "is a broker running there" in done.stderr
