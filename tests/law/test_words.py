"""One word, one meaning: what docs/glossary.md calls *never* is nobody's name."""

from __future__ import annotations

import re

from tests.law.source import ROOT, defined_names, name_of, product_files

GLOSSARY = ROOT / "docs" / "glossary.md"
RAFT_WORDS = {"term", "leader", "follower", "candidate"}
# GetLeaderBroker, its command and a member's status keep the contract's names; the machine remembers the
# entry's term, and an error says that a member does not lead.
RAFT_SPEAKERS = (
    "danube/cluster/",
    "danube/core/cluster/agreement.py",
    "danube/core/cluster/commands.py",
    "danube/core/security/results.py",
    "danube/errors.py",
    "danube/server/services/broker_admin.py",
    "danube/cli/upstream/brokers.py",
)

# (file prefix, word): why this one place may use it.
ALLOWED: dict[tuple[str, str], str] = {
    ("danube/cli/records/consume.py", "sub"): "--sub-type is the flag of the upstream command line",
}


def words_of(identifier: str) -> list[str]:
    """The lower-case words of a snake_case or CamelCase name."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", identifier)
    return [word.lower() for word in spaced.split("_") if word]


def never_words() -> set[str]:
    """The last column of the glossary's tables: words between backquotes."""
    rows = [line for line in GLOSSARY.read_text().splitlines() if line.startswith("| ")]
    return {word for row in rows for word in re.findall(r"`([a-z]+)`", row.rstrip("| ").rsplit("|", 1)[-1])}


def allowed(file: str, word: str) -> bool:
    return any(file.startswith(prefix) and word == one for prefix, one in ALLOWED)


def test_the_glossary_is_read() -> None:
    assert {"packet", "cfg", "mgr", "buf", "cnt", "sub", "msg"} <= never_words()


def test_no_name_uses_a_word_that_the_glossary_bans() -> None:
    never = never_words()
    found = {
        f"{file}:{line}: {identifier} ({word})"
        for file, path in ((name_of(path), path) for path in product_files())
        for identifier, line in defined_names(path)
        for word in words_of(identifier)
        if word in never and not allowed(file, word)
    }
    assert not found, "\n".join(sorted(found))


def test_raft_words_stay_with_raft() -> None:
    found = {
        f"{name_of(path)}:{line}: {identifier}"
        for path in product_files()
        if not name_of(path).startswith(RAFT_SPEAKERS)
        for identifier, line in defined_names(path)
        if RAFT_WORDS & set(words_of(identifier))
    }
    assert not found, "\n".join(sorted(found))


def test_booleans_are_adjectives() -> None:
    found = {
        f"{name_of(path)}:{line}: {identifier}"
        for path in product_files()
        for identifier, line in defined_names(path)
        if identifier.lstrip("_").startswith("is_")
    }
    assert not found, "\n".join(sorted(found))


def test_every_exception_is_still_needed() -> None:
    used = {
        (prefix, word)
        for prefix, word in ALLOWED
        for path in product_files()
        if name_of(path).startswith(prefix)
        for identifier, _ in defined_names(path)
        if word in words_of(identifier)
    }
    assert used == set(ALLOWED)
