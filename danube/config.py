"""Configuration: one frozen dataclass per subsystem, and a loader that says where each value came from.

Sources, a later one wins: built-in default < YAML file < environment < command-line flags.  Each
source gives text; each setting has one parser, so ``native_port: 6660``, ``DANUBE_SERVER__NATIVE_PORT``
and ``--native-port`` accept the same words.  Durations take a unit (``250ms 5s 1h 7d``), sizes may
(``64KiB 10MB``, a bare number is bytes).  Unknown keys and impossible values are refused, all of
them at once, with file and line.  ``docs/danube.yml`` lists every key.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Any, Final

from danube import limits
from danube.core.policy import DAY_MS, Durability, FailurePolicy, TopicPolicy
from danube.errors import ConfigInvalid, InvalidArgument
from danube.quantities import format_duration, format_size, parse_duration_ms, parse_size_bytes

ENVIRONMENT_PREFIX: Final = "DANUBE_"
DEFAULT_NATIVE_PORT: Final = 6660
FILE_BYTES_MAX: Final = 1 * limits.MIB

_INTEGER = re.compile(r"-?[0-9][0-9_]{0,18}\Z")


def _parse_integer(text: str) -> int:
    if not _INTEGER.match(text.strip()):
        raise ValueError("is not a whole number")
    return int(text)


def _parse_boolean(text: str) -> bool:
    try:
        return {"true": True, "false": False}[text.strip().lower()]
    except KeyError:
        raise ValueError("is not true or false") from None


def _parse_workers(text: str) -> int:
    return 0 if text.strip().lower() == "auto" else _parse_integer(text)


def _parse_text(text: str) -> str:
    if not text.isprintable():
        raise ValueError("holds control characters")
    return text


def _parse_directory(text: str) -> Path:
    if not text.strip():
        raise ValueError("is empty")
    return Path(_parse_text(text)).expanduser().absolute()


def _show_plain(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(frozen=True, slots=True)
class Setting:
    """How one key is read, checked and shown."""

    key: str
    parse: Callable[[str], Any]
    show: Callable[[Any], str] = _show_plain
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


def _setting(default: Any, key: str, parse: Callable[[str], Any], **options: Any) -> Any:
    return field(default=default, metadata={"setting": Setting(key, parse, **options)})


def _integer(default: int, key: str, least: int, most: int) -> Any:
    return _setting(default, key, _parse_integer, least=least, most=most)


def _duration(default_ms: int, key: str, least: int, most: int) -> Any:
    return _setting(default_ms, key, parse_duration_ms, show=format_duration, least=least, most=most)


def _size(default_bytes: int, key: str, least: int, most: int) -> Any:
    return _setting(default_bytes, key, parse_size_bytes, show=format_size, least=least, most=most)


def _choice(default: str, key: str, *choices: str) -> Any:
    return _setting(default, key, lambda text: text.strip().lower(), choices=choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where clients connect.  ``native_port`` 0 takes a free port, named in the banner and status."""

    host: str = _setting("127.0.0.1", "host", _parse_text)
    native_port: int = _integer(DEFAULT_NATIVE_PORT, "native_port", 0, 65_535)


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

    auto_create: bool = _setting(True, "auto_create", _parse_boolean)
    reliable: bool = _setting(True, "reliable", _parse_boolean)
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
    dead_letter_topic: str = _setting("", "dead_letter_topic", _parse_text)

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


