"""``danube cluster install-engine``: raftos into this Python, where Danube was not installed from a wheel."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Final

import click

from danube.cli.terminal.confirming import yes_option
from danube.cli.terminal.output import line, note
from danube.cli.terminal.services import Services
from danube.errors import InvalidArgument, Unavailable

PINNED: Final = Path(__file__).with_name("raftos.txt")  # its release and hash, for scripts too
MSGPACK: Final = "msgpack>=1,<2"


@click.command("install-engine", short_help="Install raftos, which a cluster over Raft needs.")
@yes_option
@click.pass_obj
def install_engine(services: Services, /, yes: bool) -> None:
    """Install raftos 0.2.6 (MIT) for this Python; its files are compared with a hash.

    A wheel of Danube holds it already.  What raftos itself asks for is left out: it cannot be installed any
    more, and only msgpack is needed.
    """
    from danube.cluster.raft import raftos_engine

    if not raftos_engine.MISSING:
        line(f"{raftos_engine.ORIGIN} is there already; nothing was done")
        return
    commands = _commands(PINNED)
    for command in commands:
        note(" ".join(command))
    note(f"{PINNED.name}: {PINNED.read_text().strip()}")
    if not yes and not services.can_ask():
        raise InvalidArgument("nobody confirmed it", why="there is no terminal to ask on", hint="add --yes")
    if not yes and not click.confirm("Run this?", err=True):
        raise InvalidArgument("nothing was installed")
    for command in commands:
        _run(command)
    line("raftos is installed; `danube start --seed-nodes ...` runs a member")


def _commands(file: Path) -> list[list[str]]:
    """By pip, or by uv in an environment that uv made without pip."""
    if find_spec("pip") is not None:
        install = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check"]
    elif uv := which("uv"):
        install = [uv, "pip", "install", "--python", sys.executable]
    else:
        raise Unavailable(
            "neither pip nor uv is there",
            hint="install one of them, or danube-broker[cluster] from its wheel",
        )
    commands = [[*install, "--no-deps", "--require-hashes", "--requirement", str(file)]]
    return commands if find_spec("msgpack") is not None else [[*install, MSGPACK], *commands]


def _run(command: list[str]) -> None:
    """Its output is the user's."""
    status = subprocess.run(command, check=False).returncode  # noqa: S603 - a fixed list, no shell
    if status:
        raise Unavailable(
            "raftos could not be installed",
            why=f"{Path(command[0]).name} left with status {status}; its lines are above",
            hint="the package index must be reachable, and the packages of this Python be yours to change",
        )
