"""Object-store faults at the level of the store (rows E1 to E6 and E8), against a real S3 server.

A scripted proxy stands between; what must hold is checked at the server behind it and in its request log.
"""

from __future__ import annotations

import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from danube import limits
from danube.errors import DanubeError, StorageFailed, StoreDamaged, StoreRefused, StoreUnavailable
from danube.wal.stores.objects import Putting
from danube.wal.stores.retries import Pauses, Retries, RetryBudget
from tests.broker_process import ROOT, die_with_parent
from tests.fakes.s3_proxy import Fault, Request, S3Proxy
from tests.s3_server import S3Server

minio_store = pytest.importorskip("danube.wal.stores.s3")

MIB = limits.MIB
QUICK = Pauses(first_s=0.01, most_s=0.05, tries=6, deadline_s=20.0)


@dataclass
class Setup:
    """A bucket, the way to it past the proxy, and one around it."""

    server: S3Server
    proxy: S3Proxy
    bucket: str

    def store(self, *, pauses: Pauses = QUICK, read_timeout_s: float = 1.0, **settings: Any) -> Any:
        given = self.server.settings(self.bucket, "p", endpoint=self.proxy.endpoint, part_bytes=5 * MIB)
        for name, value in settings.items():
            object.__setattr__(given, name, value)
        return minio_store.MinioStore(
            given, self.bucket, "p", retries=Retries(RetryBudget(), pauses), environ={},
            connect_timeout_s=1.0, read_timeout_s=read_timeout_s,
        )  # fmt: skip

    def uploads(self, key: str) -> list[str]:
        """Ids of the unfinished uploads of a whole key."""
        found = self.server.client()._list_multipart_uploads(self.bucket, prefix=key).uploads
        return [upload.upload_id for upload in found if upload.object_name == key]

    @property
    def direct(self) -> Any:
        settings = self.server.settings(self.bucket, "p", part_bytes=5 * MIB)
        return minio_store.MinioStore(settings, self.bucket, "p", environ={})


@pytest.fixture
def setup(s3_server: S3Server, seed: int) -> Iterator[Setup]:
    client = s3_server.client()
    proxy = S3Proxy("127.0.0.1", s3_server.port, client=client, seed=seed).start()
    yield Setup(s3_server, proxy, s3_server.make_bucket())
    proxy.stop()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "segment"
    file.write_bytes(random.Random(7).randbytes(17 * MIB + 5))
    return file


def putting(request: Request) -> bool:
    return request.method == "PUT"


def getting(request: Request) -> bool:
    return request.method == "GET" and not request.listing and "uploads" not in request.query


# E1: nobody there, or nobody answers


@pytest.mark.parametrize("how", ["refused", "blackhole", "reset"])
def test_an_outage_is_told_soon_and_over_when_it_is_over(setup: Setup, how: str) -> None:
    store = setup.store(pauses=Pauses(first_s=0.01, most_s=0.02, tries=2, deadline_s=5.0))
    store.put("before", b"1")
    if how == "refused":
        setup.proxy.refuse()
    else:
        setup.proxy.add(Fault(how))
    begun = time.monotonic()
    with pytest.raises(StoreUnavailable) as caught:
        store.put("during", b"2")
    assert time.monotonic() - begun < 5.0
    assert caught.value.why
    with pytest.raises(StoreUnavailable):
        list(store.list(""))
    if how == "refused":
        setup.proxy.resume()
    else:
        setup.proxy.clear()
    store.put("after", b"3")
    assert [info.key for info in store.list("")] == ["after", "before"]


def test_a_server_that_was_killed_and_came_back_is_used_again(setup: Setup) -> None:
    if setup.server.kind != "minio":
        pytest.skip("moto forgets everything when it ends")
    store = setup.store()
    store.put("k", b"1")
    setup.server.kill()
    try:
        with pytest.raises(StoreUnavailable):
            store.get("k")
    finally:
        setup.server.start()
    assert store.get("k") == b"1"


def test_the_name_of_a_host_that_is_unknown_is_unavailable(setup: Setup) -> None:
    store = setup.store(endpoint="http://no-such-host.invalid:9000", pauses=Pauses(tries=1))
    with pytest.raises(StoreUnavailable):
        store.get("k")


# E2: errors of the server, at every rate


