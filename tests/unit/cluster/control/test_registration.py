"""How a broker is kept registered, and until when its workers may serve: with a clock moved by hand."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import pytest

from danube.broker.clustered.controller import local_broker
from danube.broker.clustered.load_source import LoadSource
from danube.broker.processes.lease import SharedLease
from danube.cluster.control.calls import (
    Failed,
    Propose,
    Proposed,
    decode_request,
    encode,
    encode_outcomes,
    sent_error,
)
from danube.cluster.control.registration import MARGIN, REPORT_NS, Local, Proposals, Registration
from danube.config.loading import load
from danube.core.cluster.commands import RevokeLease
from danube.core.metadata.commands import Command, Outcome, decode_commands
from danube.core.metadata.outcomes import outcome_of
from danube.core.placement.load_report import LoadReport, report_of, storage_shared
from danube.core.placement.shares import Demand
from danube.errors import CallerError, NotFound, Unavailable
from danube.host import clock
from danube.host.capacity import Amount
from danube.ipc.counters import Counter, Counters
from danube.ipc.region import Region
from danube.ipc.usage import Usage
from tests.unit.cluster_site import SECOND_US, Site

LEASE_NS = 2_000_000_000


class Member:
    """Answers what a controller is asked, from the machine; may be cut off, or lose its answer."""

    def __init__(self) -> None:
        self.site = Site(brokers=0)
        self.reached = True
        self.answers_lost = 0
        self.proposals: list[tuple[str, int]] = []

    async def asked(self, body: bytes) -> bytes:
        if not self.reached:
            return encode(Failed(sent_error(Unavailable("the cluster has no leader"))))
        request = decode_request(body)
        assert isinstance(request, Propose)
        self.proposals.append((request.origin, request.sequence))
        outcomes = [self._outcome(command) for command in decode_commands(request.commands)]
        if self.answers_lost:
            self.answers_lost -= 1
            return encode(Failed(sent_error(Unavailable("it was not answered in time"))))
        return encode(Proposed(self.site.state.version, encode_outcomes(outcomes)))

    def _outcome(self, command: Command) -> Outcome:
        try:
            return outcome_of(self.site.state, command, self.site.do(command))
        except CallerError as error:
            return error


class Host:
    def __init__(self) -> None:
        self.member = Member()
        self.bound = SharedLease()
        self.reports = 0
        self.registration = self.again()

    def again(self) -> Registration:
        local = Local(broker_id=7, native_address="b7:6660", version="1", shared=True)
        self.registration = Registration(local, Proposals(self.member.asked), self.bound, self._report)
        return self.registration

    def _report(self) -> LoadReport:
        self.reports += 1
        return LoadReport(cpu=0.5)

    def keep(self, now_ns: int) -> None:
        asyncio.run(self.registration.keep(now_ns))

    @property
    def broker(self) -> Any:
        return self.member.site.state.cluster.brokers.find(7)


def test_the_workers_may_serve_until_the_lease_counted_from_before_it_was_asked_for() -> None:
    host = Host()
    host.keep(1_000)
    assert host.broker.alive and host.broker.native_address == "b7:6660"
    assert host.bound.end_ns == 1_000 + LEASE_NS - LEASE_NS // MARGIN
    assert host.bound.registration == host.member.site.state.version
    registered = host.bound.registration
    host.keep(500_000_000)
    assert host.bound.end_ns == 500_000_000 + LEASE_NS - LEASE_NS // MARGIN
    assert host.bound.registration == registered
    assert storage_shared(host.member.site.state.cluster.keys, 7)


def test_without_an_answer_the_bound_stays_where_it_was() -> None:
    host = Host()
    host.keep(0)
    before = host.bound.end_ns
    host.member.answers_lost = 1
    with pytest.raises(Unavailable):
        host.keep(500_000_000)
    host.member.reached = False
    with pytest.raises(Unavailable):
        host.keep(900_000_000)
    assert host.bound.end_ns == before


def test_a_lease_that_ended_ends_the_bound_before_another_one_begins() -> None:
    host = Host()
    host.keep(0)
    first = host.bound.registration
    site = host.member.site
    site.now_us += 3 * SECOND_US
    site.lead()
    site.now_us += SECOND_US
    site.step(renew=False)
    assert not host.broker.alive
    ended: list[int] = []

    class Noting(SharedLease):
        def end(self) -> None:
            ended.append(host.bound.registration)

    host.registration._bound = noting = Noting()
    host.keep(4_000_000_000)
    assert ended == [first]
    host.bound = noting
    assert host.broker.alive and host.broker.mode == "active"
    assert host.bound.registration > first
    assert host.bound.end_ns > 5_000_000_000


def test_a_registration_whose_answer_was_lost_is_made_again() -> None:
    host = Host()
    host.member.answers_lost = 1
    with pytest.raises(Unavailable):
        host.keep(0)
    assert host.bound.end_ns == 0
    host.keep(100)
    assert len(host.member.site.state.cluster.leases) == 1
    assert host.bound.end_ns > 0


def test_a_controller_that_starts_anew_takes_over_from_the_former() -> None:
    host = Host()
    host.keep(0)
    first, end_ns = host.bound.registration, host.bound.end_ns
    host.again()
    host.keep(300_000_000)
    assert host.bound.registration > first and host.bound.end_ns > end_ns
    assert len(host.member.site.state.cluster.leases) == 1


def test_load_is_told_now_and_then_and_goes_with_the_lease() -> None:
    host = Host()
    for step in range(13):
        host.keep(10**12 + step * 500_000_000)
    assert host.reports == 2
    keys = host.member.site.state.cluster.keys
    assert report_of(keys, 7) == LoadReport(cpu=0.5)
    asyncio.run(host.registration.leave())
    assert report_of(keys, 7) is None
    assert not host.broker.alive and host.bound.end_ns == 0
    assert REPORT_NS < 3 * LEASE_NS


def test_leaving_without_a_leader_is_no_error() -> None:
    host = Host()
    host.keep(0)
    host.member.reached = False
    asyncio.run(host.registration.leave())
    assert host.bound.end_ns == 0


def test_it_goes_on_by_itself_and_comes_back() -> None:
    host = Host()
    host.registration._local = Local(broker_id=7, native_address="b7:6660", lease_ms=500)

    async def live() -> None:
        task = asyncio.create_task(host.registration.run())
        await asyncio.sleep(0.3)
        host.member.site.do(RevokeLease(lease_id=host.broker.lease_id))
        await asyncio.sleep(0.3)
        assert host.broker.alive
        task.cancel()

    asyncio.run(live())
    assert len(host.member.proposals) >= 4
    sequences = [sequence for _, sequence in host.member.proposals]
    assert sequences == sorted(set(sequences))


def test_a_renewal_that_was_under_way_when_the_host_was_suspended_is_over_when_it_wakes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The clocks of a host that sleeps: the monotonic one stands still, the elapsed one goes on."""
    host = Host()
    slept_ns = 0
    monkeypatch.setattr(clock, "monotonic_ns", lambda: 5_000_000_000)
    monkeypatch.setattr(clock, "elapsed_ns", lambda: 7_000_000_000 + slept_ns)
    real = host.member.asked

    async def asked(body: bytes) -> bytes:
        nonlocal slept_ns
        answer = await real(body)
        slept_ns += 600_000_000_000
        task.cancel()
        return answer

    host.registration._proposals = Proposals(asked)

    async def main() -> None:
        nonlocal task
        task = asyncio.create_task(host.registration.run())
        with contextlib.suppress(asyncio.CancelledError):
            await task

    task: asyncio.Task[None]
    asyncio.run(main())
    assert 7_000_000_000 < host.bound.end_ns < 7_000_000_000 + LEASE_NS < clock.elapsed_ns()


