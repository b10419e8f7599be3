"""Rules about the product's own source that no linter knows."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.law.source import ROOT, dotted, name_of, nodes, product_files, tree

FILE_LINES_MAX = 800
FUNCTION_LINES_MAX = 70

# A ratchet: what is longer today, with its length.  A number here may only go down.
LONGER_FILES: dict[str, int] = {}
LONGER_FUNCTIONS: dict[str, int] = {}
FOLDER_FILES_MAX = 16  # a folder is read at a glance

CLOCK_CALLS = {
    "time.time",
    "time.time_ns",
    "datetime.now",
    "datetime.utcnow",
    "datetime.today",
    "datetime.datetime.now",
    "datetime.datetime.utcnow",
}
BANNED_CALLS = {
    "eval": "runs text as a program",
    "exec": "runs text as a program",
    "compile": "runs text as a program",
    "__import__": "hides a dependency from the import law",
    "yaml.load": "builds arbitrary objects; use yaml.safe_load",
    "tempfile.mktemp": "races; use mkstemp or mkdtemp",
    "mktemp": "races; use mkstemp or mkdtemp",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
}
BANNED_IMPORTS = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "telnetlib"}
MODULE_NAMES_BANNED = {
    "util",
    "utils",
    "helper",
    "helpers",
    "common",
    "manager",
    "handler",
    "base",
    "misc",
    "data",
    "info",
}


def offences(found: Iterator[str]) -> None:
    listed = sorted(found)
    assert not listed, "\n".join(listed)


def calls() -> Iterator[tuple[Path, ast.Call, str]]:
    for path, node in nodes():
        if isinstance(node, ast.Call):
            yield path, node, dotted(node.func)


def test_there_is_source_to_check() -> None:
    assert len(product_files()) > 10


def test_nothing_prints_but_the_cli() -> None:
    offences(
        f"{name_of(path)}:{call.lineno}: print"
        for path, call, name in calls()
        if name == "print" and not name_of(path).startswith("danube/cli/")
    )


def test_wall_clock_is_read_in_one_place() -> None:
    offences(
        f"{name_of(path)}:{call.lineno}: {name}"
        for path, call, name in calls()
        if name in CLOCK_CALLS and name_of(path) != "danube/host/clock.py"
    )


def test_no_banned_call() -> None:
    offences(
        f"{name_of(path)}:{call.lineno}: {name}: {BANNED_CALLS[name]}"
        for path, call, name in calls()
        if name in BANNED_CALLS
    )


def test_no_process_is_started_through_a_shell() -> None:
    offences(
        f"{name_of(path)}:{call.lineno}: shell=True"
        for path, call, _ in calls()
        for keyword in call.keywords
        if keyword.arg == "shell"
        and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
    )


def test_no_banned_import() -> None:
    def found() -> Iterator[str]:
        for path, node in nodes():
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                if name.split(".")[0] in BANNED_IMPORTS:
                    yield f"{name_of(path)}:{node.lineno}: {name}"  # type: ignore[attr-defined]

    offences(found())


def test_no_assert_in_the_product() -> None:
    # ``python -O`` removes assert; an invariant is ``if not ...: broken(...)``.
    offences(f"{name_of(path)}:{node.lineno}" for path, node in nodes() if isinstance(node, ast.Assert))


def test_no_handler_hides_a_broken_invariant() -> None:
    def found() -> Iterator[str]:
        for path, node in nodes():
            if not isinstance(node, ast.ExceptHandler):
                continue
            broad = node.type is None or dotted(node.type) == "BaseException"
            raises = any(isinstance(inner, ast.Raise) for inner in ast.walk(node))
            uses = node.name is not None and any(
                isinstance(inner, ast.Name) and inner.id == node.name for inner in ast.walk(node)
            )
            reports = any(dotted(inner) == "traceback.print_exc" for inner in ast.walk(node))
            if broad and not raises and not uses and not reports:
                yield f"{name_of(path)}:{node.lineno}: catches everything and drops it"

    offences(found())


def test_every_module_says_what_it_is() -> None:
    offences(
        name_of(path)
        for path in product_files()
        if path.stat().st_size and ast.get_docstring(tree(path)) is None and path.name != "__main__.py"
    )


def test_modules_are_nouns() -> None:
    offences(name_of(path) for path in product_files() if path.stem in MODULE_NAMES_BANNED)


def function_lines() -> Iterator[tuple[str, int]]:
    """(file:function, lines of its body without the docstring)."""
    for path, node in nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            count = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            yield f"{name_of(path)}:{node.name}", count


def test_files_stay_short() -> None:
    lengths = {name_of(path): len(path.read_text().splitlines()) for path in product_files()}
    offences(
        f"{name}: {count} lines, at most {LONGER_FILES.get(name, FILE_LINES_MAX)}"
        for name, count in lengths.items()
        if count > LONGER_FILES.get(name, FILE_LINES_MAX)
    )
    offences(
        f"{name}: take it off the ratchet" for name in LONGER_FILES if lengths.get(name, 0) <= FILE_LINES_MAX
    )


def test_folders_stay_small() -> None:
    counts = Counter(name_of(path.parent) for path in product_files() if path.name != "__init__.py")
    offences(
        f"{name}: {count} files, at most {FOLDER_FILES_MAX}"
        for name, count in counts.items()
        if count > FOLDER_FILES_MAX
    )


def test_functions_stay_short() -> None:
    lengths = dict(function_lines())
    offences(
        f"{name}: {count} lines, at most {LONGER_FUNCTIONS.get(name, FUNCTION_LINES_MAX)}"
        for name, count in lengths.items()
        if count > LONGER_FUNCTIONS.get(name, FUNCTION_LINES_MAX)
    )
    offences(
        f"{name}: take it off the ratchet"
        for name in LONGER_FUNCTIONS
        if lengths.get(name, 0) <= FUNCTION_LINES_MAX
    )


@pytest.mark.parametrize(
    "name", ["LICENSE", "README.md", "CHANGELOG.md", "CONTRIBUTING.md", "danube/py.typed"]
)
def test_the_repository_has_what_a_newcomer_looks_for(name: str) -> None:
    assert (ROOT / name).is_file()
