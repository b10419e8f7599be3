"""Import paths that users have in their programs: wherever the modules lie, these stay."""

from __future__ import annotations

from importlib import import_module

import pytest

import danube

PATHS = [
    *(("danube", name) for name in danube.__all__),
    ("danube", "sync"),
    ("danube.sync", "connect"),
    ("danube.config", "load"),
    *(("danube.spark", name) for name in ("session", "read", "register", "validate", "replay", "compact")),
]


@pytest.mark.parametrize(("module", "name"), PATHS)
def test_a_public_name_is_found_where_documents_say(module: str, name: str) -> None:
    assert getattr(import_module(module), name) is not None


@pytest.mark.parametrize("module", ["danube", "danube.config", "danube.spark"])
def test_a_name_that_there_is_not_is_an_attribute_error(module: str) -> None:
    name = "no_such_name"
    with pytest.raises(AttributeError, match=name):
        getattr(import_module(module), name)


def test_the_export_job_is_found_where_spark_is() -> None:
    pytest.importorskip("pyspark")
    assert import_module("danube.spark").export.main is not None
