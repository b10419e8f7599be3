"""``danube-admin``: administers a broker over gRPC with the words of the official command.

``danube-admin serve``: the web interface's server, which this release does not have.
"""

from __future__ import annotations

import click

from danube.cli.terminal.lazy import Entry
from danube.cli.upstream.admin_line import AdminLine
from danube.cli.upstream.endpoint import ADMIN_DEFAULT
from danube.cli.upstream.root import HELP, Outside, UpstreamRoot
from danube.errors import NotSupported

COMMANDS = {
    "serve": Entry("upstream.admin:serve", "Serve the web interface (not in this release)."),
    "cluster": Entry("upstream.brokers:cluster", "Members of the cluster."),
    "brokers": Entry("upstream.brokers:brokers", "List brokers, unload and activate them."),
    "namespaces": Entry("upstream.namespaces:namespaces", "List, create and delete namespaces."),
    "topics": Entry("upstream.topics:topics", "Topics, subscriptions and their policies."),
    "schemas": Entry("upstream.schemas:schemas", "Subjects of the schema registry."),
    "security": Entry("upstream.security:security", "Roles, bindings and tokens."),
}
ALIASES = {"server": "serve"}


class AdminRoot(UpstreamRoot):
    """``--endpoint`` may stand before or after the subcommand."""

    anywhere = ("--endpoint",)


@click.group(cls=AdminRoot, entries=COMMANDS, aliases=ALIASES, context_settings=HELP)
@click.option(
    "--endpoint",
    envvar="DANUBE_ADMIN_ENDPOINT",
    default=ADMIN_DEFAULT,
    show_default=True,
    show_envvar=True,
    help="The broker's admin port.",
)
@click.version_option(
    None, "-V", "--version", package_name="danube-broker", message="danube-admin %(version)s"
)
@click.pass_context
def root(context: click.Context, endpoint: str) -> None:
    """Administer a Danube broker over gRPC.

    \b
    Environment: DANUBE_ADMIN_ENDPOINT, DANUBE_ADMIN_TOKEN (or DANUBE_ADMIN_API_KEY), DANUBE_ADMIN_TLS,
    DANUBE_ADMIN_DOMAIN, DANUBE_ADMIN_CA, DANUBE_ADMIN_CERT, DANUBE_ADMIN_KEY.
    Results go to standard output, everything else to standard error.
    """
    outside = context.obj if isinstance(context.obj, Outside) else Outside()
    line = AdminLine(outside, endpoint)
    context.obj = line
    context.call_on_close(line.close)


def main() -> None:
    """Entry point of the installed command."""
    root(prog_name="danube-admin")


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
def serve() -> None:
    """Serve the web interface (not in this release)."""
    raise NotSupported(
        "danube-admin serve is not in this release",
        why="the broker has no web interface yet",
        hint="use danube-admin's other commands, or `danube status` and `danube topics describe`",
    )
