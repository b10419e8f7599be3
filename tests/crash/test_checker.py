"""The checker passes honest journals and names every kind of lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.crash.checker import Expectation, Verdict, check
from tests.crash.journal import Event, Journal, payload_of, read_journals, read_payload

TOPIC = "/default/t"
COUNT = 6


def honest(keys: list[str | None] | None = None) -> list[Event]:
    """Two producers take turns; one subscription reads and acks all; the log was read at the end."""
    events: list[Event] = []
    for offset in range(COUNT):
        producer, sequence = f"p{offset % 2}", offset // 2
        key = keys[offset] if keys else None
        events += [
            ["try", producer, TOPIC, sequence, sequence + 1, key],
            ["ok", producer, TOPIC, sequence, sequence + 1, 0, offset, "written", 100 + offset],
            ["got", "s", "c0", TOPIC, 0, offset, producer, sequence, key, True, False, 200 + offset],
            ["ack", "s", TOPIC, 0, offset],
            ["log", TOPIC, 0, offset, producer, sequence, key, True],
        ]
    return [*events, ["fault", "kill_worker", 1, 90, 95, {}]]


def judged(events: list[Event], mode: str = "exclusive", **expected: Any) -> Verdict:
    return check(events, Expectation(modes={"s": mode}, topics={"s": TOPIC}, **expected))


def without(events: list[Event], kind: str, offset: int) -> list[Event]:
    place = {"log": 3, "got": 5, "ack": 4, "ok": 6}[kind]
    return [event for event in events if not (event[0] == kind and event[place] == offset)]


def one(events: list[Event], kind: str, offset: int) -> Event:
    place = {"log": 3, "got": 5, "ack": 4, "ok": 6}[kind]
    return next(event for event in events if event[0] == kind and event[place] == offset)


def test_an_honest_run_passes() -> None:
    verdict = judged(honest(), acknowledged_min=COUNT, faults_min=1, acknowledged_after_fault_min=COUNT)
    assert verdict.passed, verdict
    assert verdict.statistics["acknowledged"] == verdict.statistics["in_log"] == COUNT
    assert verdict.statistics["redeliveries"] == 0


def test_redelivery_and_an_unknown_outcome_are_no_violation() -> None:
    events = honest()
    events.insert(-1, ["got", "s", "c1", TOPIC, 0, 2, "p0", 1, None, True, True, 900])
    events.append(["try", "p0", TOPIC, 3, 5, None])
    events.append(["fail", "p0", TOPIC, 3, 5, "OperationTimeout"])
    events.append(["log", TOPIC, 0, COUNT, "p0", 3, None, True])
    verdict = judged(events)
    assert verdict.passed, verdict
    assert verdict.statistics["redeliveries"] == 1


def test_a_lost_record_is_found() -> None:
    verdict = judged(without(honest(), "log", COUNT - 1))
    assert verdict.counts == {"lost": 1}


def test_a_hole_in_the_middle_is_found() -> None:
    verdict = judged(without(honest(), "log", 2))
    assert verdict.counts == {"lost": 1, "hole": 1}


def test_an_acknowledgement_with_a_wrong_offset_is_found() -> None:
    events = honest()
    events = [event for event in events if not (event[0] in {"got", "ack"} and event[-1] == 5)]
    one(events, "ok", 5)[6] = 9
    assert "moved" in judged(events).counts


def test_an_invented_record_is_found() -> None:
    verdict = judged([*honest(), ["log", TOPIC, 0, COUNT, "ghost", 0, None, True]])
    assert verdict.counts == {"invented": 1}


@pytest.mark.parametrize(("place", "value"), [(-1, False), (-2, "other key"), (1, "/default/other")])
def test_a_record_with_other_bytes_key_or_topic_is_found(place: int, value: object) -> None:
    events = honest()
    one(events, "log", 3)[place] = value
    assert "invented" in judged(events).counts


def test_a_stored_duplicate_is_found() -> None:
    verdict = judged([*honest(), ["log", TOPIC, 0, COUNT, "p1", 2, None, True]])
    assert verdict.counts == {"repeated": 1}


def test_a_reused_offset_is_found() -> None:
    events = honest()
    events += [["try", "p0", TOPIC, 3, 4, None], ["ok", "p0", TOPIC, 3, 4, 0, 5, "written", 300]]
    assert {"reused", "lost"} <= set(judged(events).counts)


def test_a_log_out_of_a_producers_order_is_found() -> None:
    events = [event for event in honest() if event[0] in {"try", "log"}]
    one(events, "log", 0)[5], one(events, "log", 2)[5] = 1, 0
    verdict = check(events, Expectation(acknowledged_min=0))
    assert verdict.counts == {"order": 1}


@pytest.mark.parametrize("mode", ["exclusive", "failover"])
def test_first_deliveries_out_of_order_are_found(mode: str) -> None:
    events = honest()
    one(events, "got", 1)[-1], one(events, "got", 4)[-1] = 204, 201
    assert set(judged(events, mode).counts) == {"order"}


@pytest.mark.parametrize("mode", ["exclusive", "failover", "key_shared"])
def test_what_came_again_before_it_was_looked_at_is_no_first_delivery(mode: str) -> None:
    events = honest(["a"] * COUNT)
    for offset in (0, 2):
        one(events, "got", offset)[-2:] = [True, 210 + offset]
    assert judged(events, mode).passed
    one(events, "got", 2)[-2] = False
    assert judged(events, mode).counts == {"order": 1}


def test_shared_consumers_may_interleave_but_each_sees_its_own_in_order() -> None:
    events = honest()
    one(events, "got", 1)[-1] = 210
    one(events, "got", 1)[2] = "c1"
    assert judged(events, "shared").passed
    one(events, "got", 1)[2] = "c0"
    assert judged(events, "shared").passed, "a fault may have given the record back unseen"
    assert judged(events[:-1], "shared").counts == {"order": 1}


def test_key_shared_keeps_the_order_of_each_key_only() -> None:
    keys: list[str | None] = ["a", "b", "a", "b", "a", "b"]
    events = honest(keys)
    for offset in (1, 3, 5):
        one(events, "got", offset)[-1] += 10
    assert judged(events, "key_shared").passed
    one(events, "got", 0)[-1], one(events, "got", 2)[-1] = 202, 200
    assert judged(events, "key_shared").counts == {"order": 1}


def test_a_cursor_that_went_ahead_is_found() -> None:
    never_delivered = without(without(honest(), "got", 3), "ack", 3)
    assert judged(never_delivered).counts == {"undelivered": 1}
    never_redelivered = without(honest(), "ack", 3)
    assert judged(never_redelivered).counts == {"undelivered": 1}


def told_nothing_of_offsets() -> list[Event]:
    """The same honest run over an API whose answers do not say where a record lies."""
    events = honest()
    for event in events:
        if event[0] == "ok":
            event[6] = None
    return events


def test_an_answer_without_an_offset_is_judged_by_the_log() -> None:
    assert judged(told_nothing_of_offsets()).passed
    assert judged(without(told_nothing_of_offsets(), "log", COUNT - 1)).counts == {"lost": 1}
    assert judged(without(without(told_nothing_of_offsets(), "got", 3), "ack", 3)).counts == {
        "undelivered": 1
    }
    assert judged(without(told_nothing_of_offsets(), "ack", 3)).counts == {"undelivered": 1}


def test_a_lost_beginning_of_the_log_is_found() -> None:
    unacknowledged = without(without(without(honest(), "ok", 0), "got", 0), "ack", 0)
    events = without(unacknowledged, "log", 0)
    assert judged(events).passed, "nothing says where the log begins"
    assert judged(events, log_starts={(TOPIC, 0): 0}).counts == {"hole": 1}
    assert judged(honest(), log_starts={(TOPIC, 0): 0}).passed


def test_an_ack_without_an_answer_may_have_had_its_effect() -> None:
    events = without(honest(), "ack", 3)
    assert judged([*events, ["ack_unknown", "s", TOPIC, 0, 3]]).passed
    assert judged([*events, ["ack_unknown", "s", TOPIC, 0, 2]]).counts == {"undelivered": 1}


def test_acks_of_killed_clients_are_not_held_against_the_broker() -> None:
    assert judged(without(honest(), "ack", 3), acks_are_known=False).passed
    never_delivered = without(without(honest(), "got", 3), "ack", 3)
    assert judged(never_delivered, acks_are_known=False).counts == {"undelivered": 1}


def test_a_run_that_says_nothing_fails() -> None:
    assert judged([], acknowledged_min=1).counts == {"liveness": 1}
    assert judged(honest(), faults_min=2).counts == {"liveness": 1}
    late = [event for event in honest() if event[0] != "fault"] + [["fault", "kill_all", 1, 103, 104, {}]]
    assert judged(late, acknowledged_after_fault_min=1).passed
    assert judged(late, acknowledged_after_fault_min=2).counts == {"liveness": 1}


@given(st.integers(0, COUNT - 1), st.sampled_from(["log", "got", "ack"]))
def test_no_single_missing_line_goes_unnoticed(offset: int, kind: str) -> None:
    assert not judged(without(honest(), kind, offset)).passed


@given(st.text("abc-", min_size=1, max_size=8), st.integers(0, 2**40), st.integers(0, 300))
def test_a_payload_says_who_it_is(producer: str, sequence: int, size: int) -> None:
    payload = payload_of(producer, sequence, size)
    assert len(payload) == max(64, size)
    assert read_payload(payload) == ((producer, sequence), True)


@given(st.integers(0, 63), st.integers(1, 255))
def test_no_changed_byte_goes_unnoticed(place: int, change: int) -> None:
    payload = bytearray(payload_of("p", 7, 64))
    payload[place] ^= change
    identity, intact = read_payload(bytes(payload))
    assert not intact or identity != ("p", 7)


def test_a_journal_with_a_cut_last_line_is_read_up_to_there(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "one.jsonl")
    journal.write("try", "p", TOPIC, 0, 1, None)
    journal.close()
    with (tmp_path / "one.jsonl").open("a") as file:
        file.write('["ok", "p"')
    assert list(read_journals([tmp_path / "one.jsonl"])) == [["try", "p", TOPIC, 0, 1, None]]


# -- the lives of a log in a cluster ------------------------------------------------------------------


def two_lives() -> list[Event]:
    """Offsets 0 to 5, then 100 to 102 of the next owner; p0's last record was stored by both."""
    events = honest()[:-1]
    one(events, "ok", 4)[6] = 100
    for offset, producer, sequence in ((100, "p0", 2), (101, "p1", 3), (102, "p0", 3)):
        if sequence == 3:
            events.append(["try", producer, TOPIC, sequence, sequence + 1, None])
            events.append(["ok", producer, TOPIC, sequence, sequence + 1, 0, offset, "written", 900])
        events.append(
            ["got", "s", "c0", TOPIC, 0, offset, producer, sequence, None, True, False, 150 + offset]
        )
        events.append(["ack", "s", TOPIC, 0, offset])
        events.append(["log", TOPIC, 0, offset, producer, sequence, None, True])
    return events


