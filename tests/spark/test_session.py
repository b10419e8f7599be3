"""What ``danube.spark.session`` decides, and what it leaves as others have decided it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyspark")

from danube.spark import env, session


def test_a_session_of_this_process_is_taken_as_it_is(spark: Any) -> None:
    """As in a notebook: Danube's source becomes known, and nothing else changes unless it is asked for."""
    spark.conf.set("spark.sql.session.timeZone", "Europe/Vienna")
    try:
        again = session("another", **{"spark.sql.shuffle.partitions": 3})
        assert again.conf.get("spark.sql.session.timeZone") == "Europe/Vienna"
        assert again.conf.get("spark.sql.shuffle.partitions") == "3"
        assert again.sparkContext is spark.sparkContext and again.sparkContext.master == "local[2,2]"
    finally:
        spark.conf.set("spark.sql.session.timeZone", env.SETTINGS["spark.sql.session.timeZone"])
        spark.conf.set("spark.sql.shuffle.partitions", 1)


def test_the_settings_of_a_new_session(spark: Any) -> None:
    own = {"spark.driver.extraJavaOptions": spark.conf.get("spark.driver.extraJavaOptions")}
    for name, value in env.settings_of(own, lambda key: False).items():
        assert spark.conf.get(name) == value
    assert "UseSerialGC" in own["spark.driver.extraJavaOptions"], "beside the default ones"
    assert env.COLLECTOR not in spark.conf.get("spark.driver.defaultJavaOptions"), "a JVM wants one collector"
