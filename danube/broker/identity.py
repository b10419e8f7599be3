"""The number by which clients and dashboards know this broker."""

from __future__ import annotations

import socket
from pathlib import Path

from danube.core.checksum import key_hash


def broker_id(data_dir: Path) -> int:
    """The same after every restart: 1 .. 2**63 - 1."""
    place = f"{socket.gethostname()}:{data_dir}".encode()
    return (key_hash(place) >> 1) or 1
