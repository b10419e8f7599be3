"""``danube security``: roles and bindings, keys, tokens and revocations, and who may do what."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import click

from danube.cli.terminal import arguments
from danube.cli.terminal.asking import Broker, broker_command
from danube.cli.terminal.lazy import Entry, LazyGroup
from danube.cli.terminal.output import instant, line, note, plain, show
from danube.cli.terminal.private_file import put_file
from danube.errors import InvalidArgument

ROLE_COLUMNS: Final = ("name", "permissions", "system")
BINDING_COLUMNS: Final = ("id", "principal", "role_names", "scope", "resource_name")
KEY_COLUMNS: Final = ("id", "principal", "created_us", "expires_us", "description")
REVOCATION_COLUMNS: Final = ("kind", "value", "before_us", "end_us", "reason")
EXIT_DENIED: Final = 5
KINDS: Final = ("user", "service_account")
_name = click.argument("name", metavar="NAME")
_principal = click.argument("principal", metavar="PRINCIPAL")
_ttl = click.option("--ttl", type=arguments.duration_ms, help="How long it is good: 12h, 30d.")
_file = click.option(
    "--file",
    "path",
    type=click.Path(path_type=Path),
    help="Write it there (mode 0600) instead of printing it.",
)


COMMANDS = {
    "init": Entry("broker.secured:init", "Make keys, certificates and the first token."),
}


@click.group(cls=LazyGroup, entries=COMMANDS)
def security() -> None:
    """Say who may do what, and give out what proves who somebody is.

    \b
    danube security roles create writer Produce Lookup
    danube security bindings create app-writes service_account:app --role writer --on /default/orders
    danube security tokens issue service_account:app --file app.token
    danube security can service_account:app produce /default/orders

    PRINCIPAL is user:NAME or service_account:NAME, in a binding also group:NAME.  A resource is
    /namespace/topic, /namespace, or cluster.
    """


def _told(broker: Broker, found: Any) -> dict[str, Any]:
    """The object; for people with instants for microseconds, and nothing for never."""
    row: dict[str, Any] = plain(found)
    if broker.output == "json":
        return row
    times = {name: instant(value) if value else "" for name, value in row.items() if name.endswith("_us")}
    return row | times


def _rows(broker: Broker, found: list[Any]) -> list[dict[str, Any]]:
    return [_told(broker, one) for one in found]


def place_of(resource: str) -> tuple[str, str]:
    """Scope and name of a resource as a user writes it."""
    if resource in ("cluster", ""):
        return "cluster", ""
    if resource.startswith("/") and resource.count("/") == 1:
        return "namespace", resource[1:]
    return "topic", resource if "/" in resource else f"/default/{resource}"


# -- roles and bindings -------------------------------------------------------------------------------


@security.group(cls=LazyGroup)
def roles() -> None:
    """Named sets of permissions: Lookup, View, Produce, Consume, Replicate, Manage...; some are built in."""


@broker_command(roles, "list", "List the roles.", columns=ROLE_COLUMNS)
def list_roles(broker: Broker) -> Any:
    """List all roles, built-in ones among them."""
    return _rows(broker, broker.admin.roles())


@broker_command(roles, "create", "Make or change a role.")
@_name
@click.argument("permissions", nargs=-1, required=True, metavar="PERMISSION...")
def create_role(broker: Broker, name: str, permissions: tuple[str, ...]) -> Any:
    """Make a role, or give it other permissions."""
    broker.admin.put_role(name, list(permissions))
    return {"role": name, "permissions": list(permissions)}


@broker_command(roles, "delete", "Delete a role.", _name)
def delete_role(broker: Broker, name: str) -> Any:
    """Delete a role; bindings that name it give nothing by it any more."""
    broker.admin.delete_role(name)
    return {"deleted": name}


@security.group(cls=LazyGroup)
def bindings() -> None:
    """Roles that principals have, each on a topic, a namespace or the cluster."""


_on = click.option(
    "--on", "resource", required=True, metavar="RESOURCE", help="/namespace/topic, /namespace or cluster."
)


@broker_command(bindings, "list", "List the bindings.", columns=BINDING_COLUMNS)
def list_bindings(broker: Broker) -> Any:
    """List all bindings that the caller may see."""
    rows = _rows(broker, broker.admin.bindings())
    return [{**row, "principal": f"{row['principal_type']}:{row['principal_name']}"} for row in rows]


@broker_command(bindings, "create", "Give roles to a principal.")
@_name
@_principal
@click.option("--role", "role_names", multiple=True, required=True, help="May come several times.")
@_on
def create_binding(
    broker: Broker, name: str, principal: str, role_names: tuple[str, ...], resource: str
) -> Any:
    """Give roles to a principal; NAME is by what the binding is deleted again."""
    scope, where = place_of(resource)
    broker.admin.put_binding(name, principal, list(role_names), scope, where)
    return {"binding": name, "principal": principal, "roles": list(role_names), "on": resource}


@broker_command(bindings, "delete", "Delete a binding.", _name, _on)
def delete_binding(broker: Broker, name: str, resource: str) -> Any:
    """Take back what a binding gives; producers and consumers that live by it end."""
    scope, where = place_of(resource)
    broker.admin.delete_binding(name, scope, where)
    return {"deleted": name}


# -- keys, tokens, revocations ------------------------------------------------------------------------


@security.group(cls=LazyGroup)
def keys() -> None:
    """API keys: secrets that stand wherever a token may."""


@broker_command(keys, "list", "List the keys.", columns=KEY_COLUMNS)
def list_keys(broker: Broker) -> Any:
    """List the keys; nobody can show their texts again."""
    return _rows(broker, broker.admin.api_keys())


@broker_command(keys, "create", "Make a key.")
@_principal
@_ttl
@_file
@click.option("--id", "name", default="", help="By what it is deleted again; else one is made up.")
@click.option("--description", default="", help="What it is for.")
def create_key(
    broker: Broker, principal: str, ttl: int | None, path: Path | None, name: str, description: str
) -> Any:
    """Make a key and show it, this once.  Without --ttl it is good until it is deleted."""
    made = broker.admin.create_api_key(principal, ttl_s=_seconds(ttl), name=name, description=description)
    return _given_out(broker, _told(broker, made), "key", path)


@broker_command(keys, "delete", "Delete a key.", _name)
def delete_key(broker: Broker, name: str) -> Any:
    """Delete a key by its id; connections that use it end."""
    broker.admin.delete_api_key(name)
    return {"deleted": name}


@security.group(cls=LazyGroup)
def tokens() -> None:
    """Tokens that the broker signs."""


@broker_command(tokens, "issue", "Sign a token.")
@click.argument("principal", metavar="[PRINCIPAL]", default="")
@_ttl
@_file
def issue(broker: Broker, principal: str, ttl: int | None, path: Path | None) -> Any:
    """Have the broker sign a token and show it, this once.  Without a PRINCIPAL it is the caller's own.

    It is good for 24 hours for a user, 90 days for a service account, unless --ttl says otherwise.
    """
    made = broker.admin.issue_token(principal, ttl_s=_seconds(ttl))
    return _given_out(broker, _told(broker, made), "token", path)


def _seconds(ttl_ms: int | None) -> int | None:
    if ttl_ms is not None and ttl_ms < 1_000:
        raise InvalidArgument("a lifetime is a second at the least", hint="write 12h or 30d")
    return None if ttl_ms is None else ttl_ms // 1_000


def _given_out(broker: Broker, made: dict[str, Any], secret: str, path: Path | None) -> Any:
    """Show a secret or write it to a file; for people it stands alone on standard output."""
    if path is not None:
        put_file(path, f"{made.pop(secret)}\n".encode())
        return {**made, "file": str(path)}
    if broker.output == "json":
        return made
    line(made[secret])
    note(", ".join(f"{name} {value}" for name, value in made.items() if name != secret and value))
    return None


@broker_command(security, "revoke", "Take credentials back.")
@click.argument("kind", type=click.Choice(["token", "credential", "principal", "signing_key"]))
@click.argument("value")
@click.option("--reason", default="")
@_ttl
def revoke(broker: Broker, kind: str, value: str, reason: str, ttl: int | None) -> Any:
    """Take credentials back on every broker, and end what lives by them.

    \b
    danube security revoke token ID              a token by its id (jti)
    danube security revoke credential HASH       one by the hash that logs show
    danube security revoke principal user:ann    all that it has now; newer ones are good
    danube security revoke signing_key KID       all tokens of a key
    """
    return _told(broker, broker.admin.revoke(kind, value, ttl_s=_seconds(ttl), reason=reason))


@security.group(cls=LazyGroup)
def revocations() -> None:
    """Credentials that were taken back."""


@broker_command(revocations, "list", "List the revocations.", columns=REVOCATION_COLUMNS)
def list_revocations(broker: Broker) -> Any:
    """List what is revoked; a revocation is dropped when no credential can live that long any more."""
    return _rows(broker, broker.admin.revocations())


@broker_command(revocations, "delete", "Let credentials be good again.")
@click.argument("kind")
@click.argument("value")
def delete_revocation(broker: Broker, kind: str, value: str) -> Any:
    """Delete a revocation, by kind and value."""
    broker.admin.delete_revocation(kind, value)
    return {"deleted": f"{kind} {value}"}


# -- who may what -------------------------------------------------------------------------------------


@broker_command(security, "can", "Say whether a principal may do something, and why.")
@click.argument("principal")
@click.argument("permission")
@click.argument("resource", default="cluster")
@click.option("--group", "groups", multiple=True, help="As if it was in it.  May come several times.")
def can(broker: Broker, principal: str, permission: str, resource: str, groups: tuple[str, ...]) -> Any:
    """Say yes or no and why; exit code 5 for no.  The principal `me` is the caller.

    \b
    danube security can service_account:app produce /default/orders
    danube security can me ManageNamespace /default
    danube security can user:ann produce /default/orders --group writers
    """
    if principal != "me" and principal.partition(":")[0] not in KINDS:
        raise InvalidArgument(
            f"{principal[:80]!r} is no principal", hint="write user:NAME, service_account:NAME or me"
        )
    scope, name = place_of(resource)
    asked = "" if principal == "me" else principal
    found = plain(broker.admin.can(permission, name, scope=scope, principal=asked, groups=groups))
    if broker.output == "json":
        show(found, "json")
    else:
        line(f"{'yes' if found['allowed'] else 'no'}: {found['reason']}")
    return 0 if found["allowed"] else EXIT_DENIED
