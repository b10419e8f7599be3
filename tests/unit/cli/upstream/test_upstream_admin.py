"""danube-admin: the official flags are taken, and what is printed is what scripts look for."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from danube.cli.upstream.admin import root
from danube.cli.upstream.endpoint import admin_endpoint
from danube.cli.upstream.root import Outside
from danube.errors import InvalidArgument
from danube.server.proto import DanubeAdmin_pb2 as pb
from tests.fakes.grpc_line import FakeLine

ROOT = Path(__file__).resolve().parents[4]


class Admin(FakeLine):
    """Runs ``danube-admin`` over the fake line."""

    environ: dict[str, str]

    def __call__(self, *words: str, exit_code: int = 0, environ: dict[str, str] | None = None) -> Result:
        outside = Outside(open=self.open, environ=environ or {}, sleep=self.slept.append)
        runner = CliRunner(env=dict.fromkeys(("DANUBE_ADMIN_ENDPOINT", "DANUBE_JWT_SECRET_KEY")))
        result = runner.invoke(root, list(words), obj=outside, prog_name="danube-admin", env=environ)
        assert result.exit_code == exit_code, result.output
        return result

    def lines(self, *words: str) -> list[str]:
        return self(*words).stdout.splitlines()

    def json(self, *words: str) -> Any:
        return json.loads(self(*words, "--output", "json").stdout)


@pytest.fixture
def admin() -> Admin:
    return Admin()


# The root


def test_help_is_light_and_version_is_told(admin: Admin) -> None:
    code = "import sys, danube.cli.upstream.admin, danube.cli.upstream.cli; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert not {"grpc", "google.protobuf", "asyncio", "numpy", "msgspec"} & set(ran.stdout.split())
    assert "topics" in admin("--help").stdout
    assert admin("-V").stdout.startswith("danube-admin ")


@pytest.mark.parametrize(
    "words",
    [
        ("--endpoint", "http://other:1", "brokers", "list"),
        ("--endpoint=http://other:1", "brokers", "list"),
        ("brokers", "--endpoint", "http://other:1", "list"),
        ("brokers", "list", "--endpoint", "http://other:1"),
        ("brokers", "list", "--endpoint=http://other:1"),
    ],
)
def test_the_endpoint_may_stand_anywhere(admin: Admin, words: tuple[str, ...]) -> None:
    admin(*words)
    assert [one.target for one in admin.endpoints] == ["other:1"]
    assert admin.closed == 1
    assert admin.timeouts == {5.0}


def test_the_endpoint_of_the_environment_and_the_default(admin: Admin) -> None:
    admin("brokers", "list")
    admin("brokers", "list", environ={"DANUBE_ADMIN_ENDPOINT": "http://env:2"})
    assert [one.target for one in admin.endpoints] == ["127.0.0.1:50051", "env:2"]


def test_what_stands_behind_two_dashes_is_no_option(admin: Admin) -> None:
    assert root.in_order(["a", "--", "--endpoint", "x"]) == ["a", "--", "--endpoint", "x"]  # type: ignore[attr-defined]
    admin("brokers", "list", "--endpoint", exit_code=2)


@pytest.mark.parametrize(
    ("environ", "token"),
    [
        ({}, ""),
        ({"DANUBE_ADMIN_TOKEN": "t"}, "t"),
        ({"DANUBE_ADMIN_API_KEY": "k"}, "k"),
        ({"DANUBE_ADMIN_TOKEN": "t", "DANUBE_ADMIN_API_KEY": "k"}, "t"),
    ],
)
def test_the_token_of_the_environment(environ: dict[str, str], token: str) -> None:
    assert admin_endpoint("http://h:1", environ).token == token
    assert not admin_endpoint("http://h:1", environ).tls


def test_tls_of_the_environment(tmp_path: Path) -> None:
    environ = {}
    for name, text in (("CA", b"ca"), ("CERT", b"cert"), ("KEY", b"key")):
        environ[f"DANUBE_ADMIN_{name}"] = str(tmp_path / name)
        (tmp_path / name).write_bytes(text)
    assert not admin_endpoint("http://h:1", environ).tls
    for address, extra in (("https://h:1", {}), ("http://h:1", {"DANUBE_ADMIN_TLS": "true"})):
        found = admin_endpoint(address, environ | extra)
        assert (found.tls, found.domain, found.target) == (True, "localhost", "h:1")
        assert (found.authority_certificate, found.certificate, found.private_key) == (b"ca", b"cert", b"key")
    assert admin_endpoint("https://h:1", {"DANUBE_ADMIN_DOMAIN": "d"}).domain == "d"
    with pytest.raises(InvalidArgument, match="DANUBE_ADMIN_CA cannot be read"):
        admin_endpoint("https://h:1", {"DANUBE_ADMIN_CA": str(tmp_path / "none")})


@pytest.mark.parametrize("address", ["", "host", "ftp://h:1", "http://h:1/x", "h:99999999", "http://h"])
def test_addresses_that_are_none(admin: Admin, address: str) -> None:
    assert "write http://host:port" in admin("--endpoint", address, "brokers", "list", exit_code=1).stderr


def test_a_status_goes_to_standard_error_and_leaves_with_1(admin: Admin) -> None:
    result = admin("topics", "delete", "/default/none", exit_code=1)
    assert result.stdout == ""
    assert "status NOT_FOUND: topic /default/none does not exist" in result.stderr


@pytest.mark.parametrize("words", [("nope",), ("topics", "create"), ("topics", "list", "--output", "yaml")])
def test_bad_usage_leaves_with_2(admin: Admin, words: tuple[str, ...]) -> None:
    admin(*words, exit_code=2)


@pytest.mark.parametrize("words", [("serve",), ("server", "--mode", "ui", "--addr", "0.0.0.0:8080")])
def test_the_web_interface_is_not_there(admin: Admin, words: tuple[str, ...]) -> None:
    assert "danube-admin serve is not in this release" in admin(*words, exit_code=1).stderr


# Cluster and brokers


def test_cluster_commands_on_one_host(admin: Admin) -> None:
    assert admin.lines("cluster", "status")[1:4] == [
        "  Self Node ID: 4711", "  Raft Address: ", "  Leader: 4711"
    ]  # fmt: skip
    for words in (("promote-node", "--node-id", "1"), ("remove-node", "--node-id", "1")):
        assert "status FAILED_PRECONDITION" in admin("cluster", *words, exit_code=1).stderr
    told = admin("cluster", "add-node", "--node-addr", "http://n:1", exit_code=1).stderr
    assert "--join" in told and "n:1" in [one.target for one in admin.endpoints]


@pytest.fixture
def cluster(admin: Admin, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Answers of a broker that has a cluster, by method; a test may put others."""
    answers: dict[str, Any] = {
        "ClusterStatus": pb.ClusterStatusResponse(
            leader_id=1, current_term=2, last_applied=3, voters=[1, 4], learners=[5], self_node_id=4,
            raft_addr="h:7650",
        ),
        "AddNode": pb.AddNodeResponse(success=True, node_id=4, message="node 4 was added"),
        "PromoteNode": pb.PromoteNodeResponse(success=True, message="node 4 votes"),
        "RemoveNode": pb.RemoveNodeResponse(success=False, message="it is the last voter"),
    }  # fmt: skip
    answer = admin.answer

    def instead(path: str, request: Any) -> Any:
        method = path.rpartition("/")[2]
        if method not in answers:
            return answer(path, request)
        admin.calls.append((method, request))
        return answers[method]

    monkeypatch.setattr(admin, "answer", instead)
    return answers


