"""Python processes forked from one that has imported what they need: a start takes milliseconds, not seconds.

``popen(command, ...)`` starts ``python -m module``, ``python -c code`` or ``python script``, also on the
host of another network namespace (``nsenter --net=PATH``).  In a run of the tests (:func:`enable`) it asks
the fork server of this process, whose child runs the same module as ``__main__`` and ends as any Python
process does.  Everywhere else ``subprocess.Popen`` does it, and also where an import may read a variable of
the environment.

The server has one thread, no event loop, no handler of a signal, and compiled kernels.  It ends when its
tester does, however that ends, and the kernel ends its children then (PR_SET_PDEATHSIG).  A child that has
ended is reaped once the tester knows: until then no other process is given its number.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import IO, Any, Final, TypeAlias

ROOT: Final = Path(__file__).resolve().parent.parent
# No import reads variables with such names, but for those of the second tuple.
HARMLESS: Final = (
    "AWS_", "DANUBE_", "JAVA_", "MEMBER_", "NOTIFY_SOCKET", "PYSPARK_", "PYTEST_", "SCENARIO_", "SPARK_",
    "WATCHDOG_",
)  # fmt: skip
READ_BY_IMPORTS: Final = ("DANUBE_KERNELS",)
PRELOADED: Final = (
    "danube.app",
    "danube.broker.clustered.controller",
    "danube.broker.mover.mover",
    "danube.broker.tiers.restore",
    "danube.broker.worker.worker",
    "danube.cli.broker.start",
    "danube.cli.broker.surroundings",
    "danube.cli.main",
    "danube.cluster.control.cluster_log",
    "danube.cluster.control.recovery",
    "danube.server.arrivals",
    "danube.server.grpc.doors",
    "danube.server.metrics.process",
    "danube.server.native",
    "danube.server.tls",
    "danube.wal.stores.opening",
    "uvloop",
)


@dataclass(frozen=True)
class Interpreter:
    """A Python with its options, and what its fork server imports; ``kernels`` are loaded, and off."""

    command: tuple[str, ...] = (sys.executable,)
    imports: tuple[str, ...] = PRELOADED
    kernels: bool = True


DANUBE: Final = Interpreter()
_FOUND: Final = {"PYTHONPATH": str(ROOT)}  # where nothing else is told, it makes no difference
_STREAMS: Final = 3
_MESSAGE_BYTES_MAX: Final = 1 << 17
_LOOK_MS: Final = 1_000  # whether the tester lives: a process that it forked may hold its end of the socket
_PR_SET_PDEATHSIG: Final = 1
_CLONE_NEWNET: Final = 0x40000000
_ELSEWHERE: Final = ("nsenter", "--net=")
_libc = ctypes.CDLL(None, use_errno=True)

Stream: TypeAlias = int | IO[Any] | None

_enabled_in = 0
_base: dict[str, str] = {}  # the server's environment
_lock = threading.Lock()
_servers: dict[tuple[int, Interpreter], tuple[subprocess.Popen[bytes], socket.socket]] = {}  # by our id
started_count = 0
processor_s = 0.0  # of children that have ended, and of what they waited for


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that forked it ends; for ``preexec_fn``."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def enable() -> None:
    """Use a fork server in this process from here on; it starts with the first process that is asked for."""
    global _enabled_in, _base
    if enabled():
        return
    _enabled_in, _base = os.getpid(), {**os.environ, **_FOUND}


def enabled() -> bool:
    return _enabled_in == os.getpid()


def disable() -> None:
    """End the servers of this process, and all that they have started."""
    global _enabled_in
    _enabled_in = 0
    while _servers:
        _, (process, control) = _servers.popitem()
        control.shutdown(socket.SHUT_RDWR)  # a process that this one forked may hold it, too
        control.close()
        process.wait()


def popen(
    command: Sequence[str],
    *,
    environment: Mapping[str, str],
    stdin: Stream = subprocess.DEVNULL,
    stdout: Stream = None,
    stderr: Stream = None,
    cwd: Path | None = None,
    start_new_session: bool = True,
    interpreter: Interpreter = DANUBE,
) -> Process:
    """Start ``command``, which dies with this process."""
    if enabled():
        network, words = _parted(command, interpreter)
        if words and _read_alike(environment):
            request = {
                "words": words,
                "network": network,
                "environment": dict(environment),
                "cwd": str(cwd or os.getcwd()),
                "leads": start_new_session,
            }
            return ForkedProcess(interpreter, request, (stdin, stdout, stderr))
    return subprocess.Popen(
        command, stdin=stdin, stdout=stdout, stderr=stderr, cwd=cwd, env=dict(environment), bufsize=0,
        start_new_session=start_new_session, preexec_fn=die_with_parent,
    )  # fmt: skip


def run(
    command: Sequence[str],
    *,
    environment: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    given: str = "",
    timeout_s: float = 120.0,
    interpreter: Interpreter = DANUBE,
) -> subprocess.CompletedProcess[str]:
    """Run ``python -m module words`` to its end, with ``given`` as its input; what it has printed."""
    with TemporaryFile() as stdin, TemporaryFile() as stdout, TemporaryFile() as stderr:
        stdin.write(given.encode())
        stdin.seek(0)
        started = popen(
            command,
            environment=os.environ if environment is None else environment,
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            cwd=cwd,
            interpreter=interpreter,
        )
        try:
            status = started.wait(timeout_s)
        finally:
            started.kill()
        told = [file.seek(0) or file.read().decode() for file in (stdout, stderr)]
    return subprocess.CompletedProcess(list(command), status, *told)


def _parted(command: Sequence[str], interpreter: Interpreter) -> tuple[str, list[str]]:
    """The network namespace where a command is to run ("": this one), and its words behind the interpreter's.

    There are none where it is no module, code or script of that interpreter.
    """
    network, words = "", list(command)
    program, option = _ELSEWHERE
    if words[0] == program and words[1].startswith(option):
        network, words = words[1].removeprefix(option), words[2:]
    own, rest = words[: len(interpreter.command)], words[len(interpreter.command) :]
    runs = rest and (not rest[0].startswith("-") or rest[0] in ("-c", "-m"))
    return network, rest if runs and tuple(own) == interpreter.command else []


def _read_alike(environment: Mapping[str, str]) -> bool:
    """Whether no import, and not the interpreter itself, sees a difference to the server's environment."""
    changed = dict(set(_base.items()) ^ {**_FOUND, **environment}.items())
    return all(name.startswith(HARMLESS) and name not in READ_BY_IMPORTS for name in changed)


