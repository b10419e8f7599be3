"""Options and columns of ``df.write.format("danube")``, checked on the driver before a task starts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

import msgspec

from danube.client.records.records import compression_of
from danube.config.quantities import parse_duration_ms, parse_size_bytes
from danube.config.sections import parse_boolean
from danube.core.partition.policy import Durability
from danube.errors import InvalidArgument
from danube.ids import check_label, check_topic_name
from danube.limits import MIB
from danube.spark.history.access import ACCESS_READERS, access_of
from danube.spark.history.options import parse_count, read_given
from danube.spark.sink.publishing import PublishOptions

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

# option name -> field of PublishOptions and its reader
_FIELDS: Final[dict[str, tuple[str, Callable[[str], Any]]]] = {
    "broker": ("broker", str),
    "topic": ("topic", str),
    "reliable": ("reliable", parse_boolean),
    "durability": ("durability", str),
    "partitions": ("partitions", parse_count),
    "compression": ("compression", str),
    "batchBytes": ("batch_bytes", parse_size_bytes),
    "maxInFlightBytes": ("in_flight_bytes", parse_size_bytes),
    "timeout": ("timeout_s", lambda text: parse_duration_ms(text) / 1000),
}
_OWN: Final = ("jobId", "batchId")
_SPARKS: Final = ("path", "checkpointLocation", "queryName")  # Spark's own, which it hands through

# column -> types by their names in Spark
COLUMNS: Final = {
    "payload": ("binary", "string"),
    "key": ("binary", "string"),
    "attributes": ("map<string,string>",),
    "topic": ("string",),
    "partition": ("int",),
    "publish_time": ("timestamp",),
    "schema_id": ("bigint", "int"),
    "schema_version": ("int", "bigint"),
}


class SinkOptions(msgspec.Struct, frozen=True):
    """``job`` names the work: a second run under the same name stores nothing twice."""

    publish: PublishOptions
    job: str = ""
    round_number: int = 0


def read_sink_options(given: Mapping[str, str]) -> SinkOptions:
    """Check the values of ``option(...)``; InvalidArgument names the fault."""
    readers: dict[str, Callable[[str], Any]] = {name: read for name, (_, read) in _FIELDS.items()}
    values, store = read_given(
        given, {**readers, **ACCESS_READERS, "jobId": str, "batchId": _count, **dict.fromkeys(_SPARKS, str)}
    )
    fields = {field: values[name] for name, (field, _) in _FIELDS.items() if name in values}
    if store is not None:
        raise InvalidArgument("the sink takes no options of a store", why="it publishes through a broker")
    if not fields.get("broker"):
        raise InvalidArgument("the sink has no broker", hint='say .option("broker", "danube://host:6660")')
    publish = PublishOptions(**fields, access=access_of(fields["broker"], values))
    check_publish_options(publish)
    job, round_number = values.get("jobId", ""), values.get("batchId", 0)
    if job:
        check_label(job[:200], "job")
    elif round_number:
        raise InvalidArgument("batchId needs a jobId", hint="the two together name the work")
    return SinkOptions(publish, job, round_number)


def check_publish_options(options: PublishOptions) -> None:
    """Refuse options that the client would refuse in the middle of a task."""
    if options.topic:
        check_topic_name(options.topic)
    if options.durability is not None:
        Durability.parse(options.durability)
    compression_of(options.compression)
    if not 1024 <= options.batch_bytes <= 8 * MIB:
        raise InvalidArgument(f"batchBytes must be 1 KiB to 8 MiB, not {options.batch_bytes}")
    if options.in_flight_bytes < options.batch_bytes:
        raise InvalidArgument("maxInFlightBytes must be at least batchBytes")


def check_columns(schema: StructType, topic: str) -> None:
    """Refuse a DataFrame that cannot be published: missing, unknown and wrongly typed columns."""
    types = {field.name: field.dataType.simpleString() for field in schema.fields}
    for name, kind in types.items():
        if name not in COLUMNS:
            near = get_close_matches(name, COLUMNS, n=1)
            raise InvalidArgument(
                f"column {name!r} is none of a record",
                why=f"did you mean {near[0]}?" if near else f"a record has {', '.join(COLUMNS)}",
                hint="select the columns to publish",
            )
        if kind not in COLUMNS[name]:
            raise InvalidArgument(
                f"column {name!r} is {kind}", why=f"it is to be {' or '.join(COLUMNS[name])}", hint="cast it"
            )
    if "payload" not in types:
        raise InvalidArgument("the DataFrame has no column payload", hint="select(expr('... as payload'))")
    if not topic and "topic" not in types:
        raise InvalidArgument(
            "where to publish is not known",
            hint='say .option("topic", "/default/orders"), or add a column topic',
        )


def _count(text: str) -> int:
    number = parse_count(text)
    if number >= 1 << 48:
        raise ValueError("is too large")
    return number
