"""The columns of ``format("danube")`` as Spark sees them."""

from __future__ import annotations

from typing import Final

from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import DataType, StructField, StructType

from danube.errors import InvalidArgument
from danube.spark.history import decode
from danube.spark.source.value_types import VALUE

COLUMNS: Final = from_arrow_schema(decode.COLUMNS)


def columns_of(include_attributes: bool = True, value: DataType | None = None) -> StructType:
    """The schema that a read has when none is asked for; ``value`` adds a column of decoded payloads."""
    fields = [one for one in COLUMNS.fields if include_attributes or one.name != "attributes"]
    return StructType(fields if value is None else [*fields, StructField(VALUE, value)])


def check_requested(requested: StructType, offered: StructType) -> list[str]:
    """Names of the requested columns, in their order; InvalidArgument for one that is not offered so."""
    known = {one.name: one.dataType for one in offered.fields}
    for one in requested.fields:
        if one.name not in known:
            raise InvalidArgument(f"there is no column {one.name}", hint=f"columns are {', '.join(known)}")
        if one.dataType != known[one.name]:
            raise InvalidArgument(
                f"column {one.name} is not {one.dataType.simpleString()}",
                why=f"it is {known[one.name].simpleString()}",
                hint="read it as it is and cast it",
            )
    return [one.name for one in requested.fields]
