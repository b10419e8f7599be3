"""Handing over: what a worker commits when a credential is admitted, and what happens where it cannot."""

from __future__ import annotations

from typing import Any

from danube.broker.worker.handing_over import HandingOver
from danube.core.metadata.commands import Binding, Command, PutBinding
from danube.core.metadata.machine import Metadata
from danube.core.security.authority import Authority
from danube.core.security.principals import BOOTSTRAP, Identity, Principal
from danube.errors import Overloaded, StorageFull, Unavailable

NOW_US = 1_700_000_000_000_000
FIRST = Identity(BOOTSTRAP, "token", issued_us=NOW_US)
ANNA = Identity(Principal("user", "anna"), "token", issued_us=NOW_US)
APP = Identity(Principal("service_account", "app"), "token", issued_us=NOW_US)


class Worker:
    """A worker that has not read the newest metadata yet, and whose commands wait until they are decided."""

    def __init__(self, audit: Any = None) -> None:
        self.newest = Metadata()
        self.newest.apply(1, PutBinding(binding=Binding("a", "user", "anna", ("admin",), "cluster", "")))
        self.read = Metadata()
        self.waiting: list[tuple[Command, Any]] = []
        self.submit_error: Exception | None = None
        self.committed = self.refreshed = 0
        self.handing_over = HandingOver(
            lambda: self.read.access, Authority(lambda: self.read.access), self.submit, audit=audit,
            refresh=self.refresh, committed=self.count, now_us=lambda: NOW_US + 5_000_000,
        )  # fmt: skip

    def refresh(self) -> None:
        self.refreshed += 1
        self.read = self.newest

    def count(self) -> None:
        self.committed += 1

    def submit(self, command: Command, then: Any) -> None:
        if self.submit_error is not None:
            raise self.submit_error
        self.waiting.append((command, then))

    def decide(self, error: Exception | None = None) -> None:
        ((command, then),) = self.waiting
        self.waiting.clear()
        if error is None:
            self.newest.apply(self.newest.version + 1, command)
        then(error)

    def dead(self) -> bool:
        return bool(self.newest.access.credentials.revoked(FIRST))


class Told:
    def __init__(self, error: Exception | None = None) -> None:
        self.lines: list[tuple[str, str, str]] = []
        self._error = error

    def tell(self, asker: Identity, operation: str, resource: str, *, details: Any) -> None:
        if self._error is not None:
            raise self._error
        self.lines.append((str(asker.principal), operation, details["reason"]))


def test_an_administrator_whose_binding_was_not_read_yet_takes_it_back() -> None:
    told = Told()
    worker = Worker(told)
    worker.handing_over.admitted(ANNA)
    worker.decide()
    assert worker.dead() and worker.committed == 1
    assert told.lines == [("user:anna", "take_back_first_token", "an administrator has come")]


def test_one_command_waits_at_a_time() -> None:
    worker = Worker()
    for _ in range(5):
        worker.handing_over.admitted(ANNA)
    assert len(worker.waiting) == 1
    worker.decide()
    worker.handing_over.admitted(ANNA)
    assert not worker.waiting and worker.committed == 1


def test_afterwards_nobody_costs_a_look_at_the_metadata() -> None:
    worker = Worker()
    worker.handing_over.admitted(ANNA)
    worker.decide()
    refreshed = worker.refreshed
    for identity in (ANNA, APP):
        worker.handing_over.admitted(identity)
    assert worker.refreshed == refreshed and not worker.waiting


def test_others_commit_nothing() -> None:
    worker = Worker()
    worker.handing_over.admitted(APP)
    assert not worker.waiting


def test_a_first_token_that_is_shown_is_noted_and_lives() -> None:
    worker = Worker()
    worker.handing_over.admitted(FIRST)
    worker.decide()
    worker.handing_over.admitted(FIRST)
    assert not worker.waiting and not worker.dead()


def test_a_failure_refuses_nobody_and_the_next_one_tries_again() -> None:
    worker = Worker()
    worker.submit_error = Overloaded("too many metadata changes wait")
    worker.handing_over.admitted(ANNA)
    worker.submit_error = None
    worker.handing_over.admitted(ANNA)
    worker.decide(Unavailable("the cluster has no leader"))
    assert not worker.dead() and worker.committed == 0
    worker.handing_over.admitted(ANNA)
    worker.decide()
    assert worker.dead()


def test_a_full_audit_does_not_keep_it_alive() -> None:
    worker = Worker(Told(StorageFull("the disk of the audit is full")))
    worker.handing_over.admitted(ANNA)
    worker.decide()
    assert worker.dead()
