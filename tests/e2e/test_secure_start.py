"""A broker that others reach without being asked anything says so: in its banner, its log and its metrics."""

from __future__ import annotations

import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.broker_process import BrokerProcess, free_port, wait_until

HOSTS = ("127.0.0.1", "0.0.0.0")


@pytest.mark.parametrize("host", HOSTS)
def test_banner_log_and_metric_tell_of_an_open_broker(tmp_path: Path, host: str) -> None:
    open_to_others = host != HOSTS[0]
    port = free_port()
    arguments = ["--metrics-port", str(port), *(["--host", host, "--insecure"] if open_to_others else [])]
    sentence = f"listening on {host} without encryption or authentication"
    with BrokerProcess(tmp_path / "data", workers=2, arguments=arguments) as broker:
        page = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode()
        if open_to_others:  # by the command and by a worker, each in its time
            said_twice = lambda: broker.output_path.read_text().count(sentence) == 2  # noqa: E731
            wait_until(said_twice, 30, "banner and log tell it")
        said = broker.output_path.read_text()
    (series,) = [line for line in page.splitlines() if line.startswith("danube_insecure")]
    assert series.endswith(" 1.0" if open_to_others else " 0.0")
    assert (f"warning: {sentence}" in said) == open_to_others
    logged = [line for line in said.splitlines() if "housekeeping" in line and sentence in line]
    assert len(logged) == open_to_others


def test_without_the_flag_it_ends_with_exit_code_11(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "danube",
        "start",
        "--host",
        "0.0.0.0",
        "--data-dir",
        str(tmp_path / "data"),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 11
    assert "anyone who reaches it may read and write" in ended.stderr and "--insecure" in ended.stderr
    assert not (tmp_path / "data").exists()