@pytest.mark.parametrize("rate", [0.01, 0.1, 0.3, 0.5])
@pytest.mark.parametrize(
    ("status", "code"),
    [(500, "InternalError"), (503, "ServiceUnavailable"), (503, "SlowDown"), (429, "TooManyRequests")],
)
def test_server_errors_are_retried_within_the_budget(
    setup: Setup, rate: float, status: int, code: str
) -> None:
    store = setup.store(pauses=Pauses(first_s=0.001, most_s=0.002))
    setup.proxy.add(Fault("status", status=status, code=code, rate=rate))
    asked = failed = 0
    for number in range(60):
        data = str(number).encode() * 50
        for _ in range(30):  # as the mover does: later, again
            asked += 1
            try:
                store.put(f"k{number:03d}", data)
                break
            except StoreUnavailable:
                failed += 1
        else:
            pytest.fail("a put never succeeded")
    setup.proxy.clear()
    assert setup.proxy.count() <= asked * 1.2 + 10
    assert setup.proxy.count() <= 2 * asked, "twice the normal rate at the very most"
    assert store.retries.budget.requests == asked
    if rate <= 0.1:
        assert failed <= 2
    keys = [info.key for info in setup.direct.list("")]
    assert keys == [f"k{number:03d}" for number in range(60)]
    assert all(setup.direct.get(key) == str(int(key[1:])).encode() * 50 for key in keys)


def test_many_threads_in_an_outage_do_not_storm(setup: Setup) -> None:
    store = setup.store(pauses=Pauses(first_s=0.001, most_s=0.002))
    setup.proxy.add(Fault("status", status=503, code="SlowDown"))
    failures: list[str] = []

    def work() -> None:
        for _ in range(50):
            try:
                store.put("k", b"1")
            except StoreUnavailable as error:
                failures.append(str(error))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(failures) == 400
    assert setup.proxy.count() <= 400 * 1.2 + 10


def test_a_wish_for_a_pause_is_heeded(setup: Setup) -> None:
    store = setup.store()
    headers = {"Retry-After": "1"}
    setup.proxy.add(Fault("status", status=503, code="SlowDown", headers=headers, times=1))
    store.put("k", b"1")
    first, second = setup.proxy.requests
    assert second.at - first.at >= 1.0


@pytest.mark.parametrize("rate", [0.1, 0.3])
def test_a_large_file_arrives_through_errors_because_its_parts_are_tried_again(
    setup: Setup, path: Path, rate: float
) -> None:
    store = setup.store()
    setup.proxy.add(Fault("status", status=503, code="SlowDown", rate=rate))
    for _ in range(100):
        try:
            store.put_file("f", path, Putting(part_bytes=5 * MIB))
            break
        except StoreUnavailable:
            continue
    else:
        pytest.fail("never arrived")
    setup.proxy.clear()
    assert setup.direct.get("f") == path.read_bytes()
    setup.direct.clean_uploads(0)
    assert setup.uploads("p/f") == [], "what an abort could not drop is dropped by its age"


# E3: stored, and no answer


@pytest.mark.parametrize("kind", ["hang_after", "close_after"])
def test_a_put_whose_answer_was_lost_is_repeated_without_harm(setup: Setup, kind: str) -> None:
    store = setup.store()
    setup.proxy.add(Fault(kind, matches=putting, times=1))
    store.put("k", b"content")
    assert setup.proxy.count(putting) == 2
    assert [(info.key, info.size) for info in setup.direct.list("")] == [("k", 7)]
    assert setup.direct.get("k") == b"content"


@pytest.mark.parametrize("kind", ["hang_after", "close_after"])
@pytest.mark.parametrize("step", ["begin", "part", "complete"])
def test_a_lost_answer_in_a_file_of_parts_makes_one_object(
    setup: Setup, path: Path, kind: str, step: str
) -> None:
    matches: dict[str, Callable[[Request], bool]] = {
        "begin": lambda request: request.method == "POST" and "uploads" in request.query,
        "part": lambda request: request.part == 2,
        "complete": lambda request: request.method == "POST" and "uploadId" in request.query,
    }
    store = setup.store()
    fault = setup.proxy.add(Fault(kind, matches=matches[step], times=1))
    store.put_file("f", path, Putting(part_bytes=5 * MIB))
    assert fault.met == 1
    assert setup.direct.get("f") == path.read_bytes()
    assert [info.key for info in setup.direct.list("")] == ["f"]
    assert setup.direct.clean_uploads(0) == (1 if step == "begin" else 0)


