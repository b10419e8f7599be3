"""Children of the fork server are like processes of their own: streams, environment, end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import fork_server
from tests.broker_process import ROOT, alive, wait_until
from tests.fork_server import ForkedProcess, Interpreter

PLAIN = Interpreter(imports=("json",), kernels=False)
TELL = """
import json, os, signal, sys
print(json.dumps({
    "words": sys.argv, "name": __name__, "cwd": os.getcwd(), "colour": os.environ.get("DANUBE_COLOUR"),
    "given": sys.stdin.read(), "leads": os.getsid(0) == os.getpid(), "first": sys.path[0],
    "open": sorted(map(int, os.listdir("/proc/self/fd")))[:4], "threads": len(os.listdir("/proc/self/task")),
    "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
}))
"""
TESTER = """
import os, sys, time
from tests import fork_server
from tests.fork_server import Interpreter
fork_server.enable()
command = [sys.executable, "-c", "import time; time.sleep(100)"]
child = fork_server.popen(command, environment=os.environ, interpreter=Interpreter(imports=(), kernels=False))
print(child.pid, flush=True)
time.sleep(100)
"""


@pytest.fixture(autouse=True)
def forking() -> Iterator[None]:
    """Also in a run whose processes are not forked."""
    before = fork_server.enabled()
    fork_server.enable()
    yield
    if not before:
        fork_server.disable()


def start(*words: str, **options: Any) -> ForkedProcess:
    options.setdefault("environment", os.environ)
    started = fork_server.popen([sys.executable, *words], interpreter=PLAIN, **options)
    assert isinstance(started, ForkedProcess)
    return started


def test_a_child_sees_what_a_process_of_its_own_would(tmp_path: Path) -> None:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    environment = {**os.environ, "DANUBE_COLOUR": "blue"}
    child = start("-c", TELL, "a", "b c", cwd=tmp_path, environment=environment, **pipes)
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(b"one\ntwo")
    child.stdin.close()
    told = json.loads(child.stdout.read())
    child.stdout.close()
    assert child.wait(20) == 0
    assert told.pop("open") == [0, 1, 2, 3], "the last one is the directory that lists them"
    assert told == {
        "words": ["-c", "a", "b c"], "name": "__main__", "cwd": str(tmp_path), "colour": "blue",
        "given": "one\ntwo", "leads": True, "first": "", "threads": 1, "interrupt": True,
    }  # fmt: skip


def test_modules_and_scripts_run_as_main(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys, beside\nprint(__name__, sys.argv[1:], beside.__file__)\n")
    (tmp_path / "beside.py").write_text("")
    done = fork_server.run([sys.executable, str(script), "x"], cwd=ROOT, interpreter=PLAIN)
    assert done.stdout == f"__main__ ['x'] {tmp_path / 'beside.py'}\n", done.stderr
    command = [sys.executable, "-m", "json.tool", "--compact"]
    done = fork_server.run(command, given='{"a": [1]}', cwd=ROOT, interpreter=PLAIN)
    assert (done.returncode, done.stdout) == (0, '{"a":[1]}\n'), done.stderr


@pytest.mark.parametrize(
    ("code", "status"),
    [("pass", 0), ("raise SystemExit(3)", 3), ("1 / 0", 1), ("import os; os.kill(os.getpid(), 9)", -9)],
)
def test_the_status_is_told(code: str, status: int, tmp_path: Path) -> None:
    with (tmp_path / "output").open("wb") as output:
        child = start("-c", code, stdout=output, stderr=subprocess.STDOUT)
    assert child.wait(20) == status == child.poll() == child.returncode
    assert ("ZeroDivisionError" in (tmp_path / "output").read_text()) == (code == "1 / 0")
    wait_until(lambda: not Path(f"/proc/{child.pid}").exists(), 10, "it is reaped")


def test_a_child_that_runs_is_waited_for_and_signalled() -> None:
    child = start("-c", "import time; time.sleep(100)")
    assert child.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.wait(0.01)
    child.send_signal(signal.SIGTERM)
    assert child.wait(20) == -signal.SIGTERM
    child.kill()  # it is gone, and its number may be another's


def test_what_an_import_may_read_is_not_forked(tmp_path: Path) -> None:
    fork_server.enable()
    for name in ("DANUBE_KERNELS", "NUMBA_CACHE_DIR", "PYTHONHASHSEED", "HOME"):
        child = fork_server.popen(
            [sys.executable, "-c", "pass"], environment={**os.environ, name: "0"}, interpreter=PLAIN
        )
        assert isinstance(child, subprocess.Popen), name
        assert child.wait(20) == 0
    for command in (["sleep", "0"], [sys.executable, "-I", "-c", "pass"], [sys.executable]):
        child = fork_server.popen(command, environment=os.environ, interpreter=PLAIN)
        assert isinstance(child, subprocess.Popen), command
        assert child.wait(20) == 0


def test_processor_time_of_a_child_is_counted() -> None:
    before_s = fork_server.processor_s
    child = start("-c", "import time\nwhile time.process_time() < 0.2: pass")
    assert child.wait(60) == 0
    assert 0.1 < fork_server.processor_s - before_s < 5


def test_nothing_is_left_when_the_tester_is_killed() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", TESTER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as tester:
        try:
            assert tester.stdout is not None
            pid = int(tester.stdout.readline())
            assert alive(pid)
        finally:
            tester.kill()
    wait_until(lambda: not alive(pid), 20, "the child has ended with its tester")
