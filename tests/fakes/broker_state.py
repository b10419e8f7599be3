"""The state of a running broker, as danube.json of its data directory tells it."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import msgspec

from danube.broker.processes.data_dir import LOCK_NAME, STATE_NAME, BrokerState
from danube.broker.processes.process import identity_of


def broker_state(data_dir: Path) -> BrokerState | None:
    """The broker that runs on ``data_dir``, or None.  Changes nothing."""
    try:
        lock = os.open(data_dir / LOCK_NAME, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pass
    else:
        return None
    finally:
        os.close(lock)
    try:
        state = msgspec.json.decode((data_dir / STATE_NAME).read_bytes(), type=BrokerState)
    except (OSError, msgspec.DecodeError):
        return None
    return state if state.identity in ("", identity_of(state.pid)) else None
