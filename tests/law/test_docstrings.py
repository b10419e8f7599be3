"""First lines of docstrings: a noun or an imperative, never a pronoun whose noun stands elsewhere."""

from __future__ import annotations

import ast
import re

from tests.law.source import name_of, nodes

PRONOUN = re.compile(r"(What|Who|It|They|That|The same|Nothing|Nobody|Those)\b")


def first_lines() -> list[tuple[str, str]]:
    """(where, first line) of each docstring of a module, a class or a function."""
    found = []
    for path, node in nodes():
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                where = f"{name_of(path)}:{getattr(node, 'lineno', 1)}"
                found.append((where, text.splitlines()[0]))
    return found


def test_docstrings_are_read() -> None:
    assert len(first_lines()) > 1000


def test_no_first_line_begins_with_a_pronoun() -> None:
    found = [f"{where}: {line}" for where, line in first_lines() if PRONOUN.match(line)]
    assert not found, "say the noun, or an imperative with its object:\n" + "\n".join(sorted(found))