def test_cluster_status_of_a_cluster(admin: Admin, cluster: dict[str, Any]) -> None:
    assert admin.lines("cluster", "status") == [
        "Raft Cluster Status:", "  Self Node ID: 4", "  Raft Address: h:7650", "  Leader: 1", "  Term: 2",
        "  Last Applied: 3", "  Voters: [1, 4]", "  Learners: [5]",
    ]  # fmt: skip


def test_changes_of_a_cluster(admin: Admin, cluster: dict[str, Any]) -> None:
    lines = admin.lines("cluster", "add-node", "--node-addr", "http://n:1")
    assert "Discovered: node_id=4, raft_addr=h:7650" in lines
    assert lines[-1] == "Success: node 4 was added"
    assert admin.requests("AddNode") == [pb.AddNodeRequest(addr="h:7650", node_id=4)]
    assert admin.lines("cluster", "promote-node", "--node-id", "4") == ["Success: node 4 votes"]
    failed = admin("cluster", "remove-node", "--node-id", "4", exit_code=1)
    assert "Failed: it is the last voter" in failed.stderr


def test_brokers_list(admin: Admin) -> None:
    head, rule, row = admin.lines("brokers", "list")
    assert head.split("  ")[0] == "BROKER ID"
    assert [head.index(word) for word in ("STATUS", "ADDRESS", "ROLE", "ADMIN", "METRICS")] == [
        16, 32, 58, 74, 100
    ]  # fmt: skip
    assert rule == "-" * 125
    assert row.split()[:2] == ["4711", "active"]
    (one,) = admin.json("brokers", "list")
    assert set(one) == {
        "broker_id", "broker_status", "broker_addr", "broker_role", "admin_addr", "metrics_addr"
    }  # fmt: skip