UNUSED = {(TOPIC, 0): [(COUNT, 100)]}


def test_a_record_of_two_lives_and_deliveries_of_the_first_one_after_the_second_are_no_violation() -> None:
    events = two_lives()
    for offset in (4, 5):  # they came back from a disk after the younger ones had been delivered
        one(events, "got", offset)[-1] = 500 + offset
    verdict = judged(events, unused=UNUSED, delivered_stays=True)
    assert verdict.passed, verdict


def test_offsets_that_nobody_says_are_unused_are_a_hole() -> None:
    assert judged(two_lives()).counts["hole"] == 1
    assert judged(two_lives(), unused={(TOPIC, 0): [(COUNT, 99)]}).counts["hole"] == 1
    assert judged(two_lives(), unused={(TOPIC, 0): [(COUNT, 50), (50, 100)]}).counts["hole"] == 0


def test_a_record_at_an_offset_that_is_said_to_be_unused_is_found() -> None:
    assert judged(two_lives(), unused={(TOPIC, 0): [(COUNT, 101)]}).counts["hole"] == 1


def test_a_record_twice_in_one_life_is_found() -> None:
    events = [*two_lives(), ["log", TOPIC, 0, 103, "p0", 3, None, True]]
    assert judged(events, unused=UNUSED).counts == {"repeated": 1}