# E4: bodies that are cut, other ranges, stale lists


@pytest.mark.parametrize("kind", ["truncate", "reset"])
def test_a_cut_body_is_asked_for_again(setup: Setup, path: Path, tmp_path: Path, kind: str) -> None:
    store = setup.store()
    setup.direct.put_file("f", path, Putting(part_bytes=5 * MIB))
    data = path.read_bytes()
    setup.proxy.add(Fault(kind, matches=getting, times=2))
    assert store.get("f", 100, 3 * MIB) == data[100 : 3 * MIB]
    setup.proxy.add(Fault(kind, matches=getting, times=2))
    fd = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    try:
        store.get_to("f", 0, len(data), fd, 0)
    finally:
        os.close(fd)
    assert (tmp_path / "copy").read_bytes() == data


def test_a_body_that_is_always_cut_is_never_passed_on(setup: Setup) -> None:
    store = setup.store()
    setup.direct.put("k", bytes(1_000))
    setup.proxy.add(Fault("truncate", matches=getting))
    with pytest.raises(StoreUnavailable):
        store.get("k")
    with pytest.raises(StoreUnavailable):
        store.get("k", 10, 900)


def test_an_object_that_is_replaced_between_two_tries_is_damage(setup: Setup, tmp_path: Path) -> None:
    store = setup.store()
    setup.direct.put("k", b"a" * 100_000)

    setup.proxy.add(Fault("truncate", matches=getting, times=1))
    fd = os.open(tmp_path / "copy", os.O_RDWR | os.O_CREAT)
    plain = setup.proxy.choose

    def choose(request: Request) -> Fault | None:
        if getting(request) and setup.proxy.count(getting) == 1:
            setup.direct.put("k", b"b" * 100_000)
        return plain(request)

    setup.proxy.choose = choose  # type: ignore[method-assign]
    try:
        with pytest.raises(StoreDamaged, match="replaced"):
            store.get_to("k", 0, 100_000, fd, 0)
    finally:
        os.close(fd)


def test_an_answer_of_another_kind_is_asked_for_again(setup: Setup) -> None:
    store = setup.store()
    store.put("k", b"1")
    setup.proxy.add(Fault("truncate", matches=lambda request: request.listing, times=1))
    assert [info.key for info in store.list("")] == ["k"]


def test_a_stale_list_shows_less_and_never_more(setup: Setup) -> None:
    store = setup.store()
    for number in range(5):
        store.put(f"k{number}", b"1")
    setup.proxy.add(
        Fault("hide", matches=lambda request: request.listing, hidden=lambda key: key.endswith("4"))
    )
    assert [info.key for info in store.list("")] == ["k0", "k1", "k2", "k3"]
    assert store.head("k4") is not None, "what a list hides is still there"


def test_a_slow_link_is_not_an_outage(setup: Setup) -> None:
    store = setup.store(read_timeout_s=1.0)
    data = random.Random(1).randbytes(400_000)
    store.put("k", data)
    setup.proxy.add(Fault("slow", matches=getting, bytes_per_s=200_000))
    begun = time.monotonic()
    assert store.get("k") == data
    assert time.monotonic() - begun > 1.5
    assert setup.proxy.count(getting) == 1, "it went on, so nothing was asked again"


# E5: a body that is damaged on the way in


def test_a_put_that_is_cut_on_its_way_in_is_repeated(setup: Setup) -> None:
    store = setup.store()
    data = random.Random(2).randbytes(300_000)
    setup.proxy.add(Fault("cut_request", matches=putting, times=1))
    store.put("k", data)
    assert setup.direct.get("k") == data


def test_a_store_that_damages_what_it_took_is_found_by_reading_back(setup: Setup, path: Path) -> None:
    store = setup.store()
    setup.proxy.add(Fault("damage_stored", matches=putting, times=1))
    store.put("k", bytes(1_000))
    assert store.get("k") != bytes(1_000), "the store cannot know; whoever reads back and compares does"


# E6: multipart uploads that are interrupted

