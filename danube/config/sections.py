"""The sections of the configuration: every key with its default, its parser and its bounds.

:mod:`danube.config.loading` loads them from their sources; ``docs/danube.yml`` explains each key to its user.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from danube import limits
from danube.config.quantities import format_duration, format_size, parse_duration_ms, parse_size_bytes
from danube.core.partition.policy import DAY_MS, FailurePolicy

DEFAULT_NATIVE_PORT: Final = 6660
DEFAULT_GRPC_PORT: Final = 6650
DEFAULT_ADMIN_PORT: Final = 50_051
DEFAULT_RAFT_PORT: Final = 7_650
NO_PORT: Final = -1

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}\Z")
_INTEGER = re.compile(r"-?[0-9][0-9_]{0,18}\Z")
_STORE_SCHEMES: Final = ("s3", "gs", "az", "file")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")
_PREFIX_PART = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,254}\Z")
_PREFIX_LENGTH_MAX: Final = 900  # S3 takes keys of 1024 bytes, and ours go behind it
# With the account as a path: Azure Blob behind an address of its own.
_ENDPOINT = re.compile(
    r"https?://(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253})(:[0-9]{1,5})?(/[a-z0-9]{3,24})?\Z"
)

_WEIGHT = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?\Z")

HIDDEN: Final = "(hidden)"
MEASURES: Final = ("count", "throughput", "backlog", "cpu", "memory")  # of a broker's load


def parse_integer(text: str) -> int:
    if not _INTEGER.match(text.strip()):
        raise ValueError("is not a whole number")
    return int(text)


def parse_boolean(text: str) -> bool:
    try:
        return {"true": True, "false": False}[text.strip().lower()]
    except KeyError:
        raise ValueError("is not true or false") from None


def parse_workers(text: str) -> int:
    return 0 if text.strip().lower() == "auto" else parse_integer(text)


def parse_port(text: str) -> int:
    """A port, or NO_PORT for ``off``."""
    if text.strip().lower() == "off":
        return NO_PORT
    port = parse_integer(text)
    if port < 0:
        raise ValueError("is not a port; write off to have none")
    return port


def show_port(port: int) -> str:
    return "off" if port == NO_PORT else str(port)


def parse_text(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds control characters")
    return text


def parse_host(text: str) -> str:
    """Parse a host; an empty one is refused, as it would listen on every address of the machine."""
    if not text.strip():
        raise ValueError("is empty; 0.0.0.0 and :: are every address")
    return parse_text(text)


def parse_directory(text: str) -> Path:
    if not text.strip():
        raise ValueError("is empty")
    try:
        path = Path(parse_text(text)).expanduser().absolute()
    except RuntimeError:
        raise ValueError("begins with ~, and this user has no home") from None
    for place in (path, *path.parents):
        if os.path.isdir(place):
            break
        if os.path.lexists(place):
            raise ValueError(f"cannot be used: {place} is not a directory")
    return path


def parse_advertised(text: str) -> str:
    text = text.strip()
    if text and not _ADDRESS.match(text):
        raise ValueError("is not host:port")
    return text


def parse_cluster_name(text: str) -> str:
    text = text.strip()
    if not 0 < len(text.encode()) <= 128 or not text.isprintable():
        raise ValueError("is not a name of 1 to 128 bytes")
    return text


def parse_node_addresses(text: str) -> str:
    """Addresses that commas separate."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not _ADDRESS.match(part):
            raise ValueError("is not a list of host:port")
    return ",".join(parts)


def parse_metadata(text: str) -> str:
    """``etcd://host:2379,host:2379/prefix``, etcds with TLS; ValueError repeats nothing of it."""
    text = parse_text(text.strip()).rstrip("/")
    if not text:
        return text
    scheme, _, rest = text.partition("://")
    hosts, _, prefix = rest.partition("/")
    if scheme not in ("etcd", "etcds"):
        raise ValueError("is not an etcd; write etcd://host:2379, or etcds:// for TLS")
    if "@" in hosts:
        raise ValueError("holds a user or a password; set cluster.etcd_user and cluster.etcd_password_file")
    if not hosts or not all(map(_ADDRESS.match, hosts.split(","))):
        raise ValueError("is not an etcd; write etcd://host:2379, and more of host:port behind a comma")
    if prefix and not all(map(_PREFIX_PART.match, prefix.split("/"))):
        raise ValueError("has a prefix with other characters than letters, digits, '-', '_' and '.'")
    return text


