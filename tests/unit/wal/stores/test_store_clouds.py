"""Azure Blob and Google Cloud Storage as their servers answer, through a proxy that fails by a script."""

from __future__ import annotations

import base64
import logging
import os
import random
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from danube import limits
from danube.config.sections import Secret
from danube.errors import ObjectMissing, StoreRefused, StoreUnavailable
from danube.wal.stores.objects import Putting
from danube.wal.stores.opening import open_store
from danube.wal.stores.retries import Pauses, Retries, RetryBudget
from tests.cloud_servers import ACCOUNT_KEY, GOOGLE_SECRET, CloudServer
from tests.fakes.s3_proxy import Fault, Request, S3Proxy

cloud_store = pytest.importorskip("danube.wal.stores.cloud")

pytestmark = pytest.mark.e2e
MIB = limits.MIB
QUICK = Pauses(first_s=0.01, most_s=0.05, tries=6, deadline_s=20.0)


@dataclass
class Setup:
    """A bucket of a cloud, the way to it past the proxy, and one around it."""

    server: CloudServer
    proxy: S3Proxy
    bucket: str

    def store(self, pauses: Pauses = QUICK, **more: Any) -> Any:
        parts = urlsplit(self.server.endpoint)
        endpoint = self.proxy.endpoint + parts.path
        store: Any = open_store(self.server.settings(self.bucket, "p", endpoint=endpoint, **more))
        store.retries = Retries(RetryBudget(), pauses)
        return store

    @property
    def direct(self) -> Any:
        return open_store(self.server.settings(self.bucket, "p"))


@pytest.fixture(params=["azure", "google"])
def setup(request: pytest.FixtureRequest, seed: int) -> Iterator[Setup]:
    server: CloudServer = request.getfixturevalue(f"{request.param}_server")
    proxy = S3Proxy("127.0.0.1", urlsplit(server.endpoint).port or 0, seed=seed).start()
    yield Setup(server, proxy, server.make_bucket())
    proxy.stop()


def putting(request: Request) -> bool:
    return request.method == "PUT"


def getting(request: Request) -> bool:
    return request.method == "GET" and "/p/" in request.path


def told_by(error: BaseException) -> str:
    facts = f"{error!r} {error} {getattr(error, 'hint', '')} {getattr(error, 'facts', '')}"
    return facts + "".join(traceback.format_exception(error))


def no_secret_in(told: str) -> bool:
    return not any(secret in told for secret in (ACCOUNT_KEY, GOOGLE_SECRET, "SharedKey", "Bearer"))


@pytest.mark.parametrize("how", ["refused", "reset"])
def test_an_outage_is_told_soon_and_over_when_it_is_over(setup: Setup, how: str) -> None:
    store = setup.store(Pauses(first_s=0.01, most_s=0.02, tries=2, deadline_s=5.0))
    store.put("before", b"1")
    if how == "refused":
        setup.proxy.refuse()
    else:
        setup.proxy.add(Fault(how))
    for call in (
        lambda: store.put("during", b"2"),
        lambda: store.get("before"),
        lambda: list(store.list("")),
    ):
        with pytest.raises(StoreUnavailable):
            call()
    if how == "refused":
        setup.proxy.resume()
    setup.proxy.clear()
    store.put("after", b"3")
    assert [info.key for info in store.list("")] == ["after", "before"]


@pytest.mark.parametrize(("status", "code"), [(500, "InternalError"), (503, "ServerBusy"), (429, "TooMany")])
def test_server_errors_are_retried_within_the_budget(setup: Setup, status: int, code: str) -> None:
    store = setup.store(Pauses(first_s=0.001, most_s=0.002))
    setup.proxy.add(Fault("status", status=status, code=code, rate=0.3))
    asked = 0
    for number in range(20):
        for _ in range(30):
            asked += 1
            try:
                store.put(f"k{number:02d}", b"%d" % number)
                break
            except StoreUnavailable as error:
                assert str(status) in str(error)
        else:
            pytest.fail("a put never succeeded")
    assert setup.proxy.count() <= 2 * asked, "twice the normal rate at the very most"
    setup.proxy.clear()
    assert [info.key for info in setup.direct.list("")] == [f"k{number:02d}" for number in range(20)]