UPLOADER = """
import sys
from pathlib import Path
from danube.config.sections import Secret, StorageSettings
from danube.wal.stores.objects import Putting
from danube.wal.stores.opening import open_store
endpoint, url, access, secret, path = sys.argv[1:]
settings = StorageSettings(url=url, endpoint=endpoint, access_key=Secret(access), secret_key=Secret(secret))
print("ready", flush=True)
open_store(settings).put_file("f", Path(path), Putting(part_bytes=5 << 20, parallel=1))
print("done", flush=True)
"""


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_an_upload_killed_at_a_part_is_begun_anew_by_the_next_process(
    setup: Setup, path: Path, number: int
) -> None:
    hang = setup.proxy.add(Fault("blackhole", matches=lambda request: request.part == number, times=1))
    server = setup.server
    arguments = [
        setup.proxy.endpoint,
        f"s3://{setup.bucket}/p",
        server.access_key,
        server.secret_key,
        str(path),
    ]
    child = subprocess.Popen(
        [sys.executable, "-c", UPLOADER, *arguments], cwd=ROOT, stdout=subprocess.PIPE,
        preexec_fn=die_with_parent,
    )  # fmt: skip
    try:
        give_up = time.monotonic() + 30
        while not hang.met and time.monotonic() < give_up:
            time.sleep(0.01)
        assert hang.met
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    setup.proxy.clear()
    assert setup.direct.head("f") is None, "an object is there whole or not at all"
    setup.store().put_file("f", path, Putting(part_bytes=5 * MIB))
    assert setup.direct.get("f") == path.read_bytes()
    assert len(setup.uploads("p/f")) == 1, "what the killed process began"
    assert setup.direct.clean_uploads(0) == 1
    assert setup.uploads("p/f") == []


def test_orphaned_parts_are_removed_at_their_age_and_others_are_left(setup: Setup) -> None:
    client = setup.server.client()
    for key in ("p/dir/orphan", "pp/theirs"):
        upload_id = client._create_multipart_upload(setup.bucket, key, {})
        client._upload_part(setup.bucket, key, bytes(5 * MIB), None, upload_id, 1)
    store = setup.store()
    if setup.server.kind == "minio":  # moto begins all of them in 2010
        assert store.clean_uploads(3_600_000_000) == 0, "it is young"
    assert store.clean_uploads(0) == 1
    assert setup.uploads("p/dir/orphan") == []
    assert len(setup.uploads("pp/theirs")) == 1, "another prefix is another's"


@pytest.mark.parametrize("aborted", [True, False])
def test_an_upload_that_is_refused_half_way_is_aborted_and_told(
    setup: Setup, path: Path, aborted: bool
) -> None:
    store = setup.store(pauses=Pauses(tries=1))
    setup.proxy.add(Fault("status", matches=lambda r: r.part == 3, status=403, code="AccessDenied"))
    if not aborted:
        setup.proxy.add(Fault("status", matches=lambda r: r.method == "DELETE", status=500))
    with pytest.raises(StoreRefused, match="AccessDenied to put f"):
        store.put_file("f", path, Putting(part_bytes=5 * MIB))
    assert len(setup.uploads("p/f")) == (0 if aborted else 1)
    assert setup.direct.head("f") is None


def test_an_upload_that_somebody_ends_is_tried_again_later(setup: Setup, path: Path) -> None:
    store = setup.store()
    setup.proxy.add(Fault("status", matches=lambda r: r.part == 2, status=404, code="NoSuchUpload", times=1))
    with pytest.raises(StoreUnavailable, match="ended by somebody else"):
        store.put_file("f", path, Putting(part_bytes=5 * MIB))
    store.put_file("f", path, Putting(part_bytes=5 * MIB))
    assert setup.direct.get("f") == path.read_bytes()


def test_a_completion_that_says_yes_and_then_no_is_asked_for_again(setup: Setup, path: Path) -> None:
    def ends(request: Request) -> bool:
        return request.method == "POST" and "uploadId" in request.query

    store = setup.store()
    ending = setup.proxy.add(Fault("status", matches=ends, status=200, times=1))
    store.put_file("f", path, Putting(part_bytes=5 * MIB))
    assert ending.met == 1
    assert setup.direct.get("f") == path.read_bytes()


