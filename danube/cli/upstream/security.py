"""``danube-admin security``: roles and bindings, and tokens that are signed with HS256 without a broker."""

from __future__ import annotations

import re
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import click

from danube.cli.upstream.admin_line import AdminLine
from danube.cli.upstream.calls import fields_of
from danube.cli.upstream.root import Shown, Wrong, json_output, upstream_command
from danube.core.security.principals import GIVEN_KINDS, Principal
from danube.host import clock
from danube.ids import check_label
from danube.server.proto import DanubeAdmin_pb2 as pb

if TYPE_CHECKING:
    from danube.host.credentials import Credentials

_TTL: Final = re.compile(r"([0-9]{1,12})([hd]?)\Z")
_SECONDS: Final = {"": 1, "h": 3_600, "d": 86_400}


def _credentials(secret: str) -> Credentials:
    """Check and sign with this secret; a short one is the broker's to refuse."""
    from danube.host.credentials import Credentials, secret_key

    return Credentials([secret_key("", secret.encode(), short_allowed=True)])


def read_ttl_s(text: str) -> int:
    """Seconds of ``8760h``, ``30d`` or ``3600``."""
    match = _TTL.match(text)
    if match is None or not int(match[1]):
        raise Wrong(f"{text!r} is no lifetime; write 8760h, 30d or a number of seconds")
    return int(match[1]) * _SECONDS[match[2]]


@click.group()
def tokens() -> None:
    """Make and check tokens, without a broker."""


_secret_option = click.option(
    "--secret-key", envvar="DANUBE_JWT_SECRET_KEY", required=True, show_envvar=True, help="The broker's key."
)


@upstream_command(tokens, "create")
@click.option("--subject", required=True, help="Name of the principal.")
@_secret_option
@click.option(
    "--ttl", type=read_ttl_s, default="8760h", show_default=True, help="Hours (h), days (d) or seconds."
)
@click.option(
    "--type", "principal_type", type=click.Choice(GIVEN_KINDS), default="service_account", show_default=True
)
@click.option("--issuer", default="danube-auth", show_default=True)
def create(_: Any, subject: str, secret_key: str, ttl: int, principal_type: str, issuer: str) -> list[str]:
    """Print a token, and nothing else."""
    check_label(subject, "principal")
    principal = Principal(principal_type, subject)
    return [_credentials(secret_key).sign(principal, ttl, clock.wall_us(), issuer=issuer)]


@upstream_command(tokens, "validate", click.option("--token", required=True), _secret_option)
def validate(_: Any, token: str, secret_key: str) -> list[str]:
    """Check a token's signature and lifetime."""
    from danube.cli.terminal.output import instant

    now_us = clock.wall_us()
    now_s, claims = now_us // 1_000_000, _credentials(secret_key).examine(token, now_us)
    return [
        "Token is valid.",
        f"  Subject: {claims['sub']}",
        f"  Principal type: {claims['principal_type']}",
        f"  Principal name: {claims['principal_name']}",
        f"  Issuer: {claims['iss']}",
        f"  Expires: {instant(claims['exp'] * 1_000_000)}",
        f"  Remaining: {max(0, claims['exp'] - now_s)} s",
    ]


@click.group()
def security() -> None:
    """Roles, bindings and tokens."""


security.add_command(tokens)


@security.group("roles")
def roles() -> None:
    """Named sets of permissions."""


def _words(text: str) -> list[str]:
    return [word for part in text.split(",") if (word := part.strip())]


@upstream_command(roles, "create")
@click.argument("name")
@click.option("--permissions", required=True, help="Separated by commas, for example Produce,Lookup.")
def create_role(line: AdminLine, name: str, permissions: str) -> list[str]:
    """Create a role, or replace the one of this name."""
    role = pb.RoleDefinition(name=name, permissions=_words(permissions))
    return line.tell_success(f"Role '{name}' created", "SecurityAdmin/CreateRole", role=role)