def test_a_record_that_was_acknowledged_in_an_earlier_life_is_not_stored_again() -> None:
    events = two_lives()
    next(event for event in events if event[:5] == ["ok", "p0", TOPIC, 2, 3])[6] = 4
    assert judged(events, unused=UNUSED).counts == {"repeated": 1}


def test_acknowledged_records_that_change_places_between_lives_are_found() -> None:
    """The journals agree with the log, and each life is in order: nothing but the order of lives is wrong."""
    events = two_lives()
    for kind, field in (("log", 5), ("got", 7), ("ok", 6)):
        early, late = one(events, kind, 5), one(events, kind, 101)
        early[field], late[field] = late[field], early[field]
    assert judged(events, unused=UNUSED).counts == {"order": 1}


def test_a_delivered_record_that_is_not_in_the_log_is_found() -> None:
    events = two_lives()
    events.append(["try", "p0", TOPIC, 4, 5, None])
    events.append(["got", "s", "c0", TOPIC, 0, 103, "p0", 4, None, True, False, 990])
    assert judged(events, unused=UNUSED).passed
    assert judged(events, unused=UNUSED, delivered_stays=True).counts == {"vanished": 1}


SECOND_NS = 1_000_000_000


def cut(moment_s: float, ended_s: float, **facts: Any) -> Event:
    moments = [int(moment_s * SECOND_NS)]
    return ["fault", "power_cut", 1, moments[0], int(ended_s * SECOND_NS), {"cut_ns": moments, **facts}]


