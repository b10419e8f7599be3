"""The limited child: what it answers, what stops it, whose fault it is, and what is remembered."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from danube.errors import OperationTimeout, Overloaded, SchemaInvalid, Unavailable
from danube.schema import kinds, plain
from danube.schema.limited import child
from danube.schema.limited import door as limited
from danube.schema.limited import process as child_process
from danube.schema.limited.door import Older, Outcome, Request, run
from danube.schema.model import Checks, Compatibility, Definition, SchemaType

ORDER = b'{"type":"record","name":"Order","fields":[{"name":"id","type":"int"}]}'
WIDER = b'{"type":"record","name":"Order","fields":[{"name":"id","type":"long"}]}'


@pytest.fixture(autouse=True)
def nothing_remembered() -> Iterator[None]:
    limited._memory.clear()
    yield
    limited._memory.clear()


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Puts a script of the test in the child's place; yields the lines to append to."""
    lines = ["import os, resource, signal, sys, time", "sys.path[:] = sys.argv[1:]"]

    class Script:
        READY = child.READY
        CPU_SECONDS = child.CPU_SECONDS
        MEMORY_BYTES = child.MEMORY_BYTES
        REQUEST_BYTES_MAX = child.REQUEST_BYTES_MAX

        @property
        def __file__(self) -> str:
            path = tmp_path / "script.py"
            path.write_text("\n".join(lines) + "\n")
            return str(path)

    monkeypatch.setattr(child_process, "child", Script())
    yield lines


READ = "sys.stdin.buffer.read()"
READY = "os.write(1, b'R')"


def avro(text: bytes = ORDER, **more: object) -> Request:
    return msgspec.structs.replace(Request(schema_type=SchemaType.AVRO, text=text), **more)


def test_a_definition_is_examined() -> None:
    definition = run(avro()).definition
    assert definition == kinds.examine(SchemaType.AVRO, ORDER)
    assert definition.fingerprint.startswith("sha256:") and len(definition.fingerprint) == 7 + 64


def test_violations_come_back_whole() -> None:
    older = Older(version=7, definition=kinds.examine(SchemaType.AVRO, WIDER))
    violations = run(avro(against=[older], compatibility=Compatibility.BACKWARD)).violations
    assert [(one.rule, one.path, one.direction, one.version) for one in violations] == [
        ("type_changed", "Order.id", "backward", 7)
    ]
    assert (violations[0].old, violations[0].new) == ("long", "int")


def test_checks_of_the_upstream_broker_reach_the_type() -> None:
    older = Older(version=7, definition=kinds.examine(SchemaType.AVRO, WIDER))
    request = avro(against=[older], compatibility=Compatibility.FULL, checks=Checks.UPSTREAM)
    assert run(request).violations == []


def test_a_refusal_keeps_its_words_and_facts() -> None:
    with pytest.raises(SchemaInvalid) as refused:
        run(avro(b'{\n"type":'))
    assert refused.value.what == "the Avro definition is not JSON"
    assert "line 2" in refused.value.why and refused.value.facts == {"line": 2}
    assert refused.value.hint


def test_plain_types_need_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "ask", lambda request: pytest.fail("a child was started"))
    for schema_type in plain.PLAIN:
        outcome = run(Request(schema_type=schema_type, text=b"ignored"))
        assert outcome == Outcome(
            definition=Definition(schema_type=schema_type, text=b"", fingerprint=schema_type.value)
        )


def test_another_type_breaks_the_promise() -> None:
    older = Older(version=1, definition=kinds.examine(SchemaType.AVRO, ORDER))
    request = Request(
        schema_type=SchemaType.STRING, text=b"", against=[older], compatibility=Compatibility.FORWARD
    )
    assert [(one.rule, one.old, one.new) for one in run(request).violations] == [
        ("type_changed", "avro", "string")
    ]


@pytest.mark.parametrize(
    ("schema_type", "payload", "reason"),
    [
        (SchemaType.BYTES, b"\xff\x00", None),
        (SchemaType.STRING, "Grüße".encode(), None),
        (SchemaType.STRING, b"ab\xff", "byte 2"),
        (SchemaType.NUMBER, b"\0" * 4, None),
        (SchemaType.NUMBER, b"\0" * 8, None),
        (SchemaType.NUMBER, b"\0" * 5, "has 5"),
        (SchemaType.NUMBER, b"", "has 0"),
    ],
)
def test_payloads_of_plain_types(schema_type: SchemaType, payload: bytes, reason: str | None) -> None:
    found = kinds.validator(kinds.examine(schema_type, b""))(payload)
    assert found is None if reason is None else reason in (found or "")


