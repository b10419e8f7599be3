"""Code for Spark's workers, in a cover that reports if Danube is not installed there.

Spark hands classes and functions on by name.  A Python without Danube then ends with a traceback of its
loader for each attempt of each task.  So the code that Spark loads first travels by value: the functions of
this module, and a data source that stands for ours.  It needs only pyspark, and checks for Danube.
"""

from __future__ import annotations

import sys
from typing import Any

from pyspark import cloudpickle
from pyspark.sql.datasource import DataSource


class Travelling:
    """A reader, a writer or a function of ours that Spark pickles."""

    def __reduce__(self) -> tuple[Any, ...]:
        return arrived, (cloudpickle.dumps((type(self), self.__getstate__())),)  # type: ignore[no-untyped-call]


def opened(octets: bytes) -> Any:
    """Load the object in the bytes; ImportError, in one line, if this Python has no Danube.

    ``danube.spark.failures`` knows the error by its words.
    """
    try:
        import danube.spark.failures  # noqa: F401
    except ImportError as error:
        import platform
        import sys as own

        own.tracebacklimit = 0  # Spark ends this process with the error
        raise ImportError(
            f"Danube cannot be imported by {own.executable} on {platform.node()}, where Spark runs tasks"
            f" ({error}): install it there, pip install 'danube-broker[spark]', or name a Python that has it"
            " with PYSPARK_PYTHON"
        ) from None
    from pyspark import cloudpickle as loader

    return loader.loads(octets)


def arrived(octets: bytes) -> Any:
    """The object that was pickled."""
    kind, state = opened(octets)
    made = kind.__new__(kind)
    made.__dict__.update(state or {})
    return made


def covered(source: type[DataSource]) -> type[DataSource]:
    """A data source to register in the place of ``source``."""
    cover = _cover(source.name(), cloudpickle.dumps(source))  # type: ignore[no-untyped-call]
    cover.__name__ = cover.__qualname__ = source.__name__
    return cover


def _cover(source_name: str, octets: bytes) -> type[DataSource]:
    class Cover(DataSource):
        def __init__(self, options: dict[str, str]) -> None:
            super().__init__(options)
            self.inner = opened(octets)(options)

        @classmethod
        def name(cls) -> str:
            return source_name

        def schema(self) -> Any:
            return self.inner.schema()

        def reader(self, schema: Any) -> Any:
            return self.inner.reader(schema)

        def streamReader(self, schema: Any) -> Any:  # noqa: N802
            return self.inner.streamReader(schema)

        def writer(self, schema: Any, overwrite: bool) -> Any:
            return self.inner.writer(schema, overwrite)

        def streamWriter(self, schema: Any, overwrite: bool) -> Any:  # noqa: N802
            return self.inner.streamWriter(schema, overwrite)

    return Cover


cloudpickle.register_pickle_by_value(sys.modules[__name__])  # type: ignore[no-untyped-call]
