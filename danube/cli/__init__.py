"""The ``danube`` command; each command is a module that is imported when it is called."""

from __future__ import annotations


def main() -> None:
    """Entry point of the installed command."""
    from danube.cli.root import root

    root(prog_name="danube")
