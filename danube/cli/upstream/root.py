"""Common parts of the two compatibility commands: exit codes, channels, printing.

Their words, flags and output lines are those of the official commands, so that scripts written for
these keep working; see docs/compatibility.md.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import update_wrapper
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import click

from danube.cli.terminal.lazy import Program
from danube.cli.upstream.endpoint import Endpoint

Reply = TypeVar("Reply")
Command = Callable[..., Any]

HELP: Final = {"help_option_names": ["-h", "--help"], "max_content_width": 110}
EXIT_FAILED: Final = 1  # exit code of the official commands after any error of a call


class Stream(Protocol):
    """Messages of a streaming call."""

    def __iter__(self) -> Any: ...
    def cancel(self) -> None: ...


class Channel(Protocol):
    """Calls to one address; :class:`danube.load.links.grpc_client.GrpcChannel`, or a fake in tests."""

    def call(self, method: str, request: Any, reply: type[Reply], timeout_s: float | None) -> Reply: ...
    def stream(self, method: str, request: Any, reply: type[Any]) -> Stream: ...
    def close(self) -> None: ...


def _open(endpoint: Endpoint) -> Channel:
    from danube.cli.upstream.grpc_channel import open_channel

    return open_channel(endpoint)


@dataclass(frozen=True, slots=True)
class Outside:
    """Services of a command from outside click.  Tests put theirs here."""

    open: Callable[[Endpoint], Channel] = _open
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    sleep: Callable[[float], None] = time.sleep


class UpstreamRoot(Program):
    """Runs a command; errors are told on standard error and leave with 1, flags that cannot be read with 2.

    ``anywhere`` names options of the root that may also follow the subcommand.
    """

    anywhere: tuple[str, ...] = ()

    def report(self, error: BaseException, words: list[str]) -> int:
        from danube.cli.terminal import failure
        from danube.errors import DanubeError

        code = failure.report(error, as_json=False)
        return EXIT_FAILED if isinstance(error, DanubeError) else code

    def in_order(self, words: list[str]) -> list[str]:
        """The words with the options that may stand anywhere first."""
        front: list[str] = []
        others: list[str] = []
        rest = iter(words)
        for word in rest:
            if word == "--":
                return [*front, *others, word, *rest]
            if word in self.anywhere:
                front += [word, *([following] if (following := next(rest, None)) is not None else [])]
            elif word.partition("=")[0] in self.anywhere:
                front.append(word)
            else:
                others.append(word)
        return front + others


class Wrong(click.ClickException):
    """Fault that the official commands find after they have read their flags: exit code 1, not 2."""

    exit_code = EXIT_FAILED


_SCHEMA_TYPES: Final = "json_schema avro protobuf string bytes number json int64 int float double"
json_output = click.option("--output", type=click.Choice(["json"]), help="Print JSON.")  # else it prints text
SCHEMA_TYPE: Final = click.Choice(_SCHEMA_TYPES.split(), case_sensitive=False)


def content_of(file: Path) -> bytes:
    """Return the content of a file; raises Wrong if it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise Wrong(f"{file}: {error.strerror or error}") from None


class Shown(NamedTuple):
    """Answer of a command that prints either JSON or lines."""

    value: Any
    lines: Iterable[str]


def upstream_command(
    group: click.Group, name: str, *parameters: Callable[[Any], Any]
) -> Callable[[Callable[..., Iterable[str] | Shown]], click.Command]:
    """Add a function to ``group`` that gets the group's object and its own parameters, named here or below.

    It returns the lines to print, or Shown if one of its parameters is ``--output``.
    """

    def decorate(work: Callable[..., Iterable[str] | Shown]) -> click.Command:
        def run(line: Any, /, output: str | None = None, **given: Any) -> None:
            found = work(line, **given)
            if isinstance(found, Shown) and output == "json":
                show_json(found.value)
                return
            for one in found.lines if isinstance(found, Shown) else found:
                say(one)

        command: Command = click.pass_obj(update_wrapper(run, work))
        for parameter in reversed(parameters):
            command = parameter(command)
        return group.command(name)(command)

    return decorate


def show_json(value: Any) -> None:
    """One JSON document, indented."""
    from danube.cli.terminal.output import line

    line(json.dumps(value, ensure_ascii=False, indent=2))


def say(*lines: str) -> None:
    """Lines to standard output, with control characters of strangers made visible."""
    from danube.cli.terminal.output import line
    from danube.host.telemetry import escape

    for one in lines:
        line(escape(one, characters_max=1 << 30))


def quoted(value: Any) -> str:
    """A text or a list of texts between quotes: ``["a", "b"]``."""
    return json.dumps(value, ensure_ascii=False)
