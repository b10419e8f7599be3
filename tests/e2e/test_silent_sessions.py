"""Sessions whose process hangs end, and those whose process is only busy do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import Any

import pytest

import danube.sync
from danube.errors import SubscriptionBusy

TOPIC = "/default/silent"

HOLDER = """
import sys, time, danube.sync
with danube.sync.connect(sys.argv[1]) as client:
    with client.consumer(sys.argv[2], subscription="s", mode="exclusive", start="earliest") as consumer:
        print(consumer.receive(30).payload.decode(), flush=True)
        time.sleep(3600)
"""


def test_an_exclusive_subscription_of_a_hanging_process_goes_on_to_others(broker: Any) -> None:
    process = broker(workers=1, environment={"DANUBE_LIMITS__SESSION_TIMEOUT": "1s"})
    with danube.sync.connect(process.address) as client:
        client.admin.create_topic(TOPIC)
        with client.producer(TOPIC) as producer:
            producer.send(b"held")
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, process.address, TOPIC], stdout=subprocess.PIPE, text=True
        )
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            time.sleep(2.5)  # it is busy for longer than the time-out, and answers all the same
            with pytest.raises(SubscriptionBusy), client.consumer(TOPIC, subscription="s", mode="exclusive"):
                pass
            os.kill(holder.pid, signal.SIGSTOP)
            deadline = time.monotonic() + 30
            while True:
                try:
                    with client.consumer(TOPIC, subscription="s", mode="exclusive") as heir:
                        assert heir.receive(30).payload == b"held"
                        return
                except SubscriptionBusy:
                    assert time.monotonic() < deadline, "the session of a stopped process lives on"
                    time.sleep(0.1)
        finally:
            holder.kill()
            holder.communicate()
