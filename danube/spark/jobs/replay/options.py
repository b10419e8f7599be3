"""The options of a replay, read and checked before anything is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from danube.config.quantities import parse_size_bytes
from danube.config.sections import parse_boolean
from danube.errors import InvalidArgument
from danube.ids import check_label, check_topic_name
from danube.spark.history.access import ACCESS_READERS, access_of
from danube.spark.history.options import Readers, ReadOptions, one_of, parse_count, read_options
from danube.spark.jobs.options import COMMON, parse_local_path, passed_on, read_job_options
from danube.spark.jobs.replay.state import default_state_path, work_hash
from danube.spark.jobs.replay.target import FORMATS, Target
from danube.spark.sink.options import check_publish_options
from danube.spark.sink.publishing import PublishOptions

KEEP: Final = "keep"
_JOB_LENGTH_MAX: Final = 100
_SOURCE: Final = (
    "storage",
    "topic",
    "broker",
    "startingOffsets",
    "endingOffsets",
    "startingTimestamp",
    "endingTimestamp",
    "failOnDataLoss",
)


def source_name(name: str) -> str:
    """The option of the broker that is read from; without the prefix it is that of ``to``."""
    return f"source{name[0].upper()}{name[1:]}"


READERS: Final[Readers] = {
    **{name: str for name in _SOURCE if name not in COMMON},
    "where": str.strip,
    "to": str.strip,
    "toTopic": str.strip,
    "toDirectory": parse_local_path,
    "format": one_of(*FORMATS),
    **ACCESS_READERS,
    **{source_name(name): read for name, read in ACCESS_READERS.items()},
    "job": str.strip,
    "state": parse_local_path,
    "dryRun": parse_boolean,
    "maxBytesPerSecond": parse_size_bytes,
    "maxRecordsPerSecond": parse_count,
    "partitioning": one_of("auto", KEEP, "key"),
    "publishTime": one_of(KEEP, "now"),
    "schemas": one_of(KEEP, "drop"),
    "durability": str.strip,
    "reliable": parse_boolean,
    "compression": str.strip,
    "batchBytes": parse_size_bytes,
}


class ReplayOptions(msgspec.Struct, frozen=True):
    """Options of one replay; the rates of ``target`` are for all lanes together.

    Two runs with equal ``work`` are the same work; ``partitioning`` auto keeps each record's partition if the
    target has as many.
    """

    source: ReadOptions
    target: Target
    work: str
    where: str
    partitioning: str
    state: Path
    dry_run: bool
    processes: int
    report: str

    @property
    def topic(self) -> str:
        return self.source.topics[0]


def read_replay_options(given: Mapping[str, str]) -> ReplayOptions:
    """Check given options; InvalidArgument names the option, the fault and valid values."""
    read = read_job_options(given, READERS)
    source = passed_on(given, *_SOURCE) | _access_to_source(read.get)
    source_options = read_options(source, streaming=False)
    if len(source_options.topics) > 1 or source_options.patterns:
        raise InvalidArgument("a replay takes one topic", why=f"topic is {source['topic']}")
    publish = _publish_options(read.get)
    words = [source.get(name, "") for name in _SOURCE if name != "failOnDataLoss"]
    words += [
        read.get("where", ""),
        publish.broker if publish else str(Path(read.get("toDirectory")).absolute()),
        publish.topic if publish else read.get("format", FORMATS[0]),
        *(str(read.get(name, "")) for name in ("partitioning", "publishTime", "schemas")),
    ]
    work = work_hash(*words)
    job = read.get("job") or work
    _check_job(job)
    if publish is not None and (publish.broker, publish.topic) == (
        source_options.broker,
        source_options.topics[0],
    ):
        raise InvalidArgument(
            "a topic is not replayed into itself", hint="name another topic with toTopic, then read from that"
        )
    target = Target(
        job=job,
        publish=publish,
        directory=read.get("toDirectory", ""),
        file_format=read.get("format", FORMATS[0]),
        keep_times=read.get("publishTime", KEEP) == KEEP,
        keep_schemas=read.get("schemas", KEEP) == KEEP,
        bytes_per_s=read.get("maxBytesPerSecond", 0),
        records_per_s=read.get("maxRecordsPerSecond", 0),
    )
    return ReplayOptions(
        source=source_options,
        target=target,
        work=work,
        where=read.get("where", ""),
        partitioning=read.get("partitioning", "auto"),
        state=Path(read.get("state") or default_state_path(job)).absolute(),
        dry_run=read.get("dryRun", False),
        processes=read.get("processes", 0),
        report=read.get("report", ""),
    )


def _access_to_source(get: Callable[..., Any]) -> dict[str, str]:
    """Options of access to the broker that is read from, said once where there is no other one."""
    own = {name: get(source_name(name)) for name in ACCESS_READERS}
    if not any(own.values()) and get("to", "") in ("", get("broker")):
        own = {name: get(name) for name in ACCESS_READERS}
    return {name: text for name, text in own.items() if text}


def _publish_options(get: Callable[..., Any]) -> PublishOptions | None:
    """Where to publish; None for files.  Exactly one of the two is to be named."""
    broker, topic, directory = get("to", ""), get("toTopic", ""), get("toDirectory", "")
    if directory:
        if broker or topic:
            raise InvalidArgument(
                "both a topic and a directory are named", hint="keep to and toTopic, or toDirectory"
            )
        return None
    if not broker or not topic:
        raise InvalidArgument(
            "where the records go is not known",
            hint="name a broker with to (danube://host:6660) and a topic with toTopic, or toDirectory",
        )
    check_topic_name(topic)
    names = ("durability", "reliable", "compression")
    fields = {name: get(name) for name in names} | {"batch_bytes": get("batchBytes")}
    given = {name: value for name, value in fields.items() if value is not None}
    access = access_of(broker, {name: get(name) for name in ACCESS_READERS})
    options = PublishOptions(broker=broker, topic=topic, access=access, **given)
    check_publish_options(options)
    return options


def _check_job(job: str) -> None:
    check_label(job, "job")
    if len(job) > _JOB_LENGTH_MAX or "/" in job or job.startswith("."):
        raise InvalidArgument(
            f"job {job[:40]!r} is not valid",
            why=f"it is up to {_JOB_LENGTH_MAX} characters without a slash, and names a file",
        )
