"""Keys of the upstream broker's configuration files.

Such a file is accepted unchanged: its keys are mapped to ours, and keys without a meaning here are ignored.
A key that promises a missing feature, such as access control, is refused, and the error names the
alternative.  docs/configuration.md lists every key.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from danube.config.problems import Given, Problem
from danube.limits import RECORD_BYTES_MAX

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
# Our key, and the unit that follows the number.
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
    "broker.advertised_listeners.connect_url": ("grpc.advertised", ""),
    "meta_store.seed_nodes": ("cluster.seed_nodes", ""),
    "dispatch.max_unacked_messages": ("subscriptions.max_unacked", ""),
    "policies.max_message_size": ("topics.max_record_size", ""),
    "load_manager.assignment_strategy": ("balance.strategy", ""),
    "load_manager.rebalancing.enabled": ("balance.automatic", ""),
    "load_manager.rebalancing.aggressiveness": ("balance.aggressiveness", ""),
    "load_manager.rebalancing.check_interval_seconds": ("balance.interval", "s"),
}
_TLS: Final = {f"auth.tls.{name}": f"tls.{name}" for name in ("cert_file", "key_file", "ca_file")}
SECTIONS: Final = ("broker", "load_manager", "meta_store", "auth", "dispatch", "policies")
TOP: Final = {
    "cluster_name": "cluster.name",
    "auto_create_topics": "topics.auto_create",
    "admin_tls": "admin.tls",
    "bootstrap_namespaces": "",
}
LISTS: Final = frozenset(
    {
        "bootstrap_namespaces",
        "meta_store.seed_nodes",
        "auth.super_admins",
        "auth.jwt.keys",
        "load_manager.rebalancing.blacklist_topics",
    }
)
RECORDS: Final = frozenset({"auth.jwt.keys"})  # each entry of the list is a mapping
BESIDE: Final = "meta_store.data_dir"  # a data directory, where the storage section names none
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
        "broker.advertised_listeners.broker_url",
        "auth.jwt.expiration_time",
        "load_manager.load_report_interval_seconds",
        "load_manager.rebalancing.max_moves_per_hour",
        "load_manager.rebalancing.cooldown_seconds",
        "load_manager.rebalancing.min_brokers_for_rebalance",
        "load_manager.rebalancing.min_topic_age_seconds",
    }
)
REFUSED: Final = {
    "server.busy_poll_us": "remove it: a worker sleeps until something comes",
    "storage.write_buffer": "remove it: what is acknowledged is in the log file; see topics.durability",
}
# Refused unless they have one of these values; with the alternative.
_ONLY: Final[dict[str, tuple[tuple[str, ...], str]]] = {
    "load_manager.rebalancing.blacklist_topics": (("",), "leave it empty: every topic may move"),
    **{
        f"policies.{name}": (("0",), "set it to 0, and give namespaces their own: danube namespaces set")
        for name in (
            "max_producers_per_topic",
            "max_subscriptions_per_topic",
            "max_consumers_per_topic",
            "max_consumers_per_subscription",
            "max_publish_rate",
            "max_subscription_dispatch_rate",
        )
    },
}
_ALWAYS_THERE: Final = frozenset({"default", "system"})
_RAFT_PORT: Final = "broker.ports.raft"
_WILDCARDS: Final = ("", "0.0.0.0", "::", "[::]")  # noqa: S104 - recognised, never bound here
_ALIASES: Final = frozenset(
    [*_RENAMED, *_THEIRS, *_FOLDERS, *_PLACES, *_BACKENDS, *_PASSED_OVER, *_ONLY, *_TLS, _RAFT_PORT, BESIDE]
)


def names(section: str) -> list[str]:
    """The other names of keys in a section, without its own name."""
    return [name.partition(".")[2] for name in [*_ALIASES, *REFUSED] if name.startswith(section + ".")]


def translate(
    section: str, leaves: Iterable[Given], folder: Path, problems: list[Problem]
) -> Iterator[Given]:
    """``(key, text, origin)`` by our keys; relative paths are relative to ``folder``."""
    if section in SECTIONS:
        yield from _theirs(leaves, folder, problems)
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


def top(name: str, text: str, origin: str, problems: list[Problem]) -> Iterator[Given]:
    """Return our key for a key without a section, or none if it states what holds anyway."""
    if TOP[name]:
        yield TOP[name], text, origin
        return
    missing = [one for one in text.split(",") if one and one not in _ALWAYS_THERE]
    if missing:
        hint = f"leave it out, and make each once: danube-admin namespaces create {missing[0]}"
        problems.append(Problem(origin, f"{name} makes no namespaces here: {', '.join(missing)}", hint))


def _theirs(leaves: Iterable[Given], folder: Path, problems: list[Problem]) -> Iterator[Given]:
    host, raft = "", None
    mode, tls = "", list[Given]()
    for name, text, origin in leaves:
        mode = text.strip().lower() if name == "auth.mode" else mode
        if name in _ONLY:
            allowed, hint = _ONLY[name]
            if text.strip().lower() not in allowed:
                problems.append(Problem(origin, f"{name} {text[:40]!r} cannot be had here", hint))
        elif name == BESIDE:
            yield BESIDE, _absolute(text, folder), origin
        elif name in _TLS:
            tls.append((_TLS[name], _absolute(text, folder) if text else "", origin))
        elif name == _RAFT_PORT:
            raft = (text.strip(), origin)
        elif name in _THEIRS:
            host = text.strip() if name == "broker.host" else host
            key, unit = _THEIRS[name]
            yield key, _changed(name, text.strip()) + unit, origin
        elif name.startswith("auth.") and name not in _PASSED_OVER:  # a section of both
            yield name, text, origin
    if mode == "tls":  # with another one the original broker does not read them
        yield from tls
    if raft is not None:
        yield "cluster.raft_addr", f"{'127.0.0.1' if host in _WILDCARDS else host}:{raft[0]}", raft[1]


def _changed(name: str, text: str) -> str:
    """The value as ours says it."""
    if name == "broker.advertised_listeners.connect_url":
        return text.partition("://")[2] or text
    if name == "policies.max_message_size" and text.isdecimal():  # 0 is no limit there
        return str(min(int(text) or RECORD_BYTES_MAX, RECORD_BYTES_MAX))
    return text


def _placed(text: str, backend: str, mode: str, folder: Path) -> tuple[str, str]:
    """A root is a directory of this host, a shared directory or a bucket, by the mode."""
    if mode == "object_store":
        return "storage.url", text if "://" in text else f"{_SCHEMES.get(backend, 's3')}://{text.strip('/')}"
    path = _absolute(text, folder)
    return ("storage.url", f"file://{path}") if mode == "shared_fs" else ("data_dir", path)


def _absolute(text: str, folder: Path) -> str:
    path = Path(os.path.expanduser(text))
    return str(path if path.is_absolute() else folder / path)