def test_a_local_file_that_shrinks_under_its_upload_is_told_and_leaves_nothing(
    setup: Setup, path: Path
) -> None:
    def cut(count: int) -> None:
        os.truncate(path, 7 * MIB)

    before = threading.active_count()
    with pytest.raises(StorageFailed, match="ended at"):
        setup.store().put_file("f", path, Putting(part_bytes=5 * MIB, parallel=2, progress=cut))
    assert setup.uploads("p/f") == [] and setup.direct.head("f") is None
    give_up = time.monotonic() + 10
    while threading.active_count() > before + 2 and time.monotonic() < give_up:
        time.sleep(0.01)  # of the proxy, which ends a connection when its client did
    assert not [one for one in threading.enumerate() if type(one).__module__ == "minio.helpers"]


# E8: credentials, rights, buckets, regions


def told_by(error: BaseException) -> str:
    """All that a log line, a traceback or a report of this error could hold."""
    parts = [repr(error), str(error), "".join(traceback.format_exception(error))]
    if isinstance(error, DanubeError):
        parts += [error.hint, repr(error.facts)]
    return "\n".join(parts)


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (403, "AccessDenied"), (403, "InvalidAccessKeyId"), (403, "SignatureDoesNotMatch"),
        (400, "ExpiredToken"), (404, "NoSuchBucket"), (301, "PermanentRedirect"),
        (400, "AuthorizationHeaderMalformed"), (403, "RequestTimeTooSkewed"),
    ],
)  # fmt: skip
def test_a_refusal_is_not_retried_and_tells_no_secret(
    setup: Setup, path: Path, caplog: pytest.LogCaptureFixture, status: int, code: str
) -> None:
    caplog.set_level(logging.DEBUG)
    store = setup.store()
    setup.proxy.add(Fault("status", status=status, code=code))
    calls = [
        lambda: store.put("k", b"1"), lambda: store.get("k"), lambda: list(store.list("")),
        lambda: store.delete(["k"]), lambda: store.put_file("f", path), lambda: store.clean_uploads(0),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreRefused) as caught:
            call()
        told = told_by(caught.value) + caplog.text
        assert code in told
        assert caught.value.hint
        for secret in (setup.server.secret_key, setup.server.access_key, "Signature=", "Credential="):
            assert secret not in told
    assert setup.proxy.count() == len(calls)


def test_a_wrong_secret_is_refused_without_telling_it(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    if setup.server.kind != "minio":
        pytest.skip("moto takes any secret")
    from danube.config.sections import Secret

    caplog.set_level(logging.DEBUG)
    wrong = "wr0ng-secret-5ce1"
    store = setup.store(secret_key=Secret(wrong))
    with pytest.raises(StoreRefused, match="SignatureDoesNotMatch") as caught:
        store.put("k", b"1")
    told = told_by(caught.value) + caplog.text + repr(store) + store.name
    assert wrong not in told
    assert setup.server.access_key not in told


def test_renewed_credential_files_are_taken_without_a_restart(setup: Setup, tmp_path: Path) -> None:
    if setup.server.kind != "minio":
        pytest.skip("moto takes any secret")
    from danube.config.sections import Secret

    secret = tmp_path / "secret"
    secret.write_text("expired-by-now\n")
    store = setup.store(secret_key=Secret(), secret_key_file=str(secret))
    with pytest.raises(StoreRefused):
        store.put("k", b"1")
    (tmp_path / "renewed").write_text(setup.server.secret_key + "\n")
    os.rename(tmp_path / "renewed", secret)
    store.put("k", b"1")
    secret.unlink()
    with pytest.raises(StoreRefused, match="cannot be read"):
        store.put("k", b"2")


def test_a_bucket_that_is_removed_is_refused_and_used_again_when_it_is_back(setup: Setup) -> None:
    store = setup.store()
    store.put("k", b"1")
    store.delete(["k"])
    client = setup.server.client()
    client.remove_bucket(setup.bucket)
    for call in (lambda: store.put("k", b"1"), lambda: store.get("k"), lambda: list(store.list(""))):
        with pytest.raises(StoreRefused, match="NoSuchBucket") as caught:
            call()
        assert "bucket" in caught.value.hint
    client.make_bucket(setup.bucket)
    store.put("k", b"2")
    assert store.get("k") == b"2"


def test_a_store_without_credentials_says_so(setup: Setup) -> None:
    from danube.config.sections import Secret

    with pytest.raises(StoreRefused, match="no credentials"):
        setup.store(access_key=Secret(), secret_key=Secret())
