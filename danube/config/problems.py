"""Texts of a configuration and what is wrong with them: where, and how it may be mended."""

from __future__ import annotations

from dataclasses import dataclass

Given = tuple[str, str, str]  # key, text and origin of a value, before it is parsed
Contradiction = tuple[str, str, str]  # the key to look at, what is wrong, and a hint


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with the configuration."""

    origin: str
    what: str
    hint: str = ""


def suggestion(wrong: str, known: list[str], cutoff: float = 0.6) -> str:
    """A did-you-mean for a misspelt word, or an empty text."""
    import difflib

    near = difflib.get_close_matches(wrong, known, n=1, cutoff=cutoff)
    return f"did you mean {near[0]}?" if near else ""