def test_a_definition_that_is_too_long_is_refused_without_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "ask", lambda request: pytest.fail("a child was started"))
    with pytest.raises(SchemaInvalid, match="is too long"):
        run(avro(b" " * (256 * 1024 + 1)))


def test_many_versions_are_compared_in_portions(monkeypatch: pytest.MonkeyPatch) -> None:
    portions: list[int] = []

    def ask(request: Request) -> Outcome:
        portions.append(len(request.against))
        return child_process.ask(request)

    monkeypatch.setattr(limited, "ask", ask)
    monkeypatch.setattr(limited, "PORTION_VERSIONS", 2)
    definition = kinds.examine(SchemaType.AVRO, WIDER)
    against = [Older(version=number, definition=definition) for number in range(1, 6)]
    outcome = run(avro(against=against, compatibility=Compatibility.BACKWARD_TRANSITIVE))
    assert portions == [2, 2, 1]
    assert [violation.version for violation in outcome.violations] == [1, 2, 3, 4, 5]


def test_portions_are_bounded_in_bytes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "PORTION_BYTES", 100)
    definition = Definition(schema_type=SchemaType.AVRO, text=b" " * 60)
    against = [Older(version=number, definition=definition) for number in range(1, 4)]
    assert [len(portion.against) for portion in limited._portions(avro(against=against))] == [1, 1, 1]


# What stops a child, and whose fault it is


def test_a_child_that_burns_processor_time_is_stopped(scripted: list[str]) -> None:
    scripted += [READ, "resource.setrlimit(resource.RLIMIT_CPU, (1, 2))", READY, "while True: pass"]
    with pytest.raises(SchemaInvalid, match="costs more than 2 s of processor time"):
        run(avro())


def test_a_child_that_sleeps_is_killed_in_time(scripted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "WALL_SECONDS", 0.2)
    scripted += [READ, READY, "time.sleep(60)"]
    started = time.monotonic()
    with pytest.raises(OperationTimeout, match="cannot be compiled in time"):
        run(avro())
    assert time.monotonic() - started < 10


def test_a_child_that_goes_on_behind_closed_pipes_is_killed(
    scripted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "WALL_SECONDS", 0.2)
    scripted += [READ, READY, "os.close(1), os.close(2)", "time.sleep(60)"]
    with pytest.raises(OperationTimeout, match="cannot be compiled in time"):
        run(avro())


def test_a_child_that_does_not_start_is_the_brokers_fault(
    scripted: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_process, "START_SECONDS", 0.2)
    scripted += ["time.sleep(60)"]
    with pytest.raises(OperationTimeout, match="did not start in time"):
        run(avro())


def test_a_child_that_cannot_load_is_the_brokers_fault(scripted: list[str]) -> None:
    scripted += ["import no_such_library"]
    with pytest.raises(Unavailable, match=r"cannot work.*no_such_library"):
        run(avro())


def test_a_child_that_ends_without_a_word_is_the_brokers_fault(scripted: list[str]) -> None:
    scripted += ["os._exit(3)"]
    with pytest.raises(Unavailable, match="it ended with 3"):
        run(avro())


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_crash_is_the_definitions_fault(scripted: list[str], number: signal.Signals) -> None:
    scripted += [READ, READY, f"os.kill(os.getpid(), {int(number)})"]
    with pytest.raises(SchemaInvalid, match=f"ended with signal {int(number)}"):
        run(avro())


def test_a_failure_of_the_examination_is_a_sentence(scripted: list[str]) -> None:
    scripted += [READ, READY, "raise ValueError('no such thing')"]
    with pytest.raises(SchemaInvalid, match="cannot be examined: ValueError: no such thing"):
        run(avro())


@pytest.mark.parametrize("answer", ["b''", "b'\\xc1'", "b'\\x80'", "b'\\x81\\xa5error\\x01'"])
def test_nonsense_is_not_believed(scripted: list[str], answer: str) -> None:
    scripted += [READ, READY, f"os.write(1, {answer})"]
    with pytest.raises(Unavailable, match="answered with nonsense"):
        run(avro())


def test_an_endless_answer_is_cut(scripted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "ANSWER_BYTES_MAX", 100_000)
    scripted += [READ, READY, "while True: os.write(1, b'x' * 4096)"]
    with pytest.raises(SchemaInvalid, match="too much to say"):
        run(avro())


