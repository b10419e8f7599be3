"""The options of ``format("danube")`` for reading: names, meanings, and clear words where they are wrong."""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import Any, Final

from danube.config.quantities import parse_size_bytes
from danube.config.sections import StorageSettings, parse_boolean
from danube.errors import DanubeError, InvalidArgument, InvalidName
from danube.ids import check_topic_name
from danube.spark.history.access import ACCESS_READERS, ENVIRONMENT, BrokerAccess, access_of
from danube.spark.history.plan import SPLIT_BYTES

EARLIEST: Final = "earliest"
LATEST: Final = "latest"
EARLIEST_NUMBER: Final = -2
LATEST_NUMBER: Final = -1
STORE_PREFIX: Final = "s3."
_WILD: Final = ("*", "?", "[")
_OFFSET_MAX: Final = 2**63 - 1

Readers = Mapping[str, Callable[[str], Any]]
OffsetsByTopic = dict[str, dict[int, int]]


@dataclass(frozen=True)
class Bound:
    """Start or end of a read: a word, an append time, or offsets of topics and partitions.

    ``offsets`` may hold -2 for the earliest and -1 for the latest; a partition that it does not name has
    ``word``.
    """

    word: str
    time_us: int | None = None
    offsets: OffsetsByTopic = field(default_factory=dict)


@dataclass(frozen=True)
class ReadOptions:
    """Checked options.  ``topics``: names and patterns.  ``store`` may hold secrets, never shown."""

    topics: tuple[str, ...]
    storage: tuple[str, ...] = ()
    store: StorageSettings | None = field(default=None, repr=False)
    broker: str = ""
    access: BrokerAccess = field(default=ENVIRONMENT, repr=False)
    starting: Bound = Bound(EARLIEST)
    ending: Bound = Bound(LATEST)
    records_per_trigger_max: int = 0
    partitions_min: int = 0
    split_bytes: int = SPLIT_BYTES
    fail_on_data_loss: bool = True
    include_attributes: bool = True
    decode: str = ""

    def wants(self, topic: str) -> bool:
        """Whether a topic is named or matches a pattern."""
        return any(fnmatchcase(topic, each) if _wild(each) else topic == each for each in self.topics)

    @property
    def patterns(self) -> bool:
        return any(map(_wild, self.topics))


def _wild(name: str) -> bool:
    return any(mark in name for mark in _WILD)


def parse_count(text: str, least: int = 0) -> int:
    """A whole number, ``least`` or more; ValueError for anything else."""
    try:
        number = int(text.replace("_", ""))
    except ValueError:
        raise ValueError("is not a whole number") from None
    if number < least:
        raise ValueError(f"must be {least} or more")
    return number


def _count(text: str) -> int:
    return parse_count(text, 1)


def _topics(text: str) -> tuple[str, ...]:
    names = parse_words(text)
    if not names:
        raise ValueError("names no topic")
    for name in names:
        if not _wild(name):
            try:
                check_topic_name(name)
            except InvalidName as error:
                raise ValueError(f"names {name!r}, which is no topic: {error}") from None
        elif not name.startswith("/"):
            raise ValueError(f"has the pattern {name!r}; a topic's name begins with /namespace/")
    return names


def parse_words(text: str) -> tuple[str, ...]:
    """Words between commas."""
    return tuple(word.strip() for word in text.split(",") if word.strip())


def parse_moment_us(text: str) -> int:
    """Microseconds since 1970 UTC of ISO 8601 text or of milliseconds; ValueError for anything else."""
    text = text.strip()
    try:
        if text.lstrip("-").isdigit():
            return int(text) * 1000
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("is neither a time like 2026-11-21T08:00:00Z nor milliseconds") from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return round(moment.timestamp() * 1_000_000)


def parse_offsets(text: str) -> Bound:
    """``earliest``, ``latest`` or ``{"/ns/topic": {"0": 23, "1": -2}}``."""
    word = text.strip().lower()
    if word in (EARLIEST, LATEST):
        return Bound(word)
    try:
        given = json.loads(text)
        offsets = {
            topic: {int(partition): _offset(offset) for partition, offset in partitions.items()}
            for topic, partitions in given.items()
        }
    except (ValueError, AttributeError, TypeError):
        raise ValueError(
            'is neither earliest, latest nor offsets like {"/default/orders": {"0": 23}} '
            "(-2: earliest, -1: latest)"
        ) from None
    return Bound("", None, offsets)


