"""The verbs of ``scripts/cluster``."""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from danube.core import kernels
from tests.local_cluster import (
    DIRECTORY_VARIABLE,
    SIZE_MAX,
    STATE,
    Broker,
    Failed,
    LocalCluster,
    Refused,
    locked,
    place,
)

FOLLOW_S = 0.2
ANSWER_S = 3.0
REGISTERED_S = 20.0
AWAY = "not there"


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """What was asked for; leaves with 2 where that is not understood."""
    parser = argparse.ArgumentParser(
        prog="scripts/cluster",
        description="A cluster on loopback, with one directory as the store of all brokers.",
        epilog=f"Everything lies in cluster-run, or where {DIRECTORY_VARIABLE} says.  Exit codes: 1 a broker"
        " did not do it, 2 the request cannot be done as it stands.",
    )
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    up = verbs.add_parser("up", help="start a cluster of N brokers (3), or the stopped ones of a kept one")
    up.add_argument("size", nargs="?", type=int, help=f"1 to {SIZE_MAX}")
    up.add_argument("--workers", default="1", help="worker processes of each broker (1)")
    up.add_argument("arguments", nargs="*", help="after --: more flags of danube start")
    for verb, what in (
        ("kill", "SIGKILL to all processes of a broker"),
        ("pause", "SIGSTOP to all processes of a broker"),
        ("resume", "SIGCONT to all processes of a broker"),
        ("stop", "stop a broker in order"),
        ("start", "start a broker that was stopped or killed"),
    ):
        verbs.add_parser(verb, help=what).add_argument("number", type=int, help="1, 2, ...")
    verbs.add_parser("status", help="what runs, where, and who leads").add_argument(
        "--json", action="store_true", help="as one JSON object"
    )
    logs = verbs.add_parser("logs", help="the output of all brokers in one view, by time")
    logs.add_argument("number", nargs="?", type=int, help="of this broker only")
    logs.add_argument("-f", "--follow", action="store_true", help="and what comes, until Ctrl-C")
    down = verbs.add_parser("down", help="end all processes and remove what they stored")
    down.add_argument("--keep", action="store_true", help="keep it; up goes on with it")
    return parser.parse_args(words)


def main(words: Sequence[str]) -> int:
    options = arguments(words)
    verb: Callable[[Path, argparse.Namespace], None] = VERBS[options.verb]
    try:
        verb(place(), options)
    except (Refused, Failed, TimeoutError) as error:
        print(f"scripts/cluster: {error}", file=sys.stderr)
        return 2 if isinstance(error, Refused) else 1
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        return 141
    return 0


def up(directory: Path, options: argparse.Namespace) -> None:
    size = options.size
    if size is not None and not 1 <= size <= SIZE_MAX:
        raise Refused(f"a cluster has 1 to {SIZE_MAX} brokers, not {size}")
    with locked(directory):
        if (directory / STATE).exists():
            cluster = LocalCluster.load(directory)
            if size not in (None, len(cluster.brokers)) or options.arguments:
                raise Refused(
                    f"there is a cluster of {len(cluster.brokers)} in {directory} already;"
                    " end it with: scripts/cluster down"
                )
        else:
            cluster = LocalCluster.make(directory, size or 3, options.workers, options.arguments)
        stopped = [one for one in cluster.brokers if one.state() == "stopped"]
        if not stopped:
            raise Refused(f"the cluster in {directory} runs already; end it with: scripts/cluster down")
        kernels.load(_compiling)  # once for all, which after a fresh clone takes a minute
        try:
            for broker in stopped:
                cluster.launch(broker)
            cluster.wait_ready(stopped)
            _wait_registered(cluster, stopped)
        except BaseException:
            for broker in stopped:
                if broker.session is not None:
                    broker.session.kill()
            raise
    for broker in cluster.brokers:
        print(f"broker {broker.number}: danube://{broker.address('native')}, gRPC {broker.address('grpc')}")
    print(f"try: .venv/bin/danube brokers list -s danube://{cluster.brokers[0].address('native')}")


def _compiling(news: str) -> None:
    print(f"scripts/cluster: {news}", file=sys.stderr)


def kill(cluster: LocalCluster, broker: Broker) -> None:
    _need(broker, "running", "paused").kill()


def pause(cluster: LocalCluster, broker: Broker) -> None:
    _need(broker, "running").send(signal.SIGSTOP)


def resume(cluster: LocalCluster, broker: Broker) -> None:
    _need(broker, "paused").send(signal.SIGCONT)


def stop(cluster: LocalCluster, broker: Broker) -> None:
    _need(broker, "running", "paused")
    cluster.end(broker)


def start(cluster: LocalCluster, broker: Broker) -> None:
    if broker.state() != "stopped":
        raise Refused(f"broker {broker.number} is {broker.state()}")
    cluster.launch(broker)
    if 2 * sum(one.state() == "running" for one in cluster.brokers) <= len(cluster.brokers):
        print("it serves when most brokers run: start another")
        return
    cluster.wait_ready([broker])
    _wait_registered(cluster, [broker])