def test_brokers_other_commands(admin: Admin) -> None:
    assert admin.lines("brokers", "leader-broker") == ['Leader Broker: "4711"']
    assert admin.lines("brokers", "namespaces") == ["Namespace: default", "Namespace: system"]
    assert admin.json("brokers", "namespaces") == ["default", "system"]
    assert admin.lines("brokers", "activate", "--broker-id", "4711") == ["ActivateBroker success=true"]
    assert admin.requests("ActivateBroker")[0].reason == "admin_activate"
    assert "FAILED_PRECONDITION" in admin("brokers", "unload", "--broker-id", "4711", exit_code=1).stderr
    assert admin.json("brokers", "balance")["broker_count"] == 1
    assert "Cluster is balanced" in admin("brokers", "rebalance", "--dry-run").stdout


def test_unload_sends_every_flag(admin: Admin, cluster: dict[str, Any]) -> None:
    cluster["UnloadBroker"] = pb.UnloadBrokerResponse(
        started=True, total=3, succeeded=2, failed=1, failed_topics=["/default/t"]
    )
    result = admin(
        *("brokers", "unload", "--broker-id", "7", "--max-parallel", "2", "--namespaces-include", "a"),
        *("--namespaces-include", "b", "--namespaces-exclude", "c", "--dry-run", "--timeout-seconds", "9"),
    )
    assert result.stdout == "UnloadBroker started=true total=3 succeeded=2 failed=1 pending=0\n"
    assert "/default/t" in result.stderr
    assert admin.requests("UnloadBroker") == [
        pb.UnloadBrokerRequest(
            broker_id="7", max_parallel=2, namespaces_include=["a", "b"], namespaces_exclude=["c"],
            dry_run=True, timeout_seconds=9,
        )
    ]  # fmt: skip