def test_endless_complaints_are_cut(scripted: list[str]) -> None:
    scripted += [READ, READY, "os.write(2, b'x' * 1_000_000 + b'\\nlast words')", "os._exit(1)"]
    with pytest.raises(SchemaInvalid) as refused:
        run(avro())
    assert len(str(refused.value)) < 1000


def test_a_child_that_does_not_read_does_not_stop_the_parent(scripted: list[str]) -> None:
    scripted += ["os.close(0)", "os._exit(4)"]
    with pytest.raises(Unavailable, match="it ended with 4"):
        run(avro(b" " * 200_000))


def test_a_broker_that_cannot_start_a_child_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(Unavailable, match="cannot be started"):
        run(avro())


def test_more_than_a_child_can_take_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "REQUEST_BYTES_MAX", 100)
    with pytest.raises(SchemaInvalid, match=r"take .* bytes"):
        run(avro(b" " * 200))


def test_no_child_is_left_behind(scripted: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "WALL_SECONDS", 0.1)
    scripted += [READ, "os.write(2, str(os.getpid()).encode())", READY, "time.sleep(60)"]
    pids: list[int] = []
    popen = subprocess.Popen

    def start(*arguments: object, **options: object) -> object:
        process = popen(*arguments, **options)  # type: ignore[call-overload]
        pids.append(process.pid)
        return process

    monkeypatch.setattr(child_process.subprocess, "Popen", start)
    with pytest.raises(OperationTimeout):
        run(avro())
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


# The real child under its real limits


def limits_script(body: str) -> list[str]:
    return [
        READ,
        "from danube.schema.limited import child",
        "import socket, msgspec, traceback",
        "child._limit('avro')",
        READY,
        "def told(what):",
        "    child._write(msgspec.msgpack.encode({'error': [1140, what, '', '', {}]}))",
        "try:",
        *(f"    {line}" for line in body.splitlines()),
        "except BaseException as error:",
        "    told(f'{type(error).__name__}: {error}')",
    ]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("open('/etc/hostname')", "Too many open files"),
        ("socket.socket()", "Too many open files"),
        ("open('/tmp/danube-child', 'wb')", "Too many open files"),
        ("os.pipe()", "Too many open files"),
        ("bytearray(400 * 1024 * 1024)", "MemoryError"),
        ("bytearray(100 * 1024 * 1024); told('enough')", "enough"),
    ],
)
def test_the_limits_hold(scripted: list[str], body: str, says: str) -> None:
    scripted += limits_script(body)
    with pytest.raises(SchemaInvalid, match=says):
        run(avro())


def test_a_definition_that_needs_too_much_memory_is_refused(scripted: list[str]) -> None:
    scripted += [READ, READY, "import msgspec; os.write(1, msgspec.msgpack.encode({'out_of_memory': True}))"]
    with pytest.raises(SchemaInvalid, match="costs more than 256 MiB of memory"):
        run(avro())


@pytest.mark.parametrize("schema_type", ["avro", "json_schema", "protobuf"])
def test_a_child_loads_what_it_needs_and_no_more(schema_type: str) -> None:
    program = (
        "import sys; sys.path[:] = sys.argv[1:]\n"
        "from danube.schema import kinds, verdict\nfrom danube.schema.limited import child\n"
        "from danube.schema.model import SchemaType\n"
        f"kinds.examine(SchemaType('{schema_type}'), child._SAMPLES['{schema_type}'])\n"
        "print({'numba', 'numpy', 'asyncio', 'uvloop', 'click', 'grpc', 'pydantic'} & set(sys.modules))"
    )
    command = [sys.executable, "-I", "-S", "-c", program, *child_process._import_paths()]
    assert subprocess.run(command, capture_output=True, text=True, timeout=60).stdout == "set()\n"


def test_a_cut_request_is_not_judged() -> None:
    process = subprocess.run(
        [sys.executable, "-I", "-S", child.__file__, *child_process._import_paths()],
        input=(100).to_bytes(4, "little") + b"short",
        capture_output=True,
        timeout=60,
    )
    assert process.returncode == 1 and process.stdout == b""
    assert b"the request is cut" in process.stderr


