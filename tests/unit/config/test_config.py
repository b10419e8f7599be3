"""Configuration: what is accepted, who wins, and how a mistake is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from danube.cli.topics.topics import update
from danube.config import loading as config
from danube.config.file import FILE_BYTES_MAX
from danube.config.loading import BrokerConfig, load
from danube.config.problems import Problem
from danube.config.quantities import format_duration, format_size, parse_duration_ms, parse_size_bytes
from danube.core.batch.payloads import larger_record_hint
from danube.core.partition.policy import TopicPolicy
from danube.errors import ConfigInvalid, exit_code_of
from danube.host.capacity import workers_wanted
from danube.limits import MIB, RECORD_BYTES_MAX

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = ROOT / "docs" / "danube.yml"


def written(folder: Path, text: str) -> Path:
    path = folder / "danube.yml"
    path.write_text(text)
    return path


def problems_of(**sources: Any) -> list[Problem]:
    with pytest.raises(ConfigInvalid) as caught:
        load(**{"environ": {}, **sources})
    assert exit_code_of(caught.value) == 11
    return list(caught.value.facts["problems"])


def test_nothing_given_is_all_defaults() -> None:
    loaded = load(None, {"HOME": "/nowhere"}, {})
    assert loaded.config == BrokerConfig(data_dir=Path("/nowhere/.local/share/danube"))
    assert set(loaded.origins.values()) == {"default"}
    assert loaded.config.server.host == "127.0.0.1"
    assert loaded.config.server.native_port == 6660


def test_new_topics_take_payloads_of_4_mib_and_stored_policies_keep_their_meaning() -> None:
    assert load(None, {}, {}).config.topic_policy().max_record_bytes == 4 * MIB
    stored = msgspec.msgpack.encode({"reliable": True})  # the limit was 1 MiB when it was left out
    assert msgspec.msgpack.decode(stored, type=TopicPolicy).max_record_bytes == MIB


@pytest.mark.parametrize("size", [1, MIB, MIB + 1, 5 * MIB, RECORD_BYTES_MAX])
def test_the_advice_for_a_large_payload_is_a_command_that_helps(size: int) -> None:
    found = re.search(
        r"`danube topics update (\S+) --max-record-size (\S+)`", larger_record_hint(size, "/a/b")
    )
    assert found and found[1] == "/a/b"
    assert size <= parse_size_bytes(found[2]) <= RECORD_BYTES_MAX
    assert "--max-record-size" in {name for option in update.params for name in option.opts}
    assert "topics.max_record_size" in load(None, {}, {}).origins
    assert "topics.max_record_size" in larger_record_hint(size)


def test_no_setting_is_advised_where_none_helps() -> None:
    assert "--max-record-size" not in larger_record_hint(RECORD_BYTES_MAX + 1)


def test_the_default_data_directory_follows_xdg_and_home() -> None:
    assert config.default_data_dir({"XDG_DATA_HOME": "/x", "HOME": "/h"}) == Path("/x/danube")
    assert config.default_data_dir({"XDG_DATA_HOME": "relative", "HOME": "/h"}) == Path(
        "/h/.local/share/danube"
    )


def test_a_user_without_a_home_is_told_to_name_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ConfigInvalid) as caught:
        load(None, {})
    assert "HOME is not set" in caught.value.why and "--data-dir" in caught.value.hint
    assert load(None, {}, {"data_dir": "/d"}).config.data_dir == Path("/d"), "no home is needed then"
    assert load(None, {"HOME": "/h"}).config.data_dir == Path("/h/.local/share/danube")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(ConfigInvalid, match="has no home"):
        load(None, {}, {"data_dir": "~/data"})


@pytest.mark.parametrize("below", ["", "below/further"])
def test_a_data_directory_that_is_a_file_is_refused(below: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigInvalid, match="file is not a directory"):
        load(None, {}, {"data_dir": str(tmp_path / "file" / below)})
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    with pytest.raises(ConfigInvalid, match="gone is not a directory"):
        load(None, {}, {"data_dir": str(tmp_path / "gone")})


@pytest.mark.parametrize("host", ["", " "])
def test_an_empty_host_does_not_listen_everywhere(host: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"0\.0\.0\.0 and :: are every address"):
        load(None, {}, {"server.host": host})


def test_a_flag_wins_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "server:\n  native_port: 1\n  host: file\nlog:\n  level: error\n")
    environ = {"DANUBE_SERVER__NATIVE_PORT": "2", "DANUBE_SERVER__HOST": "environment", "PATH": "/bin"}
    loaded = load(file, environ, {"server.native_port": 3, "server.host": None})
    assert (loaded.config.server.native_port, loaded.config.server.host) == (3, "environment")
    assert loaded.config.log.level == "error"
    assert loaded.origins["server.native_port"] == "flag --native-port"
    assert loaded.origins["server.host"] == "environment DANUBE_SERVER__HOST"
    assert loaded.origins["log.level"] == f"{file}:5"
    assert loaded.origins["log.format"] == "default"


def test_every_problem_is_told_at_once_with_its_line_and_a_suggestion(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "server:\n  hots: x\n  native_port: 70000\nwal:\n  sync_interval: 10\nlog: 3\nworkers: [1]\n"
        "topics:\n  auto_create: maybe\n  auto_create: true\nlimits:\n",
    )
    environ = {"DANUBE_TOPICS__DURABILTY": "fsync", "DANUBE_DATADIR": "x", "DANUBE_SERVICE_URL": "other tool"}
    found = {
        problem.origin.removeprefix(f"{file}:"): problem
        for problem in problems_of(file=file, environ=environ)
    }
    assert found["2"].hint == "did you mean host?"
    assert "above the most allowed, 65535" in found["3"].what
    assert "not a duration" in found["5"].what
    assert "log is a section" in found["6"].what
    assert "not a list" in found["7"].what
    assert "not true or false" in found["9"].what
    assert "given twice" in found["10"].what
    assert found["environment DANUBE_TOPICS__DURABILTY"].hint == "did you mean DANUBE_TOPICS__DURABILITY?"
    assert found["environment DANUBE_DATADIR"].hint == "did you mean DANUBE_DATA_DIR?"
    assert len(found) == 9


@pytest.mark.parametrize("text", ["a: [", "\x00", "- 1\n- 2\n", "server: {host: }\n"])
def test_a_file_that_is_no_mapping_of_settings_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigInvalid, match=r"danube\.yml"):
        load(written(tmp_path, text), {}, {})


def test_a_missing_or_huge_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        load(tmp_path / "absent.yml", {}, {})
    with pytest.raises(ConfigInvalid, match="larger than"):
        load(written(tmp_path, "#" * (FILE_BYTES_MAX + 1)), {}, {})


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert set(load(written(tmp_path, "# nothing\n"), {}, {}).origins.values()) == {"default"}


def test_an_alias_bomb_costs_nothing(tmp_path: Path) -> None:
    levels = "".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]\n" for n in range(1, 40))
    assert problems_of(file=written(tmp_path, "l0: &l0 x\n" + levels))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"subscriptions.poison": "dead_letter"}, "no dead_letter_topic"),
        ({"subscriptions.base_redelivery_delay": "2m"}, "above max_redelivery_delay"),
        ({"data_dir": ""}, "is empty"),
        ({"server.host": "a\nb"}, "control characters"),
        ({"workers": "65"}, "most allowed, 64"),
        ({"workers": "-1"}, "least allowed"),
        ({"log.level": "loud"}, "not one of debug, info"),
        ({"limits.connections_max": "99999999999999999999999999"}, "not a whole number"),
    ],
)
def test_values_that_cannot_hold_are_refused(flags: dict[str, object], said: str) -> None:
    assert any(said in problem.what for problem in problems_of(flags=flags))


def test_a_setting_that_left_is_refused_with_the_reason(tmp_path: Path) -> None:
    (problem,) = problems_of(file=written(tmp_path, "server: {busy_poll_us: 2000}"))
    assert problem.what == "server.busy_poll_us cannot be had here" and problem.hint.startswith("remove it")


def test_a_relative_directory_belongs_to_who_wrote_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    assert load(written(tmp_path, "data_dir: data\n"), {}, {}).config.data_dir == tmp_path / "data"
    assert load(None, {"DANUBE_DATA_DIR": "tmp/x"}, {}).config.data_dir == Path("/tmp/x")


def test_the_reference_file_names_every_setting_with_its_default() -> None:
    # An absolute home directory stands in the defaults; the file says ~.
    loaded = load(REFERENCE, {}, {})
    assert all(origin.startswith(str(REFERENCE)) for origin in loaded.origins.values()), "a key is missing"
    given = config.values(loaded.config) | {"data_dir": ""}
    assert given == config.values(BrokerConfig()) | {"data_dir": ""}


def test_every_shown_value_is_read_back_as_itself(tmp_path: Path) -> None:
    flags = {"topics.retention_time": "90m", "wal.segment_size": "20MB", "data_dir": tmp_path, "workers": 3}
    loaded = load(None, {}, flags)
    environ = {config.environment_name(key): text for key, text in config.values(loaded.config).items()}
    assert load(None, environ, {}).config == loaded.config


def test_the_default_policy_holds_for_both_delivery_modes() -> None:
    plain = BrokerConfig()
    assert plain.topic_policy().durability == "written"
    assert plain.topic_policy(reliable=False).durability == "memory"
    assert plain.topic_policy(durability="memory").reliable is False
    assert plain.topic_policy(durability="fsync").reliable is True
    for policy in (plain.topic_policy(), plain.topic_policy(reliable=False)):
        policy.check()


def test_workers_follow_the_usable_cores_unless_told() -> None:
    assert BrokerConfig(workers=7).worker_count == 7
    assert BrokerConfig().worker_count == workers_wanted().value >= 1


@pytest.mark.parametrize(
    ("text", "value"),
    [("250ms", 250), ("5s", 5_000), ("1h", 3_600_000), ("7d", 604_800_000), ("1.5s", 1_500), ("0", 0)],
)
def test_durations_are_read(text: str, value: int) -> None:
    assert parse_duration_ms(text) == value


@pytest.mark.parametrize(
    ("text", "value"), [("64KiB", 65_536), ("10MB", 10_000_000), ("512", 512), ("1g", 10**9)]
)
def test_sizes_are_read(text: str, value: int) -> None:
    assert parse_size_bytes(text) == value


@pytest.mark.parametrize("text", ["", "5", "s", "-5s", "5 parsecs", "1e9s", "٣s", "9" * 400 + "d"])
def test_what_is_no_duration_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a duration"):
        parse_duration_ms(text)


@pytest.mark.parametrize("text", ["", "x", "5XB", "-1", "5iB", "nan", "9" * 400])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a size"):
        parse_size_bytes(text)


@given(st.integers(0, 2**40))
def test_a_shown_duration_or_size_is_read_back(value: int) -> None:
    assert parse_duration_ms(format_duration(value)) == value
    assert parse_size_bytes(format_size(value)) == value


# Metrics


@pytest.mark.parametrize(
    ("text", "port"), [("off", -1), (" OFF ", -1), ("0", 0), ("9040", 9040), ("65535", 65535)]
)
def test_metrics_are_off_unless_a_port_is_given(text: str, port: int) -> None:
    assert load(None, {}, {}).config.metrics.port == -1
    found = load(None, {"DANUBE_METRICS__PORT": text}, {})
    assert found.config.metrics.port == port
    shown = config.values(found.config)["metrics.port"]
    assert load(None, {}, {"metrics.port": shown}).config.metrics.port == port, "what is shown can be given"
    assert config.flag_name("metrics.port") == "--metrics-port"


@pytest.mark.parametrize("text", ["-1", "65536", "none", "", "true", "90.40"])
def test_a_port_that_is_none_is_refused(text: str) -> None:
    (problem,) = problems_of(environ={"DANUBE_METRICS__PORT": text})
    assert problem.what.startswith("metrics.port: ")


def test_where_the_upstream_broker_listens_is_taken_from_its_file(tmp_path: Path) -> None:
    text = "broker:\n  host: 0.0.0.0\n  ports: {client: 1, admin: 2, raft: 3, prometheus: 4}\n"
    found = load(written(tmp_path, text), {}, {})
    assert found.config.server.host == "0.0.0.0"
    assert (found.config.grpc.port, found.config.admin.port, found.config.metrics.port) == (1, 2, 4)
    assert found.origins["metrics.port"] == f"{tmp_path / 'danube.yml'}:3"
    without = load(written(tmp_path, "broker: {ports: {client: 1}}\n"), {}, {})
    assert without.config.metrics.port == -1, "without a port there are no metrics, as there"


def test_a_port_that_is_given_by_both_names_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "broker: {ports: {prometheus: 1}}\nmetrics: {port: 2}\n")
    (problem,) = problems_of(file=file)
    assert "metrics.port is given twice" in problem.what


def test_what_is_unknown_of_their_broker_section_is_told(tmp_path: Path) -> None:
    file = written(tmp_path, "broker: {ports: {prometeus: 1}}\n")
    (problem,) = problems_of(file=file)
    assert problem.what == "unknown key 'broker.ports.prometeus'" and "prometheus" in problem.hint


def test_a_member_of_a_cluster_can_be_reached_and_speaks_tls_whole_or_not_at_all() -> None:
    alone = load(None, {}, {}).config.cluster
    assert not alone.enabled and alone.name == "danube"
    flags: dict[str, object] = {
        "cluster.seed_nodes": "a:7650, b:7650,[::1]:7650",
        "cluster.raft_addr": "a:7650",
    }
    member = load(None, {}, flags).config.cluster
    assert member.enabled and member.seed_nodes == "a:7650,b:7650,[::1]:7650"
    (problem,) = problems_of(flags={"cluster.seed_nodes": "a:7650,b:7650"})
    assert "cannot be reached" in problem.what
    (problem,) = problems_of(flags={**flags, "cluster.cert_file": "/c", "cluster.key_file": "/k"})
    assert "ca_file is missing" in problem.what
    (problem,) = problems_of(flags={**flags, "cluster.seed_nodes": "a"})
    assert "is not a list of host:port" in problem.what
    (problem,) = problems_of(flags={**flags, "cluster.raft_addr": ""})
    assert "raft_addr is empty" in problem.what
    load(None, {}, {"cluster.seed_nodes": "127.0.0.1:7650,localhost:7651"})


def test_how_partitions_are_balanced_may_be_written_as_upstream_writes_it(tmp_path: Path) -> None:
    file = tmp_path / "danube.yml"
    file.write_text(
        "load_manager:\n  assignment_strategy: weighted_load\n  load_report_interval_seconds: 30\n"
        "  rebalancing:\n    enabled: true\n    aggressiveness: aggressive\n    check_interval_seconds: 60\n"
        "    max_moves_per_hour: 10\n"
    )
    balance = load(file, {}, {}).config.balance
    assert (balance.strategy, balance.automatic, balance.aggressiveness) == (
        "weighted_load",
        True,
        "aggressive",
    )
    assert balance.interval_ms == 60_000


def test_weights_of_a_load_are_names_and_numbers() -> None:
    balance = load(None, {}, {"balance.weights": " cpu = 0.5 ,count=1"}).config.balance
    assert balance.weight_by_measure == {"cpu": 0.5, "count": 1.0}
    for text, complaint in (
        ("disk=1", "there are count"),
        ("cpu", "is not a list"),
        ("cpu=-1", "is not a list"),
        ("cpu=0", "weighs nothing"),
        ("", "weighs nothing"),
    ):
        (problem,) = problems_of(flags={"balance.weights": text})
        assert complaint in problem.what