def before_a_cut(level: str, *moments_s: float, lost: set[int]) -> list[Event]:
    """One record at each moment; all came to ``s``; some are not there after a power cut at 10 s."""
    events: list[Event] = [cut(10, 12)]
    for offset, moment_s in enumerate(moments_s):
        moment_ns = int(moment_s * SECOND_NS)
        events += [
            ["try", "p", TOPIC, offset, offset + 1, None],
            ["ok", "p", TOPIC, offset, offset + 1, 0, offset, level, moment_ns],
            ["got", "s", "c0", TOPIC, 0, offset, "p", offset, None, True, False, moment_ns + 1],
            ["ack", "s", TOPIC, 0, offset],
        ]
        if offset not in lost:
            events.append(["log", TOPIC, 0, offset, "p", offset, None, True])
    return events


def kept(events: list[Event], level: str = "written", **expected: Any) -> Verdict:
    return judged(events, delivered_stays=True, levels={TOPIC: level}, one_owner=True, **expected)


def test_a_power_cut_takes_the_last_written_records_of_a_moment() -> None:
    verdict = kept(before_a_cut("written", 5, 9.5, 9.9, 10.1, lost={2, 3}))
    assert verdict.passed, verdict
    assert (verdict.statistics["taken_by_cuts"], verdict.statistics["cuts"]) == (2, 1)


@pytest.mark.parametrize(
    ("level", "moments_s", "lost"),
    [
        ("fsync", (5, 9.9, 9.95), {2}),  # synced
        ("written", (5, 8.9, 8.95), {2}),  # too old for the cut
        ("written", (5, 9.9, 12.5), {2}),  # after it
        ("written", (5, 9.8, 9.9), {1}),  # from the middle
    ],
)
def test_what_a_power_cut_may_not_take_is_found(
    level: str, moments_s: tuple[float, ...], lost: set[int]
) -> None:
    assert "lost" in kept(before_a_cut(level, *moments_s, lost=lost), level).counts


