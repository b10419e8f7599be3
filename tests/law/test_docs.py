"""Documents: links resolve, names exist, and nothing tells of one machine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.law.source import ROOT, name_of, repository_files

# Written in two halves so that this file does not find itself.
REGISTRIES = ["py" + "pi.org", "python" + "hosted.org", "conda" + ".anaconda.org", "registry." + "npmjs"]
MACHINE_PATHS = [r"/home" + r"/\w+/", r"/root" + r"/", r"/Users" + r"/\w+/", r"/work" + r"/\w+/"]
FORGE_PAGES = {"../../security/advisories/new"}  # above the files: the forge makes the page
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def documents() -> list[Path]:
    return [path for path in repository_files() if path.suffix == ".md"]


def texts() -> list[tuple[str, str]]:
    found = []
    for path in repository_files():
        try:
            found.append((name_of(path), path.read_text()))
        except UnicodeDecodeError:
            continue
    return found


def anchors(path: Path) -> set[str]:
    """Anchors that headings of a document make, as the usual renderers build them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_documents() -> None:
    assert {"README.md", "docs/README.md"} <= {name_of(path) for path in documents()}


def test_links_between_documents_resolve() -> None:
    broken = []
    for path in documents():
        for link in LINK.findall(re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)):
            if re.match(r"[a-z]+:", link) or link in FORGE_PAGES:
                continue
            file, _, anchor = link.partition("#")
            target = (path.parent / file).resolve() if file else path
            if not target.exists():
                broken.append(f"{name_of(path)}: {link}")
            elif anchor and target.suffix == ".md" and anchor not in anchors(target):
                broken.append(f"{name_of(path)}: {link} (no such heading)")
    assert not broken, "\n".join(broken)


def test_tests_that_documents_name_are_there() -> None:
    """``unit/wal/test_x.py::test_y`` is a test, and ``unit/wal/test_x.py`` a file of tests."""
    named = re.compile(
        r"`(?:tests/)?((?:unit|e2e|model|crash|golden|stories|law|compat|spark)/(?:[a-z0-9_]+/)*test_\w+\.py)(?:::(\w+))?`"
    )
    missing = []
    for path in documents():
        for file, test in named.findall(path.read_text()):
            target = ROOT / "tests" / file
            if not target.is_file() or (test and f"def {test}(" not in target.read_text()):
                missing.append(f"{name_of(path)}: {file}::{test}".removesuffix("::"))
    assert not missing, "\n".join(missing)


def test_every_document_is_reachable_from_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text()
    missing = [
        name_of(path)
        for path in (ROOT / "docs").rglob("*.md")
        if path.name != "README.md" and path.relative_to(ROOT / "docs").as_posix() not in index
    ]
    assert not missing, f"docs/README.md does not name {missing}"


@pytest.mark.parametrize("pattern", [re.escape(name) for name in REGISTRIES] + MACHINE_PATHS)
def test_no_file_names_a_registry_or_one_machine(pattern: str) -> None:
    found = [name for name, text in texts() if re.search(pattern, text)]
    assert not found, found


def test_decision_records_have_the_same_shape() -> None:
    records = sorted((ROOT / "docs" / "adr").glob("*.md"))
    assert records
    for path in records:
        text = path.read_text()
        assert re.match(r"# \d{4}: ", text), path
        for part in ("Status: ", "Date: ", "## Context", "## Decision", "## Consequences", "## Rejected"):
            assert part in text, f"{name_of(path)} lacks {part!r}"


def test_the_changelog_says_an_effect_in_two_lines_at_most() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    groups = {"Added", "Changed", "Fixed", "Performance", "Formats"}
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= groups
    entries = re.findall(r"^- .+(?:\n  .+)*", text, re.MULTILINE)
    assert entries
    long = [entry for entry in entries if entry.count("\n") > 1]
    assert not long, "\n".join(long)
    twice = {entry for entry in entries if entries.count(entry) > 1}
    assert not twice, twice
