"""Diagnostics: one line an event, facts as key=value or JSON, safe against what peers put into names.

    events = telemetry.events("wal")
    events.info("segment sealed", topic="/default/orders", size_bytes=268435456)
    events.limited("handshake refused", source=address, why="bad magic")   # one a second and source

Built on :mod:`logging`, so third-party loggers come out the same way.  Every line leaves with one
``os.write`` and nothing is buffered here: a fork copies no half-written line and takes no lock along.
Nothing a peer sends can start a new line, hide one, or grow one beyond LINE_FACT_CHARACTERS_MAX a fact.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from typing import Any, Final

from danube.host.clock import monotonic_ns

LINE_FACT_CHARACTERS_MAX: Final = 1_024
TRACEBACK_CHARACTERS_MAX: Final = 16_384
SUPPRESSED_SOURCES_MAX: Final = 1_024
SUPPRESS_INTERVAL_NS: Final = 1_000_000_000
STATE_INTERVAL_NS: Final = 60_000_000_000
FILE_CHECK_LINES: Final = 256
ROOT: Final = "danube"

_file_bytes_max = 0

_RESERVED: Final = frozenset({"time", "level", "process", "logger", "event", "traceback"})
_PLAIN_PUNCTUATION: Final = frozenset("/_-.:,+@%[]{}()<>*")
_FACTS: Final = "danube_facts"


def escape(text: str, characters_max: int = LINE_FACT_CHARACTERS_MAX) -> str:
    """Return ``text`` on one line: unprintable characters are escaped, long text is cut."""
    cut = len(text) - characters_max
    if cut > 0:
        text = text[:characters_max]
    if not text.isprintable():
        text = "".join(one if one.isprintable() else _escaped(one) for one in text)
    return f"{text}... {cut} more" if cut > 0 else text


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "backslashreplace").decode("ascii")


def quote(text: str, characters_max: int = LINE_FACT_CHARACTERS_MAX) -> str:
    """``text`` between double quotes on one line, cut before it is escaped so that no escape is split."""
    cut = len(text) - characters_max
    kept = text[:characters_max].replace("\\", "\\\\").replace('"', '\\"')
    more = f"... {cut} more" if cut > 0 else ""
    return f'"{escape(kept, 2 * characters_max)}{more}"'


def _as_text(value: object) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value[: LINE_FACT_CHARACTERS_MAX + 1]).decode("utf-8", "backslashreplace")
    return str(value)


def fact_text(value: object) -> str:
    """A fact's value for a text line: bare where that is unambiguous, else quoted and escaped."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float) or value is None:
        return str(value)
    text = _as_text(value)
    short = 0 < len(text) <= LINE_FACT_CHARACTERS_MAX
    if short and all(one.isalnum() or one in _PLAIN_PUNCTUATION for one in text):
        return text
    return quote(text)


def _fact_name(name: str) -> str:
    name = "".join(one if one.isalnum() or one in "_-." else "_" for one in name[:64]) or "_"
    return "fact_" + name if name in _RESERVED else name


def _time_text(record: logging.LogRecord) -> str:
    seconds, fraction = divmod(record.created, 1)
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(fraction * 1000):03d}Z"


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def _traceback(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info) if record.exc_info and record.exc_info[0] else ""

    @staticmethod
    def _facts(record: logging.LogRecord) -> Mapping[str, object]:
        return getattr(record, _FACTS, None) or {}

    @staticmethod
    def _event(record: logging.LogRecord) -> str:
        try:
            return record.getMessage()
        except (TypeError, ValueError):  # a third-party call whose arguments do not fit its format
            return str(record.msg)


class TextFormatter(_Formatter):
    """``2026-11-21T10:25:03.123Z INFO  worker-1 wal: segment sealed topic=/default/orders``"""

    def format(self, record: logging.LogRecord) -> str:
        logger = record.name.removeprefix(ROOT + ".")
        parts = [_time_text(record), f"{record.levelname:<7}", self._process, f"{logger}:"]
        parts.append(escape(self._event(record)))
        parts += [f"{_fact_name(name)}={fact_text(value)}" for name, value in self._facts(record).items()]
        traceback = self._traceback(record)
        if traceback:
            parts.append(f"traceback={quote(traceback, TRACEBACK_CHARACTERS_MAX)}")
        return " ".join(part for part in parts if part)


class JsonFormatter(_Formatter):
    """One JSON object a line; a fact named like a standard field becomes ``fact_<name>``."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time_text(record),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "event": self._event(record)[:LINE_FACT_CHARACTERS_MAX],
        }
        for name, value in self._facts(record).items():
            plain = isinstance(value, bool | int | float) or value is None
            line[_fact_name(name)] = value if plain else _as_text(value)[:LINE_FACT_CHARACTERS_MAX]
        traceback = self._traceback(record)
        if traceback:
            line["traceback"] = traceback[:TRACEBACK_CHARACTERS_MAX]
        return json.dumps(line, allow_nan=True)


class _DescriptorHandler(logging.Handler):
    """Writes each line with one call to a descriptor; a reader that went away is not our failure."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self.descriptor = descriptor
        self._lines = 0

    def emit(self, record: logging.LogRecord) -> None:
        try:
            os.write(self.descriptor, (self.format(record) + "\n").encode("utf-8", "backslashreplace"))
            self._lines += 1
            if _file_bytes_max and self._lines % FILE_CHECK_LINES == 0:
                self._begin_file_anew()
        except OSError:
            pass  # a closed or full standard error must not stop a broker
        except Exception:
            self.handleError(record)

    def _begin_file_anew(self) -> None:
        """Empty a file that has reached its bound; it was opened for appending."""
        if os.fstat(self.descriptor).st_size > _file_bytes_max:
            os.ftruncate(self.descriptor, 0)


