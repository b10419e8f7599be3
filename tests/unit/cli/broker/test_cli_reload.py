"""``danube reload`` names why it cannot tell a broker."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from danube.broker.processes.process import identity_of
from danube.cli.broker import running
from danube.cli.broker.running import RunningBroker
from danube.errors import Unavailable, WrongState


def a_broker(**changed: object) -> RunningBroker:
    fields = {
        "pid": os.getpid(),
        "ready": True,
        "addresses": {},
        "workers": [],
        "started_at": 0,
        "reloads": True,
    }
    return RunningBroker(**(fields | changed))  # type: ignore[arg-type]


def test_a_broker_without_certificates_is_not_sent_a_signal_that_stops_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(running.os, "kill", lambda *what: sent.append(what))
    with pytest.raises(WrongState, match="has no certificates"):
        running.reload(a_broker(reloads=False), tmp_path)
    with pytest.raises(Unavailable, match="cannot be told from here"):
        running.reload(a_broker(identity="pid:[1] 1"), tmp_path)
    assert sent == []
    running.reload(a_broker(identity=identity_of(os.getpid())), tmp_path)
    assert len(sent) == 1
