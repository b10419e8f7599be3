"""Plan of a load test, as users write it: one table of options for Locust and for ``danube load``."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from danube.client.machine.address import URL_DEFAULT, parse_url
from danube.client.machine.tls import tls_of
from danube.config.quantities import format_size, parse_duration_ms, parse_size_bytes
from danube.errors import InvalidArgument
from danube.ids import check_new_topic_name
from danube.limits import PARTITIONS_MAX, RECORD_BYTES_MAX
from danube.load.stamp import STAMP_BYTES

PROTOCOLS: Final = ("native", "grpc")
MODES: Final = ("exclusive", "shared", "failover", "key_shared")
LEVELS: Final = ("written", "fsync", "memory")
GRPC_PORT: Final = 6650
CONSUMERS_MAX: Final = 1_000
KEYS_MAX: Final = 10_000
RATE_MAX: Final = 1_000_000.0
_WHOLE: Final = re.compile(r"[0-9]{1,9}\Z")
_HOST_AND_PORT: Final = re.compile(r"(?:(?:danube|http)://)?([^/\s]+:[0-9]{1,5})/?\Z")


class Option(NamedTuple):
    """One setting: ``--name``, its default and its help."""

    name: str
    default: str
    metavar: str
    help: str

    @property
    def field(self) -> str:
        return self.name.replace("-", "_")


BROKER: Final = Option("broker", URL_DEFAULT, "URL", "The broker's native address.")
TOPIC: Final = Option(
    "topic", "", "TOPIC", "Use this topic and keep it; else one is made for the run and deleted after it."
)
# Options that `danube load` and Locust's command line share; broker and topic are written differently there.
OPTIONS: Final = (
    Option("protocol", "native", "NAME", "native, grpc or both."),
    Option("grpc-broker", "", "HOST:PORT", "The gRPC address; by default port 6650 of the broker's host."),
    Option("modes", ",".join(MODES), "LIST", "Subscription types: exclusive, shared, failover, key-shared."),
    Option("consumers", "1", "N", "Consumers of each shared, failover and key-shared subscription."),
    Option("sizes", "100:6,1KiB:3,64KiB:1", "LIST", "Payload sizes, each with its weight."),
    Option("rate", "50", "N", "Records/s of each producer; 0: the next one when the last is acknowledged."),
    Option("ramp", "0", "DURATION", "Time in which a producer's rate grows from zero."),
    Option("keys", "8", "N", "Routing keys of each producer."),
    Option("partitions", "0", "N", "Partitions of a new topic; 0: not partitioned."),
    Option("durability", "", "LEVEL", "written (default), fsync or memory; an existing topic keeps its own."),
    Option("send-timeout", "30s", "DURATION", "A send fails without an answer for this long."),
    Option("drain-timeout", "30s", "DURATION", "At the end: records are lost if none arrives for this long."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checked load test.  Made by :meth:`parse`."""

    broker: str
    grpc_broker: str  # host:port
    topic: str  # empty: one for the run
    protocols: tuple[str, ...]
    modes: tuple[str, ...]
    consumers: int
    sizes: tuple[tuple[int, int], ...]  # (bytes, weight)
    rate: float  # records/s of one producer; 0: closed loop
    ramp_s: float
    keys: int
    partitions: int
    durability: str  # empty: that of the topic
    send_timeout_s: float
    drain_timeout_s: float

    @classmethod
    def parse(cls, values: Mapping[str, str]) -> Plan:
        """Parse a plan from texts by the options' field names; absent ones have their defaults.

        Raises InvalidArgument or InvalidName, with the option's name.
        """
        texts = {one.field: str(values.get(one.field) or one.default) for one in (BROKER, TOPIC, *OPTIONS)}
        addresses = parse_url(tls_of(texts["broker"], None)[0])
        if texts["topic"]:
            check_new_topic_name(texts["topic"])
        return cls(
            broker=texts["broker"],
            grpc_broker=_host_and_port(texts["grpc_broker"], addresses[0].host),
            topic=texts["topic"],
            protocols=_protocols(texts["protocol"]),
            modes=_modes(texts["modes"]),
            consumers=_whole("consumers", texts["consumers"], 1, CONSUMERS_MAX),
            sizes=_sizes(texts["sizes"]),
            rate=_rate(texts["rate"]),
            ramp_s=_seconds("ramp", texts["ramp"]),
            keys=_whole("keys", texts["keys"], 1, KEYS_MAX),
            partitions=_whole("partitions", texts["partitions"], 0, PARTITIONS_MAX),
            durability=_level(texts["durability"]),
            send_timeout_s=_seconds("send-timeout", texts["send_timeout"], least=0.1),
            drain_timeout_s=_seconds("drain-timeout", texts["drain_timeout"], least=0.1),
        )

    @property
    def size_max(self) -> int:
        """Bytes of the largest payload."""
        return max(size for size, _ in self.sizes)

    def consumer_counts(self) -> dict[tuple[str, str], int]:
        """(protocol, mode) and how many consumers it has; an exclusive subscription has one."""
        return {
            (protocol, mode): 1 if mode == "exclusive" else self.consumers
            for protocol in self.protocols
            for mode in self.modes
        }

    @property
    def users_min(self) -> int:
        """All consumers, and a producer of each protocol."""
        return sum(self.consumer_counts().values()) + len(self.protocols)

    def check_users(self, users: int) -> None:
        """Raise InvalidArgument if there are too few users for every consumer and a producer."""
        if users < self.users_min:
            raise InvalidArgument(
                f"{users} users are too few",
                why=f"there are {self.users_min - len(self.protocols)} consumers, "
                f"and each protocol needs a producer",
                hint=f"--users {self.users_min} at least, or fewer --modes",
            )


