"""The limited child: a process of its own that judges one definition and ends.

Started by :mod:`danube.schema.limited.process` as a script without site packages; its arguments are the
entries of ``sys.path``.  In order:

1. read one MessagePack request from stdin (its length comes first, four bytes little-endian);
2. load the type's library and judge a small sample, so that nothing is left to be loaded later;
3. take the limits on: processor time, memory, no file, no socket, no further process;
4. write ``READY`` to stdout.  What goes wrong before is the broker's fault, what goes wrong later the
   definition's;
5. judge, and write one MessagePack answer.

No new descriptor can be opened after step 3, so no parser can reach a network or a file, whatever the
definition asks for.  Protobuf is the exception: its compiler reads the definition from a pipe and the
well-known types from files of its own package, so it gets a few descriptors; no type can write a file.
"""

from __future__ import annotations

import math
import resource
import signal
import sys
import time
from typing import Any, Final

READY: Final = b"R"
CPU_SECONDS: Final = 2
MEMORY_BYTES: Final = 256 * 1024 * 1024  # in addition to the memory of the interpreter and the library
LIFE_SECONDS: Final = 20.0  # ends a child whose parent has ended
REQUEST_BYTES_MAX: Final = 16 * 1024 * 1024

# A small definition of each type, and how many descriptors it may have open (0, 1 and 2 are the pipes).
_SAMPLES: Final = {
    "avro": b'{"type":"record","name":"R","fields":[{"name":"a","type":"int","default":1}]}',
    "json_schema": b'{"type":"object","properties":{"a":{"type":"string","pattern":"^a+$"}}}',
    "protobuf": b'syntax = "proto3"; message Sample { string a = 1; }',
}
_DESCRIPTORS: Final = {"protobuf": 16}
_NO_DESCRIPTORS: Final = 3


def main() -> None:
    signal.setitimer(signal.ITIMER_REAL, LIFE_SECONDS)  # its signal ends a process that does not catch it
    import msgspec

    from danube.errors import DanubeError
    from danube.schema.model import Compatibility
    from danube.schema.verdict import Older, Request, judge

    request = msgspec.msgpack.decode(_read_request(), type=Request)
    if text := _SAMPLES.get(request.schema_type):
        sample = Request(schema_type=request.schema_type, text=text, compatibility=Compatibility.FULL)
        older = Older(version=1, definition=judge(sample).definition)
        judge(msgspec.structs.replace(sample, against=[older]))
    _limit(request.schema_type)
    _write(READY)
    answer: dict[str, Any]
    try:
        answer = {"outcome": judge(request)}
    except DanubeError as error:
        facts = {name: value for name, value in error.facts.items() if isinstance(value, str | int)}
        answer = {"error": [error.code, error.what, error.why, error.hint, facts]}
    except MemoryError:
        answer = {"out_of_memory": True}
    _write(msgspec.msgpack.encode(answer))


def _read_request() -> bytes:
    stdin = sys.stdin.buffer
    size = int.from_bytes(stdin.read(4), "little")
    request = stdin.read(min(size, REQUEST_BYTES_MAX))
    if not size or len(request) != size:
        raise SystemExit("the request is cut")
    return request


def _limit(schema_type: str) -> None:
    """Take the limits on.  They hold for good: each hard limit is lowered with the soft one."""
    descriptors = _DESCRIPTORS.get(schema_type, _NO_DESCRIPTORS)
    with open("/proc/self/statm", "rb") as file:
        mapped = int(file.read().split()[0]) * resource.getpagesize()
    cpu = math.ceil(time.process_time()) + CPU_SECONDS
    for which, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, mapped + MEMORY_BYTES, mapped + MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, 0, 0),
        (resource.RLIMIT_NPROC, 0, 0),
        (resource.RLIMIT_CORE, 0, 0),
        (resource.RLIMIT_NOFILE, descriptors, descriptors),
    ):
        had = resource.getrlimit(which)[1]
        allowed = hard if had == resource.RLIM_INFINITY else min(hard, had)
        resource.setrlimit(which, (min(soft, allowed), allowed))


def _write(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    sys.path[:] = sys.argv[1:]
    main()
