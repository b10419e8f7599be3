"""``danube-cli``: sends and receives messages over gRPC with the words of the official command."""

from __future__ import annotations

import click

from danube.cli.terminal.lazy import Entry
from danube.cli.upstream.root import HELP, Outside, UpstreamRoot

COMMANDS = {
    "produce": Entry("upstream.produce:produce", "Send messages to a topic."),
    "consume": Entry("upstream.consume:consume", "Receive messages of a topic."),
    "schema": Entry("upstream.schema:schema", "Subjects of the schema registry."),
}


@click.group(cls=UpstreamRoot, entries=COMMANDS, context_settings=HELP)
@click.version_option(None, "-V", "--version", package_name="danube-broker", message="danube-cli %(version)s")
@click.pass_context
def root(context: click.Context) -> None:
    """Send and receive messages over gRPC, and look at schemas."""
    context.obj = context.obj if isinstance(context.obj, Outside) else Outside()


def main() -> None:
    """Entry point of the installed command."""
    root(prog_name="danube-cli")