def default_data_dir(environ: Mapping[str, str]) -> Path:
    """``$XDG_DATA_HOME/danube``, else ``~/.local/share/danube``."""
    base = environ.get("XDG_DATA_HOME", "")
    home = (
        Path(base) if base.startswith("/") else Path(environ.get("HOME") or Path.home()) / ".local" / "share"
    )
    return home / "danube"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """Everything a broker is told at start.  ``workers`` 0 means one per usable core."""

    workers: int = _setting(
        0, "workers", _parse_workers, show=lambda n: str(n) if n else "auto", least=0, most=limits.WORKERS_MAX
    )
    data_dir: Path = field(
        default_factory=lambda: default_data_dir(os.environ),
        metadata={"setting": Setting("data_dir", _parse_directory)},
    )
    server: ServerConfig = field(default_factory=ServerConfig)
    log: LogConfig = field(default_factory=LogConfig)
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    wal: WalConfig = field(default_factory=WalConfig)
    topics: TopicsConfig = field(default_factory=TopicsConfig)
    subscriptions: SubscriptionsConfig = field(default_factory=SubscriptionsConfig)

    @property
    def worker_count(self) -> int:
        """Workers to start: as told, else one per usable core."""
        return self.workers or usable_cores()

    def topic_policy(self, *, reliable: bool | None = None, durability: str = "") -> TopicPolicy:
        """Policy of a topic that is made with these two choices; None and "" take the defaults."""
        if reliable is None:
            reliable = durability != "memory" if durability else self.topics.reliable
        level = durability or (self.topics.durability if reliable else Durability.MEMORY.label)
        return TopicPolicy(
            reliable=reliable,
            durability=level,
            retention_ms=self.topics.retention_ms,
            retention_bytes=self.topics.retention_bytes,
            max_record_bytes=self.topics.max_record_bytes,
            max_unacked=self.subscriptions.max_unacked,
            failure=self.subscriptions.failure_policy(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """What a broker tells once it serves: the banner is made from this."""

    addresses: dict[str, str]  # "native" -> "127.0.0.1:6660"
    data_dir: Path
    workers: int
    pid: int
    warnings: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A checked configuration and, by key (``server.native_port``), where its value came from."""

    config: BrokerConfig
    origins: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Given:
    """One text from one source, before it is parsed."""

    key: str
    text: str
    origin: str


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is wrong with the configuration."""

    origin: str
    what: str
    hint: str = ""


def usable_cores() -> int:
    """Cores this process may use: its affinity, cut by a cgroup v2 CPU quota, at most WORKERS_MAX."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text("ascii").split()
        if quota != "max":
            cores = min(cores, max(1, -(-int(quota) // int(period))))
    except (OSError, ValueError):
        pass  # no cgroup v2 here: the affinity is all there is to know
    return max(1, min(cores, limits.WORKERS_MAX))


def settings() -> dict[str, Setting]:
    """Every setting by its key, ``section.name`` or a bare name at the top."""
    return dict(_settings_of(BrokerConfig, ""))


def _settings_of(cls: type, prefix: str) -> Iterator[tuple[str, Setting]]:
    for item in fields(cls):
        setting = item.metadata.get("setting")
        if setting is not None:
            yield prefix + setting.key, setting
        else:
            yield from _settings_of(_section_class(item.name), item.name + ".")


_SECTIONS: Final[dict[str, type]] = {
    "server": ServerConfig,
    "log": LogConfig,
    "limits": LimitsConfig,
    "wal": WalConfig,
    "topics": TopicsConfig,
    "subscriptions": SubscriptionsConfig,
}


def _section_class(name: str) -> type:
    return _SECTIONS[name]


def values(config: BrokerConfig) -> dict[str, str]:
    """Every value as the text that would set it, by key."""
    shown: dict[str, str] = {}
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            for inner in fields(value):
                setting: Setting = inner.metadata["setting"]
                shown[f"{item.name}.{setting.key}"] = setting.show(getattr(value, inner.name))
        else:
            setting = item.metadata["setting"]
            shown[setting.key] = setting.show(value)
    return shown


def load(
    file: Path | None = None,
    environ: Mapping[str, str] | None = None,
    flags: Mapping[str, object] | None = None,
) -> Loaded:
    """Read all sources and check the result; ConfigInvalid names every problem in ``facts["problems"]``.

    ``flags`` is keyed by setting (``server.host``); a value of None was not given.
    """
    environ = os.environ if environ is None else environ
    known = settings()
    problems: list[Problem] = []
    given = [
        *(_from_file(file, known, problems) if file is not None else ()),
        *_from_environment(environ, known, problems),
        *_from_flags(flags or {}, known),
    ]
    parsed: dict[str, Any] = {"data_dir": default_data_dir(environ)}
    origins = dict.fromkeys(known, "default")
    for one in given:
        try:
            parsed[one.key] = known[one.key].read(one.text)
            origins[one.key] = one.origin
        except ValueError as error:
            problems.append(Problem(one.origin, f"{one.key}: {one.text[:80]!r} {error}"))
    if not problems:
        config = _build(parsed)
        problems += _contradictions(config, origins)
        if not problems:
            return Loaded(config, origins)
    raise _invalid(problems)


def _invalid(problems: list[Problem]) -> ConfigInvalid:
    first = problems[0]
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    return ConfigInvalid(
        f"{first.origin}: {first.what}{more}",
        why="the configuration is not valid, so nothing was started",
        hint=first.hint or "`danube config check` lists every problem",
        problems=problems,
    )


def _build(parsed: Mapping[str, Any]) -> BrokerConfig:
    arguments: dict[str, Any] = {}
    for item in fields(BrokerConfig):
        setting = item.metadata.get("setting")
        if setting is not None:
            if setting.key in parsed:
                arguments[item.name] = parsed[setting.key]
            continue
        cls = _section_class(item.name)
        inner = {
            one.name: parsed[key]
            for one in fields(cls)
            if (key := f"{item.name}.{one.metadata['setting'].key}") in parsed
        }
        arguments[item.name] = cls(**inner)
    return BrokerConfig(**arguments)


def _contradictions(config: BrokerConfig, origins: Mapping[str, str]) -> list[Problem]:
    """Values that are each allowed and cannot hold together."""
    problems = []
    subscriptions = config.subscriptions
    if subscriptions.base_redelivery_delay_ms > subscriptions.max_redelivery_delay_ms:
        origin = origins["subscriptions.base_redelivery_delay"]
        problems.append(Problem(origin, "subscriptions.base_redelivery_delay is above max_redelivery_delay"))
    if subscriptions.poison == "dead_letter" and not subscriptions.dead_letter_topic:
        problems.append(
            Problem(
                origins["subscriptions.poison"],
                "subscriptions.poison is dead_letter and there is no dead_letter_topic",
                "set subscriptions.dead_letter_topic, for example /default/dead-letters",
            )
        )
    for reliable in (True, False):
        try:
            config.topic_policy(reliable=reliable).check()
        except InvalidArgument as error:
            if not problems:
                problems.append(Problem("topics", str(error), error.hint))
    return problems


def suggestion(wrong: str, known: list[str]) -> str:
    """A did-you-mean for a misspelt word, or an empty text."""
    import difflib

    near = difflib.get_close_matches(wrong, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else ""


def _from_environment(
    environ: Mapping[str, str], known: Mapping[str, Setting], problems: list[Problem]
) -> Iterator[_Given]:
    """``DANUBE_SERVER__HOST``; other names that begin with DANUBE_ belong to other tools.

    A near miss of a key without a section (``DANUBE_DATADIR``) is refused rather than ignored.
    """
    key_by_name = {environment_name(key): key for key in known}
    top = [name for name in key_by_name if "__" not in name]
    for name, text in environ.items():
        if not name.startswith(ENVIRONMENT_PREFIX):
            continue
        if name in key_by_name:
            yield _Given(key_by_name[name], text, f"environment {name}")
        elif "__" in name:
            hint = suggestion(name, list(key_by_name)) or "docs/danube.yml lists every key"
            problems.append(Problem(f"environment {name}", "names no setting", hint))
        elif _near_miss(name, top):
            problems.append(Problem(f"environment {name}", "names no setting", suggestion(name, top)))


def _near_miss(name: str, top: list[str]) -> bool:
    import difflib

    return bool(difflib.get_close_matches(name, top, n=1, cutoff=0.9))


def environment_name(key: str) -> str:
    """The environment variable that sets a key: ``server.host`` is ``DANUBE_SERVER__HOST``."""
    return ENVIRONMENT_PREFIX + key.replace(".", "__").upper()


def flag_name(key: str) -> str:
    """The flag of ``danube start`` that sets a key, where there is one: ``log.level`` is ``--log-level``."""
    section, _, name = key.rpartition(".")
    return "--" + (f"log-{name}" if section == "log" else name).replace("_", "-")


def _from_flags(flags: Mapping[str, object], known: Mapping[str, Setting]) -> Iterator[_Given]:
    for key, value in flags.items():
        if value is not None:
            if key not in known:
                raise KeyError(key)  # the command line's own table is wrong: a bug, not a user's mistake
            yield _Given(key, _show_plain(value), f"flag {flag_name(key)}")


def _from_file(path: Path, known: Mapping[str, Setting], problems: list[Problem]) -> list[_Given]:
    from danube import config_file

    return [_Given(*found) for found in config_file.read(path, known, problems)]