@pytest.mark.parametrize(("variation", "advice"), [(0.1, False), (0.25, False), (0.35, True), (0.9, True)])
def test_balance_report(admin: Admin, cluster: dict[str, Any], variation: float, advice: bool) -> None:
    load = pb.BrokerLoadInfo(broker_id=1, load=2.5, topic_count=3, is_overloaded=True)
    cluster["GetClusterBalance"] = pb.ClusterBalanceResponse(
        coefficient_of_variation=variation,
        mean_load=1,
        brokers=[load],
        broker_count=1,
        assignment_strategy="Fair",
    )
    text = admin("brokers", "balance").stdout
    assert "Cluster Balance Report" in text
    assert "overloaded" in text
    assert ("rebalance --dry-run" in text) is advice
    found = admin.json("brokers", "balance")
    assert found["brokers"] == [
        {"broker_id": 1, "load": 2.5, "topic_count": 3, "is_overloaded": True, "is_underloaded": False}
    ]
    assert set(found) == {
        "coefficient_of_variation", "mean_load", "max_load", "min_load", "std_deviation", "broker_count",
        "brokers",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("response", "says"),
    [
        (pb.RebalanceResponse(success=False, error_message="no"), "Error: no"),
        (pb.RebalanceResponse(success=True, error_message="Cluster is balanced"), "Cluster is balanced"),
        (pb.RebalanceResponse(success=True, moves_executed=1, error_message="in background"), "executed: 1"),
        (
            pb.RebalanceResponse(
                success=True, proposed_moves=[pb.ProposedMove(topic_name="/d/t", from_broker=1, to_broker=2)]
            ),
            "/d/t: 1 -> 2",
        ),
    ],
)
def test_rebalance_report(admin: Admin, cluster: dict[str, Any], response: Any, says: str) -> None:
    cluster["TriggerRebalance"] = response
    assert says in admin("brokers", "rebalance", "--max-moves", "2").stdout
    assert admin.requests("TriggerRebalance")[0].max_moves == 2


# Namespaces and topics


def test_namespaces(admin: Admin) -> None:
    assert admin.lines("namespaces", "create", "sales") == ["Namespace Created: true"]
    admin("topics", "create", "/sales/t")
    assert admin.lines("namespaces", "topics", "sales") == ["Topic: /sales/t"]
    assert admin.json("namespaces", "topics", "sales") == ["/sales/t"]
    policies = admin.json("namespaces", "policies", "sales")
    assert len(policies) == 7
    head, *rows = admin.lines("namespaces", "policies", "sales")
    assert head == "Policies Configuration:"
    assert f"  max_message_size: {policies['max_message_size']}" in rows
    admin("topics", "delete", "/sales/t")
    assert admin.lines("namespaces", "delete", "sales") == ["Namespace Deleted: true"]


@pytest.mark.parametrize(
    "words", [("/sales/t",), ("sales/t",), ("t", "--namespace", "sales"), ("--namespace", "sales", "t")]
)
def test_every_way_to_name_a_topic(admin: Admin, words: tuple[str, ...]) -> None:
    admin("namespaces", "create", "sales")
    assert admin.lines("topics", "create", *words) == ["✅ Topic created: /sales/t"]
    assert admin.requests("CreateTopic")[0].name == "/sales/t"


def test_a_topic_without_a_namespace_leaves_with_1(admin: Admin) -> None:
    assert "--namespace" in admin("topics", "create", "t", exit_code=1).stderr


@pytest.mark.parametrize(
    ("given", "strategy"),
    [
        (None, "NonReliable"),
        ("non_reliable", "NonReliable"),
        ("reliable", "Reliable"),
        ("reliable_dispatch", "Reliable"),
        ("reliable-dispatch", "Reliable"),
        ("whatever", "NonReliable"),
    ],
)
def test_dispatch_strategies(admin: Admin, given: str | None, strategy: str) -> None:
    admin("topics", "create", "/default/t", *(("--dispatch-strategy", given) if given else ()))
    assert admin.json("topics", "list", "--namespace", "default")[0]["delivery"] == strategy


def test_partitioned_topic_with_a_subject(admin: Admin) -> None:
    admin.broker.register("orders")
    lines = admin.lines("topics", "create", "/default/p", "--partitions", "2", "--schema-subject", "orders")
    assert lines[0] == "✅ Partitioned topic created: /default/p"
    assert "orders" in lines[1]
    assert "2" in lines[2]
    assert admin.lines("topics", "list", "--namespace", "default") == [
        "Topic: /default/p-part-0 (broker_id: 4711, delivery: NonReliable)",
        "Topic: /default/p-part-1 (broker_id: 4711, delivery: NonReliable)",
    ]
    assert len(admin.json("topics", "list", "--broker", "4711")) == 2
    refused = admin("topics", "delete", "/default/p-part-0", exit_code=1).stderr
    assert "Cannot delete individual partition" in refused
    assert admin.lines("topics", "delete", "/default/p") == ["Topic Deleted: true"]


