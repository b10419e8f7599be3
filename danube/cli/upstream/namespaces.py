"""``danube-admin namespaces``."""

from __future__ import annotations

import json

import click

from danube.cli.upstream.admin_line import AdminLine, check_namespace_exists
from danube.cli.upstream.root import Shown, json_output, upstream_command

_namespace = click.argument("namespace")


@click.group()
def namespaces() -> None:
    """List, create and delete namespaces."""


@upstream_command(namespaces, "topics", _namespace, json_output)
def topics(line: AdminLine, namespace: str) -> Shown:
    """List the topics of a namespace."""
    names = list(line.ask("NamespaceAdmin/GetNamespaceTopics", name=namespace).topics)
    if not names:
        check_namespace_exists(line, namespace)
    return Shown(names, [f"Topic: {name}" for name in names])


@upstream_command(namespaces, "policies", _namespace, json_output)
def policies(line: AdminLine, namespace: str) -> Shown:
    """Show the limits that hold in a namespace; 0 is no limit."""
    found = json.loads(line.ask("NamespaceAdmin/GetNamespacePolicies", name=namespace).policies)
    return Shown(found, ["Policies Configuration:", *(f"  {name}: {value}" for name, value in found.items())])


@upstream_command(namespaces, "create", _namespace)
def create(line: AdminLine, namespace: str) -> list[str]:
    """Create a namespace."""
    return line.tell_success("Namespace Created", "NamespaceAdmin/CreateNamespace", name=namespace)


@upstream_command(namespaces, "delete", _namespace)
def delete(line: AdminLine, namespace: str) -> list[str]:
    """Delete a namespace that holds no topics."""
    return line.tell_success("Namespace Deleted", "NamespaceAdmin/DeleteNamespace", name=namespace)
