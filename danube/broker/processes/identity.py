"""The number by which clients and dashboards know this broker."""

from __future__ import annotations

import socket
from pathlib import Path

from danube.cluster.control.node_files import NODE_FILE, load_node
from danube.core.batch.checksum import key_hash


def broker_id(data_dir: Path, *, clustered: bool) -> int:
    """The same after every restart, 1 .. 2**63 - 1: in a cluster the id of the node, 0 until it has one."""
    if clustered:
        return int(load_node(data_dir).node_id) if (data_dir / NODE_FILE).exists() else 0
    place = f"{socket.gethostname()}:{data_dir}".encode()
    return (key_hash(place) >> 1) or 1