@pytest.mark.parametrize("kind", ["hang_after", "close_after"])
def test_an_answer_that_was_lost_after_the_object_was_stored_does_no_harm(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(cloud_store, "REQUEST_TIMEOUT_S", 1.0)
    store = setup.store()
    fault = setup.proxy.add(Fault(kind, matches=putting, times=1))
    store.put("k", b"content")
    assert fault.met == 1
    assert [(info.key, info.size) for info in setup.direct.list("")] == [("k", 7)]
    assert setup.direct.get("k") == b"content"


@pytest.mark.parametrize("number", [1, 3, 5])
def test_a_file_in_parts_whose_answers_are_lost_is_one_object(
    setup: Setup, tmp_path: Path, number: int
) -> None:
    """The ``number``-th request of the upload has its answer lost: beginning, a part, the end."""
    store = setup.store()
    path = tmp_path / "file"
    path.write_bytes(random.Random(1).randbytes(12 * MIB + 5))
    seen = 0

    def chosen(request: Request) -> bool:
        nonlocal seen
        seen += request.method in ("PUT", "POST")
        return seen == number and request.method in ("PUT", "POST")

    fault = setup.proxy.add(Fault("close_after", matches=chosen, times=1))
    store.put_file("dir/f", path, Putting(part_bytes=5 * MIB, parallel=1))
    assert fault.met == 1 or seen < number
    assert [info.key for info in setup.direct.list("")] == ["dir/f"]
    fd = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    try:
        store.get_to("dir/f", 0, 12 * MIB + 5, fd, 0)
    finally:
        os.close(fd)
    assert (tmp_path / "copy").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("kind", ["truncate", "reset"])
def test_a_cut_body_is_asked_for_again_and_never_passed_on(setup: Setup, kind: str) -> None:
    data = random.Random(2).randbytes(300_000)
    store = setup.store()
    store.put("k", data)
    setup.proxy.add(Fault(kind, matches=getting, times=2))
    assert store.get("k") == data
    setup.proxy.add(Fault(kind, matches=getting))
    with pytest.raises(StoreUnavailable):
        store.get("k", 5, 200_000)


@pytest.mark.parametrize(("status", "code"), [(403, "AuthorizationFailure"), (401, "Unauthorized")])
def test_a_refusal_is_told_once_and_without_secrets(
    setup: Setup, caplog: pytest.LogCaptureFixture, status: int, code: str
) -> None:
    caplog.set_level(logging.DEBUG)
    store = setup.store()
    setup.proxy.add(Fault("status", status=status, code=code))
    calls = [lambda: store.put("k", b"1"), lambda: store.get("k"), lambda: list(store.list(""))]
    for call in calls:
        with pytest.raises(StoreRefused) as caught:
            call()
        assert caught.value.hint
        assert no_secret_in(told_by(caught.value) + caplog.text)
    assert setup.proxy.count() == len(calls)


@pytest.mark.parametrize("setup", ["azure"], indirect=True)  # fake-gcs-server lets everybody in
def test_a_wrong_key_is_refused_by_the_server_itself(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    wrong = base64.b64encode(b"another-key-55aa55aa55aa55aa5555").decode()
    store = setup.store(secret_key=Secret(wrong))
    for call in (lambda: store.put("k", b"1"), lambda: store.get("k"), lambda: list(store.list(""))):
        with pytest.raises(StoreRefused) as caught:
            call()
        told = told_by(caught.value) + caplog.text
        assert no_secret_in(told) and wrong not in told


def test_a_bucket_that_is_removed_is_refused_and_not_taken_for_missing_objects(setup: Setup) -> None:
    store = setup.store()
    store.put("k", b"1")
    store.delete(["k"])
    with pytest.raises(ObjectMissing):
        store.get("k")
    setup.server.remove_bucket(setup.bucket)
    calls: list[Callable[[], Any]] = [
        lambda: store.put("k", b"1"), lambda: store.get("k"), lambda: list(store.list("")),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreRefused) as caught:
            call()
        assert "bucket" in caught.value.hint
    with pytest.raises(StoreRefused, match="no such bucket"):
        store.get("k", 0, 1)


def test_a_range_is_one_request(setup: Setup) -> None:
    store = setup.store()
    store.put("k", bytes(range(100)))
    before = setup.proxy.count()
    assert store.get("k", 10, 20) == bytes(range(10, 20))
    assert setup.proxy.count() - before == 1
