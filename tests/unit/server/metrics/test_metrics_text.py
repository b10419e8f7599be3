"""From an observation to Prometheus' text: every series, what is left out, and nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from danube.cluster.control.calls import ClusterStatus
from danube.core.partition.pending import HostMeasured, Pending
from danube.core.placement.duties import Placing
from danube.ipc.counters import Counter
from danube.server.metrics import table as metrics_table
from danube.server.metrics.text import Observed, ObservedMember, text

NOW_US = 2_000_000_000_000_000
SERIES_MAX = 10_000
Found = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def measured(**changed: Any) -> HostMeasured:
    fields: dict[str, Any] = {
        "topic_count": 3, "tiered": True, "unknown_partitions": 2, "pending": Pending(30, NOW_US - 9_000_000),
        "pending_by_topic": {
            "/a/b": Pending(10, NOW_US - 9_000_000), "/a/c": Pending(),
            "other": Pending(20, NOW_US - 1_500_000),
        },
    }  # fmt: skip
    return HostMeasured(**(fields | changed))


def member(**changed: Any) -> ObservedMember:
    status = ClusterStatus(
        self_node_id="1", raft_addr="h:1", cluster="c", cluster_id="x", role="leader", leader_id="1",
        current_term=7, last_applied=90, commit_index=91, version=5, voters={"1": "h:1", "2": "h:2"},
        learners={"3": "h:3"}, reached=["2"], placing=Placing(moving=4, cooling=5, imbalance=0.25),
    )  # fmt: skip
    return ObservedMember(status=msgspec.structs.replace(status, **changed), lease_s=1.5)


def observed(**changed: Any) -> Observed:
    counters = [{counter.name.lower(): (index + 1) * counter for counter in Counter} for index in range(2)]
    fields: dict[str, Any] = {
        "broker": "4711", "version": "1.2", "started_at_us": 1_500_000, "now_us": NOW_US,
        "counters": counters, "answered": frozenset({0}), "measured": measured(),
        "mover_alive": True, "mover_starts": 3, "store_answers": True, "upload_share": 0.3,
        "member": member(), "insecure": False,
    }  # fmt: skip
    return Observed(**(fields | changed))


def parsed(what: Observed) -> Found:
    """By name and labels without broker, which every series has."""
    found: Found = {}
    for family in text_string_to_metric_families(text(what, SERIES_MAX).decode()):
        for sample in family.samples:
            assert sample.labels.pop("broker") == "4711"
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, "a series comes once"
            found[key] = sample.value
    return found


def plain(found: Found, name: str) -> float | None:
    return found.get((name, ()))


def by_topic(found: Found, name: str) -> dict[str, float]:
    return {dict(labels)["topic"]: value for (one, labels), value in found.items() if one == name}


def test_what_is_not_off_the_host_is_told_by_topic_and_together() -> None:
    found = parsed(observed())
    assert by_topic(found, "danube_storage_pending_bytes") == {"/a/b": 10, "/a/c": 0, "other": 20}
    assert by_topic(found, "danube_storage_pending_seconds") == {"/a/b": 9, "/a/c": 0, "other": 1.5}
    assert plain(found, "danube_storage_host_pending_bytes") == 30
    assert plain(found, "danube_storage_host_pending_seconds") == 9
    assert plain(found, "danube_storage_unknown_partitions") == 2


def test_the_broker_and_its_workers() -> None:
    found = parsed(observed())
    assert found["danube_build_info", (("version", "1.2"),)] == 1
    assert plain(found, "danube_broker_start_time_seconds") == 1.5
    assert plain(found, "danube_broker_topics_owned") == 3
    assert plain(found, "danube_broker_records_in_total") == 3 * Counter.RECORDS_IN
    assert [found["danube_worker_up", (("worker", index),)] for index in "01"] == [1, 0]
    assert found["danube_worker_restarts_total", (("worker", "1"),)] == 2 * Counter.RESTARTS


@pytest.mark.parametrize(
    ("alive", "answers", "store_up"), [(True, True, 1), (True, False, 0), (False, True, 0), (False, False, 0)]
)
def test_a_store_is_up_only_by_the_word_of_a_living_mover(alive: bool, answers: bool, store_up: int) -> None:
    found = parsed(observed(mover_alive=alive, store_answers=answers))
    assert plain(found, "danube_storage_store_up") == store_up
    assert plain(found, "danube_storage_mover_up") == alive
    assert plain(found, "danube_storage_mover_restarts_total") == 2
    assert plain(found, "danube_storage_upload_share") == (0.3 if alive else None)


def test_what_is_not_known_is_not_there() -> None:
    found = parsed(observed(measured=measured(pending=None, topic_count=None, pending_by_topic={})))
    for name in ("broker_topics_owned", "storage_host_pending_bytes", "storage_host_pending_seconds"):
        assert plain(found, f"danube_{name}") is None
    assert by_topic(found, "danube_storage_pending_bytes") == {}
    silent = parsed(observed(measured=measured(tiered=None)))
    assert not any(name.startswith("danube_storage_") for name, _ in silent)


def test_local_storage_claims_nothing_of_what_is_off_the_host() -> None:
    found = parsed(observed(measured=measured(tiered=False)))
    storage = {name: value for (name, _), value in found.items() if name.startswith("danube_storage_")}
    assert storage == {"danube_storage_tiered": 0}


def of_the_cluster(found: Found) -> dict[str, float]:
    start = "danube_cluster_"
    return {name.removeprefix(start): found[name, labels] for name, labels in found if name.startswith(start)}


def test_a_member_and_what_the_leader_says_of_the_placing() -> None:
    found = parsed(observed())
    assert found["danube_cluster_members", (("kind", "voter"),)] == 2
    assert found["danube_cluster_members", (("kind", "learner"),)] == 1
    assert of_the_cluster(found) == {
        "controller_up": 1, "leads": 1, "leader_known": 1, "term": 7, "commit_index": 91,
        "applied_index": 90, "members": 1, "members_reached": 1, "lease_seconds": 1.5,
        "partitions_moving": 4, "partitions_cooling": 5, "imbalance": 0.25,
    }  # fmt: skip


def test_a_follower_and_a_silent_controller_tell_less() -> None:
    follower = of_the_cluster(parsed(observed(member=member(role="follower", leader_id="", placing=None))))
    assert (follower["leads"], follower["leader_known"]) == (0, 0)
    assert not {"partitions_moving", "partitions_cooling", "imbalance"} & set(follower)
    silent = of_the_cluster(parsed(observed(member=ObservedMember(status=None, lease_s=0.0))))
    assert silent == {"controller_up": 0, "lease_seconds": 0}
    assert not of_the_cluster(parsed(observed(member=None))), "no cluster"


def test_a_label_that_tries_to_be_a_line_is_escaped() -> None:
    topic = '/a/"} 1\ndanube_fake 1\\'
    found = parsed(observed(measured=measured(pending_by_topic={topic: Pending(7, NOW_US)})))
    assert by_topic(found, "danube_storage_pending_bytes") == {topic: 7}
    assert not any(name == "danube_fake" for name, _ in found)


def test_each_family_says_what_it_is() -> None:
    lines = text(observed(), SERIES_MAX).decode().splitlines()
    for family in metrics_table.FAMILIES:
        assert f"# HELP {family.name} {family.says}" in lines
        assert f"# TYPE {family.name} {family.kind}" in lines
        assert family.name.endswith("_total") == (family.kind == "counter")
    assert len({family.name for family in metrics_table.FAMILIES}) == len(metrics_table.FAMILIES)


def test_nothing_of_the_librarys_process_wide_metrics_is_exported() -> None:
    names = {name for name, _ in parsed(observed())}
    assert names == {family.name for family in metrics_table.FAMILIES}


def test_the_librarys_multiprocess_mode_is_not_used(tmp_path: Path) -> None:
    code = (
        "from tests.unit.server.metrics.test_metrics_text import observed, text\n"
        "assert b'danube_storage_pending_bytes' in text(observed(), 1_000)"
    )
    environ = {"PROMETHEUS_MULTIPROC_DIR": str(tmp_path / "shared"), "PATH": "/usr/bin:/bin"}
    (tmp_path / "shared").mkdir()
    root = Path(__file__).resolve().parents[4]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, env=environ, timeout=60)
    assert list((tmp_path / "shared").iterdir()) == []


def test_ten_times_as_many_topics_make_no_more_series_and_the_same_sums() -> None:
    many = {f"/default/topic-{number:06}": Pending(number, NOW_US - number) for number in range(1, 100_001)}
    found = parsed(observed(measured=measured(pending_by_topic=many)))
    assert len(found) <= SERIES_MAX
    by_bytes = by_topic(found, "danube_storage_pending_bytes")
    assert 4_900 < len(by_bytes) <= 5_000
    assert sum(by_bytes.values()) == sum(range(100_001))
    assert by_topic(found, "danube_storage_pending_seconds")["other"] == 0.1, "the oldest of them"
