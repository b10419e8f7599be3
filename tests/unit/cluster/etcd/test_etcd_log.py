"""The metadata log over etcd beyond the store's contract: races, lost answers, compaction, damage."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec
import pytest

from danube.cluster.etcd import log as etcd_log
from danube.cluster.etcd import watch as etcd_watch
from danube.cluster.etcd.calls import EtcdCalls, KeyValue
from danube.cluster.etcd.log import EtcdLog
from danube.cluster.metadata_store import ConsensusStore
from danube.core.cluster.commands import Allocated, AllocateId, CompareAndSet, KeyPut, PutKey, Skipped
from danube.core.metadata.commands import encode_command, join_commands
from danube.errors import (
    ClosedError,
    ConfigInvalid,
    ConnectionFailed,
    Damage,
    DanubeError,
    LimitExceeded,
    OutcomeUnknown,
    Overloaded,
    StorageFull,
    StorageIncompatible,
    Unavailable,
)
from danube.limits import METADATA_COMMANDS_PER_ENTRY_MAX
from tests.broker_process import free_port
from tests.etcd_server import EtcdServer
from tests.s3_server import NoServer

COUNTER = AllocateId(counter="/n")


@pytest.fixture
def prefix(etcd_server: EtcdServer) -> str:
    return etcd_server.new_prefix()


@pytest.fixture
def log(etcd_server: EtcdServer, prefix: str) -> Iterator[EtcdLog]:
    with etcd_server.log(prefix) as opened:
        yield opened


def keys_below(server: EtcdServer, prefix: str) -> list[str]:
    calls = server.calls()
    found, more = calls.get_range(prefix.encode(), prefix[:-1].encode() + b"0", 1_000)
    calls.close()
    assert not more
    return [one.key.decode().removeprefix(prefix) for one in found]


def number(outcome: object) -> int:
    assert isinstance(outcome, Allocated)
    return outcome.number


def test_writers_that_race_give_each_number_once(etcd_server: EtcdServer, prefix: str) -> None:
    numbers: list[int] = []

    def take() -> None:
        with etcd_server.log(prefix) as log:
            for _ in range(20):
                numbers.append(number(log.propose(COUNTER)))

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 81))


def test_commands_that_are_proposed_together_are_one_entry_and_refusals_change_nothing(
    log: EtcdLog, etcd_server: EtcdServer, prefix: str
) -> None:
    wrong = CompareAndSet(key="/a", value=b"", revision=9)
    outcomes = log.propose_many([COUNTER, wrong, COUNTER])
    assert [type(one).__name__ for one in outcomes] == ["Allocated", "WrongState", "Allocated"]
    assert keys_below(etcd_server, prefix) == ["entries/00000000000000000001", "head"]
    assert isinstance(log.propose_many([wrong])[0], DanubeError)
    assert log.version == 2


def test_a_refusal_is_given_only_as_of_now(log: EtcdLog, etcd_server: EtcdServer, prefix: str) -> None:
    with etcd_server.log(prefix) as other:
        revision = other.propose(PutKey(key="/a", value=b"1")).mod_revision
    done = log.propose(CompareAndSet(key="/a", value=b"2", revision=revision))
    assert done is not None and log.version == 2


def test_an_entry_is_bounded_by_what_etcd_takes(log: EtcdLog) -> None:
    big = bytes(1 << 20)
    outcomes = log.propose_many([PutKey(key=f"/{n}", value=big) for n in range(3)])
    assert [type(one).__name__ for one in outcomes] == ["KeyRecord"] * 3
    with pytest.raises(LimitExceeded):
        log.propose(CompareAndSet(key="/0", value=big, expected=big))


class LossyCalls(EtcdCalls):
    """Loses the answer of transactions, before (0) or after (1) they were sent; 2 answers."""

    def __init__(self, endpoint: str) -> None:
        super().__init__([endpoint])
        self.plan: list[int] = []
        self.down = False

    def put_if(self, guard: bytes, mod_revision: int, puts: Sequence[tuple[bytes, bytes]]) -> int | None:
        if self.down:
            raise ConnectionFailed("down")
        what = self.plan.pop(0) if self.plan else 2
        answer = None if what == 0 else super().put_if(guard, mod_revision, puts)
        if what == 2:
            return answer
        raise OutcomeUnknown("lost")


@pytest.fixture
def lossy(etcd_server: EtcdServer, prefix: str) -> Iterator[tuple[EtcdLog, LossyCalls]]:
    calls = LossyCalls(etcd_server.endpoint)
    with EtcdLog(calls, prefix) as log:
        yield log, calls


@pytest.mark.parametrize("plan", [[0], [1], [0, 2, 0], [1, 2, 1]])
def test_a_lost_answer_is_found_out(
    lossy: tuple[EtcdLog, LossyCalls], etcd_server: EtcdServer, prefix: str, plan: list[int]
) -> None:
    log, calls = lossy
    for done in (1, 3, 5):
        calls.plan = list(plan)
        assert number(log.propose(COUNTER)) == done
        with etcd_server.log(prefix) as other:
            assert other.state.snapshot() == log.state.snapshot()
            assert number(other.propose(COUNTER)) == done + 1


@pytest.mark.parametrize("plan", [[0, 0], [1, 0], [0, 1], [1, 1]])
def test_what_cannot_be_found_out_is_said_and_the_log_goes_on(
    lossy: tuple[EtcdLog, LossyCalls], etcd_server: EtcdServer, prefix: str, plan: list[int]
) -> None:
    log, calls = lossy
    log.propose(PutKey(key="/a", value=b""))
    calls.plan = list(plan)
    with pytest.raises(OutcomeUnknown):
        log.propose(COUNTER)
    before = 1 if plan[0] else 0
    assert number(log.propose(COUNTER)) == before + 1
    with etcd_server.log(prefix) as other:
        assert other.state.snapshot() == log.state.snapshot()


def test_a_lost_answer_is_found_out_although_others_went_on(
    lossy: tuple[EtcdLog, LossyCalls], etcd_server: EtcdServer, prefix: str
) -> None:
    log, calls = lossy
    plain = EtcdCalls.put_if

    def lose_and_let_another_write(guard: bytes, revision: int, puts: Any) -> int | None:
        del calls.put_if  # type: ignore[method-assign]
        plain(calls, guard, revision, puts)
        with etcd_server.log(prefix) as other:
            assert number(other.propose(COUNTER)) == 2
        raise OutcomeUnknown("lost")

    calls.put_if = lose_and_let_another_write  # type: ignore[method-assign]
    assert number(log.propose(COUNTER)) == 1
    assert number(log.propose(COUNTER)) == 3


def test_racing_writers_with_lost_answers_agree_and_nothing_is_done_twice(
    etcd_server: EtcdServer, prefix: str, seed: int
) -> None:
    numbers: list[int] = []
    unknown: list[int] = []

    def write(writer: int) -> None:
        source = random.Random(seed + writer)
        calls = LossyCalls(etcd_server.endpoint)
        with EtcdLog(calls, prefix, compact_bytes_min=2_000) as log:
            for _ in range(30):
                calls.plan = [source.choice([0, 1, 2, 2, 2]) for _ in range(4)]
                try:
                    numbers.append(number(log.propose(COUNTER)))
                except OutcomeUnknown:
                    unknown.append(writer)

    threads = [threading.Thread(target=write, args=[writer]) for writer in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(numbers) == len(set(numbers)) and len(numbers) + len(unknown) == 90
    with etcd_server.log(prefix) as log:
        last = log.state.cluster.keys.last_number("/n")
        assert len(numbers) <= last <= len(numbers) + len(unknown) and last >= max(numbers)


def test_an_attempt_that_was_overtaken_by_a_compaction_is_made_again(
    lossy: tuple[EtcdLog, LossyCalls], etcd_server: EtcdServer, prefix: str
) -> None:
    log, calls = lossy
    log.propose(COUNTER)
    plain = EtcdCalls.put_if

    def lose_while_another_compacts(guard: bytes, revision: int, puts: Any) -> int | None:
        calls.put_if = lambda *asked: plain(calls, *asked)  # type: ignore[method-assign]
        with etcd_server.log(prefix) as other:
            other._compact()
        raise OutcomeUnknown("lost")

    calls.put_if = lose_while_another_compacts  # type: ignore[method-assign]
    assert number(log.propose(COUNTER)) == 2


def test_who_is_always_too_late_gives_up(log: EtcdLog, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(log._calls, "put_if", lambda *asked: None)
        with pytest.raises(Overloaded):
            log.propose(COUNTER)
        patched.setattr(etcd_log, "_TRIES_MAX", 0)
        with pytest.raises(Overloaded):
            log.refresh()
        patched.setattr(etcd_log, "_CHANGES_WAITING_MAX", -1)
        with pytest.raises(Overloaded):
            log.propose(COUNTER)
    assert number(log.propose(COUNTER)) == 1


def test_a_reader_whose_snapshot_was_replaced_under_it_takes_the_newer_one(
    etcd_server: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with etcd_server.log(prefix) as writer:
        heads = []
        for _ in range(3):
            heads.append(writer._read_head())
            writer.propose(COUNTER)
            writer._compact()
        newest = EtcdLog._read_head
        answers = heads[1:]
        monkeypatch.setattr(EtcdLog, "_read_head", lambda log: answers.pop(0) if answers else newest(log))
        with etcd_server.log(prefix) as late:
            assert late.state.snapshot() == writer.state.snapshot()
        answers = [heads[0]._replace(head=msgspec.structs.replace(heads[0].head, version=1))]
        with etcd_server.log(prefix) as late:
            assert late.state.snapshot() == writer.state.snapshot()


def test_what_was_stored_before_etcd_went_away_is_told(lossy: tuple[EtcdLog, LossyCalls]) -> None:
    log, calls = lossy
    plain_get, plain_put = calls.get, calls.put_if
    entries = 0

    def put_if(guard: bytes, mod_revision: int, puts: Sequence[tuple[bytes, bytes]]) -> int | None:
        nonlocal entries
        entries += 1
        if entries == 2:
            calls.get = away  # type: ignore[method-assign]
            return None  # another writer was first
        return plain_put(guard, mod_revision, puts)

    def away(key: bytes) -> KeyValue | None:
        raise ConnectionFailed("away")

    calls.put_if = put_if  # type: ignore[method-assign]
    outcomes = log.propose_many([COUNTER] * (METADATA_COMMANDS_PER_ENTRY_MAX + 2))
    stored, missing = outcomes[:METADATA_COMMANDS_PER_ENTRY_MAX], outcomes[METADATA_COMMANDS_PER_ENTRY_MAX:]
    assert [number(one) for one in stored] == list(range(1, METADATA_COMMANDS_PER_ENTRY_MAX + 1))
    assert len(missing) == 2 and all(isinstance(one, ConnectionFailed) for one in missing)
    calls.get, calls.put_if = plain_get, plain_put  # type: ignore[method-assign]
    assert number(log.propose(COUNTER)) == METADATA_COMMANDS_PER_ENTRY_MAX + 1


def test_nothing_is_stored_while_it_cannot_be_reached(lossy: tuple[EtcdLog, LossyCalls]) -> None:
    log, calls = lossy
    calls.down = True
    with pytest.raises(ConnectionFailed):
        log.propose(COUNTER)
    calls.down = False
    assert number(log.propose(COUNTER)) == 1


def test_entries_are_replaced_by_a_snapshot(etcd_server: EtcdServer, prefix: str) -> None:
    with etcd_server.log(prefix) as lagging, etcd_server.log(prefix, compact_bytes_min=5_000) as log:
        log.propose(PutKey(key="/0", value=b""))
        lagging.refresh()
        for n in range(1, 60):
            log.propose(PutKey(key=f"/{n % 7}", value=bytes(300)))
        names = keys_below(etcd_server, prefix)
        assert len([name for name in names if name.startswith("entries/")]) < 40
        assert len({name.split("/")[1] for name in names if name.startswith("snapshots/")}) == 1
        with etcd_server.log(prefix) as late:
            assert late.state.snapshot() == log.state.snapshot()
        changes = lagging.refresh()
        assert changes[0] == Skipped(int(next(n for n in names if n.startswith("snap")).split("/")[1][:20]))
        assert KeyPut in map(type, changes) and lagging.state.snapshot() == log.state.snapshot()
        assert number(lagging.propose(COUNTER)) == 1


def test_a_snapshot_of_many_chunks_is_read_back(
    etcd_server: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_log, "CHUNK_BYTES", 100)
    with etcd_server.log(prefix, compact_bytes_min=1) as log:
        log.propose(PutKey(key="/a", value=bytes(range(256)) * 3))
        assert len([name for name in keys_below(etcd_server, prefix) if name.startswith("snap")]) > 5
        with etcd_server.log(prefix) as late:
            assert late.state.snapshot() == log.state.snapshot()


def test_two_that_compact_at_once_leave_one_snapshot(etcd_server: EtcdServer, prefix: str) -> None:
    with etcd_server.log(prefix) as one, etcd_server.log(prefix) as two:
        one.propose(PutKey(key="/a", value=bytes(1_000)))
        two.refresh()
        one._compact()
        two._compact()
        one.propose(COUNTER)
        one._compact()
        assert len([name for name in keys_below(etcd_server, prefix) if name.startswith("snap")]) == 1
        two.refresh()
        assert two.state.snapshot() == one.state.snapshot()


def test_a_compaction_that_fails_costs_nothing(lossy: tuple[EtcdLog, LossyCalls]) -> None:
    log, calls = lossy
    log._compact_bytes_min = 1
    calls.plan = [2, 0, 2, 1]
    assert [number(log.propose(COUNTER)) for _ in range(4)] == [1, 2, 3, 4]


def wait_for(condition: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < give_up, "it does not come"
        time.sleep(0.005)


class CountingCalls(EtcdCalls):
    """Counts what is read."""

    reads = 0

    def get(self, key: bytes) -> Any:
        self.reads += 1
        return super().get(key)


def test_with_a_watch_nothing_is_read_while_nothing_changes(
    etcd_server: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_log, "_LEVEL_NS", 60_000_000_000)
    calls = CountingCalls([etcd_server.endpoint])
    with EtcdLog(calls, prefix, watch_calls=etcd_server.calls()) as log, etcd_server.log(prefix) as other:
        watch = log._watch
        assert watch is not None
        wait_for(lambda: watch.connected)
        log.refresh()
        reads = calls.reads
        for _ in range(50):
            assert log.refresh() == []
        assert calls.reads == reads
        for done in range(1, 6):
            other.propose(COUNTER)
            wait_for(lambda: bool(log.refresh()))
            assert log.state.cluster.keys.last_number("/n") == done
        assert number(log.propose(COUNTER)) == 6
        assert calls.reads < reads + 30
        monkeypatch.setattr(etcd_log, "_LEVEL_NS", 0)
        reads = calls.reads
        log.refresh()
        assert calls.reads == reads + 1
    assert not watch._thread.is_alive()


def test_a_watch_that_is_cut_is_taken_up_again_and_nothing_is_missed(
    etcd_server: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_log, "_LEVEL_NS", 60_000_000_000)
    monkeypatch.setattr(etcd_watch, "_RETRY_S", 0.05)
    with etcd_server.log(prefix, watched=True) as log, etcd_server.log(prefix) as other:
        for done in range(1, 6):
            wait_for(lambda: bool(log._watch.connected))
            log._watch._calls.interrupt()
            other.propose(COUNTER)
            wait_for(lambda: bool(log.refresh()))
            assert log.state.cluster.keys.last_number("/n") == done


def test_a_read_barrier_does_not_rely_on_the_watch(
    etcd_server: EtcdServer, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_log, "_LEVEL_NS", 60_000_000_000)
    with etcd_server.log(prefix, watched=True) as log, etcd_server.log(prefix) as other:
        store = ConsensusStore(log, leadership=log)
        wait_for(lambda: bool(log._watch.connected))
        for value in range(20):
            other.propose(PutKey(key="/a", value=b"%d" % value))
            store.read_barrier()
            record = store.get("/a")
            assert record is not None and record.value == b"%d" % value
        assert store.leadership.leading and store.expire_leases() == 0
    with pytest.raises(ClosedError):
        log.read_barrier()


def test_a_log_that_cannot_be_opened_leaves_no_thread() -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"
    before = threading.active_count()
    for _ in range(3):
        with pytest.raises(ConnectionFailed):
            EtcdLog(EtcdCalls([endpoint]), "/d/", watch_calls=EtcdCalls([endpoint]))
    assert threading.active_count() == before


def test_a_server_that_died_and_came_back_has_everything() -> None:
    try:
        EtcdServer.program()
    except NoServer as error:
        pytest.skip(str(error))
    server = EtcdServer()
    server.start()
    try:
        with server.log("/d/") as log:
            log.propose(COUNTER)
            server.kill()
            with pytest.raises(ConnectionFailed):
                log.refresh()
            with pytest.raises(Unavailable):
                log.propose(COUNTER)
            server.start()
            assert number(log.propose(COUNTER)) == 2
            with pytest.raises(ConnectionFailed):
                server.log("/d/", f"http://127.0.0.1:{free_port()}")
    finally:
        server.stop()


def test_the_next_endpoint_is_asked_when_one_is_down(etcd_server: EtcdServer, prefix: str) -> None:
    calls = EtcdCalls([f"http://127.0.0.1:{free_port()}", etcd_server.endpoint])
    with EtcdLog(calls, prefix) as log:
        assert number(log.propose(COUNTER)) == 1


def put(server: EtcdServer, key: str, value: bytes) -> None:
    calls = server.calls()
    calls.put(key.encode(), value)
    calls.close()


def test_what_is_damaged_is_said(etcd_server: EtcdServer, prefix: str) -> None:
    with etcd_server.log(prefix) as log:
        log.propose(COUNTER)
        put(etcd_server, prefix + "head", msgspec.msgpack.encode([1, 0, 0, "", 0]))
        with pytest.raises(Damage, match="went back"):
            log.refresh()
        put(etcd_server, prefix + "head", b"\xc1")
        with pytest.raises(Damage):
            log.refresh()
        put(etcd_server, prefix + "head", msgspec.msgpack.encode([2, 5, 0, "", 0]))
        with pytest.raises(StorageIncompatible):
            log.refresh()
        calls = etcd_server.calls()
        calls.delete_range((prefix + "head").encode(), (prefix + "heae").encode())
        calls.close()
        with pytest.raises(Damage, match="gone"):
            log.refresh()
    other = etcd_server.new_prefix()
    put(etcd_server, other + "head", msgspec.msgpack.encode([1, 1, 0, "", 0]))
    with pytest.raises(Damage, match="not whole"):
        etcd_server.log(other)
    put(etcd_server, other + f"entries/{1:020}", bytes(16) + b"\x91\x81\xa4kind\xa3new")
    with pytest.raises(StorageIncompatible):
        etcd_server.log(other)
    wrong = join_commands([encode_command(CompareAndSet(key="/a", value=b"", revision=7))])
    put(etcd_server, other + f"entries/{1:020}", bytes(16) + wrong)
    with pytest.raises(Damage, match="cannot be applied"):
        etcd_server.log(other)


def test_a_closed_log_is_closed(log: EtcdLog) -> None:
    log.close()
    log.close()
    for ask in (log.refresh, lambda: log.propose(COUNTER)):
        with pytest.raises(ClosedError):
            ask()


@pytest.mark.parametrize("endpoints", [[], ["127.0.0.1:2379"], ["ftp://a"], ["http://"], ["http://a/path"]])
def test_what_is_no_endpoint_is_refused(endpoints: list[str]) -> None:
    with pytest.raises(ConfigInvalid):
        EtcdCalls(endpoints)
    with pytest.raises(ConfigInvalid):
        EtcdLog(EtcdCalls(["http://127.0.0.1"]), "/no-slash")


Answer = Callable[[str, str], tuple[int, bytes]]


@contextmanager
def gateway(answer: Answer) -> Iterator[str]:
    """A server that answers as ``answer`` says of path and authorization."""

    class Gateway(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = answer(self.path, self.headers.get("Authorization", ""))
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Gateway)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_token_is_taken_and_taken_again_when_it_is_no_longer_good() -> None:
    tokens = iter(["first", "second"])
    good = ["first"]

    def answer(path: str, authorization: str) -> tuple[int, bytes]:
        if path == "/v3/auth/authenticate":
            good[0] = next(tokens)
            return 200, b'{"token": "%s"}' % good[0].encode()
        if authorization != good[0]:
            return 401, b'{"error": "invalid auth token", "code": 16}'
        return 200, b"{}"

    with gateway(answer) as endpoint:
        calls = EtcdCalls([endpoint], user="u", password="p")
        assert calls.get(b"a") is None
        good[0] = "expired"
        assert calls.get(b"a") is None and good[0] == "second"
        calls.close()


UNDECIDED = [
    (503, b'{"error": "etcdserver: request timed out", "code": 14}'),
    (503, b'{"error": "etcdserver: no leader", "code": 14}'),
    (504, b'{"error": "context deadline exceeded", "code": 4}'),
    (503, b'{"error": "upstream is away"}'),
]


@pytest.mark.parametrize("status, body", UNDECIDED)
def test_a_transaction_that_etcd_gave_up_may_have_taken_effect(status: int, body: bytes) -> None:
    """Its leader may have changed between the proposal and the answer."""
    with gateway(lambda path, authorization: (status, body)) as endpoint:
        calls = EtcdCalls([endpoint])
        with pytest.raises(OutcomeUnknown):
            calls.put_if(b"a", 0, [])
        with pytest.raises(ConnectionFailed):
            calls.get(b"a")
        calls.close()


@pytest.mark.parametrize("status, body", UNDECIDED)
def test_a_read_goes_on_to_the_next_endpoint_when_one_has_no_leader(status: int, body: bytes) -> None:
    with (
        gateway(lambda path, authorization: (status, body)) as cut_off,
        gateway(lambda path, authorization: (200, b"{}")) as sound,
    ):
        calls = EtcdCalls([cut_off, sound])
        assert calls.get(b"a") is None
        calls.close()


@pytest.mark.parametrize(
    "status, body, error",
    [
        (500, b'{"error": "etcdserver: mvcc: database space exceeded", "code": 8}', StorageFull),
        (400, b'{"message": "no", "code": 3}', Unavailable),
        (401, b'{"error": "invalid", "code": 16}', Unavailable),
        (502, b"<html>", ConnectionFailed),
        (200, b"[]", Unavailable),
    ],
)
def test_what_etcd_refuses_is_an_error_of_ours(status: int, body: bytes, error: type[DanubeError]) -> None:
    with gateway(lambda path, authorization: (status, body)) as endpoint:
        for user in ("", "u"):
            calls = EtcdCalls([endpoint], user=user)
            with pytest.raises(error):
                calls.get(b"a")
            calls.close()
        calls = EtcdCalls([endpoint])
        with pytest.raises(OutcomeUnknown if error is ConnectionFailed else error):
            calls.put_if(b"a", 0, [])
        calls.close()
