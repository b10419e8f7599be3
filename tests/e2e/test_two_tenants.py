"""Two tenants with equal names, side by side under kill -9: neither ever meets a byte of the other.

``DANUBE_TENANT_RECORDS``: records of each tenant (default 40,000).
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from danube import sync
from danube.errors import OperationTimeout
from tests.broker_process import BrokerProcess
from tests.e2e.authority_site import Site, token

RECORDS = int(os.environ.get("DANUBE_TENANT_RECORDS", "40000"))
BATCH = 500
TENANTS = ("north", "south")


def connected(site: Site, tenant: str) -> sync.Client:
    """A client that waits out a worker's replacement on a slow host."""
    return sync.connect(site.process.address, token=token(tenant), timeout=60)


def payload(tenant: str, number: int) -> bytes:
    return f"{tenant} {number:012}".encode().ljust(100, b".")


def published(producer: Any, tenant: str, numbers: range) -> None:
    """Have records of a tenant acknowledged."""
    for start in range(numbers.start, numbers.stop, BATCH):
        batch = range(start, min(start + BATCH, numbers.stop))
        keys = [b"%d" % (number % 8) for number in batch]
        producer.send_many([payload(tenant, number) for number in batch], keys=keys)


def read(site: Site, tenant: str) -> set[bytes]:
    """What the subscription has, which all tenants call alike; every record is acknowledged."""
    wanted, found = {payload(tenant, number) for number in range(RECORDS)}, set[bytes]()
    with (
        site.connect(tenant) as client,
        client.consumer(f"/{tenant}/orders", "reader", start="earliest") as one,
    ):
        for batch in one.batches():
            found.update(batch.payloads)
            batch.ack()
            if found >= wanted:
                break
        with pytest.raises(OperationTimeout):  # nothing of anybody else comes behind them
            while True:
                found.add(one.receive(timeout=2).payload)
    return found


def stored(process: BrokerProcess, own: str, other: str) -> int:
    """How many files hold records of one tenant; none of them holds a byte of the other."""
    count = 0
    for path in Path(process.data_dir, "partitions").rglob("*"):
        try:
            content = path.read_bytes()
        except (IsADirectoryError, FileNotFoundError):  # a folder, or replaced meanwhile
            continue
        if own.encode() in content:
            count += 1
            assert other.encode() not in content, f"{path.name} holds records of both"
    return count


def test_neither_of_two_tenants_meets_a_byte_of_the_other(broker: Any) -> None:
    site = Site(broker, workers=2)
    try:
        for tenant in TENANTS:
            site.namespace(tenant)
            site.bind(tenant, "namespace-admin", "namespace", tenant)
            with connected(site, tenant) as client:
                client.admin.create_topic(f"/{tenant}/orders", partitions=2, durability="written")
        half = RECORDS // 2
        with ThreadPoolExecutor(2) as pool, ExitStack() as stack:
            producers = {}
            for tenant in TENANTS:  # connected before, because a first connection is tried once
                client = stack.enter_context(connected(site, tenant))
                producers[tenant] = stack.enter_context(client.producer(f"/{tenant}/orders", name="p"))
            for part in (range(half), range(half, RECORDS)):
                running = [pool.submit(published, producers[one], one, part) for one in TENANTS]
                site.process.kill_worker(part.start and 1)  # beside their publishing
                for one in running:
                    one.result(120)
            site.process.running_workers()
            found = dict(zip(TENANTS, pool.map(lambda tenant: read(site, tenant), TENANTS), strict=True))
        for tenant in TENANTS:
            assert found[tenant] == {payload(tenant, number) for number in range(RECORDS)}
        for own, other in (TENANTS, TENANTS[::-1]):
            assert stored(site.process, f"{own} 0", f"{other} 0") >= 2, "each partition has files of its own"
    finally:
        site.close()