def test_a_topic_on_no_broker_is_listed_without_one(admin: Admin, cluster: dict[str, Any]) -> None:
    one = pb.TopicInfo(name="/default/t", delivery="Reliable")
    cluster["ListNamespaceTopics"] = pb.TopicInfoListResponse(topics=[one])
    assert admin.lines("topics", "list", "--namespace", "default") == [
        "Topic: /default/t (delivery: Reliable)"
    ]


@pytest.mark.parametrize("words", [(), ("--namespace", "a", "--broker", "1")])
def test_a_list_is_of_a_namespace_or_of_a_broker(admin: Admin, words: tuple[str, ...]) -> None:
    admin("topics", "list", *words, exit_code=2)


def test_describe(admin: Admin) -> None:
    admin.broker.register("orders", "avro")
    admin("topics", "create", "/default/t", "--schema-subject", "orders", "--dispatch-strategy", "reliable")
    admin("topics", "create", "/default/plain")
    admin.broker.subscribe("/default/t", "s")
    assert admin.json("topics", "describe", "/default/t") == {
        "topic": "/default/t", "broker_id": "4711", "delivery": "Reliable", "schema_subject": "orders",
        "schema_id": 1, "schema_version": 1, "schema_type": "avro", "compatibility_mode": "BACKWARD",
        "subscriptions": ["s"],
    }  # fmt: skip
    assert admin.json("topics", "describe", "/default/plain")["schema_id"] is None
    lines = admin.lines("topics", "describe", "/default/t")
    assert lines[0] == "Topic: /default/t"
    assert "  Compatibility: BACKWARD" in lines
    assert lines[-1] == 'Subscriptions: ["s"]'
    assert "Schema: none" in admin.lines("topics", "describe", "/default/plain")


@pytest.mark.parametrize(
    "words",
    [
        ("topics", "describe", "/default/t"),
        ("topics", "describe", "/no/t"),
        ("topics", "subscriptions", "/default/t"),
        ("topics", "list", "--namespace", "no"),
        ("topics", "list", "--broker", "77"),
        ("namespaces", "topics", "no"),
    ],
)
@pytest.mark.parametrize("output", [(), ("--output", "json")])
def test_what_does_not_exist_is_not_shown_as_empty(
    admin: Admin, words: tuple[str, ...], output: tuple[str, ...]
) -> None:
    admin("topics", "create", "/default/t2")
    admin("topics", "create", "/default/t-part-x")
    told = admin(*words, *output, exit_code=1)
    assert not told.stdout
    assert "status NOT_FOUND" in told.stderr


def test_what_is_empty_is_shown_as_empty(admin: Admin) -> None:
    assert admin.json("namespaces", "topics", "default") == []
    assert admin.json("topics", "list", "--namespace", "default") == []
    assert admin.json("topics", "list", "--broker", "4711") == []
    admin("topics", "create", "/default/p", "--partitions", "2")
    for name in ("/default/p", "/default/p-part-1"):
        assert admin.json("topics", "subscriptions", name) == []


def test_a_topic_that_no_broker_has_yet_is_described(admin: Admin, cluster: dict[str, Any]) -> None:
    admin("topics", "create", "/default/t")
    cluster["DescribeTopic"] = pb.DescribeTopicResponse(name="/default/t", delivery="Reliable")
    assert admin.json("topics", "describe", "/default/t")["delivery"] == "Reliable"


