"""Takes the first token back once an administrator has come; one for each worker.

Whichever worker admits a credential asks the rule (:mod:`danube.core.security.first_token`) and commits what
is due.  The revocation reaches all workers and brokers like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from danube.core.metadata.commands import Revoke
from danube.core.security.authority import Authority
from danube.core.security.first_token import may_live, taking_back
from danube.core.security.principals import BOOTSTRAP, Identity
from danube.errors import DanubeError
from danube.host import clock, telemetry

if TYPE_CHECKING:
    from danube.broker.audit.audit import Audit
    from danube.core.metadata.commands import Command, Outcome
    from danube.core.metadata.roles import Access

_log = telemetry.events("admission")
OPERATION: Final = "take_back_first_token"  # in the audit


class HandingOver:
    """Hears of each credential that is admitted."""

    def __init__(
        self,
        access: Callable[[], Access],
        authority: Authority,
        submit: Callable[[Command, Callable[[Outcome], None]], None],
        *,
        audit: Audit | None,
        refresh: Callable[[], None],
        committed: Callable[[], None],
        now_us: Callable[[], int] = clock.wall_us,
    ) -> None:
        """``refresh``: reads what others committed; ``committed``: tells them of what this worker has."""
        self._audit = audit
        self._access = access
        self._authority = authority
        self._submit = submit
        self._refresh = refresh
        self._committed = committed
        self._now_us = now_us
        self._waits = False  # for the outcome of a command

    def admitted(self, identity: Identity) -> None:
        """Commit what is due when this identity comes in.

        A failure refuses nobody: the next administrator who comes in tries again.
        """
        if self._waits or not (identity.principal == BOOTSTRAP or may_live(self._access())):
            return
        try:
            self._refresh()  # the binding of a new administrator may be some milliseconds old
            now_us = self._now_us()
            due = taking_back(self._access(), self._authority, identity, now_us)
            if due is None:
                return
            self._submit(Revoke(revocation=due, now_us=now_us), self._ended)
            self._waits = True
            _log.info("first tokens are taken back", why=due.reason, principal=str(identity.principal))
            if self._audit is not None:
                details = {"reason": due.reason, "before_us": due.before_us}
                self._audit.tell(identity, OPERATION, str(BOOTSTRAP), details=details)
        except DanubeError as error:
            _failed(error)

    def _ended(self, outcome: Outcome) -> None:
        self._waits = False
        if isinstance(outcome, DanubeError):
            _failed(outcome)
        else:
            self._committed()


def _failed(error: DanubeError) -> None:
    _log.limited("first tokens were not taken back", source="first token", why=str(error))
