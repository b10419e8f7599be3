"""Why a store refuses: the reason reaches whoever can mend it, also where an answer has no body."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest

from danube.broker.mover.health import StoreHealth
from danube.broker.processes import supervisor
from danube.broker.processes.contexts import Pulse
from danube.broker.processes.supervisor import Supervisor
from danube.config.sections import Secret, StorageSettings
from danube.errors import StoreRefused, StoreUnavailable, WrongState
from danube.wal.stores.retries import Pauses, Retries
from danube.wal.stores.s3 import MinioStore
from tests.fakes.memory_store import MemoryStore
from tests.fakes.s3_proxy import Fault, Request, S3Proxy

QUICK = Pauses(first_s=0.001, most_s=0.002, tries=2)
REASONS = [
    (403, "SignatureDoesNotMatch", "secret key"),
    (403, "InvalidAccessKeyId", "access key"),
    (403, "RequestTimeTooSkewed", "clock"),
    (403, "AccessDenied", "rights on the bucket"),
    (400, "ExpiredToken", "renew the credentials"),
    (400, "AuthorizationHeaderMalformed", "storage.region"),
    (404, "NoSuchBucket", "bucket"),
]


@pytest.fixture
def proxy(seed: int) -> Iterator[S3Proxy]:
    """Answers by script alone: there is no server behind it."""
    made = S3Proxy("127.0.0.1", 1, seed=seed).start()
    yield made
    made.stop()


def amazon(proxy: S3Proxy) -> MinioStore:
    settings = StorageSettings(endpoint=proxy.endpoint, access_key=Secret("k"), secret_key=Secret("s"))
    return MinioStore(settings, "bucket", "p", retries=Retries(pauses=QUICK), environ={})


def cloud(proxy: S3Proxy) -> Any:
    from obstore.store import S3Store

    cloud_store = pytest.importorskip("danube.wal.stores.cloud")
    config = {
        "endpoint": proxy.endpoint, "access_key_id": "k", "secret_access_key": "s", "region": "us-east-1",
    }  # fmt: skip
    options = {"allow_http": True, "timeout": timedelta(seconds=5)}
    inner = S3Store(
        "bucket", prefix="p", config=config, client_options=options, retry_config={"max_retries": 0}
    )
    return cloud_store.CloudStore(inner, "gs://bucket/p", retries=Retries(pauses=QUICK))


def of(method: str) -> Any:
    def matches(request: Request) -> bool:
        return request.method == method

    return matches


@pytest.mark.parametrize(("status", "code", "hint"), REASONS)
def test_a_refused_head_is_told_with_the_reason_of_one_get(
    proxy: S3Proxy, status: int, code: str, hint: str
) -> None:
    proxy.add(Fault("status", status=status, code=code))
    with pytest.raises(StoreRefused) as refused:
        amazon(proxy).head("k")
    assert refused.value.facts["s3_code"] == code and hint in refused.value.hint
    assert [request.method for request in proxy.requests] == ["HEAD", "GET"]


@pytest.mark.parametrize(("status", "code", "hint"), REASONS)
def test_so_it_is_of_the_clouds(proxy: S3Proxy, status: int, code: str, hint: str) -> None:
    proxy.add(Fault("status", status=status, code=code))
    with pytest.raises(StoreRefused) as refused:
        cloud(proxy).head("k")
    assert hint in refused.value.hint and (code in str(refused.value) or code == "NoSuchBucket")
    assert len(proxy.requests) == 2


@pytest.mark.parametrize("kind", [amazon, cloud])
def test_an_object_that_is_not_there_is_none_and_an_outage_is_an_outage(proxy: S3Proxy, kind: Any) -> None:
    proxy.add(Fault("status", status=404, code="NoSuchKey"))
    assert kind(proxy).head("k") is None
    proxy.clear()
    proxy.add(Fault("status", matches=of("HEAD"), status=404, code="NoSuchKey"))
    proxy.add(Fault("status", matches=of("GET"), status=503, code="SlowDown"))
    with pytest.raises(StoreUnavailable):
        kind(proxy).head("k")


@pytest.mark.parametrize("kind", [amazon, cloud])
@pytest.mark.parametrize(("status", "code"), [(416, "InvalidRange"), (206, "none")])
def test_where_the_get_is_not_refused_the_head_s_own_refusal_holds(
    proxy: S3Proxy, kind: Any, status: int, code: str
) -> None:
    proxy.add(Fault("status", matches=of("HEAD"), status=403))
    headers = {"Content-Range": "bytes 0-0/1"} if status == 206 else {}
    proxy.add(Fault("status", matches=of("GET"), status=status, code=code, headers=headers))
    with pytest.raises(StoreRefused, match="403"):
        kind(proxy).head("k")


class Link:
    def __init__(self) -> None:
        self.frames: list[dict[str, Any]] = []

    def send(self, kind: str, **fields: Any) -> None:
        self.frames.append(fields)


def test_the_hint_goes_to_the_workers_and_to_the_supervisor() -> None:
    pulse, link = Pulse(), Link()
    health = StoreHealth(MemoryStore(), cast(Any, [link]), pulse, lambda: None)
    assert pulse.store_error is None and not pulse.store_answers
    health.failed(StoreRefused("store s3://b answered 403", hint="check the secret key"))
    assert link.frames[-1]["hint"] == "check the secret key" and not link.frames[-1]["answers"]
    assert pulse.store_error == "store s3://b answered 403 (check the secret key)"
    health.failed(StoreUnavailable("ü" * 2_000))
    assert pulse.store_error == "ü" * 1_024, "cut to its room, and nothing of the one before is left"
    health.answered()
    assert link.frames[-1] == {"name": "memory://", "answers": True, "error": "", "hint": ""}
    assert pulse.store_error == "" and pulse.store_answers
    pulse.reset()
    assert pulse.store_error is None
    pulse.close()


def warnings(error: str | None, waited_ns: int, clustered: bool = False) -> tuple[str, ...] | None:
    made = SimpleNamespace(
        _served_ns=5, _mover=SimpleNamespace(pulse=SimpleNamespace(store_error=error)),
        _controller=object() if clustered else None,
    )  # fmt: skip
    return Supervisor._about_store(cast(Any, made), 5 + waited_ns)


def test_the_banner_waits_a_moment_for_the_store_and_warns() -> None:
    told = str(WrongState("s3://b is not the store of ./data", hint="use another prefix"))
    over_ns = supervisor.STORE_WORD_NS
    assert warnings("", 0) == ()
    assert warnings(None, over_ns - 1) is None, "it has said nothing yet"
    for waited_ns in (0, over_ns):
        (warning,) = warnings(told, waited_ns) or ()
        assert told in warning and "records stay on this host" in warning
    (warning,) = warnings(None, over_ns) or ()
    assert "has not answered yet" in warning
    assert warnings(told, 0, clustered=True) is None, "it may be no member yet"
    assert warnings(None, over_ns, clustered=True) == ()
    assert told in (warnings(told, over_ns, clustered=True) or ("",))[0]
    local = SimpleNamespace(_served_ns=0, _mover=None, _controller=None)
    assert Supervisor._about_store(cast(Any, local), 9) == ()
