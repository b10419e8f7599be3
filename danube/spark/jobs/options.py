"""Options that all jobs share, and reading a job's options with clear words where they are wrong."""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

from danube.config.sections import StorageSettings, parse_boolean
from danube.errors import InvalidArgument, StorageFailed
from danube.host import files
from danube.spark.history.options import STORE_PREFIX, Readers, parse_count, parse_words, read_given
from danube.spark.history.places import AnyPlace, open_place
from danube.spark.jobs.findings import Report

_SCHEME: Final = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(?=/)")  # one letter is a drive


def parse_local_path(text: str) -> str:
    """A path of this machine, also as ``file:///path``; ValueError for the URL of a store.

    As a path ``s3://bucket/lake`` is a folder ``s3:`` below the current one.
    """
    text = text.strip()
    found = _SCHEME.match(text)
    if found is None:
        return text
    if found[1].lower() != "file" or not text[found.end() :].startswith("/"):
        raise ValueError(
            "must be a path of this machine, not the URL of a store: mount the store, or copy later"
        )
    return "/" + text[found.end() :].lstrip("/")


COMMON: Final[Readers] = {
    "storage": str.strip,
    "topic": parse_words,
    "processes": parse_count,
    "report": parse_local_path,
}


def passed_on(given: Mapping[str, str], *names: str) -> dict[str, str]:
    """The given options of these names, and those of a store, for a read's own options."""
    known = {name.lower(): name for name in names}
    return {
        known.get(key.lower(), key): text
        for key, text in given.items()
        if key.lower() in known or key.lower().startswith(STORE_PREFIX)
    }


class JobOptions:
    """The options of one run.  ``settings``: of the object store; may hold secrets, never shown."""

    def __init__(self, values: dict[str, Any], settings: StorageSettings | None) -> None:
        self._values = values
        self.settings = settings

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    @property
    def storage(self) -> str:
        text: str = self._values.get("storage", "")
        if not text:
            raise InvalidArgument(
                "option storage is missing", hint="name a broker's data directory or s3://bucket/prefix"
            )
        return text

    def place(self) -> AnyPlace:
        """Open the place that ``storage`` names; the settings are for a store."""
        return open_place(self.storage, self.settings if "://" in self.storage else None)

    def wants(self, topic: str) -> bool:
        """Whether a topic is named or matches a pattern; without the option all are."""
        names: tuple[str, ...] = self._values.get("topic", ())
        return not names or any(fnmatchcase(topic, name) for name in names)


def read_job_options(given: Mapping[str, str], readers: Readers) -> JobOptions:
    """Read what was given; InvalidArgument names the option and what to write."""
    return JobOptions(*read_given(given, {**COMMON, **readers}))


class Surroundings(NamedTuple):
    """Surroundings of a job: processes of this machine, or a session with this ``--master`` and settings."""

    local: bool = False
    url: str = ""
    settings: Mapping[str, str] = {}


def parse_arguments(
    job: str, description: str, readers: Readers, argv: Sequence[str]
) -> tuple[dict[str, str], Surroundings]:
    """The pairs of a command line, ``--s3.region`` and so on among them, and where the job is to run."""
    parser = argparse.ArgumentParser(f"danube.spark.{job}", description=description, allow_abbrev=False)
    parser.add_argument(
        "--local", action="store_true", help="work in processes of this machine, without Java"
    )
    parser.add_argument(
        "--master", dest="spark_url", default="", help="of Spark: spark://host:7077; not under spark-submit"
    )
    parser.add_argument(
        "--conf", action="append", default=[], metavar="NAME=VALUE", help="a setting of Spark"
    )
    known = {**COMMON, **readers}
    for name, read in known.items():
        flag = "".join(f"-{letter.lower()}" if letter.isupper() else letter for letter in name)
        if read is parse_boolean:
            parser.add_argument(f"--{flag}", dest=name, nargs="?", const="true")
        else:
            parser.add_argument(f"--{flag}", dest=name)
    found, rest = parser.parse_known_args(list(argv))
    given = {name: text for name in known if (text := getattr(found, name)) is not None}
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--s3.") or not (rest or "=" in flag):
            parser.error(f"unrecognized argument {flag}")
        name, equals, text = flag[2:].partition("=")
        given[name] = text if equals else rest.pop(0)
    settings: dict[str, str] = {}
    for text in found.conf:
        name, equals, value = text.partition("=")
        if not equals:
            parser.error(f"--conf {text} is not NAME=VALUE")
        settings[name] = value
    if found.local and (found.spark_url or settings):
        parser.error("--local works without Spark: leave --master and --conf away")
    return given, Surroundings(found.local, found.spark_url, settings)


@contextmanager
def reported(job: str, path: str | None) -> Iterator[Report]:
    """Give the block a report to fill; add its duration, and write it to ``path``, whole or not at all."""
    start_s = time.monotonic()
    report = Report(job=job)
    yield report
    report.seconds = round(time.monotonic() - start_s, 3)
    if not path:
        return
    try:
        files.replace_durably(Path(path).absolute(), report.to_json())
    except OSError as error:
        why = error.strerror or str(error)
        raise StorageFailed(f"the report {path} cannot be written", why=why) from None
