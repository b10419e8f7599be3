"""Faults of the object store under a running broker (rows E1 to E6, E8 and E11 of docs/reliability.md)."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from danube import limits, sync
from danube.errors import OperationTimeout, StorageFull
from tests.broker_process import wait_until
from tests.e2e.side_by_side import Bench, beside
from tests.e2e.side_by_side import alone as alone
from tests.e2e.side_by_side import lanes as lanes
from tests.e2e.test_storage_faults import small_disk as small_disk
from tests.e2e.tiered_site import TOPIC, WAIT_S, Site, getting, of_segment, payload, putting, tiered
from tests.fakes.s3_proxy import Fault, Request, S3Proxy
from tests.s3_server import S3Server

pytestmark = pytest.mark.timeout(300)
MIB = limits.MIB
HOUR_OF_SEGMENTS = 60  # one a minute is what `storage.seal_after` makes of a steady stream


@pytest.fixture
def proxy(s3_server: S3Server, seed: int) -> Iterator[S3Proxy]:
    made = S3Proxy("127.0.0.1", s3_server.port, client=s3_server.client(), seed=seed).start()
    yield made
    made.stop()


@pytest.fixture
def site(broker: Any, s3_server: S3Server, proxy: S3Proxy) -> Site:
    return Site(broker, s3_server, proxy)


def moved(site: Site, count: int = 100) -> int:
    """Publish, seal and wait until it is in the store alone; returns the end."""
    site.publish(count)
    end = site.seal()
    site.wait_moved(end)
    return end


# -- E1: nobody there, or nobody answers ----------------------------------------------------------


@pytest.mark.parametrize("how", ["refused", "blackhole", "reset"])
@beside
def test_acks_go_on_in_an_outage_and_its_backlog_leaves_after_it(
    bench: Bench, s3_server: S3Server, how: str
) -> None:
    with tiered(bench, s3_server) as site:
        moved(site)
        if how == "refused":
            site.proxy.refuse()
        else:
            site.proxy.add(Fault(how))
        begun = len(site.proxy.requests)
        for _ in range(HOUR_OF_SEGMENTS):
            site.publish(10)
            site.seal()
        local = site.partition()
        assert local["local_start"] == 100, "nothing leaves this host before it is in the store"
        if how != "blackhole":  # that takes as long as a request may
            wait_until(lambda: bool(site.error()), WAIT_S, "the outage is told")
        status = site.status()
        assert status["pending_bytes"] > HOUR_OF_SEGMENTS * 10 * 2_000 and status["pending_seconds"] > 0
        assert len(site.proxy.requests) - begun < 200, "an outage is knocked at, not stormed"
        site.publish(10)
        if how == "refused":
            site.proxy.resume()
        site.proxy.clear()
        site.wait_moved(site.seal())
        status = site.status()
        assert (status["pending_bytes"], status["pending_seconds"]) == (0, 0), "the exposure is over"
        assert site.read(len(site.sent), "all") == site.sent
        site.verify()


def test_a_disk_that_fills_in_an_outage_refuses_and_recovers_with_the_store(
    broker: Any, s3_server: S3Server, proxy: S3Proxy, small_disk: Path
) -> None:
    site = Site(broker, s3_server, proxy, data_dir=small_disk / "data", DANUBE_STORAGE__SEAL_AFTER="1s")
    site.publish(10)
    wait_until(lambda: bool(site.status()["store"]["answers"]), WAIT_S, "the store is the broker's")
    assert (
        site.read(10, "before") == site.sent
    )  # from now on there is room for cursors, however full the disk
    proxy.refuse()
    refused = 0
    with sync.connect(site.address) as client, client.producer(TOPIC, name="large") as producer:
        for _ in range(2_000):
            data = payload(len(site.sent), 40_000)
            try:
                ack = producer.send(data)
            except StorageFull:
                refused += 1
                if refused == 3:
                    break
            else:
                site.sent.append((ack.offset, data))
        assert refused == 3, "the disk was never full"
        assert site.read(len(site.sent), "during") == site.sent, "consumers read and ack on"
        mover = site.broker.processes()["mover"]
        os.kill(mover, signal.SIGKILL)
        wait_until(lambda: site.broker.processes().get("mover", mover) != mover, WAIT_S, "a new mover")
        proxy.resume()
        give_up = time.monotonic() + WAIT_S
        while True:  # no operator: what is in the store leaves, and there is room again
            data = payload(len(site.sent), 40_000)
            try:
                ack = producer.send(data)
                break
            except StorageFull:
                assert time.monotonic() < give_up, site.status()
                time.sleep(0.2)
        site.sent.append((ack.offset, data))
    assert site.read(len(site.sent), "after") == site.sent


# -- E3: done, and the answer lost -----------------------------------------------------------------


def test_answers_that_are_lost_make_no_second_segment(site: Site) -> None:
    lost = site.proxy.add(Fault("close_after", matches=putting, rate=0.4))
    hung = site.proxy.add(Fault("hang_after", matches=lambda one: putting(one) and of_segment(one), times=1))
    for _ in range(10):
        site.publish(50)
        site.seal()
    wait_until(lambda: lost.met > 5 and hung.met == 1, WAIT_S, "answers were lost")
    site.proxy.clear()
    site.wait_moved(len(site.sent))
    report = site.verify()
    assert len(site.objects()) == 10 == report["objects"]
    assert site.read(len(site.sent), "all") == site.sent


# -- E4: wrong bytes come back ---------------------------------------------------------------------


@beside
def test_wrong_bytes_are_fetched_again_and_never_served(bench: Bench, s3_server: S3Server) -> None:
    with tiered(bench, s3_server) as site:
        for _ in range(4):
            site.publish(300)
            site.seal()
        site.wait_moved(len(site.sent))
        for kind in ("damage", "truncate", "swap"):
            site.proxy.add(Fault(kind, matches=getting, rate=0.1))
        assert site.read(len(site.sent), "through") == site.sent
        assert any(request.fault for request in site.proxy.requests if getting(request))


@beside
def test_bytes_that_stay_wrong_are_named_and_hold_up_nobody_else(bench: Bench, s3_server: S3Server) -> None:
    with tiered(bench, s3_server) as site:
        for _ in range(2):
            site.publish(300)
            site.seal()
        site.wait_moved(len(site.sent))
        site.broker.restart()  # the cache is empty
        site.publish(5)
        site.proxy.add(Fault("damage", matches=getting))
        with pytest.raises(OperationTimeout):
            site.read(1, "cold", timeout_s=3)
        with sync.connect(site.address) as client, client.consumer(TOPIC, "cold", "shared") as consumer:
            with pytest.raises(OperationTimeout):
                consumer.receive(timeout=2)
            state = site.state("cold")
        assert state.startswith("waiting_for_store") and (
            "0 .. " in state or "not the one uploaded" in state
        ), state
        assert site.read(5, "hot", start=600) == site.sent[600:], "what is on this host is read"
        site.proxy.clear()
        assert site.read(len(site.sent), "cold-again") == site.sent


# -- E5: the store damages what it took -------------------------------------------------------------


def test_a_store_that_damages_what_it_takes_is_caught_before_anything_leaves(site: Site) -> None:
    damaging = site.proxy.add(
        Fault("damage_stored", matches=lambda one: one.method == "PUT" and of_segment(one))
    )
    site.publish(200)
    site.seal()
    wait_until(lambda: "is not what was uploaded" in site.error(), WAIT_S, "the damage is told")
    assert damaging.met and site.partition()["local_start"] == 0 and site.partition()["uploaded_end"] == 0
    assert site.read(200, "local") == site.sent
    site.proxy.clear()
    site.wait_moved(200)
    site.verify()
    assert site.read(200, "remote") == site.sent


# -- E6: parts --------------------------------------------------------------------------------------


def test_a_mover_killed_at_every_part_leaves_no_half_object(
    broker: Any, s3_server: S3Server, proxy: S3Proxy
) -> None:
    site = Site(
        broker, s3_server, proxy, DANUBE_STORAGE__PART_SIZE="5MiB", DANUBE_STORAGE__UPLOAD_PARALLEL="1"
    )
    source = random.Random(5)
    for number in (1, 2, 3):
        hung = proxy.add(Fault("blackhole", matches=lambda one, number=number: one.part == number, times=1))  # type: ignore[misc]
        with sync.connect(site.address) as client, client.producer(TOPIC, name="large") as producer:
            data = [source.randbytes(MIB - 100) for _ in range(11)]
            acks = [producer.send(one) for one in data]
        site.sent += [(ack.offset, one) for ack, one in zip(acks, data, strict=True)]
        site.seal()
        wait_until(lambda hung=hung: hung.met == 1, WAIT_S, f"part {number} is on its way")  # type: ignore[misc]
        site.kill_mover()
        assert len(site.objects()) == number - 1, "an object is there whole or not at all"
        proxy.clear()
        site.wait_moved(len(site.sent))
    report = site.verify()
    assert report["objects"] == 3 == len(site.objects())
    unfinished = site.server.settings(site.bucket, "p")
    from danube.wal.stores.opening import open_store

    store = open_store(unfinished)
    assert store.clean_uploads(0) == 3, "what each of them had begun is dropped by its age"
    assert store.clean_uploads(0) == 0
    assert site.read(len(site.sent), "all") == site.sent


# -- E8: credentials, rights, buckets, regions ------------------------------------------------------

REFUSALS = [
    (400, "ExpiredToken"), (403, "InvalidAccessKeyId"), (403, "AccessDenied"), (404, "NoSuchBucket"),
    (301, "PermanentRedirect"), (400, "AuthorizationHeaderMalformed"),
]  # fmt: skip


@beside
def test_refusals_cost_no_ack_and_are_told_without_a_secret(bench: Bench, s3_server: S3Server) -> None:
    with tiered(bench, s3_server) as site:
        moved(site)
        told = ""
        for status, code in REFUSALS:
            site.proxy.add(Fault("status", status=status, code=code))
            site.publish(10)
            site.seal()
            wait_until(lambda code=code: code in site.error(), WAIT_S, f"{code} is told")  # type: ignore[misc]
            told += str(site.status()) + site.danube("storage", "status", "-s", site.address, "-o", "json")
            site.proxy.clear()
            site.wait_moved(len(site.sent))
        told += site.broker.output_path.read_text()
        files = b"".join(path.read_bytes() for path in site.broker.data_dir.rglob("*") if path.is_file())
        for secret in (site.server.secret_key, site.server.access_key, "Signature=", "Credential="):
            assert secret not in told
            assert secret.encode() not in files
        assert "ExpiredToken" in told and "AuthorizationHeaderMalformed" in told
        assert site.read(len(site.sent), "all") == site.sent


@beside
def test_a_bucket_that_is_not_there_yet_is_used_when_it_comes(bench: Bench, s3_server: S3Server) -> None:
    with tiered(bench, s3_server, bucket=f"{s3_server.make_bucket()}-late") as site:
        site.publish(50)
        site.seal()
        wait_until(lambda: "NoSuchBucket" in site.error(), WAIT_S, "the missing bucket is told")
        s3_server.make_bucket(site.bucket)
        site.wait_moved(50)
        assert site.read(50, "all") == site.sent


# -- E11: objects that somebody deletes or overwrites ------------------------------------------------


@pytest.mark.parametrize("harm", ["deleted", "overwritten"])
@beside
def test_objects_harmed_by_others_are_named_and_read_when_they_are_back(
    bench: Bench, s3_server: S3Server, harm: str
) -> None:
    with tiered(bench, s3_server) as site:
        for _ in range(3):
            site.publish(300)
            site.seal()
        site.wait_moved(900)
        key = sorted(site.objects())[1]
        client = site.server.client()
        response = client.get_object(site.bucket, key)
        kept = response.read()
        response.close()
        if harm == "deleted":
            client.remove_object(site.bucket, key)
        else:
            client.put_object(site.bucket, key, BytesIO(bytes(len(kept))), len(kept))
        site.broker.restart()  # the cache is empty
        pids = site.broker.pids
        begun = len(site.proxy.requests)
        found = []
        with sync.connect(site.address) as client_of_broker:
            with client_of_broker.consumer(TOPIC, "reader", "exclusive", start="earliest") as consumer:
                with pytest.raises(OperationTimeout):
                    while True:
                        message = consumer.receive(timeout=4)
                        found.append((message.offset, bytes(message.payload)))
                        message.ack_nowait()
                assert found == site.sent[:300], "up to the harmed one, and no further"
                state = site.state("reader")
                wanted = key.removeprefix("p/") if harm == "deleted" else "300"
                assert state.startswith("waiting_for_store") and wanted in state, state
                asked = [
                    one for one in site.proxy.requests[begun:] if getting(one) and one.path.endswith(key)
                ]
                assert 0 < len(asked) < 30, "it is asked for slowly"
                assert site.broker.pids == pids, "nobody crashed"
                client.put_object(site.bucket, key, BytesIO(kept), len(kept))
                while len(found) < 900:
                    message = consumer.receive(timeout=60)
                    found.append((message.offset, bytes(message.payload)))
                    message.ack_nowait()
        assert found == site.sent


def of_list(request: Request) -> bool:
    return request.listing


def test_a_list_that_lags_makes_nobody_forget(site: Site) -> None:
    """E4, too: after a restart the store lists none of the manifests that were installed."""
    moved(site, 200)
    site.broker.kill()
    stale = site.proxy.add(Fault("hide", matches=of_list, hidden=lambda key: "manifest-" in key))
    site.broker.start()
    assert site.read(200, "all") == site.sent
    site.publish(50)
    site.wait_moved(site.seal())
    assert stale.met
    site.proxy.clear()
    assert site.read(250, "more") == site.sent
    site.verify()


# -- E2: errors of the server ----------------------------------------------------------------------


def test_errors_of_every_kind_do_not_double_the_rate_of_requests(
    broker: Any, s3_server: S3Server, proxy: S3Proxy, alone: None
) -> None:
    rates = []
    for rate in (0.0, 0.09):
        site = Site(broker, s3_server, proxy)
        for status, code in (
            (500, "InternalError"),
            (503, "ServiceUnavailable"),
            (503, "SlowDown"),
            (429, "Busy"),
        ):
            proxy.add(Fault("status", status=status, code=code, rate=rate))
        begun, begun_s = len(proxy.requests), time.monotonic()
        for _ in range(45):  # so many that no single pause decides
            site.publish(20)
            site.seal()
        site.wait_moved(len(site.sent))
        rates.append((len(proxy.requests) - begun) / (time.monotonic() - begun_s))
        assert site.broker.stop() == 0
        proxy.clear()
    assert any(request.fault for request in proxy.requests)
    assert rates[1] <= 2 * rates[0], rates
