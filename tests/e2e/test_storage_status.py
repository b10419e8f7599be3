"""``storage_status`` while the store refuses the broker from the start: bytes, seconds, and why."""

from __future__ import annotations

import json
import os
import ssl
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danube import sync
from tests import fork_server
from tests.broker_process import ROOT, BrokerProcess, free_port, wait_until
from tests.certificates import Authority
from tests.fakes.s3_proxy import Fault, S3Proxy
from tests.s3_server import S3Server

TOPIC = "/default/exposed"
RECORDS, RECORD_BYTES = 300, 1_000
SEALING = {"DANUBE_STORAGE__SEAL_AFTER": "1s"}


def publish(address: str, count: int = RECORDS) -> None:
    with sync.connect(address) as client, client.producer(TOPIC, name="writer") as producer:
        for _ in range(count):
            producer.send_nowait(b"x" * RECORD_BYTES)
        producer.flush()


def asked(address: str) -> dict[str, Any]:
    with sync.connect(address) as client:
        return dict(client.admin.storage_status(""))


def seal(address: str) -> None:
    """What is not active any more must not be forgotten."""
    with sync.connect(address) as client:
        client.admin.seal(TOPIC)


def check_exposed(status: dict[str, Any]) -> None:
    (row,) = status["topics"]
    least = RECORDS * RECORD_BYTES
    assert status["tiered"] and status["pending_bytes"] == row["pending_bytes"] >= least
    assert row["local_bytes"] >= row["pending_bytes"] and row["uploaded_bytes"] == 0
    assert 0 < row["pending_seconds"] < 300 and row["unconfirmed"] == status["unconfirmed"] == 1


def refused(address: str, words: str) -> dict[str, Any]:
    """Wait until the store is known not to answer, and why."""

    def known() -> bool:
        store = asked(address)["store"]
        return store["answers"] is False and words in store["error"]

    wait_until(known, 90, f"the store does not answer: {words}")
    return asked(address)


def test_a_dead_endpoint_at_the_start_is_told_with_what_is_at_risk(
    broker: Callable[..., BrokerProcess],
) -> None:
    environment = {
        **SEALING, "DANUBE_STORAGE__MODE": "object_store", "DANUBE_STORAGE__URL": "s3://bucket/prefix",
        "DANUBE_STORAGE__ENDPOINT": f"http://127.0.0.1:{free_port()}",
        "AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    }  # fmt: skip
    process = broker(workers=2, environment=environment)
    assert asked(process.address)["topics"] == [], "it answers before anything is stored, too"
    publish(process.address)
    check_exposed(asked(process.address))
    seal(process.address)
    status = refused(process.address, "the connection was refused")
    check_exposed(status)
    assert "the connection was refused" in status["topics"][0]["error"]
    process.kill()
    process.start()  # now it meets segments of an earlier life
    check_exposed(asked(process.address))
    check_exposed(refused(process.address, "the connection was refused"))
    command = [sys.executable, "-m", "danube", "storage", "status", "-s", process.address]
    told = fork_server.run([*command, "-o", "json"], cwd=ROOT)
    assert told.returncode == 0, told.stderr
    check_exposed(json.loads(told.stdout))
    plain = fork_server.run(command, cwd=ROOT)
    assert plain.returncode == 0 and TOPIC in plain.stdout
    assert "the object store s3://bucket/prefix does not answer: " in plain.stderr


@pytest.mark.parametrize("how", ["credentials", "bucket", "blackhole"])
def test_a_store_that_refuses_from_the_start_is_told_and_used_once_it_is_mended(
    how: str, broker: Callable[..., BrokerProcess], s3_server: S3Server
) -> None:
    proxy = S3Proxy("127.0.0.1", s3_server.port, client=s3_server.client()).start()
    try:
        bucket = f"danube-status-{how}-{free_port()}"
        environment = {**SEALING, **s3_server.environ(bucket, "p", endpoint=proxy.endpoint)}
        words = "NoSuchBucket"
        if how != "bucket":
            s3_server.make_bucket(bucket)
        if how == "credentials":
            words = "InvalidAccessKeyId"
            proxy.add(Fault("status", status=403, code="InvalidAccessKeyId"))
        elif how == "blackhole":
            words = ""
            proxy.add(Fault("blackhole"))
        process = broker(workers=2, environment=environment)
        publish(process.address)
        seal(process.address)
        check_exposed(asked(process.address))
        if how != "blackhole":  # else it takes the client's time-outs to be sure
            status = refused(process.address, words)
            check_exposed(status)
            assert s3_server.secret_key not in json.dumps(status)
        if how == "bucket":
            s3_server.make_bucket(bucket)
        proxy.clear()
        wait_until(lambda: not asked(process.address)["pending_bytes"], 120, "everything is off the host")
        status = asked(process.address)
        assert status["store"]["answers"] and status["unconfirmed"] == status["errors"] == 0
        assert status["topics"][0]["uploaded_bytes"] >= RECORDS * RECORD_BYTES
    finally:
        proxy.stop()


def test_a_store_with_a_bad_certificate_is_told_and_used_once_it_has_a_good_one(
    broker: Callable[..., BrokerProcess], s3_server: S3Server, tmp_path: Path
) -> None:
    authority, context = Authority(tmp_path / "tls"), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def present(names: str, days: int) -> None:
        files = authority.sign("store", names, days=days)
        context.load_cert_chain(files.cert_file, files.key_file)

    present("IP:127.0.0.1", -1)
    proxy = S3Proxy("127.0.0.1", s3_server.port, client=s3_server.client(), tls=context).start()
    try:
        store = s3_server.environ(s3_server.make_bucket(), "p", endpoint=proxy.endpoint)
        trusted = {"SSL_CERT_FILE": str(authority.cert)}
        process = broker(workers=1, environment={**SEALING, **store, **trusted})
        publish(process.address)
        seal(process.address)
        check_exposed(refused(process.address, "its certificate has expired"))
        assert not proxy.count(), "no request went out"
        present("IP:127.0.0.1", 2)
        wait_until(lambda: not asked(process.address)["pending_bytes"], 120, "everything is off the host")
        assert asked(process.address)["store"]["answers"]
        present("IP:127.0.0.2", 2)
        plain = fork_server.run(
            [sys.executable, "-m", "danube", "verify", store["DANUBE_STORAGE__URL"]],
            environment={**os.environ, **store, **trusted}, cwd=ROOT,
        )  # fmt: skip
        assert plain.returncode == 12 and "its certificate is for another name" in plain.stderr
    finally:
        proxy.stop()


def test_a_store_of_another_broker_is_a_warning_at_the_start(
    broker: Callable[..., BrokerProcess], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    (store / "partitions" / f"{1:016x}-0").mkdir(parents=True)
    (store / "partitions" / f"{1:016x}-0" / "manifest-0000000001-0000000001").write_bytes(b"another's")
    (store / "store.json").write_bytes(b'{"format":1,"store_id":"another","created_us":1}')
    process = broker(workers=1, arguments=["--storage", f"file://{store}"])
    wait_until(lambda: "serves (pid" in process.output_tail(), 20, "the banner")
    banner = process.output_tail()
    assert "warning: the object store cannot be used now" in banner
    assert "the store holds another broker's data" in banner and "another bucket or prefix" in banner
