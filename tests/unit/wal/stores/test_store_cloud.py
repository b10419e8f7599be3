"""The store behind Google and Azure: errors in our words, secrets kept, real answers of a real server.

obstore's S3 client stands in for those clouds: the same library, requests and refusals.
"""

from __future__ import annotations

import base64
import logging
import os
import random
import traceback
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from danube import limits
from danube.config.sections import Secret, StorageSettings
from danube.errors import ConfigInvalid, DanubeError, StoreRefused, StoreUnavailable
from danube.wal.stores.objects import Putting
from danube.wal.stores.opening import open_store
from danube.wal.stores.retries import Pauses, Retries
from tests.fakes.s3_proxy import Fault, Request, S3Proxy
from tests.s3_server import S3Server

cloud_store = pytest.importorskip("danube.wal.stores.cloud")

MIB = limits.MIB
SECRET = "s3cr3t-7f21c0"


@pytest.fixture
def proxy(s3_server: S3Server, seed: int) -> Iterator[S3Proxy]:
    made = S3Proxy("127.0.0.1", s3_server.port, client=s3_server.client(), seed=seed).start()
    yield made
    made.stop()


@pytest.fixture
def store(s3_server: S3Server, proxy: S3Proxy) -> Any:
    from obstore.store import S3Store

    inner = S3Store(
        s3_server.make_bucket(),
        prefix="p",
        config={
            "endpoint": proxy.endpoint,
            "access_key_id": s3_server.access_key,
            "secret_access_key": s3_server.secret_key,
            "region": "us-east-1",
        },
        client_options={"allow_http": True, "timeout": timedelta(seconds=1)},
        retry_config={"max_retries": 0},
    )
    retries = Retries(pauses=Pauses(first_s=0.01, most_s=0.02, tries=3))
    return cloud_store.CloudStore(inner, "gs://bucket/p", retries=retries)


def getting(request: Request) -> bool:
    return request.method == "GET" and not request.listing


def test_files_go_up_and_down(store: Any, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(random.Random(1).randbytes(12 * MIB + 5))
    store.put_file("dir/f", path, Putting(part_bytes=5 * MIB, parallel=2))
    fd = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    try:
        store.get_to("dir/f", 10, 12 * MIB, fd, 0)
    finally:
        os.close(fd)
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()[10 : 12 * MIB]
    assert [info.key for info in store.list("dir/")] == ["dir/f"]
    store.delete(["dir/f", "none"])
    assert list(store.list("")) == []


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "SlowDown"), (429, "Busy")])
def test_errors_of_the_server_are_tried_again_by_us_alone(
    store: Any, proxy: S3Proxy, status: int, code: str
) -> None:
    proxy.add(Fault("status", status=status, code=code, times=2))
    store.put("k", b"1")
    assert proxy.count() == 3
    proxy.add(Fault("status", status=status, code=code))
    with pytest.raises(StoreUnavailable, match=str(status)):
        store.put("k", b"2")
    assert proxy.count() == 6


@pytest.mark.parametrize(
    ("status", "code"), [(403, "AccessDenied"), (401, "Unauthorized"), (400, "ExpiredToken")]
)
def test_a_refusal_is_told_once_and_without_secrets(
    store: Any, proxy: S3Proxy, s3_server: S3Server, caplog: pytest.LogCaptureFixture, status: int, code: str
) -> None:
    caplog.set_level(logging.DEBUG)
    proxy.add(Fault("status", status=status, code=code))
    calls = [lambda: store.put("k", b"1"), lambda: store.get("k"), lambda: list(store.list(""))]
    for call in calls:
        with pytest.raises(StoreRefused) as caught:
            call()
        error = caught.value
        told = (
            "".join(traceback.format_exception(error)) + f"{error!r} {error.hint} {error.facts}" + caplog.text
        )
        assert s3_server.access_key not in told
        assert s3_server.secret_key not in told
    assert proxy.count() == len(calls)


def test_an_outage_is_unavailable(store: Any, proxy: S3Proxy) -> None:
    store.put("k", b"1")
    proxy.refuse()
    for call in (lambda: store.get("k"), lambda: store.put("k", b"1"), lambda: list(store.list(""))):
        with pytest.raises(StoreUnavailable):
            call()
    proxy.resume()
    assert store.get("k") == b"1"


@pytest.mark.parametrize("kind", ["truncate", "reset"])
def test_a_cut_body_is_asked_for_again_and_never_passed_on(store: Any, proxy: S3Proxy, kind: str) -> None:
    data = random.Random(2).randbytes(300_000)
    store.put("k", data)
    proxy.add(Fault(kind, matches=getting, times=1))
    assert store.get("k") == data
    proxy.add(Fault(kind, matches=getting))
    with pytest.raises(StoreUnavailable):
        store.get("k", 5, 200_000)


def test_a_list_that_breaks_goes_on_where_it_was(store: Any, proxy: S3Proxy) -> None:
    for number in range(5):
        store.put(f"k{number}", b"1")
    proxy.add(Fault("status", matches=lambda request: request.listing, status=503, times=1))
    assert [info.key for info in store.list("")] == [f"k{number}" for number in range(5)]


def test_deleting_goes_on_behind_what_is_not_there(tmp_path: Path) -> None:
    from obstore.store import LocalStore

    store = cloud_store.CloudStore(LocalStore(str(tmp_path)), "file://")
    for key in ("a", "b", "c"):
        store.put(key, b"1")
    store.delete(["a", "none", "b", "none-either", "c"])
    assert list(store.list("")) == []


@pytest.mark.parametrize(
    "settings",
    [
        StorageSettings(url="az://c", access_key=Secret("me"), secret_key=Secret(SECRET)),
        StorageSettings(url="gs://b", credentials=Secret(SECRET)),
        StorageSettings(url="gs://b", credentials_file=f"/no/such/{SECRET}"),
    ],
)
def test_keys_of_the_wrong_form_are_told_without_themselves(settings: StorageSettings) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        open_store(settings)
    error = caught.value
    assert SECRET not in f"{error!r} {error} {error.hint} {error.facts}"
    assert "".join(traceback.format_exception(error)).count(SECRET) == 0


def test_an_endpoint_with_a_path_is_azures_alone() -> None:
    key = base64.b64encode(bytes(32)).decode()
    given = {"endpoint": "http://127.0.0.1:1/account", "access_key": Secret("me"), "secret_key": Secret(key)}
    assert open_store(StorageSettings(url="az://box", **given)).name == "az://box"  # type: ignore[arg-type]
    with pytest.raises(ConfigInvalid, match=r"storage\.endpoint"):
        open_store(StorageSettings(url="s3://box", **given))  # type: ignore[arg-type]


def test_stores_of_both_clouds_open_without_asking_anybody() -> None:
    key = base64.b64encode(bytes(32)).decode()
    azure = StorageSettings(url="az://box/dir", access_key=Secret("me"), secret_key=Secret(key))
    assert open_store(azure).name == "az://box/dir"
    google = StorageSettings(url="gs://box/dir/deep", anonymous=True, endpoint="http://127.0.0.1:1")
    opened = open_store(google)
    assert opened.name == "gs://box/dir/deep"
    with pytest.raises(DanubeError) as caught:
        cloud_store.CloudStore(opened._inner, "gs://box", retries=Retries(pauses=Pauses(tries=1))).get("k")  # type: ignore[attr-defined]
    assert isinstance(caught.value, StoreUnavailable)