def bound_file(bytes_max: int) -> None:
    """Empty the output whenever it is larger than this: for a file that is not rotated.

    Applies to this process and its forks; 0 is no bound.
    """
    global _file_bytes_max
    _file_bytes_max = bytes_max


class Suppressor:
    """Lets one event a second and source through and counts the others.

    Sources beyond the bound share one bucket, so a flood from many addresses costs no memory.
    """

    def __init__(
        self, interval_ns: int = SUPPRESS_INTERVAL_NS, sources_max: int = SUPPRESSED_SOURCES_MAX
    ) -> None:
        self._interval_ns = interval_ns
        self._sources_max = sources_max
        self._forgotten_ns = -interval_ns
        self._seen: dict[object, tuple[int, int]] = {}

    def admit(self, source: object, now_ns: int) -> int | None:
        """None: suppress.  Else: let it through; so many were suppressed since the last one."""
        seen = self._seen
        if source not in seen and len(seen) >= self._sources_max:
            self._forget(now_ns)
            if len(seen) >= self._sources_max:
                source = None
        last = seen.get(source)
        if last is not None and now_ns - last[0] < self._interval_ns:
            seen[source] = (last[0], last[1] + 1)
            return None
        seen[source] = (now_ns, 0)
        return last[1] if last is not None else 0

    def _forget(self, now_ns: int) -> None:
        """Drop sources that were quiet for an interval; a scan of the full table once per interval."""
        if now_ns - self._forgotten_ns < self._interval_ns:
            return
        self._forgotten_ns = now_ns
        quiet = [source for source, (at_ns, _) in self._seen.items() if now_ns - at_ns >= self._interval_ns]
        for source in quiet:
            del self._seen[source]


class Events:
    """Diagnostics of one part of the program: an event in plain words, and facts by name."""

    def __init__(self, logger: logging.Logger) -> None:
        self._logger = logger
        self._suppressor = Suppressor()
        self._states = Suppressor(STATE_INTERVAL_NS)

    def debug(self, event: str, /, **facts: Any) -> None:
        self._emit(logging.DEBUG, event, facts)

    def info(self, event: str, /, **facts: Any) -> None:
        self._emit(logging.INFO, event, facts)

    def warning(self, event: str, /, **facts: Any) -> None:
        self._emit(logging.WARNING, event, facts)

    def error(self, event: str, /, **facts: Any) -> None:
        self._emit(logging.ERROR, event, facts)

    def failure(self, event: str, error: BaseException, /, **facts: Any) -> None:
        """An error with its traceback."""
        self._emit(logging.ERROR, event, facts, error)

    def limited(self, event: str, /, *, source: object, level: int = logging.WARNING, **facts: Any) -> None:
        """Log an event that a peer can cause at will: once a second for each event and source.

        A source must not change: a host without its port (:func:`danube.host.tcp.host_of`), a partition, a
        key.
        """
        if not self._logger.isEnabledFor(level):
            return
        suppressed = self._suppressor.admit((event, str(source)), monotonic_ns())
        if suppressed is not None:
            extra = {"suppressed": suppressed} if suppressed else {}
            self._emit(level, event, {"source": source, **facts, **extra})

    def lasting(self, event: str, /, *, source: object, level: int = logging.WARNING, **facts: Any) -> None:
        """Log a state that is checked again and again: when its facts change, else once a minute."""
        if self._logger.isEnabledFor(level) and (
            self._states.admit((event, str(source), str(facts)), monotonic_ns()) is not None
        ):
            self._emit(level, event, {"source": source, **facts})

    def _emit(
        self, level: int, event: str, facts: dict[str, Any], error: BaseException | None = None
    ) -> None:
        if self._logger.isEnabledFor(level):
            trace = (type(error), error, error.__traceback__) if error is not None else None
            # The event goes as an argument: a % in it must not be read as a format.
            self._logger.log(level, "%s", event, extra={_FACTS: facts}, exc_info=trace)


def events(name: str) -> Events:
    """The events of one part: ``wal``, ``broker.worker`` ..."""
    return Events(logging.getLogger(f"{ROOT}.{name}"))


def configure(level: str = "info", format: str = "text", *, process: str = "", descriptor: int = 2) -> None:
    """Send everything at or above ``level`` to ``descriptor`` (2: standard error).

    Called once in each process; a worker calls it again after the fork with its own ``process`` name.
    """
    handler = _DescriptorHandler(descriptor)
    handler.setFormatter(JsonFormatter(process) if format == "json" else TextFormatter(process))
    root = logging.getLogger()
    for old in [one for one in root.handlers if isinstance(one, _DescriptorHandler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    logging.getLogger(ROOT).setLevel(level.upper())
