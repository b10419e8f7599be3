"""Errors on standard error, as three lines or as JSON, and the exit code that goes with each."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from danube.errors import CallerError, ConnectionFailed, DanubeError, OperationTimeout, exit_code_of

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_OUTPUT_CLOSED = 141  # the exit code that a shell shows for a program that SIGPIPE ended


class OutputClosed(Exception):
    """The reader of standard output went away: ``danube consume ... | head``."""


class Terminated(BaseException):
    """SIGTERM arrived; like KeyboardInterrupt, no ``except Exception`` may swallow it."""


def wants_json(words: Sequence[str]) -> bool:
    """Whether the command line asks for JSON; read from the words, since parsing may have failed."""
    for index, word in enumerate(words):
        if word == "--":
            return False
        if word in ("-ojson", "-o=json", "--output=json"):
            return True
        if word in ("-o", "--output") and words[index + 1 : index + 2] == ["json"]:
            return True
    return False


def report(error: BaseException, *, as_json: bool) -> int:
    """Tell about an error and return the exit code; quiet for a closed pipe and for an interrupt."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else 1
    if isinstance(error, OutputClosed | BrokenPipeError):
        _forget_output()
        return EXIT_OUTPUT_CLOSED
    if isinstance(error, click.Abort) and isinstance(error.__cause__, EOFError):
        error = error.__cause__  # click takes any EOFError for the end of the user's input
    if isinstance(error, KeyboardInterrupt | click.Abort):
        return EXIT_INTERRUPTED
    if isinstance(error, Terminated):
        return EXIT_TERMINATED
    if isinstance(error, click.exceptions.Exit):
        return error.exit_code
    if isinstance(error, BaseExceptionGroup) and error.exceptions:
        return report(error.exceptions[0], as_json=as_json)
    if isinstance(error, click.ClickException):
        return _report_click(error, as_json)
    known = _as_danube_error(error)
    if known is None:
        _report_unexpected(error, as_json)
        return 1
    _write(known, as_json)
    return exit_code_of(known)


def error_object(error: DanubeError) -> dict[str, object]:
    """The documented JSON of an error."""
    body: dict[str, object] = {
        "code": error.code,
        "reason": type(error).__name__,
        "message": str(error),
        "hint": error.hint,
        "retryable": error.retryable,
    }
    problems = error.facts.get("problems")
    if problems:
        body["details"] = [{"where": one.origin, "what": one.what, "hint": one.hint} for one in problems]
    violations = _violations(error)
    if violations:
        body["details"] = [{name: getattr(one, name) for name in one.__struct_fields__} for one in violations]
    return {"error": body}


def _as_danube_error(error: BaseException) -> DanubeError | None:
    if isinstance(error, DanubeError):
        return error
    if isinstance(error, TimeoutError):
        return OperationTimeout(
            "the broker did not answer in time", hint="raise --timeout or look at the broker"
        )
    if isinstance(error, ConnectionError):
        return ConnectionFailed("the connection to the broker broke", why=str(error))
    return None


def _write(error: DanubeError, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(error_object(error)), err=True)
        return
    from danube.host.telemetry import escape

    click.echo(f"error: {escape(error.what)}", err=True)
    problems = error.facts.get("problems") or ()
    if len(problems) > 1:
        for one in problems:
            hint = f" ({one.hint})" if one.hint else ""
            click.echo(f"  {escape(one.origin)}: {escape(one.what)}{escape(hint)}", err=True)
    for violation in _violations(error):
        click.echo(f"  {escape(str(violation))}", err=True)
    if error.why:
        click.echo(f"  why: {escape(error.why)}", err=True)
    if error.hint:
        click.echo(f"  try: {escape(error.hint)}", err=True)


def _violations(error: DanubeError) -> list[Any]:
    """Return the violations of a schema that was refused."""
    if not error.facts.get("violations"):
        return []
    from danube.client.machine.schema_plans import violations_of

    return list(violations_of(error))


def _report_click(error: click.ClickException, as_json: bool) -> int:
    if as_json:
        body = {
            "code": CallerError.code,
            "reason": "UsageError",
            "message": error.format_message(),
            "hint": "see --help",
            "retryable": False,
        }
        click.echo(json.dumps({"error": body}), err=True)
    else:
        error.show()
    return error.exit_code


def _report_unexpected(error: BaseException, as_json: bool) -> None:
    import traceback

    found = DanubeError(
        "unexpected failure", why=f"{type(error).__name__}: {error}", hint="this is a bug; please report it"
    )
    if not as_json or os.environ.get("DANUBE_TRACEBACK"):
        traceback.print_exception(error, file=sys.stderr)
    _write(found, as_json)


def _forget_output() -> None:
    """Point standard output at nothing, so that the interpreter's last flush is quiet as well."""
    try:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)
    except (OSError, ValueError):
        pass  # standard output is no real file, so there is nothing to flush