def parse_weights(text: str) -> str:
    """Check weights of a load, such as ``cpu=0.3,count=0.2``; return them in normal form."""
    weights: dict[str, float] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, _, number = (word.strip() for word in part.partition("="))
        if name not in MEASURES:
            raise ValueError(f"names {name[:40]!r}; there are {', '.join(MEASURES)}")
        if not _WEIGHT.match(number):
            raise ValueError("is not a list like cpu=0.3,count=0.2")
        weights[name] = float(number)
    if not any(weights.values()):
        raise ValueError("weighs nothing")
    return ",".join(f"{name}={weight:g}" for name, weight in weights.items())


def show_plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


class Secret:
    """A text that no log line, error or ``repr`` shows; ``reveal()`` returns it."""

    __slots__ = ("_text",)

    def __init__(self, text: str = "") -> None:
        self._text = text

    def reveal(self) -> str:
        return self._text

    @property
    def size_bytes(self) -> int:
        return len(self._text.encode())

    def __bool__(self) -> bool:
        return bool(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and self._text == other._text

    def __hash__(self) -> int:
        return hash(self._text)

    def __repr__(self) -> str:
        return HIDDEN if self._text else ""


NO_SECRET: Final = Secret()


def parse_secret(text: str) -> Secret:
    if text == HIDDEN:
        raise ValueError("is what `danube config show` prints in place of a secret, not the secret")
    return Secret(parse_text(text))


class StoreUrl(NamedTuple):
    """``path``: of ``file://`` the directory as it is written, else the prefix."""

    scheme: str
    bucket: str
    path: str


def split_store_url(text: str) -> StoreUrl:
    """Split a store's URL; the message of a ValueError names the fault and contains no possible secret.

    A prefix is used unchanged.  Characters that stores, signatures and other programs encode differently
    (``+``, ``%``, letters that are not ASCII, ``//``) are refused here, before a request fails.
    """
    scheme, found, rest = text.partition("://")
    if not found or scheme not in _STORE_SCHEMES:
        raise ValueError("is not a store; write s3://bucket/prefix, file:///directory, gs://... or az://...")
    if scheme == "file":
        if not rest.startswith("/"):
            raise ValueError("names no directory; write file:///absolute/path")
        return StoreUrl(scheme, "", rest)
    if any(mark in rest for mark in "@?#"):
        raise ValueError("has more than a bucket and a prefix; keys and settings are given apart from it")
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.match(bucket):
        raise ValueError(
            f"names no bucket; write {scheme}://bucket/prefix with letters, digits, '.', '-', '_'"
        )
    prefix = prefix.removesuffix("/")
    for part in prefix.split("/") if prefix else ():
        if not _PREFIX_PART.match(part):
            raise ValueError(_wrong_part(part))
    if len(prefix) > _PREFIX_LENGTH_MAX:
        raise ValueError(f"has a prefix of {len(prefix)} characters; {_PREFIX_LENGTH_MAX} is the limit")
    return StoreUrl(scheme, bucket, prefix)


def _wrong_part(part: str) -> str:
    """Why a part of a prefix cannot be used."""
    wrong = next((mark for mark in part if not _PREFIX_PART.match(mark) and mark != "."), "")
    why = "a part that begins with '.'" if part.startswith(".") else "a part of more than 255 characters"
    why = f"{wrong!r} in its prefix" if wrong else why if part else "an empty part in its prefix (//)"
    return f"has {why}; parts between slashes have letters, digits, '-', '_' and, behind the first, '.'"


def parse_store_url(text: str) -> str:
    """Parse ``scheme://place``; opening the store shows whether it exists."""
    text = parse_text(text.strip())
    if text:
        split_store_url(text)
    return text


def parse_endpoint(text: str) -> str:
    text = parse_text(text.strip()).rstrip("/")
    if text and not _ENDPOINT.match(text):
        raise ValueError("is not an endpoint; write http://host:port or https://host")
    return text


@dataclass(frozen=True, slots=True)
class Setting:
    """How one key is read, checked and shown."""

    key: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = show_plain
    least: int | None = None
    most: int | None = None
    private: bool = False  # never shown, not even in a complaint about it
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> Any:
        """Parse and check one text; ValueError names the fault."""
        value = self.parse(text)
        if self.choices and value not in self.choices:
            raise ValueError(f"is not one of {', '.join(self.choices)}")
        if self.least is not None and value < self.least:
            raise ValueError(f"is below the least allowed, {self.show(self.least)}")
        if self.most is not None and value > self.most:
            raise ValueError(f"is above the most allowed, {self.show(self.most)}")
        return value


def declare(default: Any, key: str, parse: Callable[[str], Any], **options: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(key, parse, **options)})


