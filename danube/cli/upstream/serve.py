"""``danube-admin serve``: the web interface's server, which this release does not have."""

from __future__ import annotations

import click

from danube.errors import NotSupported


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def serve() -> None:
    """Serve the web interface (not in this release)."""
    raise NotSupported(
        "danube-admin serve is not in this release",
        why="the broker has no web interface yet",
        hint="use danube-admin's other commands, or `danube status` and `danube topics describe`",
    )
