"""Hours of mixed load with faults: nothing acknowledged is lost, and nothing grows.

    python -m perf.soak --minutes 120 --seed 7 --report soak.json

Load goes on in epochs.  Each is judged by the audit of ``danube load`` and leaves nothing behind, so a run
takes as many hours as it is given.  A line a minute says how far it is.  A run that was stopped (SIGINT or
SIGTERM: the open epoch is judged first) or killed (the open epoch is not) goes on with the same command.

Exit code: 0 nothing was violated and no slope is beyond its bound; 1 something was, and the directory is
left as it was found; 2 wrong arguments; 3 stopped before the time was over.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from perf.soak.soak import EXIT_CODES, STOPPED, Settings, Soak, State, StateRefused, text
from perf.soak.store import KINDS
from tests.s3_server import NoServer

USAGE = 2
LOCK = "soak.lock"


def seconds_between(words: str) -> tuple[float, float]:
    """``30-60``: at least and at most so many seconds."""
    least, _, most = words.partition("-")
    found = float(least), float(most or least)
    if not 0 < found[0] <= found[1]:
        raise ValueError(words)
    return found


def positive(words: str) -> float:
    return seconds_between(words)[0]


def minutes(words: str) -> float:
    return 60 * positive(words)


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    """What was given; of the settings only those that were."""
    parser = argparse.ArgumentParser(
        prog="python -m perf.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--seed", type=int, help="of everything random; drawn when it is not given")
    add("--report", type=Path, help="write what was found to this file, as JSON")
    add("--restart", action="store_true", help="forget the run that is in the directory")
    for name, setting, kind, told in (
        ("minutes", "total_s", minutes, "how long, over all sessions (120)"),
        ("directory", "directory", Path, "data, samples, state (soak-runs)"),
        ("epoch-minutes", "epoch_s", minutes, "how often history is judged (5)"),
        ("fault-every", "fault_every_s", seconds_between, "LEAST-MOST seconds between two faults (30-60)"),
        ("sample-every", "sample_every_s", positive, "seconds (5)"),
        ("settle", "settle_s", float, "seconds after a fault, before samples count again (5)"),
        ("rate", "rate", positive, "records/s of each producer (20)"),
        ("workers", "workers", int, "of the broker (2)"),
    ):
        add(f"--{name}", dest=setting, metavar=name.upper(), type=kind, default=argparse.SUPPRESS, help=told)
    gentle = "gentle: none ends a process, for slopes of long lives; alternate: four epochs each"
    add("--faults", choices=["all", "gentle", "alternate"], default=argparse.SUPPRESS, help=gentle)
    store = "tiered storage; auto: an S3 server where there is one, else a directory"
    add("--store", choices=KINDS, default=argparse.SUPPRESS, help=store)
    return parser.parse_args(words)


def stopping(stopped: threading.Event) -> None:
    """The first signal lets the open epoch end; a second one ends the process."""

    def stop(number: int, frame: Any) -> None:
        if stopped.is_set():
            raise KeyboardInterrupt
        print("stopping: the open epoch is judged first; once more to leave at once", flush=True)
        stopped.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)


say = partial(print, flush=True)


@contextmanager
def claimed(directory: Path, restart: bool) -> Iterator[None]:
    """Hold the directory of a run; raise StateRefused when it is another's, or something else altogether."""
    if directory.exists() and any(directory.iterdir()) and not (directory / LOCK).exists():
        raise StateRefused(f"{directory} holds something else than a soak; name another --directory")
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / LOCK).open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StateRefused(f"a soak is running in {directory}; name another --directory") from None
        for path in directory.iterdir() if restart else ():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != LOCK:
                path.unlink()
        yield


def run(settings: Settings, seed: int | None, restart: bool) -> dict[str, Any]:
    stopped = threading.Event()
    with claimed(settings.directory, restart):
        state = State.load(settings.directory / "state.json", seed, settings.lasting)
        soak = Soak(settings, state, say, stopped)
        stopping(stopped)
        done_min = soak.record.latest.at_s / 60
        goes_on = f", {done_min:.1f} done" if done_min else ""
        say(f"soak of {settings.total_s / 60:g} min{goes_on}, seed {state.seed}, store {soak.store.kind}")
        return soak.run()


def main(words: list[str] | None = None) -> int:
    given = vars(arguments(words))
    seed, report, restart = (given.pop(name) for name in ("seed", "report", "restart"))
    try:
        found = run(Settings(**given), seed, restart)
    except (StateRefused, NoServer) as refused:
        print(f"error: {refused}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        say("left at once; the open epoch is not judged")
        return EXIT_CODES[STOPPED]
    if report:
        report.write_text(json.dumps(found, indent=2) + "\n")
    say(text(found))
    return EXIT_CODES[found["verdict"]]


if __name__ == "__main__":
    sys.exit(main())