def test_subscriptions(admin: Admin) -> None:
    admin("topics", "create", "/default/t")
    admin.broker.subscribe("/default/t", "b")
    admin.broker.subscribe("/default/t", "a")
    assert admin.lines("topics", "subscriptions", "/default/t") == ['Subscriptions: ["a", "b"]']
    assert admin.json("topics", "subscriptions", "/default/t") == ["a", "b"]
    assert admin.lines("topics", "unsubscribe", "/default/t", "-s", "a") == ["Unsubscribed: true"]
    assert admin.lines("topics", "unsubscribe", "/default/t", "--subscription", "b") == ["Unsubscribed: true"]
    assert "FAILED_PRECONDITION" in admin("topics", "unload", "/default/t", exit_code=1).stderr


REQUIRED = [
    *("--max-redelivery-count", "3", "--ack-timeout-ms", "1000", "--base-redelivery-delay-ms", "10"),
    *("--max-redelivery-delay-ms", "20"),
]


@pytest.mark.parametrize(
    ("poison", "shown"),
    [("dead_letter", "dead_letter"), ("dead-letter", "dead_letter"), ("block", "block"), ("drop", "drop")],
)
@pytest.mark.parametrize("backoff", [None, "fixed", "exponential"])
def test_failure_policy_there_and_back(admin: Admin, poison: str, shown: str, backoff: str | None) -> None:
    admin("topics", "create", "/default/t", "--dispatch-strategy", "reliable")
    dead = ("--dead-letter-topic", "/default/dead") if shown == "dead_letter" else ()
    words = (*REQUIRED, "--poison-policy", poison, *dead)
    lines = admin.lines(
        *("topics", "set-failure-policy", "/default/t", "-s", "s", *words),
        *(("--backoff-strategy", backoff) if backoff else ()),
    )
    assert lines == ["✅ Failure policy updated for topic '/default/t' subscription 's'"]
    expected = {
        "topic": "/default/t", "subscription": "s", "max_redelivery_count": 3, "ack_timeout_ms": 1000,
        "base_redelivery_delay_ms": 10, "max_redelivery_delay_ms": 20, "backoff_strategy": backoff or "fixed",
        "dead_letter_topic": "/default/dead" if dead else None, "poison_policy": shown,
    }  # fmt: skip
    assert admin.json("topics", "get-failure-policy", "/default/t", "-s", "s") == expected
    text = admin.lines("topics", "get-failure-policy", "/default/t", "-s", "s")
    assert len(text) == len(expected)
    assert f"poison_policy: {shown}" in text


def test_failure_policy_needs_its_flags_and_fails_where_unset(admin: Admin) -> None:
    admin("topics", "create", "/default/t", "--dispatch-strategy", "reliable")
    for left_out in range(0, len(REQUIRED), 2):
        words = REQUIRED[:left_out] + REQUIRED[left_out + 2 :]
        admin(
            *("topics", "set-failure-policy", "/default/t", "-s", "s", *words, "--poison-policy", "drop"),
            exit_code=2,
        )
    admin("topics", "set-failure-policy", "/default/t", "-s", "s", *REQUIRED, exit_code=2)
    assert (
        "no failure policy"
        in admin("topics", "get-failure-policy", "/default/t", "-s", "s", exit_code=1).stderr
    )


def test_topic_schema_commands(admin: Admin) -> None:
    admin.broker.register("orders")
    admin("topics", "create", "/default/t")
    lines = admin.lines("topics", "configure-schema", "/default/t", "--subject", "orders")
    assert lines[0].startswith("Schema configuration set ")
    assert lines[2:] == ["  Validation Policy: NONE", "  Payload Validation: DISABLED"]
    assert admin.requests("ConfigureTopicSchema")[0].validation_policy == "NONE"
    words = ("--policy", "enforce", "--enable-payload-validation")
    lines = admin.lines("topics", "set-validation-policy", "/default/t", *words)
    assert lines[0].startswith("Validation policy updated ")
    assert lines[1:] == ["  Validation Policy: ENFORCE", "  Payload Validation: ENABLED"]
    assert admin.json("topics", "get-schema-config", "/default/t") == {
        "topic": "/default/t", "schema_subject": "orders", "validation_policy": "ENFORCE",
        "enable_payload_validation": True, "schema_id": 1,
    }  # fmt: skip
    assert "  Schema ID: 1" in admin.lines("topics", "get-schema-config", "/default/t")
    admin("topics", "set-validation-policy", "/default/t", "--policy", "loud", exit_code=2)


