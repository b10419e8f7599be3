"""Rights at the object store: a broker that may use its prefix alone, and a reader of one tenant's topics."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import minio
import pytest
from minio.credentials.providers import StaticProvider
from minio.minioadmin import MinioAdmin

from danube import sync
from danube.broker.tiers.restore import restore_from
from danube.config.sections import Secret
from danube.errors import StoreRefused
from danube.host.clock import wall_us
from danube.wal.stores.objects import ObjectStore
from danube.wal.stores.opening import open_store
from danube.wal.tier.keys import KeyKind, parse_key
from danube.wal.verify.store import verify_store
from danube.wal.verify.tree import Verified
from tests import fork_server
from tests.broker_process import ROOT, wait_until
from tests.e2e.test_tiering import TIERED, payload, publish, read
from tests.s3_server import S3Server

NORTH, SOUTH = "/north/orders", "/south/orders"
COUNT = 300
USING = ["s3:GetObject", "s3:PutObject", "s3:DeleteObject", "s3:AbortMultipartUpload"]
PASSWORD = "not-a-secret-of-anybody"


class Users:
    """Users of a MinIO server, each with a policy of its own."""

    def __init__(self, server: S3Server, bucket: str) -> None:
        provider = StaticProvider(server.access_key, server.secret_key)
        self._admin = MinioAdmin(
            endpoint=f"127.0.0.1:{server.port}", credentials=provider, region="us-east-1", secure=False
        )
        self._server, self._bucket = server, bucket

    def add(self, name: str, place: str, actions: list[str], **bucket_rights: str) -> None:
        """Let a user do ``actions`` with keys that begin with ``place``, and list these."""
        bucket = f"arn:aws:s3:::{self._bucket}"
        listing = {"StringLike": {"s3:prefix": [f"{place}*"]}}
        statements: list[dict[str, Any]] = [
            {"Effect": "Allow", "Action": actions, "Resource": [f"{bucket}/{place}*"]},
            {"Effect": "Allow", "Action": ["s3:ListBucket"], "Resource": [bucket], "Condition": listing},
            *({"Effect": "Allow", "Action": [one], "Resource": [bucket]} for one in bucket_rights.values()),
        ]
        self._admin.user_add(name, PASSWORD)
        self._admin.policy_add(name, policy={"Version": "2012-10-17", "Statement": statements})
        self._admin.policy_set(name, user=name)

    def store(self, name: str, prefix: str = "p") -> ObjectStore:
        keys = {"access_key": Secret(name), "secret_key": Secret(PASSWORD)}
        return open_store(self._server.settings(self._bucket, prefix, **keys))

    def environ(self, name: str) -> dict[str, str]:
        given = self._server.environ(self._bucket, "p")
        return {**given, "AWS_ACCESS_KEY_ID": name, "AWS_SECRET_ACCESS_KEY": PASSWORD}


def folders(address: str) -> list[str]:
    """Return what the keys of each topic begin with, by name, as docs/tiers.md tells."""
    command = [sys.executable, "-m", "danube", "topics", "list", "-s", address, "-o", "json"]
    done = fork_server.run(command, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = {one["topic"]: int(one["topic_id"]) for one in json.loads(done.stdout)}
    return [f"partitions/{found[topic]:016x}-" for topic in (NORTH, SOUTH)]


def test_a_broker_needs_its_prefix_alone_and_a_tenant_reads_its_topics_alone(
    broker: Any, s3_server: S3Server, tmp_path: Path
) -> None:
    if s3_server.kind != "minio":
        pytest.skip(f"{s3_server.kind} keeps no policies")
    bucket = s3_server.make_bucket()
    users, theirs = Users(s3_server, bucket), s3_server.client()
    users.add("broker", "p/", USING, uploads="s3:ListBucketMultipartUploads")
    process = broker(workers=1, environment={**TIERED, **users.environ("broker")})
    with sync.connect(process.address) as client:
        for topic in (NORTH, SOUTH):
            client.admin.create_namespace(topic.split("/")[1])
            client.admin.create_topic(topic)
    for topic in (NORTH, SOUTH):
        publish(process.address, 0, COUNT, topic=topic)
    for topic in (NORTH, SOUTH):
        wait_until(lambda topic=topic: gone_up(process.address, topic), 90, f"{topic} is in the store")
    assert read(process.address, "earliest", COUNT, "all", NORTH) == [(n, payload(n)) for n in range(COUNT)]
    wait_until(lambda: any(key.startswith("metadata/") for key in keys_of(theirs, bucket)), 90, "metadata")
    check_names(keys_of(theirs, bucket))
    north, south = folders(process.address)
    check_reader(users, north, south)
    users.add("auditor", "p/", ["s3:GetObject"])
    verified, auditor = Verified(), users.store("auditor")
    verify_store(auditor, wall_us(), verified)
    assert not verified.findings and verified.objects >= 2
    told = restore_from(auditor, tmp_path / "restored")
    assert told.problems == [] and told.objects >= 2
    with sync.connect(process.address) as client:
        client.admin.delete_topic(NORTH)
    wait_until(lambda: not any(key.startswith(north) for key in keys_of(theirs, bucket)), 90, "north is gone")
    assert any(key.startswith(south) for key in keys_of(theirs, bucket))
    output = process.output_path.read_text()
    assert "cannot be dropped" not in output and "AccessDenied" not in output
    with pytest.raises(StoreRefused):
        users.store("broker", "q").put("k", b"beyond its prefix")


def gone_up(address: str, topic: str) -> bool:
    """Whether no record of a topic is on the host alone any more."""
    with sync.connect(address) as client:
        return int(client.admin.describe_topic(topic).partitions[0]["local_start"]) >= COUNT


def keys_of(client: minio.Minio, bucket: str) -> list[str]:
    """All keys, without the store's prefix; nothing is beside it."""
    found = [str(one.object_name) for one in client.list_objects(bucket, recursive=True)]
    assert all(key.startswith("p/") for key in found)
    return [key.removeprefix("p/") for key in found]


def check_names(keys: list[str]) -> None:
    """Ids and numbers alone: no text of a user is in a key."""
    kinds = {found.kind for key in keys if (found := parse_key(key)) is not None}
    assert {KeyKind.STORE, KeyKind.METADATA, KeyKind.SEGMENT, KeyKind.MANIFEST} <= kinds
    assert all(parse_key(key) is not None for key in keys)
    assert not any(word in key for key in keys for word in ("north", "south", "orders", "default"))


def check_reader(users: Users, own: str, other: str) -> None:
    users.add("reader", f"p/{own}", ["s3:GetObject"])
    reader, all_of = users.store("reader"), users.store("broker")
    mine, foreign = ([one.key for one in all_of.list(folder)] for folder in (own, other))
    assert [one.key for one in reader.list(own)] == mine
    assert all(reader.get(key) == all_of.get(key) for key in mine)
    (metadata, *_) = all_of.list("metadata/")
    refused: list[Any] = [
        lambda: list(reader.list("")), lambda: list(reader.list(other)), lambda: reader.get(foreign[0]),
        lambda: reader.head(foreign[0]), lambda: reader.get(metadata.key),
        lambda: reader.put(f"{own}0/x", b"x"), lambda: reader.delete(mine[:1]),
    ]  # fmt: skip
    for ask in refused:
        with pytest.raises(StoreRefused):
            ask()
