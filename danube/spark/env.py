"""A Spark session as Danube's source wants it.  What each setting brings stands in docs/spark.md.

Whoever starts Python decides first: what spark-submit, a notebook's session or the installation's files have
chosen stays, and so does the master.  Danube's settings fill what is left open.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from danube.errors import ConfigInvalid
from danube.spark.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSIONS: Final = ((4, 2), (4, 4))  # from, and below
JAVA_OPTIONS: Final = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"  # spark-submit has started the JVM, with its settings
SETTINGS: Final[Mapping[str, str]] = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.executor.defaultJavaOptions": JAVA_OPTIONS,  # extraJavaOptions come behind them
    "spark.driver.defaultJavaOptions": JAVA_OPTIONS,
    "spark.speculation": "false",
}


def check_version() -> None:
    """ConfigInvalid where pyspark is missing or is one that this source was not built for."""
    try:
        import pyspark
    except ImportError:
        raise ConfigInvalid(
            "Spark is not installed", why="there is no pyspark", hint="pip install 'danube-broker[spark]'"
        ) from None
    version = tuple(int(part) for part in pyspark.__version__.split(".")[:2])
    least, below = VERSIONS
    if not least <= version < below:
        raise ConfigInvalid(
            f"pyspark {pyspark.__version__} cannot be used",
            why="the source needs 4.2 or 4.3",
            hint="pip install 'danube-broker[spark]'",
        )


def prepare_environment(java_home: Path | None = None) -> None:
    """Set what Spark's processes read from the environment, where it is not set yet.

    Workers must be this very Python: the one on PATH may have no pyarrow.
    """
    if SUBMITTED not in os.environ:
        os.environ["JAVA_HOME"] = str(java_home or find_java())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    package_root = str(Path(__file__).resolve().parent.parent.parent)
    known = os.environ.get("PYTHONPATH", "")
    if package_root not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, known]))


def settings_of(given: Mapping[str, Any], decided: Callable[[str], bool]) -> dict[str, str]:
    """Danube's settings that are not ``decided`` elsewhere, with ``given`` over them.

    Names have ``_`` or ``.``; true and false are words.
    """
    chosen = {key: value for key, value in SETTINGS.items() if not decided(key)}
    for name, value in given.items():
        key = name if "." in name else name.replace("_", ".")
        chosen[key] = str(value).lower() if isinstance(value, bool) else str(value)
    return chosen


def _decided() -> Callable[[str], bool]:
    """Whether spark-submit, or whoever has a session in this process, chose a setting."""
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is not None:
        return lambda key: True
    if SUBMITTED in os.environ:
        SparkContext._ensure_initialized()  # the JVM is there, and its settings with it
    chosen: Callable[[str], bool] = SparkConf().contains
    return chosen


def make_session(name: str, where: str, settings: Mapping[str, Any]) -> SparkSession:
    """The session, with ``format("danube")`` registered; ``where`` empty leaves the master as it is."""
    check_version()
    prepare_environment()
    from pyspark.sql import SparkSession

    from danube.spark import register

    builder = SparkSession.builder.appName(name)
    if where:
        builder = builder.master(where)
    for key, value in settings_of(settings, _decided()).items():
        builder = builder.config(key, value)
    made: SparkSession = builder.getOrCreate()
    register(made)
    return made
