"""Faults of the object store: each lasts a while, and leaves the proxy passing everything again.

The proxy (:mod:`tests.fakes.s3_proxy`) stands between the broker and a real S3 server.  A fault proves
itself by the requests that it met; an outage by having refused to listen.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from tests.crash import nemesis
from tests.fakes.s3_proxy import Fault, Request, S3Proxy

StoreFault = Callable[[S3Proxy, random.Random], dict[str, Any]]


def outage(proxy: S3Proxy, source: random.Random) -> dict[str, Any]:
    """Nobody listens, and what was open is cut."""
    away_s = source.uniform(0.5, 3.0)
    proxy.refuse()
    try:
        time.sleep(away_s)
    finally:
        proxy.resume()
    return {"away_s": round(away_s, 3)}


def slow_down(proxy: S3Proxy, source: random.Random) -> dict[str, Any]:
    """503 SlowDown to four of ten requests."""
    return _meeting(proxy, source, Fault("status", status=503, code="SlowDown", rate=0.4))


def lost_answers(proxy: S3Proxy, source: random.Random) -> dict[str, Any]:
    """Half of the objects are stored and the answer is lost."""
    return _meeting(proxy, source, Fault("close_after", matches=_writes, rate=0.5))


def damaged_reads(proxy: S3Proxy, source: random.Random) -> dict[str, Any]:
    """Half of what is read is cut, half of the rest has a bit flipped."""
    faults = [Fault(kind, matches=lambda request: request.method == "GET", rate=0.5) for kind in _DAMAGE]
    return _meeting(proxy, source, *faults)


_DAMAGE = ("truncate", "damage")
STORE_FAULTS: dict[str, StoreFault] = {
    fault.__name__: fault for fault in (outage, slow_down, lost_answers, damaged_reads)
}


def _writes(request: Request) -> bool:
    return request.method in ("PUT", "POST")


def _meeting(proxy: S3Proxy, source: random.Random, *faults: Fault) -> dict[str, Any]:
    for fault in faults:
        proxy.add(fault)
    try:
        time.sleep(source.uniform(0.5, 2.0))
    finally:
        proxy.clear()
    return {"met": sum(fault.met for fault in faults)}


def for_nemesis(proxy: S3Proxy) -> dict[str, nemesis.Fault]:
    """The same faults as a nemesis takes them, which hands over the broker."""
    return {
        name: lambda broker, source, fault=fault: fault(proxy, source)  # type: ignore[misc]
        for name, fault in STORE_FAULTS.items()
    }
