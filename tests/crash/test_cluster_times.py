"""Times without service are told from journals as they were, and the plan of faults comes from its seed."""

from __future__ import annotations

from typing import Any

from tests.crash import main
from tests.crash.clients import end_of_records
from tests.crash.cluster_main import ROUND_MINUTES, round_seconds
from tests.crash.cluster_nemesis import WEIGHTS, ClusterNemesis, plan_of
from tests.crash.cluster_times import histogram, summary, times_of
from tests.crash.journal import Event

TOPIC = "/default/t"
SECOND_NS = 1_000_000_000


def ack(at_s: float, offset: int, partition: int = 0) -> Event:
    return ["ok", "p", TOPIC, 0, 1, partition, offset, "fsync", int(at_s * SECOND_NS)]


def fault(name: str, start_s: float, end_s: float, **facts: Any) -> Event:
    known = {"seconds": end_s - start_s, "healed_s": 0.5, "owned": [], **facts}
    return ["fault", name, 7, int(start_s * SECOND_NS), int(end_s * SECOND_NS), known]


def test_a_failover_ends_with_the_first_acknowledgement_of_the_next_owner() -> None:
    events = [
        *(
            ack(one / 10, one) for one in range(100, 120)
        ),  # to 11.9 s: what the dead one had answered counts not
        ack(12.5, 1000),
        ack(12.6, 1001),
        ack(14.2, 5, partition=1),  # this partition's owner came back in time, and went on
        ack(14.9, 1000, partition=1),
        fault("kill_broker", 10, 14, owned=[[TOPIC, 0, 1000], [TOPIC, 1, 1000]]),
    ]
    times = times_of(events)
    assert times["failover after kill"] == [2.5]
    assert times["failover after cut"] == [] and times["move"] == [] and times["healing"] == [0.5]


def test_each_kind_of_fault_has_its_times() -> None:
    owned = [[TOPIC, 0, 1000]]
    events = [ack(12, 1000), ack(22, 2000), fault("not_heard", 20, 21, owned=[[TOPIC, 0, 2000]])]
    events.append(fault("pause_broker", 11, 15, owned=owned))
    times = times_of(events)
    assert times["failover after pause"] == [1.0] and times["failover after cut"] == [2.0]


def test_a_move_takes_the_longest_time_without_an_acknowledgement() -> None:
    moments = [
        9.0,
        10.1,
        10.2,
        10.9,
        11.0,
        11.1,
        14.0,
    ]  # 1.1 s ended after it was asked for; 2.9 s began later
    facts = {"topic": TOPIC, "partition": 0, "asked_ns": int(10.15e9), "moved_ns": int(10.5e9)}
    events = [*(ack(one, number) for number, one in enumerate(moments[:-1])), ack(14.0, 9)]
    assert times_of([*events, fault("move_partition", 10.15, 10.5, **facts)])["move"] == [2.9]
    facts["moved_ns"] = int(10.05e9)
    assert times_of([*events, fault("move_partition", 10.15, 10.2, **facts)])["move"] == [0.7]
    del facts["moved_ns"]
    assert times_of([*events, fault("move_partition", 10.15, 10.5, **facts)])["move"] == [], "it did not move"


def test_a_histogram_counts_everything_once() -> None:
    seconds = [0.05, 0.1, 0.3, 2.4, 2.6, 99.0]
    found = summary(seconds)
    assert (found["count"], found["median_s"], found["max_s"]) == (6, 2.4, 99.0)
    assert found["at_most_s"]["0.1"] == 2 and found["at_most_s"]["20.0"] == 5
    lines = histogram("move", seconds).splitlines()
    assert lines[0] == "move: 6, 2.40 s in the middle, 99.00 s at most"
    assert sum(int(line.split("s  ")[1].split()[0]) for line in lines[1:]) == 6
    assert histogram("move", []) == "move: none" and summary([])["max_s"] is None


def test_a_seed_gives_one_plan_whose_faults_all_exist() -> None:
    plan = plan_of(11, 200)
    assert plan == plan_of(11, 200) and plan[:20] == plan_of(11, 20) and plan != plan_of(12, 200)
    assert {step.fault for step in plan} == set(WEIGHTS)
    assert all(callable(getattr(ClusterNemesis, name)) for name in WEIGHTS)
    named = plan_of(11, 3, ["flap", "kill_all"])
    assert [step.fault for step in named] == ["flap", "kill_all", plan[2].fault]


def test_a_reader_stops_before_offsets_that_nobody_uses() -> None:
    def hole(start: int, end: int) -> dict[str, int]:
        return {"start": start, "end": end}

    assert end_of_records({"high_watermark": 10}) == 10
    assert end_of_records({"high_watermark": 10, "holes": [hole(2, 5)]}) == 10
    assert end_of_records({"high_watermark": 90, "holes": [hole(2, 5), hole(7, 40), hole(40, 90)]}) == 7


def test_rounds_last_as_long_as_they_may() -> None:
    options = main.arguments(["--cluster", "--long", "--minutes", "25"])
    assert round_seconds(options, 25 * 60) == ROUND_MINUTES * 60 and round_seconds(options, 90) == 90
    assert round_seconds(options, -1) == 30, "one that has begun says something"
    assert round_seconds(main.arguments(["--cluster", "--long"]), None) == ROUND_MINUTES * 60
    assert round_seconds(main.arguments(["--cluster", "--short"]), None) == 0
    assert round_seconds(main.arguments(["--cluster", "--cycles", "2"]), None) == 0
