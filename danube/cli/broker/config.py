"""``danube config``: the settings of a broker started here, and the source of each."""

from __future__ import annotations

import json
import re
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from danube.cli.broker.here import config_file_option
from danube.cli.terminal.output import line, output_option, show
from danube.cli.terminal.services import Services

if TYPE_CHECKING:
    from danube.config.loading import Loaded

_PLAIN_YAML = re.compile(r"[A-Za-z0-9/][A-Za-z0-9/._-]*\Z")


@click.group()
def config() -> None:
    """Show and check the broker's configuration.

    Defaults, then the file, then the environment (DANUBE_SERVER__HOST), then flags; a later one wins.
    """


@config.command("show", short_help="Print every value.")
@config_file_option
@click.option("--origin", is_flag=True, help="Show the source of each value.")
@output_option("yaml", "table", "json", default="yaml")
@click.pass_obj
def show_config(services: Services, /, file: Path | None, origin: bool, output: str) -> None:
    """Print every value, as a file that `danube start --config` accepts."""
    from danube.config.loading import load, values

    loaded = load(file, services.environ)
    if output == "yaml":
        line(_as_yaml(loaded, origin))
        return
    rows = [
        {"key": key, "value": text, **({"origin": loaded.origins[key]} if origin else {})}
        for key, text in values(loaded.config).items()
    ]
    show(rows, output)


@config.command("check", short_help="Check a configuration and list every problem.")
@config_file_option
@output_option()
@click.pass_obj
def check(services: Services, /, file: Path | None, output: str) -> None:
    """Check file and environment; exit code 11 if there is any problem."""
    from danube.cli.broker.surroundings import warnings_about
    from danube.config.loading import load

    loaded = load(file, services.environ)
    given = sum(origin != "default" for origin in loaded.origins.values())
    show({"valid": True, "values_given": given, "warnings": warnings_about(loaded.config)}, output)


def _as_yaml(loaded: Loaded, origin: bool) -> str:
    from danube.config.loading import values

    lines: list[str] = []
    above: list[str] = []
    for key, text in values(loaded.config).items():
        *sections, name = key.split(".")
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(above, sections, strict=False)))
        lines += [f"{'  ' * at}{sections[at]}:" for at in range(same, len(sections))]
        above = sections
        entry = f"{'  ' * len(sections)}{name}: {_yaml_text(text)}"
        lines.append(f"{entry:<44} # {loaded.origins[key]}" if origin else entry)
    return "\n".join(lines)


def _yaml_text(text: str) -> str:
    return text if _PLAIN_YAML.match(text) else json.dumps(text)
