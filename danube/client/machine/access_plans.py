"""Plans about access: roles, bindings, API keys, tokens, revocations, and who may do what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from danube.client.machine.paging import asked, page_of, whole_list
from danube.client.machine.reply import Plan
from danube.client.machine.session import Session
from danube.errors import InvalidArgument
from danube.limits import PAGE_ENTRIES_MAX

Row = dict[str, Any]


class AccessPlans:
    """Each method is a plan: it yields replies and returns the answer.

    Principals are texts such as ``service_account:orders``.  Lists take ``after``, ``limit`` and ``prefix``.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def _facts(self, op: str, **arguments: Any) -> Plan[Row]:
        return dict((yield self._session.admin(op, **arguments)))

    def roles(self, *, after: str = "", limit: int | None = None, prefix: str = "") -> Plan[list[Row]]:
        """Roles by name, built-in ones among them."""
        return (yield from whole_list(self._session, "roles", page_of(after, limit, prefix)))

    def put_role(self, name: str, permissions: list[str]) -> Plan[None]:
        """Make a role, or give it other permissions."""
        yield self._session.admin("put_role", name=name, permissions=permissions)

    def delete_role(self, name: str) -> Plan[None]:
        """Delete a role; bindings that name it give nothing by it any more."""
        yield self._session.admin("delete_role", repeatable=False, name=name)

    def bindings(
        self,
        scope: str | None = None,
        resource: str | None = None,
        *,
        after: str = "",
        limit: int | None = None,
        prefix: str = "",
    ) -> Plan[list[Row]]:
        """Bindings, all or of one scope (cluster, namespace, topic), or of one resource."""
        where = {} if scope is None else {"scope": scope}
        where |= {} if resource is None else {"resource": resource}
        return (yield from whole_list(self._session, "bindings", page_of(after, limit, prefix), **where))

    def put_binding(
        self, name: str, principal: str, roles: list[str], scope: str, resource: str = ""
    ) -> Plan[None]:
        """Give roles to a principal, on the cluster, a namespace, or a topic or schema subject."""
        kind, _, who = principal.partition(":")
        yield self._session.admin(
            "put_binding", id=name, principal_type=kind, principal_name=who, role_names=roles, scope=scope,
            resource_name=resource,
        )  # fmt: skip

    def delete_binding(self, name: str, scope: str, resource: str = "") -> Plan[None]:
        """Take back what a binding gives."""
        yield self._session.admin(
            "delete_binding", repeatable=False, id=name, scope=scope, resource_name=resource
        )

    def api_keys(self, *, after: str = "", limit: int | None = None, prefix: str = "") -> Plan[list[Row]]:
        """API keys by id, without their secrets, which the broker does not know."""
        return (yield from whole_list(self._session, "api_keys", page_of(after, limit, prefix)))

    def create_api_key(
        self, principal: str, *, ttl_s: int | None = None, name: str = "", description: str = ""
    ) -> Plan[Row]:
        """Make an API key; the answer's ``key`` is shown this once and never again."""
        return (yield from self._facts(
            "create_api_key", repeatable=False, principal=principal, ttl_s=ttl_s, id=name,
            description=description,
        ))  # fmt: skip

    def delete_api_key(self, name: str) -> Plan[None]:
        """Delete an API key by its id; connections that use it end."""
        yield self._session.admin("delete_api_key", repeatable=False, id=name)

    def revocations(self, *, after: str = "", limit: int | None = None, prefix: str = "") -> Plan[list[Row]]:
        """Credentials that were taken back, by kind and value."""
        return (yield from whole_list(self._session, "revocations", page_of(after, limit, prefix)))

    def revoke(self, kind: str, value: str, *, ttl_s: int | None = None, reason: str = "") -> Plan[Row]:
        """Take credentials back, by ``kind`` and ``value``.

        ``token``: one by its id (jti).  ``credential``: one by the hash that logs show.  ``principal``: all
        that it has now.  ``signing_key``: all tokens of a key.
        """
        given = {"kind": kind, "value": value, "ttl_s": ttl_s, "reason": reason}
        return (yield from self._facts("revoke", repeatable=False, **given))

    def delete_revocation(self, kind: str, value: str) -> Plan[None]:
        """Let revoked credentials be good again."""
        yield self._session.admin("delete_revocation", repeatable=False, kind=kind, value=value)

    def issue_token(self, principal: str = "", *, ttl_s: int | None = None) -> Plan[Row]:
        """Have the broker sign a token, for the caller itself or, as an administrator, for another."""
        return (yield from self._facts("issue_token", repeatable=False, principal=principal, ttl_s=ttl_s))

    def audit(
        self, *, since: str = "", until: str = "", principal: str = "", operation: str = "",
        resource: str = "", outcome: str = "", newest: int = 0,
        after: str = "", limit: int | None = None, prefix: str = "",
    ) -> Plan[list[Row]]:  # fmt: skip
        """Audit lines of the connected broker's host, by time; ``newest``: so many of the last ones.

        ``since`` and ``until`` are UTC as in the lines, such as ``2026-11-28T08:00``.  ``prefix`` is of the
        resource.
        """
        wanted: dict[str, Any] = {
            "since": since, "until": until, "principal": principal, "operation": operation,
            "resource": resource, "outcome": outcome,
        }  # fmt: skip
        if not 0 <= newest <= PAGE_ENTRIES_MAX:
            raise InvalidArgument(f"newest must be from 0 to {PAGE_ENTRIES_MAX:,}, not {newest}")
        if newest:
            page = page_of("", newest, prefix)
            answer = yield self._session.admin("audit", **asked(page), **wanted, newest=True)
            return list(answer["entries"])
        return (yield from whole_list(self._session, "audit", page_of(after, limit, prefix), **wanted))

    def can(
        self,
        permission: str,
        resource: str = "",
        *,
        scope: str = "topic",
        principal: str = "",
        groups: Sequence[str] = (),
    ) -> Plan[Row]:
        """Whether a principal (default: the caller) has a permission on a resource, and by which binding.

        ``groups``: names of groups that the principal is taken to be in; the broker knows those of callers.
        """
        return (yield from self._facts(
            "can", permission=permission, scope=scope, resource_name=resource, principal=principal,
            groups=list(groups),
        ))  # fmt: skip
