"""Load tests: when records are due, what they say about themselves, and what a plan takes."""

from __future__ import annotations

import itertools

import pytest

from danube.errors import DanubeError, InvalidArgument
from danube.host.clock import monotonic_ns
from danube.load import stamp
from danube.load.plan import MODES, OPTIONS, Plan, size_label, words_of
from danube.load.producing import Sizes
from danube.load.schedule import OpenLoop

MS = 1_000_000


# -- the clock ------------------------------------------------------------------------------------


def test_a_constant_rate() -> None:
    clock = OpenLoop(rate=200, began_ns=7)
    assert [clock.due_ns(number) - 7 for number in range(4)] == [0, 5 * MS, 10 * MS, 15 * MS]
    assert clock.due_ns(2_000_000) - 7 == 10_000_000 * MS  # nothing adds up over ten thousand seconds


def test_producers_do_not_send_at_once() -> None:
    assert OpenLoop(10, 0, phase=0.25).due_ns(3) == OpenLoop(10, 0).due_ns(3) + 25 * MS


def test_a_ramp_grows_linearly_and_then_the_rate_holds() -> None:
    clock = OpenLoop(rate=100, began_ns=0, ramp_s=10)
    moments = [clock.due_ns(number) for number in range(1_500)]
    assert moments == sorted(moments)
    within = [sum(1 for one in moments if one < second * 1_000 * MS) for second in range(16)]
    per_second = [after - before for before, after in itertools.pairwise(within)]
    for second, count in enumerate(per_second[:10]):
        assert abs(count - (second + 0.5) * 10) <= 1.5  # 5, 15, 25 ... 95
    assert all(abs(count - 100) <= 1 for count in per_second[10:14])


def test_what_is_due_does_not_depend_on_what_was_sent() -> None:
    clock = OpenLoop(50, 0)
    assert clock.due_ns(10) == OpenLoop(50, 0).due_ns(10) == 200 * MS


# -- stamps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [stamp.STAMP_BYTES, 100, 1024, 65_536])
def test_a_stamp_comes_back(size: int) -> None:
    due_ns = monotonic_ns() - 40 * MS
    payload = stamp.write(5, 2**64 - 1, 12, 3, size, due_ns)
    assert len(payload) == size
    found = stamp.read(payload)
    assert isinstance(found, stamp.Stamp)
    assert (found.run, found.producer, found.number, found.key) == (5, 2**64 - 1, 12, 3)
    assert found.due_ns == due_ns
    assert found.age_ms(due_ns + 45 * MS) == 45


def test_a_record_of_another_machine_is_timed_by_the_wall_clock() -> None:
    found = stamp.read(stamp.write(1, 1, 0, 0, 100, monotonic_ns() - 500 * MS))
    assert isinstance(found, stamp.Stamp)
    other = found._replace(clock=found.clock ^ 1, due_ns=0)
    assert 499 < other.age_ms(0) < 60_000


def test_any_changed_byte_is_damage() -> None:
    payload = stamp.write(5, 6, 7, 0, 100, 9)
    for position in range(len(payload)):
        changed = bytearray(payload)
        changed[position] ^= 0x40
        found = stamp.read(bytes(changed))
        assert found is None if position < 4 else isinstance(found, stamp.Damaged), position


def test_any_cut_is_damage() -> None:
    payload = stamp.write(5, 6, 7, 0, 100, 9)
    for size in range(4, 100):
        assert isinstance(stamp.read(payload[:size]), stamp.Damaged)
    assert isinstance(stamp.read(payload + b"x"), stamp.Damaged)


@pytest.mark.parametrize("payload", [b"", b"x", b'{"id": 1}', bytes(200)])
def test_other_records_are_not_ours(payload: bytes) -> None:
    assert stamp.read(payload) is None


# -- plans ----------------------------------------------------------------------------------------


