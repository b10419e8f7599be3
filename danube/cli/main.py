"""The root command: which commands there are, and the one place where errors become exit codes.

``danube --help`` imports click and this module, nothing else; the help lines stand in the table.
"""

from __future__ import annotations

import os

import click

from danube.cli.terminal.lazy import Entry, Program
from danube.cli.terminal.services import Services

COMMANDS = {
    "start": Entry("broker.start:start", "Start a broker on this host."),
    "stop": Entry("broker.stop:stop", "Stop the broker of a data directory."),
    "reload": Entry("broker.stop:reload_certificates", "Let a broker load its certificates and keys again."),
    "status": Entry("broker.stop:status", "Show whether a broker runs, and its state."),
    "produce": Entry("records.produce:produce", "Send records to a topic."),
    "consume": Entry("records.consume:consume", "Receive records of a topic."),
    "topics": Entry("topics.topics:topics", "List, create, describe, update and delete topics."),
    "subscriptions": Entry(
        "topics.subscriptions:subscriptions", "List, describe, seek, unblock and delete subscriptions."
    ),
    "namespaces": Entry("topics.namespaces:namespaces", "Show and change namespaces and their policies."),
    "tenants": Entry("topics.namespaces:tenants", "Show and change tenants and their quotas."),
    "quotas": Entry("topics.namespaces:quotas", "Show how much of their quotas is used."),
    "cluster": Entry("broker.cluster:cluster", "Show and change the members of a cluster."),
    "brokers": Entry("broker.brokers:brokers", "Show, empty and balance the brokers of a cluster."),
    "storage": Entry("stored.storage:storage", "Show tiered storage; restore from an object store."),
    "schema": Entry("topics.schema:schema", "Register, compare and look up schemas."),
    "verify": Entry("stored.verify:verify", "Check stored data: every segment, manifest and object."),
    "inspect": Entry("stored.inspect:inspect", "Describe one stored file or object."),
    "spark": Entry("stored.spark:spark", "Validate, replay, compact and export stored history."),
    "bench": Entry("records.bench:bench", "Measure throughput and latency against a broker."),
    "load": Entry("records.load:load", "Load-test a broker with Locust and account for every record."),
    "audit": Entry("security.audit:audit", "Show, search and verify who asked for what."),
    "security": Entry("security.access:security", "Say who may do what; keys, tokens and revocations."),
    "doctor": Entry("security.doctor:doctor", "Check how well a running broker of this host is secured."),
    "certs": Entry("security.certs:certs", "Make, show and check certificates."),
    "context": Entry("security.context:context", "Keep brokers, and what they are shown, by name."),
    "login": Entry("security.context:login", "Store a token for the broker of a context."),
    "config": Entry("broker.config:config", "Show and check the broker's configuration."),
    "completion": Entry("completion:completion", "Print the completion script of a shell."),
    "version": Entry("version:version", "Print the version."),
}
_WITHOUT_CONTEXT = ("start", "stop", "context", "login", "completion", "version")
ALIASES = {"topic": "topics", "subscription": "subscriptions", "broker": "brokers", "schemas": "schema"}


@click.group(
    cls=Program,
    entries=COMMANDS,
    aliases=ALIASES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    invoke_without_command=True,
)
@click.option("--version", is_flag=True, help="Print the version and exit.")
@click.option("--context", "chosen", metavar="NAME", help="Ask the broker of this context.")
@click.pass_context
def root(context: click.Context, version: bool, chosen: str | None) -> None:
    """Danube, a message broker.

    \b
    Try it:
      danube start --detach
      danube produce hello -m "first record"
      danube consume hello --from earliest --count 1
      danube stop

    Data goes to standard output, everything else to standard error.  Exit codes: 0 success, 2 usage,
    3 not found, 4 conflict, 6 broker unreachable, 7 timed out, 8 invalid data, 9 partial success,
    10 check found something, 11 configuration invalid, 12 storage problem, 130 interrupted.
    """
    context.obj = context.obj or Services()
    if version:
        from danube import __version__

        click.echo(f"danube {__version__}")
    elif context.invoked_subcommand is None:
        click.echo(context.get_help())
    elif context.invoked_subcommand not in _WITHOUT_CONTEXT:
        from danube.cli.terminal import contexts

        contexts.apply(os.environ, chosen)


def main() -> None:
    """Entry point of the installed command."""
    root(prog_name="danube")