def words_of(values: Mapping[str, str]) -> list[str]:
    """The command line for Locust that says the same."""
    options = (BROKER, TOPIC, *OPTIONS)
    return [f"--{one.name}={values[one.field]}" for one in options if values.get(one.field)]


def size_label(size: int) -> str:
    """``100B``, ``1KiB``."""
    text = format_size(size)
    return text if text[-1] == "B" else f"{text}B"


def _refuse(name: str, text: str, hint: str) -> InvalidArgument:
    return InvalidArgument(f"--{name} {shlex.quote(text[:80])} is not valid", hint=hint)


def _whole(name: str, text: str, least: int, most: int) -> int:
    number = int(text) if _WHOLE.match(text) else -1
    if not least <= number <= most:
        raise _refuse(name, text, f"a whole number, {least} to {most}")
    return number


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 <= rate <= RATE_MAX:
        raise _refuse("rate", text, "records per second, 0 for one after the other")
    return rate


def _seconds(name: str, text: str, least: float = 0.0) -> float:
    try:
        seconds = parse_duration_ms(text) / 1000
    except ValueError:
        raise _refuse(name, text, "a duration such as 250ms, 30s or 5m") from None
    if seconds < least:
        raise _refuse(name, text, f"at least {least:g}s")
    return seconds


def _protocols(text: str) -> tuple[str, ...]:
    if text == "both":
        return PROTOCOLS
    if text not in PROTOCOLS:
        raise _refuse("protocol", text, "native, grpc or both")
    return (text,)


def _modes(text: str) -> tuple[str, ...]:
    words = [word.strip().replace("-", "_") for word in text.split(",")]
    modes = ["failover" if word == "fail_over" else word for word in words]
    if not set(modes) <= set(MODES) or len(set(modes)) < len(modes):
        raise _refuse("modes", text, "some of exclusive,shared,failover,key-shared, each once")
    return tuple(modes)


def _level(text: str) -> str:
    if text and text not in LEVELS:
        raise _refuse("durability", text, "written, fsync or memory")
    return text


def _sizes(text: str) -> tuple[tuple[int, int], ...]:
    """``100:6,64KiB`` as sizes and weights; the weight is 1 where none is given."""
    hint = f"sizes from {STAMP_BYTES} to {RECORD_BYTES_MAX}, such as 100:6,1KiB:3,64KiB:1"
    found: dict[int, int] = {}
    for word in text.split(","):
        size_text, colon, weight_text = word.strip().partition(":")
        try:
            size = parse_size_bytes(size_text)
        except ValueError:
            raise _refuse("sizes", text, hint) from None
        weight = int(weight_text) if _WHOLE.match(weight_text) else 1 - bool(colon)
        if not STAMP_BYTES <= size <= RECORD_BYTES_MAX or weight < 1 or size in found:
            raise _refuse("sizes", text, hint)
        found[size] = weight
    return tuple(found.items())


def _host_and_port(text: str, host: str) -> str:
    if not text:
        return f"[{host}]:{GRPC_PORT}" if ":" in host else f"{host}:{GRPC_PORT}"
    match = _HOST_AND_PORT.match(text)
    if match is None:
        raise _refuse("grpc-broker", text, "host:port or http://host:port")
    return match[1]
