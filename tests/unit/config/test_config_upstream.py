"""Configuration files of the upstream broker: all seven that it ships, by their keys and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from danube.config.loading import BrokerConfig, load
from danube.errors import ConfigInvalid
from danube.limits import RECORD_BYTES_MAX

SEEDS = "broker1:7650,broker2:7650,broker3:7650"
REBALANCING = {
    "enabled": False, "aggressiveness": "balanced", "check_interval_seconds": 300, "max_moves_per_hour": 10,
    "cooldown_seconds": 60, "min_topic_age_seconds": 300,
}  # fmt: skip
SECURE = {
    "mode": "tls",
    "tls": {"cert_file": "./cert/a.pem", "key_file": "./cert/b.pem", "ca_file": "./cert/c.pem"},
    "jwt": {"secret_key": "a secret", "issuer": "danube-auth", "expiration_time": 3600},
    "super_admins": ["admin"],
}
DURABLE = {
    "backend": "s3", "root": "s3://bucket/folder", "region": "us-east-1", "endpoint": "http://minio:9000",
    "access_key": "one", "secret_key": "two", "anonymous": False, "virtual_host_style": False,
}  # fmt: skip
ADVANCED = {"cache_capacity": 1024, "file_sync": {"interval_ms": 5000, "max_batch_bytes": 10_485_760}}
BUFFER = {"backend": "valkey", "endpoints": ["redis://127.0.0.1:6379"], "wait_replicas": 0,
          "wait_timeout_ms": 100, "on_wait_timeout": "fail", "max_cached_closed_segments": 5}  # fmt: skip


def file_of(
    *,
    seeds: bool = False,
    auth: Any = None,
    strategy: str = "fair",
    storage: Any = None,
    rotation: Any = None,
    record: int = 10_485_760,
    **rebalancing: Any,
) -> dict[str, Any]:
    """What all seven have alike, and what differs."""
    stored = {
        "mode": "local",
        "local_wal_root": "./danube-data/wal",
        "metadata_prefix": "/danube",
        "local_retention": {"time_minutes": 2880, "size_mb": 20_480, "check_interval_minutes": 5},
        "wal": {"rotation": {"max_bytes": 536_870_912}, **(rotation or {})},
    }
    stored |= storage or {}
    limits = ("producers_per_topic", "subscriptions_per_topic", "consumers_per_topic",
              "consumers_per_subscription", "publish_rate", "subscription_dispatch_rate")  # fmt: skip
    return {
        "cluster_name": "MY_CLUSTER",
        "broker": {
            "host": "0.0.0.0", "ports": {"client": 6650, "admin": 50_051, "raft": 7650, "prometheus": 9040}
        },
        "meta_store": {
            "data_dir": "./danube-data/raft", **({"seed_nodes": SEEDS.split(",")} if seeds else {})
        },
        "bootstrap_namespaces": ["default"],
        "auto_create_topics": True,
        "auth": auth or {"mode": "none"},
        "load_manager": {
            "assignment_strategy": strategy,
            "load_report_interval_seconds": 30,
            "rebalancing": {
                **REBALANCING, "min_brokers_for_rebalance": 2, "blacklist_topics": [], **rebalancing
            },
        },
        "storage": {key: value for key, value in stored.items() if value is not None},
        "dispatch": {"max_unacked_messages": 10},
        "policies": {**{f"max_{name}": 0 for name in limits}, "max_message_size": record},
    }  # fmt: skip


SHARED = {"mode": "shared_fs", "local_wal_root": None, "durable": {"root": "./danube-data/shared-fs"}}
BUCKET = {"mode": "object_store", "durable": DURABLE}
FILES = {
    "broker": file_of(),
    "secure": file_of(auth=SECURE),
    "rebalance": file_of(enabled=True, aggressiveness="aggressive", check_interval_seconds=5),
    "shared_fs": file_of(storage=SHARED),
    "write_buffer": file_of(storage={"write_buffer": BUFFER}),
    "docker": file_of(seeds=True),
    "docker_cloud": file_of(
        seeds=True, strategy="balanced", storage=BUCKET, rotation={"advanced": ADVANCED}, record=52_428_800
    ),
}  # fmt: skip
TAKEN = [name for name in FILES if name not in ("secure", "write_buffer")]


def text_of(value: Any, depth: int = 0) -> str:
    """YAML, one key a line."""
    lines = []
    for key, inner in value.items():
        if isinstance(inner, dict):
            lines.append(f"{'  ' * depth}{key}:\n{text_of(inner, depth + 1)}")
        else:
            word = {True: "true", False: "false"}.get(inner) if isinstance(inner, bool) else inner
            shown = repr(inner) if isinstance(inner, str) else word
            lines.append(f"{'  ' * depth}{key}: {shown}")
    return "\n".join(lines)


def written(folder: Path, value: Any) -> Path:
    path = folder / "danube_broker.yml"
    path.write_text(text_of(value))
    return path


def taken(folder: Path, value: Any) -> BrokerConfig:
    return load(written(folder, value), {}, {"cluster.raft_addr": "broker1:7650"}).config


def problems(folder: Path, value: Any, **flags: object) -> str:
    with pytest.raises(ConfigInvalid) as caught:
        load(written(folder, value), {}, flags)
    return "\n".join(f"{one.what} ({one.hint})" for one in caught.value.facts["problems"])


@pytest.mark.parametrize("name", TAKEN)
def test_what_every_file_says_is_taken(tmp_path: Path, name: str) -> None:
    found = taken(tmp_path, FILES[name])
    assert found.cluster.name == "MY_CLUSTER" and found.server.host == "0.0.0.0"
    assert (found.grpc.port, found.admin.port, found.metrics.port) == (6650, 50_051, 9040)
    assert found.topics.auto_create and found.topics.max_record_bytes == RECORD_BYTES_MAX
    assert found.subscriptions.max_unacked == 10
    assert found.wal.segment_bytes == 512 << 20
    assert (found.storage.local_retention_ms, found.storage.local_retention_bytes) == (
        172_800_000,
        20_480 << 20,
    )


@pytest.mark.parametrize("name", TAKEN)
def test_what_differs_between_the_files_is_taken(tmp_path: Path, name: str) -> None:
    found = taken(tmp_path, FILES[name])
    seeded = name.startswith("docker")
    assert found.cluster.seed_nodes == (SEEDS if seeded else "") and found.cluster.enabled is seeded
    assert found.balance.strategy == ("balanced" if name == "docker_cloud" else "fair")
    assert found.balance.automatic is (name == "rebalance")
    assert found.balance.interval_ms == (5_000 if name == "rebalance" else 300_000)
    mode = {"shared_fs": "shared_fs", "docker_cloud": "object_store"}.get(name, "local")
    assert found.storage.mode == mode
    folder = tmp_path / "danube-data" / ("raft" if name == "shared_fs" else "wal")
    assert found.data_dir == folder, "the storage section's, else the one of the metadata"
    if mode == "object_store":
        assert found.storage.url == "s3://bucket/folder" and found.storage.endpoint == "http://minio:9000"
    elif mode == "shared_fs":
        assert found.storage.url == f"file://{tmp_path / 'danube-data' / 'shared-fs'}"


def test_access_control_is_not_left_out_in_silence(tmp_path: Path) -> None:
    found = problems(tmp_path, FILES["secure"])
    assert found.startswith("auth.jwt.secret_key has less than 32 bytes"), "it listens on every address"
    jwt = {"secret_key": "a secret of thirty-two bytes, or more"}
    secure = taken(tmp_path, file_of(auth=SECURE | {"jwt": jwt}))
    assert secure.auth.mode == "tls" and secure.tls.cert_file == str(tmp_path / "cert" / "a.pem")
    plain = taken(tmp_path, file_of(auth=SECURE | {"mode": "none"}))
    assert plain.tls.cert_file == "", "as there"
    assert plain.auth.jwt_secret_key.reveal() == "a secret" and plain.auth.super_admins == "admin"


def test_the_write_buffer_is_named_with_what_there_is_instead(tmp_path: Path) -> None:
    found = problems(tmp_path, FILES["write_buffer"])
    assert found.count("\n") == 0 and "storage.write_buffer" in found and "topics.durability" in found


def test_members_that_cannot_be_reached_need_an_address(tmp_path: Path) -> None:
    found = problems(tmp_path, FILES["docker"])
    assert "cluster.raft_addr 127.0.0.1:7650" in found
    alone = load(
        written(tmp_path, file_of() | {"broker": {"host": "10.0.0.1", "ports": {"raft": 7}}}), {}, {}
    )
    assert alone.config.cluster.raft_addr == "10.0.0.1:7"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"bootstrap_namespaces": ["default", "sales"]}, "danube-admin namespaces create sales"),
        ({"policies": {"max_publish_rate": 5}}, "max_publish_rate"),
        ({"policies": {"max_subscription_dispatch_rate": 5}}, "danube namespaces set"),
        ({"load_manager": {"rebalancing": {"blacklist_topics": ["/default/a"]}}}, "every topic may move"),
        ({"dispatch": {"max_unacked_messages": 0}}, "subscriptions.max_unacked"),
        ({"meta_store": {"seed_nodes": "a b"}}, "cluster.seed_nodes"),
        ({"meta_store": {"seeds": "a:1"}}, "seed_nodes"),
    ],
)
def test_what_is_not_kept_here_is_named_with_its_equal(tmp_path: Path, changed: Any, told: str) -> None:
    assert told in problems(tmp_path, file_of() | changed)


def test_other_keys_of_that_broker_are_taken(tmp_path: Path) -> None:
    found = taken(
        tmp_path,
        {
            "admin_tls": False, "bootstrap_namespaces": [],
            "broker": {"advertised_listeners": {"broker_url": "http://in:1", "connect_url": "http://out:2"}},
            "policies": {"max_message_size": 0},
        },
    )  # fmt: skip
    assert (found.admin.tls, found.grpc.advertised) == (False, "out:2")
    assert found.topics.max_record_bytes == RECORD_BYTES_MAX
    assert taken(tmp_path, {"policies": {"max_message_size": 1000}}).topics.max_record_bytes == 1000
