"""Problems of a configuration: where one is, and how it may be mended."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with the configuration."""

    origin: str
    what: str
    hint: str = ""


def suggestion(wrong: str, known: list[str]) -> str:
    """A did-you-mean for a misspelt word, or an empty text."""
    import difflib

    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""
