"""``danube-admin namespaces``."""

from __future__ import annotations

import json

import click

from danube.cli.upstream.admin_line import AdminLine
from danube.cli.upstream.missing import check_namespace_exists
from danube.cli.upstream.root import json_output, say, show_json
from danube.server.proto import DanubeAdmin_pb2 as pb


@click.group()
def namespaces() -> None:
    """List, create and delete namespaces."""


@namespaces.command("topics")
@click.argument("namespace")
@json_output
@click.pass_obj
def topics(line: AdminLine, namespace: str, output: str | None) -> None:
    """List the topics of a namespace."""
    request = pb.NamespaceRequest(name=namespace)
    names = list(line.ask("NamespaceAdmin/GetNamespaceTopics", request, pb.TopicListResponse).topics)
    if not names:
        check_namespace_exists(line, namespace)
    if output:
        show_json(names)
    else:
        say(*(f"Topic: {name}" for name in names))


@namespaces.command("policies")
@click.argument("namespace")
@json_output
@click.pass_obj
def policies(line: AdminLine, namespace: str, output: str | None) -> None:
    """Show the limits that hold in a namespace; 0 is no limit."""
    request = pb.NamespaceRequest(name=namespace)
    found = json.loads(line.ask("NamespaceAdmin/GetNamespacePolicies", request, pb.PolicyResponse).policies)
    if output:
        show_json(found)
    else:
        say("Policies Configuration:", *(f"  {name}: {value}" for name, value in found.items()))


@namespaces.command("create")
@click.argument("namespace")
@click.pass_obj
def create(line: AdminLine, namespace: str) -> None:
    """Create a namespace."""
    request = pb.NamespaceRequest(name=namespace)
    done = line.ask("NamespaceAdmin/CreateNamespace", request, pb.NamespaceResponse)
    say(f"Namespace Created: {str(done.success).lower()}")


@namespaces.command("delete")
@click.argument("namespace")
@click.pass_obj
def delete(line: AdminLine, namespace: str) -> None:
    """Delete a namespace that holds no topics."""
    request = pb.NamespaceRequest(name=namespace)
    done = line.ask("NamespaceAdmin/DeleteNamespace", request, pb.NamespaceResponse)
    say(f"Namespace Deleted: {str(done.success).lower()}")
