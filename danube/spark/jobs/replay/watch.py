"""Progress of a replay while its tasks run elsewhere: how far the target topic has grown."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from danube.client.blocking.client import Client, connect
from danube.errors import DanubeError
from danube.spark.jobs.replay.target import Target
from danube.spark.jobs.running import Progress, no_progress
from danube.spark.sink.publishing import PublishOptions

INTERVAL_S: Final = 2.0


@contextmanager
def watched(target: Target, offered: int, progress: Progress) -> Iterator[None]:
    """Tell every two seconds how many records the target has got; others may publish to it as well."""
    options = target.publish
    if options is None or progress is no_progress:
        yield
        return
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(options, offered, progress, ended), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join(INTERVAL_S)


def _watch(options: PublishOptions, offered: int, progress: Progress, ended: threading.Event) -> None:
    try:
        with connect(options.broker, token=options.token, name="danube replay") as client:
            first, start_s = _records_in(client, options.topic), time.monotonic()
            while not ended.wait(INTERVAL_S):
                stored = _records_in(client, options.topic) - first
                rate = stored / (time.monotonic() - start_s)
                progress(f"replay: {stored} records stored, of at most {offered}; {rate:.0f} a second")
    except DanubeError:
        return  # the tasks tell what is wrong


def _records_in(client: Client, topic: str) -> int:
    return sum(int(part["log_end"]) for part in client.admin.describe_topic(topic).partitions)