def test_a_power_cut_takes_what_a_killed_worker_left_while_nobody_has_opened_its_log_again() -> None:
    events = [kill("kill_worker", 7.05, 8), *before_a_cut("written", 5, 7, lost={1})]
    assert kept(events).passed
    events = [kill("kill_worker", 7.05, 8), *before_a_cut("written", 5, 7, 8.5, lost={1, 2})]
    assert {"lost", "vanished"} == set(kept(events).counts), (
        "acknowledged again: the log was open, and synced"
    )


def test_a_delivered_record_that_was_synced_does_not_vanish_in_a_power_cut() -> None:
    events = [one for one in before_a_cut("written", 5, 8, 9.9, lost={1}) if one[0] != "ok"]
    assert kept(events, acknowledged_min=0).counts["vanished"] == 1


def test_a_record_that_one_owner_stored_on_both_sides_of_a_power_cut_is_found() -> None:
    events = [*honest(), ["log", TOPIC, 0, 20, "p1", 2, None, True]]
    unused = {(TOPIC, 0): [(COUNT, 20)]}
    assert judged(events, unused=unused, one_owner=True).counts == {"repeated": 1}


def given_again(moment_s: float, *faults: Event) -> list[Event]:
    """Record 2 was acked, that was confirmed at 20 s, and it comes again."""
    events = honest()[:-1]
    confirmed = ["confirmed", "s", TOPIC, 0, [1, 2], 20 * SECOND_NS]
    again = ["got", "s", "c1", TOPIC, 0, 2, "p0", 1, None, True, True, int(moment_s * SECOND_NS)]
    return [*events, *faults, confirmed, again]


def kill(name: str, start_s: float, end_s: float, **facts: Any) -> Event:
    return ["fault", name, 1, int(start_s * SECOND_NS), int(end_s * SECOND_NS), facts]


ALONE = {"alone": frozenset({"s"})}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (given_again(20.1), ALONE),
        (given_again(20.1, kill("kill_all", 0.0, 0.0)), ALONE),  # before it came
        (given_again(60), {}),  # nobody holds a redelivery as long
        (given_again(25, kill("kill_all", 21, 23)), {}),
        (given_again(25, cut(21, 23, ended="all")), {}),
        (given_again(90, kill("kill_broker", 60, 70)), ALONE | {"ack_copy_s": 20.0}),
        (given_again(60, kill("kill_all", 18, 19)), ALONE),  # nobody had it when the ack was sent once more
    ],
)
def test_a_record_that_comes_after_its_ack_was_confirmed_is_found(
    events: list[Event], expected: dict[str, Any]
) -> None:
    assert judged(events, **expected).counts == {"given twice": 1}


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (given_again(19.9), ALONE),  # before it was confirmed
        (given_again(20.1), {}),  # another consumer had it already
        (given_again(25, kill("kill_worker", 21, 23)), {}),  # and is connected to another worker
        (given_again(60, kill("kill_broker", 25, 50)), ALONE | {"ack_copy_s": 20.0}),
    ],
)
def test_a_record_that_was_on_its_way_is_not_given_twice(
    events: list[Event], expected: dict[str, Any]
) -> None:
    verdict = judged(events, **expected)
    assert verdict.passed, verdict


def test_what_a_broker_says_that_it_left_out_is_found() -> None:
    counts = {"expired": 0, "damaged": 0, "lag": 0}
    assert judged([*honest(), ["stands", "s", TOPIC, 0, counts]]).passed
    verdict = judged([*honest(), ["stands", "s", TOPIC, 0, counts | {"expired": 700}]])
    assert verdict.counts == {"passed over": 1}
    assert "expired 700" in verdict.examples[0]