@upstream_command(roles, "get", click.argument("name"), json_output)
def get_role(line: AdminLine, name: str) -> Shown:
    """Show a role."""
    found = line.ask("SecurityAdmin/GetRole", name=name).role
    return Shown(_role(found), _told_role(found))


@upstream_command(roles, "list", json_output)
def list_roles(line: AdminLine) -> Shown:
    """List the roles."""
    found = line.ask("SecurityAdmin/ListRoles").roles
    return Shown([_role(one) for one in found], chain.from_iterable(map(_told_role, found)))


@upstream_command(roles, "delete", click.argument("name"))
def delete_role(line: AdminLine, name: str) -> list[str]:
    """Delete a role."""
    return line.tell_success(f"Role '{name}' deleted", "SecurityAdmin/DeleteRole", name=name)


def _role(role: pb.RoleDefinition) -> dict[str, Any]:
    return fields_of(role, "name", "permissions", "system")


def _told_role(role: pb.RoleDefinition) -> list[str]:
    permissions = ", ".join(role.permissions)
    return [f"Role '{role.name}'", f"  Permissions: {permissions}", f"  System: {str(role.system).lower()}"]


@security.group("bindings")
def bindings() -> None:
    """Roles given to principals."""


_binding_id = click.argument("binding_id", metavar="ID")
_scope = click.option("--scope", required=True, help="cluster, namespace or topic.")
_resource = click.option(
    "--resource", "resource_name", default="", help="Namespace, or /namespace/topic; none for the cluster."
)


@upstream_command(bindings, "create")
@_binding_id
@click.option("--principal-type", required=True)
@click.option("--principal-name", required=True)
@click.option("--roles", required=True, help="Separated by commas.")
@_scope
@_resource
def create_binding(line: AdminLine, binding_id: str, roles: str, **facts: Any) -> list[str]:
    """Give roles to a principal."""
    binding = pb.BindingDefinition(id=binding_id, role_names=_words(roles), **facts)
    return line.tell_success(
        f"Binding '{binding_id}' created", "SecurityAdmin/CreateBinding", binding=binding
    )


@upstream_command(bindings, "get", _binding_id, _scope, _resource, json_output)
def get_binding(line: AdminLine, **asked: Any) -> Shown:
    """Show a binding."""
    found = line.ask("SecurityAdmin/GetBinding", **asked).binding
    return Shown(_binding(found), _told_binding(found))


@upstream_command(bindings, "list")
@click.option("--scope", help="cluster, namespace or topic; all where left out.")
@click.option("--resource", "resource_name", default="")
@json_output
def list_bindings(line: AdminLine, scope: str | None, resource_name: str) -> Shown:
    """List the bindings of one place, or all."""
    if scope is None:
        found = line.ask("SecurityAdmin/ListAllBindings").bindings
    else:
        found = line.ask("SecurityAdmin/ListBindings", scope=scope, resource_name=resource_name).bindings
    return Shown([_binding(one) for one in found], chain.from_iterable(map(_told_binding, found)))


@upstream_command(bindings, "delete", _binding_id, _scope, _resource)
def delete_binding(line: AdminLine, binding_id: str, **place: Any) -> list[str]:
    """Delete a binding."""
    return line.tell_success(
        f"Binding '{binding_id}' deleted", "SecurityAdmin/DeleteBinding", binding_id=binding_id, **place
    )


def _binding(binding: pb.BindingDefinition) -> dict[str, Any]:
    names = ("id", "principal_type", "principal_name", "role_names", "scope", "resource_name")
    return fields_of(binding, *names)


def _told_binding(binding: pb.BindingDefinition) -> list[str]:
    return [
        f"Binding '{binding.id}'",
        f"  Principal: {binding.principal_type}:{binding.principal_name}",
        f"  Roles: {', '.join(binding.role_names)}",
        f"  Scope: {binding.scope} {binding.resource_name}".rstrip(),
    ]