def _wait_registered(cluster: LocalCluster, brokers: Sequence[Broker]) -> None:
    """Until others know that these are there; raises Failed."""
    deadline = time.monotonic() + REGISTERED_S
    wanted = {broker.address("native") for broker in brokers}
    while not wanted <= {address for address, row in _told(cluster).items() if row["role"] != AWAY}:
        if time.monotonic() > deadline:
            raise Failed("brokers serve, and are not registered; look at: scripts/cluster logs")
        time.sleep(0.1)


def _need(broker: Broker, *states: str) -> Any:
    """The broker's processes; raises Refused in any other state."""
    if broker.state() not in states:
        raise Refused(f"broker {broker.number} is {broker.state()}, not {' or '.join(states)}")
    return broker.session


def _for_one(change: Callable[[LocalCluster, Broker], None]) -> Callable[[Path, argparse.Namespace], None]:
    def verb(directory: Path, options: argparse.Namespace) -> None:
        LocalCluster.load(directory)  # before a lock file is made
        with locked(directory):
            cluster = LocalCluster.load(directory)
            broker = cluster.broker(options.number)
            change(cluster, broker)
            print(f"broker {broker.number}: {broker.state()}")

    return verb


def down(directory: Path, options: argparse.Namespace) -> None:
    LocalCluster.load(directory)
    with locked(directory):
        cluster = LocalCluster.load(directory)
        cluster.end_all()
        if not options.keep:
            cluster.remove()
    print("all brokers ended" + ("; what they stored is kept" if options.keep else ""))


# -- looking ------------------------------------------------------------------------------------------


def status(directory: Path, options: argparse.Namespace) -> None:
    cluster = LocalCluster.load(directory)
    told = _told(cluster)
    rows = [
        {
            "number": broker.number,
            "state": broker.state(),
            "pid": broker.process["pid"] if broker.process and broker.state() != "stopped" else 0,
            **{door: broker.address(door) for door in broker.ports},
            **told.get(broker.address("native"), {"role": "", "mode": "", "partitions": ""}),
        }
        for broker in cluster.brokers
    ]
    if options.json:
        print(json.dumps({"directory": str(directory), "brokers": rows}))
        return
    columns = ("number", "state", "pid", "role", "mode", "partitions", "native", "grpc", "admin")
    table = [columns, *(tuple(str(row[column]) for column in columns) for row in rows)]
    widths = [max(len(row[place]) for row in table) for place in range(len(columns))]
    for row in table:
        print("  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip())


def _told(cluster: LocalCluster) -> dict[str, dict[str, Any]]:
    """What the first broker that answers says of all, by native address."""
    from danube import sync
    from danube.errors import DanubeError

    for broker in cluster.brokers:
        if broker.state() != "running":
            continue
        with suppress(DanubeError, OSError):
            with sync.connect(f"danube://{broker.address('native')}", timeout=ANSWER_S) as client:
                rows = client.admin.cluster("brokers")
            return {
                row["native_address"]: {
                    "role": row["role"] if row["alive"] else AWAY,
                    "mode": row["mode"],
                    "partitions": row["partitions"],
                }
                for row in rows
            }
    return {}


def logs(directory: Path, options: argparse.Namespace) -> None:
    """All that was printed, merged by the time at the beginning of each line."""
    cluster = LocalCluster.load(directory)
    brokers = cluster.brokers if options.number is None else [cluster.broker(options.number)]
    views = [LogView(broker.name, cluster.log_path(broker)) for broker in brokers]
    while True:
        lines = sorted((line for view in views for line in view.more()), key=lambda line: line[0])
        sys.stdout.write("".join(f"{name} | {text}\n" for _, name, text in lines))
        sys.stdout.flush()
        if not options.follow:
            return
        time.sleep(FOLLOW_S)


class LogView:
    """One broker's output, read on from where it was."""

    def __init__(self, name: str, path: Path) -> None:
        self._name = name
        self._path = path
        self._position = 0
        self._time = ""

    def more(self) -> list[tuple[str, str, str]]:
        """Whole lines with the time that they or the one before them begin with."""
        with suppress(FileNotFoundError), self._path.open("rb") as file:
            file.seek(self._position)
            data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._position += len(data)
            return [self._line(line) for line in data.decode("utf-8", "replace").splitlines()]
        return []

    def _line(self, line: str) -> tuple[str, str, str]:
        first = line.partition(" ")[0]
        if len(first) == len("2026-01-01T00:00:00.000Z") and first.endswith("Z"):
            self._time = first
        return self._time, self._name, line


VERBS: dict[str, Callable[[Path, argparse.Namespace], None]] = {
    "up": up,
    "down": down,
    "status": status,
    "logs": logs,
    **{verb.__name__: _for_one(verb) for verb in (kill, pause, resume, stop, start)},
}