class ForkedProcess:
    """What tests use of ``subprocess.Popen``, for a child of the fork server."""

    def __init__(
        self, interpreter: Interpreter, request: dict[str, Any], streams: tuple[Stream, Stream, Stream]
    ) -> None:
        global started_count
        self.args = request["words"]
        self.returncode: int | None = None
        self._lock = threading.Lock()
        self._report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours: list[IO[bytes] | None] = []
        given: list[int] = []
        opened: list[int] = [theirs.detach()]
        for number, stream in enumerate(streams):
            descriptor, end = self._opened(number, stream, given, opened)
            given.append(descriptor)
            ours.append(end)
        self.stdin, self.stdout, self.stderr = ours
        try:
            with _lock:
                server = _running_server(interpreter)
                socket.send_fds(server, [json.dumps(request).encode()], [*given, opened[0]])
        finally:
            for descriptor in opened:
                os.close(descriptor)
        told = self._report.recv(_MESSAGE_BYTES_MAX)
        if not told:
            raise OSError("the fork server has ended")
        self.pid = int(json.loads(told)["pid"])
        started_count += 1

    @staticmethod
    def _opened(
        number: int, stream: Stream, given: list[int], opened: list[int]
    ) -> tuple[int, IO[bytes] | None]:
        """The child's descriptor of a stream, and our end of a pipe."""
        if stream == subprocess.PIPE:
            reading, writing = os.pipe2(os.O_CLOEXEC)
            theirs, ours = (reading, writing) if number == 0 else (writing, reading)
            opened.append(theirs)
            return theirs, os.fdopen(ours, "wb" if number == 0 else "rb", 0)
        if stream == subprocess.STDOUT:
            return given[1], None
        if stream == subprocess.DEVNULL:
            opened.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
            return opened[-1], None
        if stream is None:
            return number, None
        return (stream if isinstance(stream, int) else stream.fileno()), None

    def poll(self) -> int | None:
        """The exit status, or minus the signal that ended it; None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        status = self._ended(None if timeout is None else int(timeout * 1000))
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0)
        return status

    def _ended(self, timeout_ms: int | None) -> int | None:
        global processor_s
        descriptor = self._report.fileno()
        if descriptor >= 0:  # not closed by another thread, which then knows the status
            poller = select.poll()
            poller.register(descriptor, select.POLLIN)
            if not poller.poll(timeout_ms):
                return None
        with self._lock:
            if self.returncode is None:
                told = self._report.recv(_MESSAGE_BYTES_MAX)
                found = json.loads(told) if told else {"status": -signal.SIGKILL, "processor_s": 0.0}
                self.returncode = found["status"]
                processor_s += found["processor_s"]
                self._report.close()
            return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def __del__(self) -> None:
        self._report.close()

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


Process: TypeAlias = subprocess.Popen[bytes] | ForkedProcess


def _running_server(interpreter: Interpreter) -> socket.socket:
    """Our end of the server's socket; the first call starts it."""
    known = _servers.get((os.getpid(), interpreter))
    if known is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        told = {
            "descriptor": theirs.fileno(),
            "tester": os.getpid(),
            "imports": interpreter.imports,
            "kernels": interpreter.kernels,
        }
        process = subprocess.Popen(
            [*interpreter.command, __file__, json.dumps(told)],
            cwd=ROOT, env=_base, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            start_new_session=True, pass_fds=[theirs.fileno()],
        )  # fmt: skip
        theirs.close()
        known = _servers[os.getpid(), interpreter] = process, ours
    return known[1]