@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
@pytest.mark.parametrize(
    ("schema_type", "text"),
    [
        ("avro", ORDER),
        ("avro", b'{"type":"http://localhost/x"}'),
        ("json_schema", b'{"$ref":"http://localhost:9/x.json"}'),
        ("json_schema", b'{"$ref":"file:///etc/passwd"}'),
        ("protobuf", b'syntax = "proto3"; import "/etc/passwd"; message A {}'),
    ],
)
def test_no_definition_reaches_a_network_or_a_file(tmp_path: Path, schema_type: str, text: bytes) -> None:
    body = msgspec.msgpack.encode(Request(schema_type=SchemaType(schema_type), text=text))
    trace = tmp_path / "trace"
    command = [sys.executable, "-I", "-S", child.__file__, *child_process._import_paths()]
    process = subprocess.run(
        ["strace", "-f", "-o", str(trace), "-e", "trace=%network,openat,open,creat,execve,write", *command],
        input=len(body).to_bytes(4, "little") + body,
        capture_output=True,
        timeout=100,
    )
    if b"ptrace" in process.stderr.lower():
        pytest.skip("strace may not trace here")
    assert process.stdout.startswith(child.READY), process.stderr
    lines = trace.read_text().splitlines()
    ready = next(number for number, line in enumerate(lines) if 'write(1, "R", 1)' in line)
    assert not [line for line in lines if "socket(" in line and "= -1" not in line]
    installed = (sys.prefix, sys.base_prefix, "/proc/self/fd")
    later = [line for line in lines[ready + 1 :] if "(" in line and "write(" not in line]
    assert not [line for line in later if "= -1" not in line and not any(one in line for one in installed)]
    if schema_type == "avro":
        assert later == []


# Memory and concurrency


def test_an_answer_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    def ask(request: Request) -> Outcome:
        asked.append(request)
        if request.text == ORDER:
            return Outcome(definition=Definition(schema_type=SchemaType.AVRO, text=ORDER))
        raise SchemaInvalid("bad", why="very", hint="good", line=3)

    monkeypatch.setattr(limited, "ask", ask)
    assert run(avro()) is run(avro())
    for _ in range(2):
        with pytest.raises(SchemaInvalid, match="bad: very") as refused:
            run(avro(b"?"))
        assert (refused.value.hint, refused.value.facts) == ("good", {"line": 3})
    assert [request.text for request in asked] == [ORDER, b"?"]


def test_a_failure_of_the_broker_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []

    def ask(request: Request) -> Outcome:
        asked.append(request)
        raise Unavailable("not now")

    monkeypatch.setattr(limited, "ask", ask)
    for _ in range(2):
        with pytest.raises(Unavailable):
            run(avro())
    assert len(asked) == 2


def test_memory_is_bounded_in_number_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = limited._Memory()
    small = Outcome(definition=Definition(schema_type=SchemaType.AVRO, text=b"x"))
    monkeypatch.setattr(limited, "REMEMBERED_MAX", 3)
    for number in range(5):
        memory.put(bytes([number]), small)
    assert [memory.get(bytes([number])) is not None for number in range(5)] == [False, False] + [True] * 3
    monkeypatch.setattr(limited, "REMEMBERED_BYTES_MAX", 2000)
    memory.put(b"large", Outcome(definition=Definition(schema_type=SchemaType.AVRO, text=b"x" * 1900)))
    assert memory.get(b"\x04") is None and memory.get(b"large") is not None
    memory.put(b"larger", Outcome(definition=Definition(schema_type=SchemaType.AVRO, text=b"x" * 3000)))
    assert memory.get(b"larger") is None and memory._size_bytes == 0


def test_the_same_question_at_the_same_time_costs_one_child(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    running, most, lock = 0, 0, threading.Lock()
    go = threading.Event()

    def ask(request: Request) -> Outcome:
        nonlocal running, most
        with lock:
            asked.append(request)
            running += 1
            most = max(most, running)
        go.wait(10)
        with lock:
            running -= 1
        return Outcome(definition=Definition(schema_type=SchemaType.AVRO, text=request.text))

    monkeypatch.setattr(limited, "ask", ask)
    threads = [threading.Thread(target=run, args=(avro(text),)) for text in (b"1", b"2", b"3", b"4") * 2]
    for thread in threads:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(10)
    assert most <= limited.CHILDREN_MAX
    assert {request.text for request in asked} == {b"1", b"2", b"3", b"4"}


def test_a_busy_broker_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limited, "WAIT_SECONDS", 0.05)
    for _ in range(limited.CHILDREN_MAX):
        assert limited._children.acquire(blocking=False)
    try:
        with pytest.raises(Overloaded, match="busy"):
            run(avro())
    finally:
        for _ in range(limited.CHILDREN_MAX):
            limited._children.release()