# Schemas


def test_schemas_register_and_get(admin: Admin, tmp_path: Path) -> None:
    file = tmp_path / "orders.json"
    file.write_text('{"type":"object"}')
    words = ("schemas", "register", "orders", "--schema-type", "json_schema", "--file", str(file))
    lines = admin.lines(*words, "--description", "what", "--tags", "a", "--tags", "b")
    assert lines[:4] == ["Registered new schema version", "Subject: orders", "Schema ID: 1", "Version: 1"]
    assert lines[4].startswith("Fingerprint: sha256:")
    assert admin.lines(*words)[0] == "Schema already exists"
    made = admin.json("schemas", "register", "orders", "--schema-type", "json_schema", "--schema", "{}")
    assert (made["subject"], made["schema_id"], made["version"], made["is_new_version"]) == (
        "orders",
        1,
        2,
        True,
    )
    found = admin.json("schemas", "get", "--id", "1", "--version", "1")
    assert found["schema_definition"] == '{"type":"object"}'
    assert (found["compatibility_mode"], found["tags"], found["description"]) == (
        "BACKWARD",
        ["a", "b"],
        "what",
    )
    assert set(found) == {field.name for field in _schema_fields()}
    assert admin.json("schemas", "get", "--subject", "orders")["version"] == 2
    assert admin.json("schemas", "get", "--subject", "orders", "--version", "1")["version"] == 1
    text = admin.lines("schemas", "get", "--subject", "orders", "--version", "1")
    assert text[-3:] == ["{", '  "type": "object"', "}"]


def _schema_fields() -> Any:
    from danube.server.proto import SchemaRegistry_pb2

    return SchemaRegistry_pb2.GetSchemaResponse.DESCRIPTOR.fields


def test_a_definition_that_is_no_json_is_shown_as_it_is(admin: Admin) -> None:
    admin.broker.register("p", "protobuf", b'syntax = "proto3";\nmessage A {}')
    assert admin.lines("schemas", "get", "--subject", "p")[-2:] == ['syntax = "proto3";', "message A {}"]


@pytest.mark.parametrize(
    ("words", "exit_code"),
    [
        (("register", "s", "--schema-type", "avro"), 1),
        (("register", "s", "--schema-type", "avro", "--file", "no-such-file"), 1),
        (("register", "s", "--schema", "{}"), 2),
        (("register", "s", "--schema-type", "xml", "--schema", "{}"), 2),
        (("check", "s", "--schema-type", "avro"), 1),
        (("get",), 1),
        (("get", "--subject", "s", "--id", "1"), 2),
        (("set-compatibility", "s"), 2),
        (("set-compatibility", "s", "--mode", "sideways"), 2),
        (("delete", "s", "--version", "1"), 1),
        (("delete", "s", "--confirm"), 2),
    ],
)
def test_schemas_leave_with_the_code_of_the_official_command(
    admin: Admin, words: tuple[str, ...], exit_code: int
) -> None:
    admin("schemas", *words, exit_code=exit_code)
    assert not admin.calls


def test_a_list_of_subjects_has_modes_as_the_answer_spells_them(admin: Admin) -> None:
    admin.broker.register("orders", "avro")
    assert [one["compatibility_mode"] for one in admin.json("schemas", "list-subjects")] == ["backward"]


def test_plain_types_need_no_definition_and_two_are_too_many(admin: Admin, tmp_path: Path) -> None:
    admin("schemas", "register", "s", "--schema-type", "String")
    file = tmp_path / "x"
    file.write_text("{}")
    words = ("--schema-type", "avro", "--schema", "{}", "--file", str(file))
    admin("schemas", "register", "s", *words, exit_code=2)


