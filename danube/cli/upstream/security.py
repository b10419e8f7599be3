"""``danube-admin security``: roles and bindings; tokens are in their own module."""

from __future__ import annotations

from typing import Any

import click

from danube.cli.upstream.admin_line import AdminLine
from danube.cli.upstream.root import Command, json_output, say, show_json
from danube.cli.upstream.tokens import tokens
from danube.server.proto import DanubeAdmin_pb2 as pb


@click.group()
def security() -> None:
    """Roles, bindings and tokens."""


security.add_command(tokens)


@security.group("roles")
def roles() -> None:
    """Named sets of permissions."""


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


@roles.command("create")
@click.argument("name")
@click.option("--permissions", required=True, help="Separated by commas, for example Produce,Lookup.")
@click.pass_obj
def create_role(line: AdminLine, name: str, permissions: str) -> None:
    """Create a role, or replace the one of this name."""
    role = pb.RoleDefinition(name=name, permissions=_words(permissions))
    done = line.ask("SecurityAdmin/CreateRole", pb.CreateRoleRequest(role=role), pb.CreateRoleResponse)
    say(f"Role '{name}' created: {str(done.success).lower()}")


@roles.command("get")
@click.argument("name")
@json_output
@click.pass_obj
def get_role(line: AdminLine, name: str, output: str | None) -> None:
    """Show a role."""
    found = line.ask("SecurityAdmin/GetRole", pb.GetRoleRequest(name=name), pb.GetRoleResponse).role
    if output:
        show_json(_role(found))
    else:
        _tell_role(found)


@roles.command("list")
@json_output
@click.pass_obj
def list_roles(line: AdminLine, output: str | None) -> None:
    """List the roles."""
    found = line.ask("SecurityAdmin/ListRoles", pb.Empty(), pb.ListRolesResponse).roles
    if output:
        show_json([_role(one) for one in found])
    for one in () if output else found:
        _tell_role(one)


@roles.command("delete")
@click.argument("name")
@click.pass_obj
def delete_role(line: AdminLine, name: str) -> None:
    """Delete a role."""
    done = line.ask("SecurityAdmin/DeleteRole", pb.DeleteRoleRequest(name=name), pb.DeleteRoleResponse)
    say(f"Role '{name}' deleted: {str(done.success).lower()}")


def _role(role: pb.RoleDefinition) -> dict[str, Any]:
    return {"name": role.name, "permissions": list(role.permissions), "system": role.system}


def _tell_role(role: pb.RoleDefinition) -> None:
    say(f"Role '{role.name}'", f"  Permissions: {', '.join(role.permissions)}")
    say(f"  System: {str(role.system).lower()}")


@security.group("bindings")
def bindings() -> None:
    """Who holds which roles where."""


def _place_options(command: Command) -> Command:
    scope = click.option("--scope", required=True, help="cluster, namespace or topic.")
    resource = click.option(
        "--resource", default="", help="Namespace, or /namespace/topic; none for the cluster."
    )
    return scope(resource(command))


@bindings.command("create")
@click.argument("binding_id", metavar="ID")
@click.option("--principal-type", required=True)
@click.option("--principal-name", required=True)
@click.option("--roles", required=True, help="Separated by commas.")
@_place_options
@click.pass_obj
def create_binding(
    line: AdminLine,
    binding_id: str,
    principal_type: str,
    principal_name: str,
    roles: str,
    scope: str,
    resource: str,
) -> None:
    """Give roles to a principal."""
    binding = pb.BindingDefinition(
        id=binding_id,
        principal_type=principal_type,
        principal_name=principal_name,
        role_names=_words(roles),
        scope=scope,
        resource_name=resource,
    )
    request = pb.CreateBindingRequest(binding=binding)
    done = line.ask("SecurityAdmin/CreateBinding", request, pb.CreateBindingResponse)
    say(f"Binding '{binding_id}' created: {str(done.success).lower()}")


@bindings.command("get")
@click.argument("binding_id", metavar="ID")
@_place_options
@json_output
@click.pass_obj
def get_binding(line: AdminLine, binding_id: str, scope: str, resource: str, output: str | None) -> None:
    """Show a binding."""
    request = pb.GetBindingRequest(scope=scope, resource_name=resource, binding_id=binding_id)
    found = line.ask("SecurityAdmin/GetBinding", request, pb.GetBindingResponse).binding
    if output:
        show_json(_binding(found))
    else:
        _tell_binding(found)


@bindings.command("list")
@click.option("--scope", help="cluster, namespace or topic; all where left out.")
@click.option("--resource", default="")
@json_output
@click.pass_obj
def list_bindings(line: AdminLine, scope: str | None, resource: str, output: str | None) -> None:
    """List the bindings of one place, or all."""
    if scope is None:
        found = line.ask("SecurityAdmin/ListAllBindings", pb.Empty(), pb.ListBindingsResponse).bindings
    else:
        request = pb.ListBindingsRequest(scope=scope, resource_name=resource)
        found = line.ask("SecurityAdmin/ListBindings", request, pb.ListBindingsResponse).bindings
    if output:
        show_json([_binding(one) for one in found])
    for one in () if output else found:
        _tell_binding(one)


@bindings.command("delete")
@click.argument("binding_id", metavar="ID")
@_place_options
@click.pass_obj
def delete_binding(line: AdminLine, binding_id: str, scope: str, resource: str) -> None:
    """Delete a binding."""
    request = pb.DeleteBindingRequest(scope=scope, resource_name=resource, binding_id=binding_id)
    done = line.ask("SecurityAdmin/DeleteBinding", request, pb.DeleteBindingResponse)
    say(f"Binding '{binding_id}' deleted: {str(done.success).lower()}")


def _binding(binding: pb.BindingDefinition) -> dict[str, Any]:
    names = ("id", "principal_type", "principal_name", "role_names", "scope", "resource_name")
    shown = {name: getattr(binding, name) for name in names}
    return shown | {"role_names": list(binding.role_names)}


def _tell_binding(binding: pb.BindingDefinition) -> None:
    where = f"{binding.scope} {binding.resource_name}".rstrip()
    say(f"Binding '{binding.id}'", f"  Principal: {binding.principal_type}:{binding.principal_name}")
    say(f"  Roles: {', '.join(binding.role_names)}", f"  Scope: {where}")
