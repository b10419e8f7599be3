"""Runs a benchmark: makes the topic, starts one process per producer and consumer, adds up.

A child gets its part as one JSON line, connects, answers ``{"ready": true}``, waits for ``go`` and
answers with one JSON line.  Times are CLOCK_MONOTONIC, which all processes of a host share.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

from danube.cli.terminal.output import note
from danube.cli.terminal.own_process import own_command, own_environment
from danube.cli.terminal.services import Services
from danube.errors import DanubeError, Unavailable, error_for_code
from danube.limits import RECORD_BYTES_DEFAULT

ENDING_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One benchmark as the user asked for it; ``count`` and ``rate`` are for all producers together."""

    workload: str  # publish, consume, e2e, latency
    address: str
    topic: str
    temporary: bool
    reliable: bool
    durability: str
    size: int
    count: int
    batch: int
    partitions: int
    producers: int
    consumers: int
    rate: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Part(Plan):
    """The share of one process; ``count`` and ``rate`` are its own."""

    role: str  # publish, consume, latency
    index: int


class Child:
    """One process of the benchmark."""

    def __init__(self, part: Part) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - this program, with no words of a user
            own_command("danube.cli.records.bench_child"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=own_environment(os.environ),
        )
        self._tell(json.dumps(asdict(part)))

    def _tell(self, line: str) -> None:
        stdin = self._process.stdin
        if stdin is not None:
            try:
                stdin.write(line.encode() + b"\n")
                stdin.flush()
            except BrokenPipeError:
                pass  # it ended; answer() reads its last line

    def go(self) -> None:
        self._tell("go")

    def answer(self) -> dict[str, Any]:
        """The next line it says; its error raised here."""
        line = self._process.stdout.readline() if self._process.stdout is not None else b""
        if not line:
            code = self._process.wait()
            raise Unavailable(f"a process of the benchmark ended with exit code {code}")
        found: dict[str, Any] = json.loads(line)
        error = found.get("error")
        if error is not None:
            raise error_for_code(error["code"], error["what"], error["why"], error["hint"])
        return found

    def end(self) -> None:
        """Leave no process behind, whatever happened."""
        if self._process.stdin is not None:
            try:
                self._process.stdin.close()
            except BrokenPipeError:
                pass
        try:
            self._process.wait(ENDING_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def measure(services: Services, plan: Plan) -> dict[str, Any]:
    """Run the benchmark and return its documented result."""
    with _topic(services, plan):
        if plan.workload == "latency":
            (answer,) = _together(services, [_part(plan, "latency", 0)])
            return _head(plan) | answer
        producers = [_part(plan, "publish", index) for index in range(plan.producers)]
        consumers = [_part(plan, "consume", index) for index in range(plan.consumers)]
        if plan.workload == "publish":
            return _head(plan) | _throughput(plan, _together(services, producers))
        if plan.workload == "consume":
            _together(services, [replace(part, rate=0.0) for part in producers])
            return _head(plan) | _throughput(plan, _together(services, consumers))
        answers = _together(services, [*consumers, *producers])
        received = answers[: plan.consumers]
        began_ns = min(answer["began_ns"] for answer in answers[plan.consumers :])
        return _head(plan) | _throughput(plan, [one | {"began_ns": began_ns} for one in received])


def _head(plan: Plan) -> dict[str, Any]:
    """Return the plan that was measured; a figure stands beside its durability level."""
    named = asdict(plan)
    for name in ("address", "topic", "temporary"):
        named.pop(name)
    size_bytes = named.pop("size")
    return {**named, "size_bytes": size_bytes}


def _throughput(plan: Plan, answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the throughput from the first process's begin to the last one's end."""
    records = sum(answer["records"] for answer in answers)
    began_ns = min(answer["began_ns"] for answer in answers)
    seconds = max(max(answer["ended_ns"] for answer in answers) - began_ns, 1) / 1e9
    expected = plan.count * max(plan.consumers, 1)
    return {
        "records": records,
        "missing": expected - records,  # a non-reliable topic drops the oldest for a slow consumer
        "seconds": round(seconds, 6),
        "records_per_second": round(records / seconds),
        "bytes_per_second": round(records * plan.size / seconds),
    }


def _part(plan: Plan, role: str, index: int) -> Part:
    part = Part(**asdict(plan), role=role, index=index)
    if role == "publish":
        share, rest = divmod(plan.count, plan.producers)
        return replace(part, count=share + (index < rest), rate=plan.rate / plan.producers)
    return part


def _together(services: Services, parts: list[Part]) -> list[dict[str, Any]]:
    """Start the processes, let them begin at once, and collect their measurements."""
    if services.shows_progress():
        note(f"{parts[0].workload}: {len(parts)} processes, {parts[0].count:,} records each ...")
    children: list[Child] = []
    try:
        children.extend(Child(part) for part in parts)
        for child in children:
            child.answer()
        for child in children:
            child.go()
        return [child.answer() for child in children]
    finally:
        for child in children:
            child.end()


@contextmanager
def _topic(services: Services, plan: Plan) -> Iterator[None]:
    with services.connect(plan.address) as client:
        if plan.temporary:
            client.admin.create_topic(
                plan.topic,
                partitions=plan.partitions,
                reliable=plan.reliable,
                durability=plan.durability,
                max_record_bytes=max(plan.size, RECORD_BYTES_DEFAULT),
            )
        try:
            yield
        finally:
            if plan.temporary:
                try:
                    client.admin.delete_topic(plan.topic)
                except DanubeError as error:
                    note(f"the topic {plan.topic} was left behind: {error}")
