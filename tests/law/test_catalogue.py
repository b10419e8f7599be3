"""The error catalogue is total and unique, and every limit has its place."""

from __future__ import annotations

import ast
import importlib
import pkgutil

import pytest

import danube
from danube import errors, limits
from tests.law.source import PRODUCT, dotted, name_of, product_files, tree

GRPC_STATUSES = {
    "CANCELLED",
    "UNKNOWN",
    "INVALID_ARGUMENT",
    "DEADLINE_EXCEEDED",
    "NOT_FOUND",
    "ALREADY_EXISTS",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNIMPLEMENTED",
    "INTERNAL",
    "UNAVAILABLE",
    "DATA_LOSS",
    "UNAUTHENTICATED",
}
FAMILIES = (errors.CallerError, errors.Unavailable, errors.Damage)
# Official clients retry on these, so a permanent error must not have one of them.
RETRIED_STATUSES = {"UNAVAILABLE", "DEADLINE_EXCEEDED"}
INSIDE_ONLY = {errors.RingDamaged}  # handled by the worker that meets it; no client ever sees it


def every_class(root: type[errors.DanubeError]) -> set[type[errors.DanubeError]]:
    return {root}.union(*(every_class(cls) for cls in root.__subclasses__()))


def test_every_error_has_a_code_of_its_own() -> None:
    declared = every_class(errors.DanubeError) - {errors.DanubeError}
    assert declared == set(errors.catalogue())
    codes = [cls.code for cls in errors.catalogue()]
    assert len(codes) == len(set(codes))
    assert errors.DanubeError.code not in codes


@pytest.mark.parametrize("cls", errors.catalogue(), ids=lambda cls: cls.__name__)
def test_every_error_maps_to_a_status_and_an_exit_code(cls: type[errors.DanubeError]) -> None:
    assert cls.status in GRPC_STATUSES
    assert 1 <= cls.exit_code <= 125
    family = [one for one in FAMILIES if issubclass(cls, one)]
    assert len(family) == 1, "an error belongs to exactly one family"
    assert cls.retryable == issubclass(cls, errors.Unavailable)
    assert cls.code // 100 == family[0].code // 100, "the code's hundreds name the family"
    if not cls.retryable and cls not in INSIDE_ONLY:
        assert cls.status not in RETRIED_STATUSES


@pytest.mark.parametrize("cls", errors.catalogue(), ids=lambda cls: cls.__name__)
def test_an_error_survives_the_wire(cls: type[errors.DanubeError]) -> None:
    back = errors.error_for_code(cls.code, "what", "why", "hint")
    assert type(back) is cls
    assert (back.what, back.why, back.hint) == ("what", "why", "hint")


def test_an_unknown_code_becomes_its_family() -> None:
    assert type(errors.error_for_code(1199, "later")) is errors.CallerError
    assert type(errors.error_for_code(1299, "later")) is errors.Unavailable
    assert type(errors.error_for_code(9999, "later")) is errors.DanubeError


def test_a_code_cannot_be_used_twice() -> None:
    with pytest.raises(TypeError, match="used twice"):
        type("Twice", (errors.CallerError,), {"code": errors.InvalidName.code})


def test_a_broken_invariant_passes_every_except_exception() -> None:
    assert not issubclass(errors.InvariantBroken, Exception)


def test_limits_agree() -> None:
    importlib.reload(limits)
    with pytest.raises(ImportError, match="disagree"):
        limits._agree(False, "for the test")


def test_limits_are_positive_numbers_and_all_are_used() -> None:
    names = {name for name in vars(limits) if name.isupper()}
    units = {"KIB", "MIB", "GIB"}
    assert all(getattr(limits, name) > 0 for name in names)
    source = {path: path.read_text() for path in product_files() if path.name != "limits.py"}
    unused = {name for name in names - units if not any(name in text for text in source.values())}
    assert not unused, f"a limit that nothing enforces: {sorted(unused)}"


def test_every_module_can_be_imported_alone() -> None:
    for found in pkgutil.walk_packages([str(PRODUCT)], f"{danube.__name__}."):
        if found.name.endswith("__main__") or ".proto" in found.name:
            continue
        if found.name == "danube.load.locustfile":  # it patches the process for gevent, as Locust wants it
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:  # Spark is an extra
            assert error.name is not None and error.name.split(".")[0] == "pyspark", error
            assert found.name.startswith("danube.spark."), found.name


def test_every_raised_error_is_from_the_catalogue() -> None:
    builtin = {"Exception", "RuntimeError", "BaseException"}
    found = [
        f"{name_of(path)}:{node.lineno}: raise {dotted(node.exc.func)}"
        for path in product_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and dotted(node.exc.func) in builtin
    ]
    assert not found, "\n".join(found)