def test_the_clock_of_rights_counts_what_the_monotonic_one_may_not() -> None:
    """They differ by the time in which this host was suspended, and by nothing else."""
    before = clock.monotonic_ns()
    elapsed = clock.elapsed_ns()
    slept = time.clock_gettime_ns(time.CLOCK_BOOTTIME) - time.clock_gettime_ns(time.CLOCK_MONOTONIC)
    assert before - 1_000_000 <= elapsed - slept <= clock.monotonic_ns() + 1_000_000


def test_an_answer_of_another_kind_is_an_error() -> None:
    async def asked(body: bytes) -> bytes:
        return encode(Failed(sent_error(NotFound("no such lease"))))

    with pytest.raises(NotFound):
        asyncio.run(Proposals(asked).propose([RevokeLease(lease_id=1)], 1.0))


# -- where a broker is -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "native", "grpc"),
    [
        ({}, "127.0.0.1:6660", "127.0.0.1:6650"),
        ({"cluster.raft_addr": "one.test:7650", "addresses": "0.0.0.0"}, "one.test:6660", "one.test:6650"),
        ({"cluster.raft_addr": "one.test:7650", "addresses": "[::]"}, "one.test:6660", "one.test:6650"),
        ({"grpc.advertised": "lb.test:443", "addresses": "10.0.0.1"}, "10.0.0.1:6660", "lb.test:443"),
        ({"server.advertised": "nat.test:7000", "addresses": "0.0.0.0"}, "nat.test:7000", "127.0.0.1:6650"),
    ],
)
def test_a_broker_that_listens_everywhere_is_where_its_members_reach_it(
    flags: dict[str, str], native: str, grpc: str
) -> None:
    host = flags.pop("addresses", "127.0.0.1")
    local = local_broker(7, load(None, {}, flags).config, {"native": f"{host}:6660", "grpc": f"{host}:6650"})
    assert (local.native_address, local.grpc_address, local.admin_address) == (native, grpc, "")
    assert not local.shared


