"""A click group whose commands are imported when they are called, not when they are listed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import click


class Entry(NamedTuple):
    """Location of a command (``module:name``, below danube.cli) and its line in the help."""

    place: str
    help: str

    @property
    def target(self) -> str:
        return f"danube.cli.{self.place}"


class LazyGroup(click.Group):
    """Commands by name from a table; aliases work and are not listed; a near miss is suggested."""

    def __init__(
        self,
        *args: Any,
        entries: Mapping[str, Entry] | None = None,
        aliases: Mapping[str, str] | None = None,
        **rest: Any,
    ) -> None:
        super().__init__(*args, **rest)
        self._entries = dict(entries or {})
        self._aliases = dict(aliases or {})

    def list_commands(self, context: click.Context) -> list[str]:
        return [*self._entries, *super().list_commands(context)]

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        name = self._aliases.get(name, name)
        entry = self._entries.get(name)
        if entry is None:
            return super().get_command(context, name)
        module, _, attribute = entry.target.partition(":")
        command: click.Command = getattr(import_module(module), attribute)
        return command

    def format_commands(self, context: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, entry.help) for name, entry in self._entries.items()]
        rows += [
            (name, self.commands[name].get_short_help_str(100)) for name in super().list_commands(context)
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def resolve_command(
        self, context: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if self.get_command(context, name) is None and not name.startswith("-"):
            from difflib import get_close_matches

            near = get_close_matches(name, [*self.list_commands(context), *self._aliases], n=1)
            hint = f" Did you mean {near[0]}?" if near else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", context)
        return super().resolve_command(context, args)


class Program(LazyGroup):
    """Runs a command and exits with its exit code, or with that of its error."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **extra: Any) -> NoReturn:
        words = list(sys.argv[1:] if args is None else args)
        extra["standalone_mode"] = False
        try:
            result = super().main(self.in_order(words), *rest, **extra)
        except BaseException as error:
            sys.exit(self.report(error, words))
        sys.exit(result if isinstance(result, int) else 0)

    def in_order(self, words: list[str]) -> list[str]:
        """The words as click wants them."""
        return words

    def report(self, error: BaseException, words: list[str]) -> int:
        """Tell about an error and return the exit code."""
        from danube.cli.terminal import failure

        return failure.report(error, as_json=failure.wants_json(words))