def integer(default: int, key: str, least: int, most: int) -> Any:
    return declare(default, key, parse_integer, least=least, most=most)


def duration(default_ms: int, key: str, least: int, most: int) -> Any:
    return declare(default_ms, key, parse_duration_ms, show=format_duration, least=least, most=most)


def size(default_bytes: int, key: str, least: int, most: int) -> Any:
    return declare(default_bytes, key, parse_size_bytes, show=format_size, least=least, most=most)


def choice(default: str, key: str, *choices: str) -> Any:
    return declare(default, key, lambda text: text.strip().lower(), choices=choices)


def hidden(key: str) -> dict[str, Any]:
    return {"setting": Setting(key, parse_secret, private=True)}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Addresses for clients.  ``native_port`` 0 takes a free port, named in the banner and status.

    ``advertised`` (``host:port``) is where clients and the other brokers of a cluster are sent for what this
    one serves; without it that is where it listens.  ``local_socket``: whether clients of this host find
    one beside the port (danube/host/local_socket.py).  ``insecure``: ports that others reach without being
    asked who they are are meant (danube/config/exposure.py).
    """

    host: str = declare("127.0.0.1", "host", parse_host)
    native_port: int = integer(DEFAULT_NATIVE_PORT, "native_port", 0, 65_535)
    advertised: str = declare("", "advertised", parse_advertised)
    local_socket: str = choice("auto", "local_socket", "auto", "on", "off")
    insecure: bool = declare(False, "insecure", parse_boolean)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConfig:
    """The Danube gRPC API on ``server.host``; port 0 takes a free one.

    ``advertised`` (``host:port``) is the address that lookups return; by default the address that the client
    dialled.  With a certificate and its key the port speaks TLS with these, whatever the section tls has.
    ``reflection``: whether both gRPC ports describe themselves to tools; auto does where only this host
    reaches them.
    """

    port: int = integer(DEFAULT_GRPC_PORT, "port", 0, 65_535)
    advertised: str = declare("", "advertised", parse_advertised)
    cert_file: str = declare("", "cert_file", parse_text)
    key_file: str = declare("", "key_file", parse_text)
    reflection: str = choice("auto", "reflection", "auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminConfig:
    """The administration API over gRPC on ``server.host``; ``tls`` uses the certificate of ``grpc``.

    With a certificate in the section tls it speaks TLS anyway.
    """

    port: int = integer(DEFAULT_ADMIN_PORT, "port", 0, 65_535)
    tls: bool = declare(False, "tls", parse_boolean)


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsConfig:
    """Prometheus metrics over HTTP on ``server.host``; port 0 takes a free one, NO_PORT serves none.

    Series with a topic as label are for ``topics_max`` topics, the oldest; the others are one together.  All
    series together are at most ``series_max``, whatever ``topics_max`` says.
    """

    port: int = declare(NO_PORT, "port", parse_port, show=show_port, most=65_535)
    topics_max: int = integer(1_000, "topics_max", 0, 10_000)
    series_max: int = integer(10_000, "series_max", 1_000, 100_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files of this broker: with a certificate and its key all ports for clients speak TLS.

    ``ca_file`` signs the certificates of clients, and ``crl_file`` lists those that it revoked.
    """

    cert_file: str = declare("", "cert_file", parse_text)
    key_file: str = declare("", "key_file", parse_text)
    ca_file: str = declare("", "ca_file", parse_text)
    crl_file: str = declare("", "crl_file", parse_text)
    client_certificates: str = choice("off", "client_certificates", "off", "optional", "required")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaConfig:
    """``compatibility_checks``: all rules, or only those of the broker that official clients grew up with."""

    compatibility_checks: str = choice("strict", "compatibility_checks", "strict", "upstream")
    default_compatibility: str = choice(
        "backward", "default_compatibility", "none", "backward", "forward", "full", "backward_transitive",
        "forward_transitive", "full_transitive",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Diagnostics, on standard error."""

    level: str = choice("info", "level", "debug", "info", "warning", "error")
    format: str = choice("text", "format", "text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Bounds per broker; each worker gets an equal share of ``connections_max``.

    ``connections_per_address``, ``connections_per_principal``, ``connection_rate`` (openings a second of one
    address): of the host, whichever workers they reach; 0 is no limit.
    """

    connections_max: int = integer(limits.CONNECTIONS_MAX, "connections_max", 1, 1_000_000)
    connections_per_address: int = integer(0, "connections_per_address", 0, 1_000_000)
    connections_per_principal: int = integer(0, "connections_per_principal", 0, 1_000_000)
    connection_rate: int = integer(0, "connection_rate", 0, 1_000_000)
    handshake_timeout_ms: int = duration(
        round(limits.HANDSHAKE_TIMEOUT_S * 1000), "handshake_timeout", 100, 300_000
    )
    session_timeout_ms: int = duration(
        round(limits.SESSION_TIMEOUT_S * 1000), "session_timeout", 1_000, 3_600_000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WalConfig:
    """The log's files.  ``sync_interval_ms``: how often ``written`` topics are synced in the background.

    ``sync_lag_max_ms``: while older records are not synced, their acknowledgements wait for the disk.
    """

    segment_bytes: int = size(limits.SEGMENT_BYTES, "segment_size", 16 * limits.MIB, 4 * limits.GIB)
    sync_interval_ms: int = duration(limits.SYNC_INTERVAL_MS, "sync_interval", 1, 1_000)
    sync_lag_max_ms: int = duration(limits.SYNC_LAG_MAX_MS, "sync_lag_max", 50, 60_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageSettings:
    """Address of the object store and how to use it: all that ``wal.open_store`` needs.

    Credentials, the first that is given: the keys here, their files, ``profile`` of the AWS files, the
    environment (``AWS_ACCESS_KEY_ID`` and so on), the default profile, the host's own role.
    """

    url: str = declare("", "url", parse_store_url, private=True)
    endpoint: str = declare("", "endpoint", parse_endpoint, private=True)
    region: str = declare("", "region", parse_text)
    access_key: Secret = field(default=NO_SECRET, metadata=hidden("access_key"))
    access_key_file: str = declare("", "access_key_file", parse_text)
    secret_key: Secret = field(default=NO_SECRET, metadata=hidden("secret_key"))
    secret_key_file: str = declare("", "secret_key_file", parse_text)
    session_token: Secret = field(default=NO_SECRET, metadata=hidden("session_token"))
    session_token_file: str = declare("", "session_token_file", parse_text)
    profile: str = declare("", "profile", parse_text)
    role_arn: str = declare("", "role_arn", parse_text)
    credentials: Secret = field(default=NO_SECRET, metadata=hidden("credentials"))
    credentials_file: str = declare("", "credentials_file", parse_text)
    anonymous: bool = declare(False, "anonymous", parse_boolean)
    virtual_host_style: bool = declare(False, "virtual_host_style", parse_boolean)
    upload_parallel: int = integer(4, "upload_parallel", 1, 64)
    part_bytes: int = size(16 * limits.MIB, "part_size", 5 * limits.MIB, 1 * limits.GIB)


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig(StorageSettings):
    """Tiered storage.  ``mode`` local keeps every segment here and needs no store."""

    mode: str = choice("local", "mode", "local", "shared_fs", "object_store")
    seal_after_ms: int = duration(60_000, "seal_after", 1_000, 30 * DAY_MS)
    upload_hold_ms: int = duration(300_000, "upload_hold_time", 0, DAY_MS)
    upload_hold_bytes: int = size(16 * limits.GIB, "upload_hold_size", 0, 1 << 50)
    merge_below_bytes: int = size(64 * limits.MIB, "merge_below", 0, 4 * limits.GIB)
    merge_to_bytes: int = size(256 * limits.MIB, "merge_to", 1 * limits.MIB, 4 * limits.GIB)
    compact_after_ms: int = duration(60_000, "compact_after", 0, 365 * DAY_MS)
    compact_bytes_min: int = size(1 * limits.MIB, "compact_min_size", 0, 1 << 50)
    compact_dirty_percent: int = integer(50, "compact_dirty_percent", 0, 100)
    compact_keys_max: int = integer(1_000_000, "compact_keys_max", 1_000, 100_000_000)
    local_retention_ms: int = duration(2 * DAY_MS, "local_retention_time", 0, 36_500 * DAY_MS)
    local_retention_bytes: int = size(20 * 1000**3, "local_retention_size", 0, 1 << 60)
    local_retention_segments: int = integer(0, "local_retention_segments", 0, 1_000_000)
    cache_bytes: int = size(256 * limits.MIB, "cache_size", 16 * limits.MIB, 1 << 50)
    orphan_age_ms: int = duration(22 * DAY_MS // 24, "orphan_age", 60_000, 365 * DAY_MS)
    restore: str = choice("never", "restore", "never", "if_empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """Membership of a cluster; without ``metadata``, ``seed_nodes`` and ``join`` there is no cluster.

    ``metadata`` is the etcd that holds the cluster's metadata; without it the members vote.

    ``raft_addr`` (``host:port``) is this broker's address for other members, and where it listens; for a
    name, on all addresses of the host.  The certificate's authority signs members only.
    """

    name: str = declare("danube", "name", parse_cluster_name)
    raft_addr: str = declare(f"127.0.0.1:{DEFAULT_RAFT_PORT}", "raft_addr", parse_advertised)
    seed_nodes: str = declare("", "seed_nodes", parse_node_addresses)
    join: str = declare("", "join", parse_node_addresses)
    heartbeat_ms: int = duration(150, "heartbeat", 20, 10_000)
    lease_ms: int = duration(2_000, "lease", 500, 60_000)
    cert_file: str = declare("", "cert_file", parse_text)
    key_file: str = declare("", "key_file", parse_text)
    ca_file: str = declare("", "ca_file", parse_text)
    metadata: str = declare("", "metadata", parse_metadata, private=True)
    etcd_user: str = declare("", "etcd_user", parse_text)
    etcd_password: Secret = field(default=NO_SECRET, metadata=hidden("etcd_password"))
    etcd_password_file: str = declare("", "etcd_password_file", parse_text)
    etcd_ca_file: str = declare("", "etcd_ca_file", parse_text)
    etcd_cert_file: str = declare("", "etcd_cert_file", parse_text)
    etcd_key_file: str = declare("", "etcd_key_file", parse_text)
    etcd_compact: bool = declare(True, "etcd_compact", parse_boolean)

    @property
    def enabled(self) -> bool:
        return bool(self.seed_nodes or self.join or self.metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceConfig:
    """Placement and moves of a cluster's partitions; see danube.core.placement.balance.

    ``interval_ms`` 0 takes the interval of the aggressiveness.
    """

    strategy: str = choice("balanced", "strategy", "fair", "balanced", "weighted_load")
    aggressiveness: str = choice("balanced", "aggressiveness", "conservative", "balanced", "aggressive")
    automatic: bool = declare(True, "automatic", parse_boolean)
    interval_ms: int = duration(0, "interval", 0, DAY_MS)
    moves_max: int = integer(16, "moves_max", 1, 1_000)
    weights: str = declare(
        "count=0.2,throughput=0.3,backlog=0.1,cpu=0.3,memory=0.1", "weights", parse_weights
    )

    @property
    def weight_by_measure(self) -> dict[str, float]:
        pairs = (part.split("=") for part in self.weights.split(","))
        return {name: float(weight) for name, weight in pairs}


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsConfig:
    """Defaults of a topic.

    ``durability`` is that of reliable topics; non-reliable ones are always ``memory``.
    ``partitions`` 0 makes a topic that is not partitioned.  Retention 0 keeps for ever.
    """

    auto_create: bool = declare(True, "auto_create", parse_boolean)
    reliable: bool = declare(True, "reliable", parse_boolean)
    durability: str = choice("written", "durability", "written", "fsync")
    partitions: int = integer(0, "partitions", 0, limits.PARTITIONS_MAX)
    retention_ms: int = duration(7 * DAY_MS, "retention_time", 0, 36_500 * DAY_MS)
    retention_bytes: int = size(0, "retention_size", 0, 1 << 60)
    max_record_bytes: int = size(limits.RECORD_BYTES_DEFAULT, "max_record_size", 1, limits.RECORD_BYTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionsConfig:
    """Defaults of a reliable topic's subscriptions."""

    max_unacked: int = integer(limits.MAX_UNACKED_DEFAULT, "max_unacked", 1, limits.MAX_UNACKED_LIMIT)
    ack_timeout_ms: int = duration(30_000, "ack_timeout", 1, 7 * DAY_MS)
    max_redelivery_count: int = integer(5, "max_redelivery_count", 0, 1_000_000)
    base_redelivery_delay_ms: int = duration(1_000, "base_redelivery_delay", 0, DAY_MS)
    max_redelivery_delay_ms: int = duration(60_000, "max_redelivery_delay", 0, DAY_MS)
    backoff: str = choice("exponential", "backoff", "fixed", "exponential")
    poison: str = choice("block", "poison", "block", "drop", "dead_letter")
    dead_letter_topic: str = declare("", "dead_letter_topic", parse_text)

    def failure_policy(self) -> FailurePolicy:
        chosen = asdict(self)
        del chosen["max_unacked"]
        return FailurePolicy(**chosen)
