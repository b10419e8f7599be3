"""``danube start --detach``: a broker in a session of its own, started from this one."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from danube.cli.broker.running import read_running
from danube.cli.terminal.output import note
from danube.cli.terminal.own_process import own_command, own_environment
from danube.errors import AlreadyRunning, OperationTimeout, StorageFailed, Unavailable

if TYPE_CHECKING:
    from danube.config.loading import BrokerConfig, Loaded, Started

SILENCE_MAX_S = 60.0  # without a line and without work: a first start compiles kernels, each takes seconds
START_MAX_S = 900.0  # whatever it does
WORK_MIN_S = 0.5  # of processor time: on a busy machine one kernel may take minutes
LOOK_INTERVAL_S = 0.02
OUTPUT_FILE = "danube.out"
OUTPUT_BYTES_MAX = 64 * 1024 * 1024
_OUTPUT_LINES_SHOWN = 5
_READ_BYTES = 64 * 1024
_LOG_LINE = re.compile(rb"\d{4}-\d\d-\d\dT|\{")  # as danube.host.telemetry writes it, as text or JSON


def start_detached(loaded: Loaded) -> Started:
    """Start the broker with exactly this configuration and wait until it serves.

    Its output goes to ``danube.out`` in the data directory, which is emptied when it grows large.  Progress
    of the start is passed on to standard error.  Raises Unavailable when the broker ends, and
    OperationTimeout when it neither says nor does anything for SILENCE_MAX_S.
    """
    config, file = loaded.config, _kept(loaded.file)
    holder = read_running(config.data_dir)
    if holder is not None:
        raise AlreadyRunning(
            f"a broker is running on {config.data_dir} (pid {holder.pid})",
            why="a data directory belongs to one broker at a time",
            hint="stop it with `danube stop`, or give this one another --data-dir",
        )
    output = config.data_dir / OUTPUT_FILE
    with _append_to(output) as sink:
        before = sink.tell()
        process = subprocess.Popen(  # noqa: S603 - this program, with paths that were checked
            own_command("danube", "start", *_flags(config, file)),
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            start_new_session=True,
            env=_environment(config, file),
        )
    return _wait_ready(config, process, Spoken(output, before))


def _append_to(output: Path) -> BinaryIO:
    try:
        output.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        return open(output, "ab", opener=_private)
    except OSError as error:
        raise StorageFailed(
            f"{output} cannot be written", why=error.strerror or str(error), hint="choose another --data-dir"
        ) from None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)


def _kept(file: Path | None) -> Path | None:
    """The configuration file, if the child can read it as well, and read it again."""
    return file.absolute() if file is not None and file.is_file() else None


def _flags(config: BrokerConfig, file: Path | None = None) -> list[str]:
    named = ["--config", str(file)] if file is not None else []
    return ["--data-dir", str(config.data_dir), *named, "--output-bytes-max", str(OUTPUT_BYTES_MAX)]


def _environment(config: BrokerConfig, file: Path | None = None) -> dict[str, str]:
    """The whole checked configuration as environment, so that the child agrees whatever becomes of the file.

    Only what `danube reload` reads again is left to the file.
    """
    from danube.config.auth import RELOADED
    from danube.config.loading import environment_name, values

    left = RELOADED if file is not None else ()
    given = {key: text for key, text in values(config, secrets_shown=True).items() if key not in left}
    kept = {name: text for name, text in own_environment(os.environ).items() if name != "DANUBE_CONFIG"}
    return kept | {environment_name(key): text for key, text in given.items()}


def _wait_ready(config: BrokerConfig, process: subprocess.Popen[bytes], spoken: Spoken) -> Started:
    from danube.config.loading import Started

    worked_s = 0.0
    end = time.monotonic() + START_MAX_S
    give_up = time.monotonic() + SILENCE_MAX_S
    while time.monotonic() < min(give_up, end):
        now_worked_s = _processor_time_s(process.pid)
        if spoken.pass_on() or now_worked_s >= worked_s + WORK_MIN_S:
            worked_s = now_worked_s
            give_up = time.monotonic() + SILENCE_MAX_S
        found = read_running(config.data_dir)
        if found is not None and found.pid == process.pid and found.ready:
            return Started(
                addresses=found.addresses,
                data_dir=config.data_dir,
                workers=len(found.workers),
                pid=found.pid,
                warnings=list(found.warnings),
            )
        if process.poll() is not None:
            raise Unavailable(
                f"the broker ended with exit code {process.returncode} before it served",
                why=spoken.last_lines(),
                hint=f"all it said is in {spoken.path}",
            )
        time.sleep(LOOK_INTERVAL_S)
    process.terminate()
    raise OperationTimeout(
        f"the broker did nothing for {SILENCE_MAX_S:.0f} s, does not serve and was told to stop",
        why=spoken.last_lines(),
        hint=f"all it said is in {spoken.path}",
    )


def _processor_time_s(pid: int) -> float:
    """Return the processor time that the broker's first process has taken; 0 when it is gone (proc(5))."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Spoken:
    """Follows the broker's output in ``danube.out``."""

    def __init__(self, output: Path, start: int) -> None:
        self.path = output
        self._start = self._position = start

    def pass_on(self) -> bool:
        """Show new lines about the progress of the start; return whether the broker wrote anything.

        Log lines stay in the file, and so does the banner: the caller shows one of its own.
        """
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                text = file.read(_READ_BYTES)
        except OSError:
            return False
        whole = text[: text.rfind(b"\n") + 1] if len(text) < _READ_BYTES else text
        self._position += len(whole)
        for one in whole.splitlines():
            if one.startswith(b"Danube "):
                break
            if not _LOG_LINE.match(one):
                note(one.decode("utf-8", "backslashreplace"))
        return bool(whole)

    def last_lines(self) -> str:
        """Return the last lines of the child, joined to one."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._start)
                lines = file.read(_READ_BYTES).decode("utf-8", "backslashreplace").splitlines()
        except OSError as error:
            return str(error)
        return "; ".join(one.strip() for one in lines[-_OUTPUT_LINES_SHOWN:]) or "it said nothing"
