"""What a broker makes is its user's alone, whatever the umask of the shell that starts it."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from danube import sync
from tests.broker_process import BrokerProcess

NO_MASK = ("/bin/sh", "-c", 'umask 0; exec "$@"', "sh")
GROUP_AND_OTHERS = 0o077
STRANGER = 65534  # the user "nobody"
# Prints how far its user comes with each path.
INTRUDER = """
import os, socket, sys
for path in sys.stdin.read().split("\\0"):
    for way, attempt in {
        "read": lambda: os.open(path, os.O_RDONLY),
        "written": lambda: os.open(path, os.O_WRONLY),
        "planted": lambda: os.open(path + "/planted", os.O_CREAT | os.O_WRONLY),
        "removed": lambda: os.rename(path, path + "-gone"),
        "connected": lambda: socket.socket(socket.AF_UNIX).connect(path),
    }.items():
        try:
            attempt()
        except OSError:
            continue
        print(way, path)
"""


def test_nothing_of_a_data_directory_is_open_to_others_under_umask_0(tmp_path: Path) -> None:
    data = tmp_path / "data"
    broker = BrokerProcess(data, workers=2, prefix=NO_MASK, environment={"DANUBE_AUDIT__MODE": "on"})
    with broker, sync.connect(broker.address) as client:
        client.admin.create_topic("/default/a", partitions=4)
        with (
            client.producer("/default/a") as producer,
            client.consumer("/default/a", subscription="s") as consumer,
        ):
            producer.send_many([b"x" * 100] * 100)
            consumer.receive(60).ack()
        mask = Path(f"/proc/{broker.worker_pids[0]}/status").read_text().partition("Umask:\t")[2].split()[0]
        assert mask == "0000", "else this shows nothing"
        while_it_runs = open_to_others(data)
    assert while_it_runs == [] and open_to_others(data) == []
    assert len(list(data.rglob("*"))) > 10


def test_another_user_can_neither_read_nor_plant_nor_replace() -> None:
    """Files, folders, and what the processes hold, where the folder above is open to all."""
    other = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
    with tempfile.TemporaryDirectory(dir="/tmp") as above:
        os.chmod(above, 0o755)
        if os.geteuid() or subprocess.run([*other, "ls", above], capture_output=True).returncode:
            pytest.skip("only root may act as another user")
        data = Path(above, "data")
        broker = BrokerProcess(data, workers=2, environment={"DANUBE_AUDIT__MODE": "on"})
        with broker, sync.connect(broker.address) as client, client.producer("/default/a") as producer:
            producer.send_many([b"x" * 100] * 100)
            names = ("fd/0", "mem", "environ", "maps")
            held = [f"/proc/{pid}/{name}" for pid in broker.pids for name in names]
            paths = [above, str(data), *map(str, data.rglob("*")), *held]
            assert len(paths) > 30
            tried = lambda: subprocess.run(  # noqa: E731
                [*other, sys.executable, "-I", "-c", INTRUDER],
                input="\0".join(paths), capture_output=True, text=True, check=True, cwd="/",
            ).stdout  # fmt: skip
            assert tried() == f"read {above}\n", "it lists that folder, which is no part of the broker"
            data.chmod(0o711)  # by mistake; what lies in it is still its owner's alone
            assert tried() == f"read {above}\n"


def test_a_broker_needs_no_capability(tmp_path: Path) -> None:
    """Without any, and unable to get one, all its processes start, serve, stop and come back."""
    drop = ["/usr/bin/setpriv", "--no-new-privs"]
    if os.geteuid() == 0:
        drop += ["--inh-caps=-all", "--ambient-caps=-all", "--bounding-set=-all"]
    if not Path(drop[0]).exists() or subprocess.run([*drop, "true"], capture_output=True).returncode:
        pytest.skip("setpriv is not here, or may not give capabilities away")
    broker = BrokerProcess(
        tmp_path / "data", workers=2, prefix=drop,
        environment={"DANUBE_AUDIT__MODE": "on", "DANUBE_SERVER__LOCAL_SOCKET": "on"},
    )  # fmt: skip
    for life in range(2):
        with broker.start(), sync.connect(broker.address) as client:
            for pid in broker.pids:
                status = Path(f"/proc/{pid}/status").read_text()
                assert "NoNewPrivs:\t1\n" in status and "CapEff:\t0000000000000000\n" in status
                assert "CapBnd:\t0000000000000000\n" in status or os.geteuid() != 0
            with (
                client.producer("/default/a") as producer,
                client.consumer("/default/a", subscription="s", start="earliest") as consumer,
            ):
                producer.send_many([b"%d" % life] * 100)
                for _ in range(100):
                    message = consumer.receive(60)
                    assert message.payload == b"%d" % life
                    message.ack()
                consumer.flush()
            assert broker.stop() == 0


def open_to_others(directory: Path) -> list[str]:
    found = []
    for path in [directory, *directory.rglob("*")]:
        mode = path.lstat().st_mode
        if mode & GROUP_AND_OTHERS and not stat.S_ISLNK(mode):
            found.append(f"{oct(mode)} {path}")
    return found
