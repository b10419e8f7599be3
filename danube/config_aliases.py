"""Keys as configuration files of the upstream broker write them: storage, doors, balance.

A file that was written for it is taken as it is: its nested keys are put into ours, those that have no
meaning here are passed over, and the one that promises something we do not keep is refused.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from danube.config import Problem

_STORE_KEYS: Final = {
    "region": "storage.region",
    "endpoint": "storage.endpoint",
    "access_key": "storage.access_key",
    "secret_key": "storage.secret_key",
    "session_token": "storage.session_token",
    "profile": "storage.profile",
    "role_arn": "storage.role_arn",
    "anonymous": "storage.anonymous",
    "virtual_host_style": "storage.virtual_host_style",
    "account_name": "storage.access_key",
    "account_key": "storage.secret_key",
    "credentials_json": "storage.credentials",
    "credentials_path": "storage.credentials_file",
}
# Ours, and what is written behind the number.
_RENAMED: Final[dict[str, tuple[str, str]]] = {
    **{f"storage.durable.{name}": (key, "") for name, key in _STORE_KEYS.items()},
    **{f"storage.object_store.{name}": (key, "") for name, key in _STORE_KEYS.items()},
    "storage.local_retention.time_minutes": ("storage.local_retention_time", "m"),
    "storage.local_retention.size_mb": ("storage.local_retention_size", "MiB"),
    "storage.wal.retention.time_minutes": ("storage.local_retention_time", "m"),
    "storage.wal.retention.size_mb": ("storage.local_retention_size", "MiB"),
    "storage.wal.rotation.max_bytes": ("wal.segment_size", ""),
    "storage.wal.rotation.max_hours": ("storage.seal_after", "h"),
}
# Sections that are all theirs: where the broker listens, and where partitions go.
_THEIRS: Final[dict[str, tuple[str, str]]] = {
    "broker.host": ("server.host", ""),
    "broker.ports.client": ("grpc.port", ""),
    "broker.ports.admin": ("admin.port", ""),
    "broker.ports.prometheus": ("metrics.port", ""),
    "load_manager.assignment_strategy": ("balance.strategy", ""),
    "load_manager.rebalancing.enabled": ("balance.automatic", ""),
    "load_manager.rebalancing.aggressiveness": ("balance.aggressiveness", ""),
    "load_manager.rebalancing.check_interval_seconds": ("balance.interval", "s"),
}
SECTIONS: Final = ("broker", "load_manager")
_FOLDERS: Final = frozenset({"storage.local_wal_root", "storage.cache_root", "storage.wal.dir"})
_PLACES: Final = frozenset({"storage.root", "storage.durable.root", "storage.object_store.root"})
_BACKENDS: Final = frozenset({"storage.durable.backend", "storage.object_store.backend"})
_SCHEMES: Final = {"s3": "s3", "gcs": "gs", "azblob": "az"}
_PASSED_OVER: Final = frozenset(
    {
        "storage.metadata_prefix",
        "storage.metadata_root",
        "storage.durable.project",
        "storage.object_store.project",
        "storage.local_retention.check_interval_minutes",
        "storage.wal.retention.check_interval_minutes",
        "storage.wal.file_name",
        "storage.wal.cache_capacity",
        "storage.wal.advanced.cache_capacity",
        "storage.wal.file_sync.interval_ms",
        "storage.wal.file_sync.max_batch_bytes",
        "storage.wal.advanced.file_sync.interval_ms",
        "storage.wal.advanced.file_sync.max_batch_bytes",
        "broker.ports.raft",
        "load_manager.load_report_interval_seconds",
        "load_manager.rebalancing.max_moves_per_hour",
        "load_manager.rebalancing.cooldown_seconds",
        "load_manager.rebalancing.min_brokers_for_rebalance",
        "load_manager.rebalancing.min_topic_age_seconds",
    }
)
REFUSED: Final = {
    "storage.write_buffer": "remove it: what is acknowledged is in the log file; see topics.durability",
}
_ALIASES: Final = frozenset([*_RENAMED, *_THEIRS, *_FOLDERS, *_PLACES, *_BACKENDS, *_PASSED_OVER])


def names(section: str) -> list[str]:
    """The other names of keys in a section, without its own name."""
    return [name.partition(".")[2] for name in [*_ALIASES, *REFUSED] if name.startswith(section + ".")]


def translate(
    section: str, leaves: Iterable[tuple[str, str, str]], folder: Path, problems: list[Problem]
) -> Iterator[tuple[str, str, str]]:
    """``(key, text, origin)`` by our keys; relative paths are relative to ``folder``."""
    if section in SECTIONS:
        for name, text, origin in leaves:
            if name in _THEIRS:
                key, unit = _THEIRS[name]
                yield key, text.strip() + unit if unit else text, origin
        return
    place: tuple[str, str] | None = None
    backend, mode = "s3", ""
    for name, text, origin in leaves:
        if section != "storage" or (name not in _ALIASES and name != "storage.mode"):
            yield name, text, origin
        elif name in _PLACES:
            place = (text, origin)
        elif name in _BACKENDS:
            backend = text.strip().lower()
            if backend not in _SCHEMES:
                problems.append(Problem(origin, f"{name} is not one of {', '.join(_SCHEMES)}"))
        elif name in _RENAMED:
            key, unit = _RENAMED[name]
            yield key, text.strip() + unit if unit else text, origin
        elif name in _FOLDERS:
            yield "data_dir", _absolute(text, folder), origin
        elif name == "storage.mode":
            mode = text.strip().lower()
            yield name, text, origin
    if place is not None:
        key, text = _placed(place[0], backend, mode, folder)
        yield key, text, place[1]


def _placed(text: str, backend: str, mode: str, folder: Path) -> tuple[str, str]:
    """A root is a directory of this host, a shared directory or a bucket, by the mode."""
    if mode == "object_store":
        return "storage.url", text if "://" in text else f"{_SCHEMES.get(backend, 's3')}://{text.strip('/')}"
    path = _absolute(text, folder)
    return ("storage.url", f"file://{path}") if mode == "shared_fs" else ("data_dir", path)


def _absolute(text: str, folder: Path) -> str:
    path = Path(os.path.expanduser(text))
    return str(path if path.is_absolute() else folder / path)
