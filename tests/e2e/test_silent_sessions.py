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

# With "inherited" a child that knows nothing of Danube holds the connections when this process is gone.
HOLDER = """
import os, stat, subprocess, sys, time, danube.sync
with danube.sync.connect(sys.argv[1]) as client:
    with client.consumer(sys.argv[2], subscription="s", mode="exclusive", start="earliest") as consumer:
        payload = consumer.receive(30).payload.decode()
        if sys.argv[3] == "inherited":
            for number in map(int, os.listdir("/proc/self/fd")):
                try:
                    if stat.S_ISSOCK(os.fstat(number).st_mode):
                        os.set_inheritable(number, True)
                except OSError:
                    pass
            child = subprocess.Popen(["sleep", "3600"], close_fds=False, stdout=subprocess.DEVNULL)
            payload += f" {child.pid}"
        print(payload, flush=True)
        time.sleep(3600)
"""


@pytest.mark.parametrize(
    ("way", "local"), [("stopped", "on"), ("stopped", "off"), ("inherited", "on"), ("inherited", "off")]
)
def test_an_exclusive_subscription_of_a_silent_process_goes_on_to_others(
    broker: Any, way: str, local: str
) -> None:
    """It hangs, or it died while a child holds its socket; through the Unix socket and through TCP."""
    settings = {"DANUBE_LIMITS__SESSION_TIMEOUT": "1s", "DANUBE_SERVER__LOCAL_SOCKET": local}
    process = broker(workers=1, environment=settings)
    with danube.sync.connect(process.address) as client:
        client.admin.create_topic(TOPIC)
        with client.producer(TOPIC) as producer:
            producer.send(b"held")
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER, process.address, TOPIC, way], stdout=subprocess.PIPE, text=True
        )
        child = 0
        try:
            assert holder.stdout is not None
            payload, *children = holder.stdout.readline().split()
            assert payload == "held"
            child = int(children[0]) if children else 0
            if not child:
                time.sleep(2.5)  # it is busy for longer than the time-out, and answers all the same
            with pytest.raises(SubscriptionBusy), client.consumer(TOPIC, subscription="s", mode="exclusive"):
                pass
            os.kill(holder.pid, signal.SIGKILL if child else signal.SIGSTOP)
            assert not child or holder.wait(30) < 0
            deadline = time.monotonic() + 30
            while True:
                try:
                    with client.consumer(TOPIC, subscription="s", mode="exclusive") as heir:
                        assert heir.receive(30).payload == b"held"
                        return
                except SubscriptionBusy:
                    assert time.monotonic() < deadline, "the session of a silent process lives on"
                    time.sleep(0.1)
        finally:
            if child:
                os.kill(child, signal.SIGKILL)
            holder.kill()
            holder.communicate()