def _offset(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not EARLIEST_NUMBER <= value <= _OFFSET_MAX:
        raise ValueError("not an offset")
    return value


_READERS: Final[Readers] = {
    "topic": _topics,
    "storage": parse_words,
    "path": parse_words,
    "broker": str.strip,
    **ACCESS_READERS,
    "startingOffsets": parse_offsets,
    "endingOffsets": parse_offsets,
    "startingTimestamp": parse_moment_us,
    "endingTimestamp": parse_moment_us,
    "maxRecordsPerTrigger": _count,
    "minPartitions": _count,
    "splitBytes": parse_size_bytes,
    "failOnDataLoss": parse_boolean,
    "includeAttributes": parse_boolean,
    "decode": str.strip,
}
_FIELDS: Final = {
    "topic": "topics",
    "broker": "broker",
    "maxRecordsPerTrigger": "records_per_trigger_max",
    "minPartitions": "partitions_min",
    "failOnDataLoss": "fail_on_data_loss",
    "includeAttributes": "include_attributes",
}
_CONTRADICTIONS: Final = (
    ("startingOffsets", "startingTimestamp"),
    ("endingOffsets", "endingTimestamp"),
    ("storage", "path"),
)


def read_options(given: Mapping[str, str], *, streaming: bool | None) -> ReadOptions:
    """Check the options of one read; InvalidArgument names the option, the fault and valid values.

    ``streaming`` None: the caller does not know yet whether this is a stream.
    """
    values, store = read_given(given, _READERS)
    for one, other in _CONTRADICTIONS:
        if one in values and other in values:
            raise InvalidArgument(f"options {one} and {other} exclude each other", hint="keep one of them")
    return _checked(values, store, streaming)


def _checked(values: dict[str, Any], store: StorageSettings | None, streaming: bool | None) -> ReadOptions:
    if "topic" not in values:
        raise InvalidArgument(
            "option topic is missing", hint="name one, several with commas, or a pattern: /default/*"
        )
    storage = values.get("storage") or values.get("path") or ()
    if not storage and not values.get("broker"):
        raise InvalidArgument(
            "neither storage nor broker is given",
            hint="storage is a data directory or s3://bucket/prefix; broker is danube://host:port",
        )
    if store and not any("://" in place for place in storage):
        raise InvalidArgument("there are s3. options and no store", hint="set storage to s3://bucket/prefix")
    default = Bound(LATEST if streaming else EARLIEST)
    starting = _bound(values, "starting", default)
    ending = _bound(values, "ending", Bound(LATEST))
    _check_mode(values, starting, ending, streaming)
    decode = values.get("decode", "")
    return ReadOptions(
        **{field: values[name] for name, field in _FIELDS.items() if name in values},
        storage=storage,
        store=store,
        access=access_of(values.get("broker", ""), values),
        starting=starting,
        ending=ending,
        split_bytes=max(1, values.get("splitBytes", SPLIT_BYTES)),
        decode="" if decode.lower() == "false" else decode,
    )


def _check_mode(values: Mapping[str, Any], starting: Bound, ending: Bound, streaming: bool | None) -> None:
    """Refuse options of a batch read in a stream, and of a stream in a batch read."""
    if streaming:
        for name in ("endingOffsets", "endingTimestamp"):
            if name in values:
                raise InvalidArgument(f"option {name} is for batch reads", why="a stream has no end")
    elif streaming is False:
        if "maxRecordsPerTrigger" in values:
            raise InvalidArgument("option maxRecordsPerTrigger is for streams")
        if starting.word == LATEST:
            raise InvalidArgument("a batch read that starts at the latest offset reads nothing")
        if ending.word == EARLIEST:
            raise InvalidArgument("a read that ends at the earliest offset reads nothing")
        _refuse_reversed(starting, ending)


def _refuse_reversed(starting: Bound, ending: Bound) -> None:
    """A start behind the end is a mistake; it would read nothing and say nothing."""
    if starting.time_us is not None and ending.time_us is not None and starting.time_us > ending.time_us:
        raise InvalidArgument(
            "startingTimestamp is behind endingTimestamp",
            why=f"{starting.time_us} and {ending.time_us} in microseconds since 1970",
        )
    for topic, offsets in starting.offsets.items():
        for partition, start in offsets.items():
            end = ending.offsets.get(topic, {}).get(partition, LATEST_NUMBER)
            if start > end >= 0:
                raise InvalidArgument(
                    f"startingOffsets has {start} for {topic} partition {partition}, endingOffsets {end}",
                    why="the end is the offset behind the last record that is read",
                )


def _bound(values: dict[str, Any], side: str, default: Bound) -> Bound:
    if f"{side}Timestamp" in values:
        return Bound("", values[f"{side}Timestamp"])
    bound: Bound = values.get(f"{side}Offsets", default)
    return bound


def read_given(given: Mapping[str, str], readers: Readers) -> tuple[dict[str, Any], StorageSettings | None]:
    """Values of the options by name, and the settings of a store among them (``s3.*``); None without any.

    Names count in any case, with or without dashes.  InvalidArgument names the option, what is wrong and
    what to write.  The text of a setting is not shown: it may be a secret.
    """
    names = {name.lower(): name for name in readers}
    settings = {f"{STORE_PREFIX}{one.name}": one for one in fields(StorageSettings) if one.name != "url"}
    plain = {_plain(name): one for name, one in settings.items()}
    values: dict[str, Any] = {}
    store: dict[str, Any] = {}
    for key, text in given.items():
        if key.lower().startswith(STORE_PREFIX):
            one = plain.get(_plain(key))
            if one is None:
                raise _unknown(key, list(settings))
            store[one.name] = _read(key, one.metadata["setting"].read, str(text), secret=True)
            continue
        name = names.get(key.lower().replace("-", ""))
        if name is None:
            raise _unknown(key, list(readers))
        values[name] = _read(name, readers[name], str(text))
    return values, StorageSettings(**store) if store else None


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "").replace(".", "")


def _read(name: str, read: Callable[[str], Any], text: str, *, secret: bool = False) -> Any:
    try:
        return read(text)
    except DanubeError:
        raise
    except ValueError as error:
        why = "" if secret else f"it is {text[:200]!r}"
        raise InvalidArgument(f"option {name} {error}", why=why) from None


def one_of(*words: str) -> Callable[[str], str]:
    """A reader of one of these words."""

    def read(text: str) -> str:
        word = text.strip().lower()
        if word not in words:
            raise ValueError(f"must be one of {', '.join(words)}")
        return word

    return read


def _unknown(key: str, names: list[str]) -> InvalidArgument:
    lower = {name.lower(): name for name in names}
    near = [lower[one] for one in difflib.get_close_matches(key.lower(), lower, 1, 0.5)]
    return InvalidArgument(
        f"option {key} is not known",
        why=f"did you mean {near[0]}?" if near else "",
        hint=f"options are {', '.join(sorted(names))}",
    )
