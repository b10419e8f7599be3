"""The load test's gRPC producers and consumers, in a process of their own: what they do when things break."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable

import pytest

import danube.sync
from tests.broker_process import ROOT, BrokerProcess, die_with_parent, free_port
from tests.child_process import Child

BEGINNING = """
import json, sys, time
from danube.errors import DanubeError
from danube.load.collector import Collector
from danube.load.links.grpc import GrpcReceiver, GrpcSender
from danube.load.links.links import Place
from danube.load.plan import Plan
def plan_of(address, **options):
    return Plan.parse({"grpc_broker": address, "protocol": "grpc", **options})
def place_of(topic="/default/t", *partitions):
    return Place(topic, partitions or (topic,), "written")
def said(call):
    try:
        return call()
    except DanubeError as error:
        return f"{type(error).__name__}: {error}"
collector = Collector("00000000000000aa")
arguments = json.loads(sys.argv[1])
"""


def run(script: str, **arguments: object) -> dict[str, object]:
    """What the script puts into ``found``, in a process of its own: grpcio keeps threads, and tests fork."""
    code = f"{BEGINNING}\nfound = {{}}\n{script}\nprint(json.dumps(found))"
    ran = subprocess.run(
        [sys.executable, "-c", code, json.dumps(arguments)],
        capture_output=True, text=True, timeout=90, cwd=ROOT, check=False, preexec_fn=die_with_parent,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return dict(json.loads(ran.stdout))


def make(broker: BrokerProcess, partitions: int = 0) -> list[str]:
    with danube.sync.connect(broker.address) as client:
        return client.admin.create_topic("/default/t", partitions=partitions).partitions


def test_a_port_where_nothing_listens_is_told_when_the_time_is_over() -> None:
    found = run(
        """
plan = plan_of(arguments["address"], send_timeout="1s")
sender = GrpcSender(plan, collector, place_of(), "p")
found["open"] = said(sender.open)
found["send"] = said(sender.begin(b"x", "k"))
sender.close()
found["closed"] = said(sender.begin(b"x", "k"))
receiver = GrpcReceiver(plan, collector, place_of(), "s", "shared", "c")
found["subscribe"] = said(receiver.open)
receiver.close()
found["retries"] = collector.take()["counts"]["retries"]
""",
        address=f"127.0.0.1:{free_port()}",
    )
    for call in ("open", "send", "subscribe"):
        assert str(found[call]).startswith("ConnectionFailed: status UNAVAILABLE"), found
    assert found["closed"] == "ClosedError: the producer is closed"
    assert int(str(found["retries"])) >= 2


def test_what_the_broker_refuses_is_told_at_once(broker: Callable[..., BrokerProcess]) -> None:
    one = broker(workers=1)
    make(one)
    found = run(
        """
plan = plan_of(arguments["address"])
receiver = GrpcReceiver(plan, collector, place_of("/default/none"), "s", "shared", "c")
found["subscribe"] = said(receiver.open)
receiver.close()
first = GrpcReceiver(plan, collector, place_of(), "s", "exclusive", "c1")
first.open()
second = GrpcReceiver(plan, collector, place_of(), "s", "exclusive", "c2")
found["second"] = said(second.open)
second.close()
found["nothing"] = first.receive(0.2) is None
sender = GrpcSender(plan, collector, place_of(), "p")
sender.open()
found["large"] = said(sender.begin(bytes(5 << 20), "k"))
found["sent"] = said(sender.begin(b"x", "k"))
found["received"] = first.receive(20).payload.decode()
first.close()
sender.close()
""",
        address=one.grpc_address,
    )
    assert "NOT_FOUND" in str(found["subscribe"])
    assert "PERMISSION_DENIED" in str(found["second"])
    assert "INVALID_ARGUMENT" in str(found["large"])
    assert (found["sent"], found["received"], found["nothing"]) == ("written", "x", True)


def test_a_key_goes_to_the_partition_that_the_native_client_chooses(
    broker: Callable[..., BrokerProcess],
) -> None:
    one = broker(workers=2)
    partitions = make(one, 4)
    with danube.sync.connect(one.address) as client, client.producer("/default/t") as producer:
        expected = [producer.send(b"x", key=f"key-{number}").partition for number in range(20)]
        with client.consumer("/default/t", "look", start="latest") as consumer:
            run(
                """
place = place_of("/default/t", *arguments["parts"])
sender = GrpcSender(plan_of(arguments["address"]), collector, place, "p")
sender.open()
for number in range(20):
    sender.begin(b"%d" % number, f"key-{number}")()
sender.close()
""",
                address=one.grpc_address,
                parts=partitions,
            )
            got: dict[int, tuple[int, object]] = {}
            while len(got) < 20:
                message = consumer.receive(timeout=20)
                got[int(message.payload)] = (message.partition, message.key)
    assert got == {number: (expected[number], f"key-{number}") for number in range(20)}


RESTARTED = """
plan = plan_of(arguments["address"], send_timeout="1m")
place = place_of()
receiver = GrpcReceiver(plan, collector, place, "s", "exclusive", "c")
receiver.open()
sender = GrpcSender(plan, collector, place, "p")
sender.open()
sender.begin(b"before", "k")()
first = receiver.receive(20)
first.ack()
print("ready", flush=True)
sys.stdin.readline()
sender.begin(b"after", "k")()
payloads, readers = [], {id(first.reader)}
while "after" not in payloads:
    delivery = receiver.receive(30)
    payloads.append(delivery.payload.decode())
    readers.add(id(delivery.reader))
    delivery.ack()
receiver.close()
sender.close()
counts = collector.take()["counts"]
print(json.dumps({"payloads": payloads, "readers": len(readers), "counts": counts}), flush=True)
"""


class Script(Child):
    """A script in place of a file."""

    def __init__(self, code: str, **arguments: object) -> None:
        self.role = "script"
        self._pending = b""
        self._process = subprocess.Popen(
            [sys.executable, "-c", BEGINNING + code, json.dumps(arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            preexec_fn=die_with_parent,
            bufsize=0,
        )


@pytest.mark.crash
def test_both_ends_outlive_a_broker_that_is_killed(broker: Callable[..., BrokerProcess]) -> None:
    one = broker(workers=2)
    make(one)
    child = Script(RESTARTED, address=one.grpc_address)
    try:
        child.wait_ready()
        one.kill()
        one.start()
        child.go()
        found = child.result(60)
    finally:
        child.close()
    # The acknowledgement of the first record may have been lost with the broker.
    assert found["payloads"] in (["after"], ["before", "after"])
    assert found["readers"] == 2  # subscribed anew: its order begins anew
    assert found["counts"]["reconnects"] >= 1


def test_a_token_goes_to_no_other_host_in_the_clear_and_a_missing_file_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DANUBE_TOKEN", "secret")
    monkeypatch.setenv("DANUBE_TLS_CA", "/none.pem")
    found = run(
        """
for name, fields in {"other": {"grpc_broker": "192.0.2.1:1"}, "tls": {"broker": "danube+tls://h:1"}}.items():
    plan = Plan.parse({"grpc_broker": "127.0.0.1:1", "protocol": "grpc", **fields})
    found[name] = said(GrpcSender(plan, collector, place_of(), "p").open)
"""
    )
    assert str(found["other"]).startswith("InvalidArgument: the token is not sent"), found
    assert str(found["tls"]).startswith("InvalidArgument: /none.pem cannot be read"), found
