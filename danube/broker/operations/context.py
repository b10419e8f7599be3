"""The context of operations: their objects, and their answers.

An operation takes plain values and answers with a value or an error, on the loop: at once, or after a command
was committed or a definition examined.  :mod:`danube.broker.routing.router` joins their tables.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from danube.cluster.control.cluster_log import ClusterLog
from danube.core.metadata.policies import fitting
from danube.core.metadata.quotas import check_auto_create, namespace_of
from danube.core.security.authority import EVERYBODY
from danube.core.security.principals import INTERNAL, Identity, Principal
from danube.errors import DanubeError, NotFound
from danube.ids import check_topic_name
from danube.schema.model import Checks, Compatibility

if TYPE_CHECKING:
    from danube.broker.operations.examinations import Examinations
    from danube.broker.operations.proposals import Proposals
    from danube.cluster.log.local_log import LocalLog
    from danube.core.metadata.commands import Command, Outcome, TopicRecord
    from danube.core.metadata.machine import Metadata
    from danube.core.partition.policy import TopicPolicy
    from danube.core.security import arguments as of

Answer = Callable[[Any], None]
"""Takes the value, or the DanubeError that stands for it."""

Operation = Callable[["Operations", Any, Answer], None]
"""Its second argument is the struct of its row in :mod:`danube.core.security.operations`."""
AskOwner = Callable[[str, str, dict[str, Any], Answer], None]


def proposing(view: Callable[[Any], Any] = lambda made: None) -> Operation:
    """The operation that commits its arguments, which are a command, and answers ``view`` of it."""

    def operation(operations: Operations, args: Command, answer: Answer) -> None:
        operations.propose(args, answer, view)

    return operation


def _no_audit(asked: of.AuditLines, answer: Answer) -> None:
    answer(NotFound("this broker writes no audit files", hint="set audit.mode: on, and start it again"))


class TokenSigner(Protocol):
    """Signs tokens (:mod:`danube.host.credentials`)."""

    def sign(self, principal: Principal, ttl_s: int, now_us: int, **claims: Any) -> str: ...


class Operations:
    """The operations of one worker, and their objects."""

    def __init__(
        self,
        metadata: LocalLog,
        proposals: Proposals,
        examinations: Examinations,
        *,
        refresh: Callable[[], None],
        metadata_changed: Callable[[], None],
        status: Callable[[], dict[str, Any]],
        default_policy: TopicPolicy,
        default_compatibility: Compatibility = Compatibility.BACKWARD,
        compatibility_checks: Checks = Checks.STRICT,
        store: Callable[[], dict[str, Any]] | None = None,
    ) -> None:
        """``store``: the condition of the object store; None where storage is local.

        The router sets ``ask_owner``, which carries out an operation at the owner of a partition (partition,
        op, args, answer).  The worker sets ``used_of``: what a namespace or tenant uses of its limits on
        rates and bytes, and where there is an audit ``audit_lines``.  Where access is controlled, it sets
        ``authority`` and ``signer``.
        """
        self.ask_owner: AskOwner
        self.identity = INTERNAL
        self.authority = EVERYBODY
        self.shows: Callable[[str], bool] | None = None  # of a list, by its key; None: everything
        self.signer: TokenSigner | None = None
        self.used_of: Callable[[str], dict[str, int]] = lambda whose: {}
        self.audit_lines: Callable[[of.AuditLines, Answer], None] = _no_audit
        self.refresh = refresh
        self.status = status
        self.examinations = examinations
        self.default_policy = default_policy
        self.default_compatibility = default_compatibility
        self.compatibility_checks = compatibility_checks
        self.store = store
        self.clustered = isinstance(metadata, ClusterLog)
        self.metadata = metadata
        self._proposals = proposals
        self._metadata_changed = metadata_changed

    def acting_for(self, identity: Identity, shows: Callable[[str], bool] | None = None) -> Operations:
        """Return these operations for one request; ``identity`` is who asks, and ``shows`` what he sees."""
        other = copy.copy(self)
        other.identity, other.shows = identity, shows
        return other

    @property
    def state(self) -> Metadata:
        """The metadata as this worker has read it."""
        return self.metadata.state

    def find_topic(self, name: str) -> TopicRecord | None:
        """Return the topic of a logical name, after reading what others committed; raises InvalidName."""
        check_topic_name(name)
        if (found := self.state.find_topic(name)) is not None:
            return found
        self.refresh()
        return self.state.find_topic(name)

    def topic(self, name: str) -> TopicRecord:
        """Like find_topic; raises TopicNotFound, with suggestions, where there is none."""
        return self.find_topic(name) or self.state.topic(name)

    def policy_of_new(self, topic: str) -> TopicPolicy:
        """The policy of a new topic that names none: the default one, as its namespace allows."""
        limits = self.state.quotas.effective(namespace_of(topic))
        return self.default_policy if limits is None else fitting(self.default_policy, limits)

    def policy_of_used(self, topic: str) -> TopicPolicy:
        """Return the policy of one that is made by being used; raises TopicNotFound where that makes none."""
        check_auto_create(self.state, topic)
        return self.policy_of_new(topic)

    def propose(
        self, command: Command, answer: Answer, view: Callable[[Any], Any] = lambda made: None
    ) -> None:
        """Commit a command off the loop; answer with ``view`` of its outcome, or the error of either."""

        def committed(outcome: Outcome) -> None:
            self._metadata_changed()
            if isinstance(outcome, DanubeError):
                answer(outcome)
                return
            try:
                value = view(outcome)
            except DanubeError as error:
                value = error
            answer(value)

        self._proposals.submit(command, committed)