# -- load ------------------------------------------------------------------------------------------


def test_load_is_what_the_counters_and_the_kernel_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0]
    monkeypatch.setattr("danube.broker.clustered.load_source.clock.monotonic_ns", lambda: now[0])
    monkeypatch.setattr("danube.broker.clustered.load_source.usable_cores", lambda root: Amount(2, ""))
    region = Region.create(2, 4096)
    try:
        counters = [Counters(region, worker) for worker in range(2)]
        (tmp_path / "proc" / "41").mkdir(parents=True)

        def used(ticks: int) -> None:
            (tmp_path / "proc" / "41" / "stat").write_text(f"41 (a) b) S {'0 ' * 10}{ticks} {ticks} 0 0")

        used(100)
        (tmp_path / "proc" / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 1 kB\nMemAvailable: 250 kB\n")
        counters[0].put(Counter.PID, 41)
        counters[1].put(Counter.PID, 42)  # it is gone
        source = LoadSource(region, root=tmp_path)
        now[0] = 1_000_000_000
        source.report()
        counters[0].add(Counter.BYTES_IN, 3_000)
        counters[1].add(Counter.BYTES_OUT, 1_000)
        counters[0].add(Counter.RECORDS_IN, 8)
        counters[0].put(Counter.PARTITIONS_OPEN, 5)
        counters[0].put(Counter.BACKLOG_RECORDS, 7)
        counters[1].put(Counter.BACKLOG_RECORDS, 4)
        used(150)
        now[0] = 3_000_000_000
        found = source.report()
        assert (found.bytes_per_s, found.records_per_s, found.partition_count) == (2_000, 4, 5)
        assert found.cpu == pytest.approx(0.25, abs=0.01)  # one second of the two cores' four
        assert (found.memory, found.backlog_records) == (0.75, 11) and found.usage == {}
        slots = [Usage(region, worker).slot(5) for worker in range(2)]
        slots[0].take(10, 1_000)
        slots[1].take(30, 3_000)
        slots[1].store(7)
        now[0] = 5_000_000_000
        assert source.report().usage == {"5": Demand(20.0, 2_000.0, False, 7)}
        slots[1].store(0)
        now[0] = 7_000_000_000
        assert source.report().usage == {}, "nothing was taken, and nothing is stored"
        slots[0].hold()
        assert source.report().usage == {"5": Demand(0.0, 0.0, True, 0)}
    finally:
        del counters, source, slots
        region.close()