def test_a_plan_of_defaults() -> None:
    plan = Plan.parse({})
    assert plan.protocols == ("native",) and plan.modes == MODES
    assert plan.sizes == ((100, 6), (1024, 3), (65_536, 1)) and plan.size_max == 65_536
    assert (plan.rate, plan.consumers, plan.keys, plan.partitions) == (50, 1, 8, 0)
    assert plan.grpc_broker == "127.0.0.1:6650"
    assert plan.users_min == 5


def test_every_option_is_taken() -> None:
    values = {
        "broker": "danube://[::1]:7000",
        "topic": "/default/orders",
        "protocol": "both",
        "grpc_broker": "http://other:6650",
        "modes": "shared, fail-over,key-shared",
        "consumers": "3",
        "sizes": "100,2KiB:4",
        "rate": "12.5",
        "ramp": "1m",
        "keys": "2",
        "partitions": "4",
        "durability": "fsync",
        "send_timeout": "500ms",
        "drain_timeout": "10s",
    }
    assert set(values) == {"broker", "topic", *(one.field for one in OPTIONS)}
    plan = Plan.parse(values)
    assert plan.modes == ("shared", "failover", "key_shared") and plan.protocols == ("native", "grpc")
    assert plan.sizes == ((100, 1), (2048, 4))
    assert (plan.rate, plan.ramp_s, plan.send_timeout_s, plan.drain_timeout_s) == (12.5, 60, 0.5, 10)
    assert plan.grpc_broker == "other:6650" and plan.durability == "fsync"
    assert plan.users_min == 2 * 3 * 3 + 2
    assert f"--sizes={values['sizes']}" in words_of(values)
    assert Plan.parse(values | {"grpc_broker": ""}).grpc_broker == "[::1]:6650"


@pytest.mark.parametrize(
    ("field", "text", "said"),
    [
        ("broker", "tcp://x", "danube://"),
        ("topic", "orders", "/namespace/name"),
        ("topic", "/default/x-part-1", "partition"),
        ("protocol", "amqp", "native, grpc or both"),
        ("grpc_broker", "host", "host:port"),
        ("modes", "shared,shared", "each once"),
        ("modes", "fanout", "exclusive"),
        ("consumers", "0", "1 to"),
        ("consumers", "1e3", "whole number"),
        ("sizes", "10", "sizes from"),
        ("sizes", "100:0", "sizes from"),
        ("sizes", "100:", "sizes from"),
        ("sizes", "100:x", "sizes from"),
        ("sizes", "100,100", "sizes from"),
        ("sizes", "99MiB", "sizes from"),
        ("sizes", "big", "sizes from"),
        ("rate", "-1", "records per second"),
        ("rate", "fast", "records per second"),
        ("rate", "nan", "records per second"),
        ("ramp", "10", "duration"),
        ("keys", "0", "1 to"),
        ("partitions", "-1", "0 to"),
        ("durability", "quorum", "written, fsync or memory"),
        ("send_timeout", "0", "at least"),
        ("drain_timeout", "soon", "duration"),
    ],
)
def test_a_bad_option_is_named_with_what_it_should_be(field: str, text: str, said: str) -> None:
    with pytest.raises(DanubeError) as caught:
        Plan.parse({field: text})
    error = caught.value
    told = f"{error.what} {error.why} {error.hint}"
    assert said in told and text.split(",")[0] in told
    assert error.exit_code == 2


def test_too_few_users_are_refused() -> None:
    plan = Plan.parse({"modes": "shared", "consumers": "3"})
    plan.check_users(4)
    with pytest.raises(InvalidArgument, match="3 users are too few") as caught:
        plan.check_users(3)
    assert "--users 4" in caught.value.hint


def test_sizes_come_by_their_weights() -> None:
    sizes = Sizes(((100, 6), (1024, 3), (65_536, 1)), seed=1)
    found = [sizes.next() for _ in range(20_000)]
    shares = [found.count(one) / len(found) for one in (100, 1024, 65_536)]
    assert [round(one, 1) for one in shares] == [0.6, 0.3, 0.1]


def test_sizes_are_labelled_with_their_unit() -> None:
    assert [size_label(one) for one in (100, 1024, 65_536, 1000)] == ["100B", "1KiB", "64KiB", "1000B"]
