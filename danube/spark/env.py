"""A Spark session as Danube's source wants it.  What each setting brings stands in docs/spark.md."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from danube.errors import ConfigInvalid
from danube.spark.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

VERSIONS: Final = ((4, 2), (4, 4))  # from, and below
JAVA_OPTIONS: Final = "-Darrow.enable_unsafe_memory_access=true -Darrow.enable_null_check_for_get=false"
SETTINGS: Final[Mapping[str, str]] = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.executor.extraJavaOptions": JAVA_OPTIONS,
    "spark.driver.extraJavaOptions": JAVA_OPTIONS,
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
    os.environ["JAVA_HOME"] = str(java_home or find_java())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("PYSPARK_DRIVER_PYTHON", sys.executable)
    package_root = str(Path(__file__).resolve().parent.parent.parent)
    known = os.environ.get("PYTHONPATH", "")
    if package_root not in known.split(os.pathsep):
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [package_root, known]))


def settings_of(given: Mapping[str, Any]) -> dict[str, str]:
    """Danube's settings with ``given`` over them; names have ``_`` or ``.``, true and false are words."""
    chosen = dict(SETTINGS)
    for name, value in given.items():
        key = name if "." in name else name.replace("_", ".")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if key.endswith("extraJavaOptions"):
            text = f"{JAVA_OPTIONS} {text}"
        chosen[key] = text
    return chosen


def make_session(name: str, where: str, settings: Mapping[str, Any]) -> SparkSession:
    """The session, with ``format("danube")`` registered."""
    check_version()
    prepare_environment()
    from pyspark.sql import SparkSession

    from danube.spark import register

    builder = SparkSession.builder.appName(name).master(where)
    for key, value in settings_of(settings).items():
        builder = builder.config(key, value)
    made: SparkSession = builder.getOrCreate()
    register(made)
    return made