def test_schemas_other_commands(admin: Admin) -> None:
    admin.broker.register("orders", "avro", b"1")
    admin.broker.register("orders", "avro", b"22")
    _, *rows = admin.lines("schemas", "versions", "orders")
    assert rows[0].startswith("  Version 1: schema_id=1, fingerprint=sha256:")
    assert [one["version"] for one in admin.json("schemas", "versions", "orders")] == [1, 2]
    check = ("schemas", "check", "orders", "--schema-type", "avro", "--schema")
    assert admin.json(*check, "{}") == {"subject": "orders", "is_compatible": True, "errors": []}
    assert "is compatible" in admin(*check, "{}").stdout
    refused = admin(*check, "incompatible").stdout
    assert "not compatible" in refused
    assert "id is gone" in refused
    assert admin.json(*check, "incompatible", "--mode", "none")["is_compatible"]
    assert admin.requests("CheckCompatibility")[-1].compatibility_mode == "NONE"
    assert "Compatibility Mode: BACKWARD" in admin.lines("schemas", "get-compatibility", "orders")
    lines = admin.lines("schemas", "set-compatibility", "orders", "--mode", "full")
    assert lines == ["Compatibility mode set for subject 'orders'", "Mode: FULL"]
    assert admin.requests("SetCompatibilityMode")[0].compatibility_mode == "FULL"
    expected = {"subject": "orders", "compatibility_mode": "FULL"}
    assert admin.json("schemas", "get-compatibility", "orders") == expected
    assert admin.json("schemas", "set-compatibility", "orders", "--mode", "FULL") == expected
    assert admin.lines("schemas", "list-subjects") == ["orders (type: avro, latest version: 2, mode: FULL)"]
    assert [one["subject"] for one in admin.json("schemas", "list-subjects")] == ["orders"]
    deleted = admin.lines("schemas", "delete", "orders", "--version", "1", "--confirm")
    assert deleted[0].startswith("Deleted version 1 ")
    assert [one["version"] for one in admin.json("schemas", "versions", "orders")] == [2]


# Security


def test_roles(admin: Admin) -> None:
    lines = admin.lines("security", "roles", "create", "reader", "--permissions", "Consume, Lookup,")
    assert lines == ["Role 'reader' created: true"]
    shown = {"name": "reader", "permissions": ["Consume", "Lookup"], "system": False}
    assert admin.json("security", "roles", "get", "reader") == shown
    assert [one for one in admin.json("security", "roles", "list") if not one["system"]] == [shown]
    assert "  Permissions: Consume, Lookup" in admin.lines("security", "roles", "get", "reader")
    assert "Role 'reader'" in admin.lines("security", "roles", "list")
    assert admin.lines("security", "roles", "delete", "reader") == ["Role 'reader' deleted: true"]


def test_bindings(admin: Admin) -> None:
    admin("security", "roles", "create", "reader", "--permissions", "Consume")
    place = ("--scope", "topic", "--resource", "/default/t")
    who = ("--principal-type", "user", "--principal-name", "alice", "--roles", "reader")
    bindings = ("security", "bindings")
    assert admin.lines(*bindings, "create", "b1", *who, *place) == ["Binding 'b1' created: true"]
    shown = {
        "id": "b1", "principal_type": "user", "principal_name": "alice", "role_names": ["reader"],
        "scope": "topic", "resource_name": "/default/t",
    }  # fmt: skip
    assert admin.json(*bindings, "get", "b1", *place) == shown
    assert admin.json(*bindings, "list", *place) == [shown]
    assert admin.json(*bindings, "list") == [shown]
    assert "Binding 'b1'" in admin.lines(*bindings, "list")
    assert "  Principal: user:alice" in admin.lines(*bindings, "get", "b1", *place)
    assert admin.lines(*bindings, "delete", "b1", *place) == ["Binding 'b1' deleted: true"]
    admin(*bindings, "create", "b1", *who, "--scope", "world", exit_code=1)
