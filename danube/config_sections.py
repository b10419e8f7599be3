"""The sections of the configuration: every key with its default, its parser and its bounds.

:mod:`danube.config` loads them from their sources; ``docs/danube.yml`` explains each key to its user.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from danube import limits
from danube.core.policy import DAY_MS, FailurePolicy
from danube.quantities import format_duration, format_size, parse_duration_ms, parse_size_bytes

DEFAULT_NATIVE_PORT: Final = 6660
DEFAULT_GRPC_PORT: Final = 6650
DEFAULT_ADMIN_PORT: Final = 50_051

_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]{1,253}):[0-9]{1,5}\Z")
_INTEGER = re.compile(r"-?[0-9][0-9_]{0,18}\Z")


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


def parse_text(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds control characters")
    return text


def parse_directory(text: str) -> Path:
    if not text.strip():
        raise ValueError("is empty")
    return Path(parse_text(text)).expanduser().absolute()


def parse_advertised(text: str) -> str:
    text = text.strip()
    if text and not _ADDRESS.match(text):
        raise ValueError("is not host:port")
    return text


def show_plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Setting:
    """How one key is read, checked and shown."""

    key: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = show_plain
    least: int | None = None
    most: int | None = None
    choices: tuple[str, ...] = ()

    def read(self, text: str) -> Any:
        """Parse and check one text; ValueError says what is wrong with it."""
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


def _integer(default: int, key: str, least: int, most: int) -> Any:
    return declare(default, key, parse_integer, least=least, most=most)


def _duration(default_ms: int, key: str, least: int, most: int) -> Any:
    return declare(default_ms, key, parse_duration_ms, show=format_duration, least=least, most=most)


def _size(default_bytes: int, key: str, least: int, most: int) -> Any:
    return declare(default_bytes, key, parse_size_bytes, show=format_size, least=least, most=most)


def _choice(default: str, key: str, *choices: str) -> Any:
    return declare(default, key, lambda text: text.strip().lower(), choices=choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where clients connect.  ``native_port`` 0 takes a free port, named in the banner and status."""

    host: str = declare("127.0.0.1", "host", parse_text)
    native_port: int = _integer(DEFAULT_NATIVE_PORT, "native_port", 0, 65_535)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcConfig:
    """The Danube gRPC API on ``server.host``; port 0 takes a free one.

    ``advertised`` (``host:port``) is what lookups answer; without it they answer the address that the
    client itself dialled.  With a certificate and its key the port speaks TLS.
    """

    port: int = _integer(DEFAULT_GRPC_PORT, "port", 0, 65_535)
    advertised: str = declare("", "advertised", parse_advertised)
    cert_file: str = declare("", "cert_file", parse_text)
    key_file: str = declare("", "key_file", parse_text)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminConfig:
    """The administration API over gRPC on ``server.host``; ``tls`` uses the certificate of ``grpc``."""

    port: int = _integer(DEFAULT_ADMIN_PORT, "port", 0, 65_535)
    tls: bool = declare(False, "tls", parse_boolean)


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaConfig:
    """``compatibility_checks``: all rules, or only those of the broker that official clients grew up with."""

    compatibility_checks: str = _choice("strict", "compatibility_checks", "strict", "upstream")
    default_compatibility: str = _choice(
        "backward", "default_compatibility", "none", "backward", "forward", "full", "backward_transitive",
        "forward_transitive", "full_transitive",
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Diagnostics, on standard error."""

    level: str = _choice("info", "level", "debug", "info", "warning", "error")
    format: str = _choice("text", "format", "text", "json")


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsConfig:
    """Bounds per broker; each worker gets an equal share of ``connections_max``."""

    connections_max: int = _integer(limits.CONNECTIONS_MAX, "connections_max", 1, 1_000_000)
    handshake_timeout_ms: int = _duration(
        round(limits.HANDSHAKE_TIMEOUT_S * 1000), "handshake_timeout", 100, 300_000
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WalConfig:
    """The log's files.  ``sync_interval_ms``: how often ``written`` topics are synced in the background."""

    segment_bytes: int = _size(limits.SEGMENT_BYTES, "segment_size", 16 * limits.MIB, 4 * limits.GIB)
    sync_interval_ms: int = _duration(limits.SYNC_INTERVAL_MS, "sync_interval", 1, 1_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicsConfig:
    """What a topic gets when nothing else is asked for.

    ``durability`` is that of reliable topics; non-reliable ones are always ``memory``.
    ``partitions`` 0 makes a topic that is not partitioned.  Retention 0 keeps for ever.
    """

    auto_create: bool = declare(True, "auto_create", parse_boolean)
    reliable: bool = declare(True, "reliable", parse_boolean)
    durability: str = _choice("written", "durability", "written", "fsync")
    partitions: int = _integer(0, "partitions", 0, limits.PARTITIONS_MAX)
    retention_ms: int = _duration(7 * DAY_MS, "retention_time", 0, 36_500 * DAY_MS)
    retention_bytes: int = _size(0, "retention_size", 0, 1 << 60)
    max_record_bytes: int = _size(1 * limits.MIB, "max_record_size", 1, limits.RECORD_BYTES_MAX)


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionsConfig:
    """What a reliable topic's subscriptions get when nothing else is asked for."""

    max_unacked: int = _integer(limits.MAX_UNACKED_DEFAULT, "max_unacked", 1, limits.MAX_UNACKED_LIMIT)
    ack_timeout_ms: int = _duration(30_000, "ack_timeout", 1, 7 * DAY_MS)
    max_redelivery_count: int = _integer(5, "max_redelivery_count", 0, 1_000_000)
    base_redelivery_delay_ms: int = _duration(1_000, "base_redelivery_delay", 0, DAY_MS)
    max_redelivery_delay_ms: int = _duration(60_000, "max_redelivery_delay", 0, DAY_MS)
    backoff: str = _choice("exponential", "backoff", "fixed", "exponential")
    poison: str = _choice("block", "poison", "block", "drop", "dead_letter")
    dead_letter_topic: str = declare("", "dead_letter_topic", parse_text)

    def failure_policy(self) -> FailurePolicy:
        return FailurePolicy(
            max_redelivery_count=self.max_redelivery_count,
            ack_timeout_ms=self.ack_timeout_ms,
            base_redelivery_delay_ms=self.base_redelivery_delay_ms,
            max_redelivery_delay_ms=self.max_redelivery_delay_ms,
            backoff=self.backoff,
            poison=self.poison,
            dead_letter_topic=self.dead_letter_topic,
        )
