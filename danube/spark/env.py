"""A Spark session with the settings for Danube's source; docs/spark.md gives the reason of each.

Settings of spark-submit, of a notebook's session or of the installation's files stay, and so does the master.
Danube adds its own settings only where none is set.
"""

from __future__ import annotations

import os
import re
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
COLLECTOR: Final = "-XX:+UseParallelGC"  # a JVM that is told of two collectors does not start
SUBMITTED: Final = "PYSPARK_GATEWAY_PORT"  # spark-submit has started the JVM, with its settings
SETTINGS: Final[Mapping[str, str]] = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.python.unix.domain.socket.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.executor.defaultJavaOptions": JAVA_OPTIONS,  # extraJavaOptions come behind them
    "spark.driver.defaultJavaOptions": JAVA_OPTIONS,
    "spark.speculation": "false",
}
_COLLECTORS: Final = re.compile(r"-XX:\+Use\w+GC\b")


def check_version() -> None:
    """ConfigInvalid if pyspark is missing or is one that this source was not built for."""
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
    """Set environment variables that Spark's processes read, unless they are set already.

    Workers must use the Python of the driver: the one on PATH may have no pyarrow.
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
    for side in ("driver", "executor"):
        default, extra = f"spark.{side}.defaultJavaOptions", f"spark.{side}.extraJavaOptions"
        theirs = decided(extra) or _COLLECTORS.search(chosen.get(extra, ""))
        if chosen.get(default) == JAVA_OPTIONS and not theirs:
            chosen[default] = f"{JAVA_OPTIONS} {COLLECTOR}"
    return chosen


def installed_settings(environ: Mapping[str, str]) -> set[str]:
    """Return the settings in the installation's ``spark-defaults.conf``; empty if there is none."""
    home = environ.get("SPARK_HOME", "")
    folder = environ.get("SPARK_CONF_DIR") or (os.path.join(home, "conf") if home else "")
    path = Path(folder, "spark-defaults.conf")
    if not folder or not path.is_file():
        return set()
    lines = (line.strip() for line in path.read_text(errors="replace").splitlines())
    return {re.split(r"[\s=:]", line, maxsplit=1)[0] for line in lines if line and line[0] not in "#!"}


def _decided() -> Callable[[str], bool]:
    """Return a test whether spark-submit, the installation or a session of this process chose a setting."""
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is not None:
        return lambda key: True
    if SUBMITTED in os.environ:
        SparkContext._ensure_initialized()  # the JVM is there, and its settings with it
    known, installed = SparkConf(), installed_settings(os.environ)
    return lambda key: known.contains(key) or key in installed


def make_session(name: str, where: str, settings: Mapping[str, Any]) -> SparkSession:
    """A session; ``where`` empty leaves the master as it is."""
    check_version()
    prepare_environment()
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.appName(name)
    if where:
        builder = builder.master(where)
    for key, value in settings_of(settings, _decided()).items():
        builder = builder.config(key, value)
    made: SparkSession = builder.getOrCreate()
    return made
