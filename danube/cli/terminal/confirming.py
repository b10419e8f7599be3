"""Confirmation by the user before records are lost."""

from __future__ import annotations

import click

from danube.cli.terminal.services import Services
from danube.errors import InvalidArgument

yes_option = click.option("-y", "--yes", is_flag=True, help="Do not ask.")


def confirm(services: Services, name: str, lost: str, yes: bool) -> None:
    """Request the name of the object to delete as confirmation; raises InvalidArgument without a terminal."""
    if yes:
        return
    if not services.can_ask():
        raise InvalidArgument(
            f"{lost}, and nobody confirmed it", why="there is no terminal to ask on", hint="add --yes"
        )
    click.echo(f"{lost}.", err=True)
    answer = click.prompt(f"Type {name} to go on", err=True, default="", show_default=False)
    if answer.strip() != name:
        raise InvalidArgument(
            "the names differ, so nothing was done", hint="type the whole name, or add --yes"
        )