# -- the server ---------------------------------------------------------------------------------------------


class _Server:
    """Forks on request, tells what became of each child, and reaps it when the tester has heard."""

    def __init__(self, control: socket.socket, tester: int) -> None:
        self._control = control
        self._tester = tester
        self._running: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the process
        self._told: dict[int, tuple[int, socket.socket]] = {}  # by the descriptor of the report

    def next_child(self) -> dict[str, Any]:
        """Serve; only a child returns, with what it is to run."""
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        while os.getppid() == self._tester:
            for descriptor, _ in poller.poll(_LOOK_MS):
                if descriptor == self._control.fileno():
                    request = self._fork(poller)
                    if request is not None:
                        return request
                elif descriptor in self._running:
                    poller.unregister(descriptor)
                    report = self._tell(descriptor)
                    poller.register(report, select.POLLIN)
                else:
                    poller.unregister(descriptor)
                    pid, report = self._told.pop(descriptor)
                    os.waitpid(pid, 0)
                    report.close()
        os._exit(0)

    def _fork(self, poller: select.poll) -> dict[str, Any] | None:
        """In the child: the request."""
        message, descriptors, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES_MAX, _STREAMS + 1)
        if not message:
            os._exit(0)  # the tester has gone
        parent = os.getpid()
        report = socket.socket(fileno=descriptors[_STREAMS])
        pid = os.fork()
        if pid == 0:
            report.close()
            request = json.loads(message)
            self._become(request, descriptors[:_STREAMS], parent)
            return dict(request)
        for descriptor in descriptors[:_STREAMS]:
            os.close(descriptor)
        watched = os.pidfd_open(pid)
        self._running[watched] = pid, report
        poller.register(watched, select.POLLIN)
        _send(report, {"pid": pid})
        return None

    def _become(self, request: dict[str, Any], streams: list[int], parent: int) -> None:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        if request["leads"]:
            os.setsid()
        self._control.close()
        for watched, (_, report) in self._running.items():
            os.close(watched)
            report.close()
        for _, report in self._told.values():
            report.close()
        for number, descriptor in enumerate(streams):
            os.dup2(descriptor, number)
            os.close(descriptor)
        if request["network"]:
            _enter(request["network"])
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["environment"])

    def _tell(self, watched: int) -> socket.socket:
        """The child has ended, and stays until the tester closes its end of the report."""
        pid, report = self._running.pop(watched)
        os.close(watched)
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        status = ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        _send(report, {"status": status, "processor_s": spent_s(pid)})
        self._told[report.fileno()] = pid, report
        return report


def _enter(network: str) -> None:
    descriptor = os.open(network, os.O_RDONLY)
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"setns to {network}")
    os.close(descriptor)


def _send(report: socket.socket, told: dict[str, Any]) -> None:
    try:
        report.send(json.dumps(told).encode())
    except OSError:
        pass  # nobody asks any more


def note_killed(pids: Sequence[int]) -> None:
    """Count the time of processes that are killed together with the one that would wait for them."""
    global processor_s
    processor_s += sum(map(spent_s, pids))


def spent_s(pid: int) -> float:
    """Processor time of a process, and of its children that it has waited for; 0 where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")


def _preload(imports: Sequence[str], *, kernels: bool) -> None:
    """Import what the children need; kernels are switched on by a child that wants them."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in imports:
        importlib.import_module(name)
    if kernels:
        from danube.cli.main import COMMANDS
        from danube.core import kernels as loaded

        for entry in COMMANDS.values():
            importlib.import_module(entry.target.partition(":")[0])
        loaded.load()
        loaded.unload()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        raise RuntimeError(f"a fork takes one thread along, and there are {len(threads)}")
    gc.collect()
    gc.freeze()


def _run(request: dict[str, Any]) -> None:
    """As ``python words`` does."""
    first, *rest = request["words"]
    if first == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        main = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec", dont_inherit=True), vars(main))
    else:
        sys.argv = [first, *rest]
        sys.path.insert(0, str(Path(first).resolve().parent))
        runpy.run_path(first, run_name="__main__")


def main(told: dict[str, Any]) -> None:
    del sys.path[0]  # the folder of this file; each child puts its own there
    control = socket.socket(fileno=told["descriptor"])
    control.set_inheritable(False)
    _preload(told["imports"], kernels=told["kernels"])
    _run(_Server(control, told["tester"]).next_child())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
