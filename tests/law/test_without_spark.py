"""A test file that needs Spark is skipped where there is none, and does not stop the others."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.law.source import PRODUCT, ROOT, name_of, tree

TESTS = ROOT / "tests"


def module_name(path: Path) -> str:
    return name_of(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def imported(statement: ast.stmt) -> set[str]:
    """Modules that a statement at the top of a file loads; ``from a import b`` may load ``a.b``."""
    if isinstance(statement, ast.Import):
        return {alias.name for alias in statement.names}
    if isinstance(statement, ast.ImportFrom) and statement.module:
        return {statement.module, *(f"{statement.module}.{alias.name}" for alias in statement.names)}
    return set()


def without_spark(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and ast.unparse(statement).startswith(
        "pytest.importorskip('pyspark'"
    )


def needing_spark(bodies: dict[str, list[ast.stmt]]) -> set[str]:
    """Modules that cannot be loaded without pyspark, by themselves or by what they load."""
    loads = {name: set().union(*map(imported, body)) for name, body in bodies.items()}
    needing: set[str] = set()
    while True:
        found = {
            name
            for name, names in loads.items()
            if any(each in needing or each.partition(".")[0] == "pyspark" for each in names)
        }
        if found == needing:
            return needing
        needing = found


def unguarded(body: list[ast.stmt], needing: set[str]) -> list[str]:
    """What a test file loads of Spark before it asks whether Spark is there."""
    loaded: set[str] = set()
    for statement in body:
        if without_spark(statement):
            break
        loaded |= imported(statement)
    return sorted(each for each in loaded if each in needing or each.partition(".")[0] == "pyspark")


@pytest.fixture(scope="module")
def bodies() -> dict[str, list[ast.stmt]]:
    paths = [*PRODUCT.rglob("*.py"), *TESTS.rglob("*.py")]
    return {module_name(path): tree(path).body for path in paths}


def test_every_test_file_can_be_read_without_spark(bodies: dict[str, list[ast.stmt]]) -> None:
    needing = needing_spark(bodies)
    assert {"danube.spark.source.source", "danube.spark.jobs.spark_runner"} <= needing
    wrong = {
        name: early
        for name, body in bodies.items()
        if name.startswith("tests.") and name.rpartition(".")[2].startswith(("test_", "conftest"))
        if (early := unguarded(body, needing))
    }
    assert wrong == {}, "put pytest.importorskip('pyspark') before these imports"


def test_an_import_behind_the_question_is_allowed_and_one_before_is_not() -> None:
    asked = ast.parse("import pytest\npytest.importorskip('pyspark')\nimport pyspark\n").body
    assert unguarded(asked, set()) == []
    early = ast.parse("from danube.spark.jobs.export import export\nimport pytest\n").body
    assert unguarded(early, {"danube.spark.jobs.export.export"}) == ["danube.spark.jobs.export.export"]
