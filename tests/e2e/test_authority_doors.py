"""The doors of a broker obey the matrix: what it refuses is refused, and what it lets read is read.

The matrix is judged in full, without a broker, against tests/golden/authority.txt.  Here each row that names
something is asked of a real broker; test_cluster_matrix.py asks three.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from danube import sync
from tests.broker_process import Brokers
from tests.e2e.authority_matrix import (
    FIRST,
    NAMED,
    build,
    grpc_cells,
    grpc_marks,
    native_cells,
    native_marks,
    of_port,
    reviewed,
    told,
)
from tests.e2e.authority_site import Site, first_token, token
from tests.e2e.grpc_parts import DanubeCalls
from tests.golden.authority_cases import CALLERS


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The site of the matrix, as a real broker; its topics and bindings."""
    brokers = Brokers(tmp_path_factory.mktemp("doors"))
    made = Site(brokers.make, workers=1)  # a right that was given is known at once
    build(made.ask, made.admin.admin.create_topic)
    yield made
    made.close()
    brokers.kill()


def test_the_reviewed_file_has_every_caller() -> None:
    assert all(set(marks) == set(CALLERS) for marks in reviewed().values())


def credential_of(caller: str) -> str:
    if caller == "nobody":
        return ""
    return first_token() if caller == FIRST else token(caller, "user")


@pytest.mark.parametrize("caller", [*NAMED, FIRST])
def test_the_native_door_obeys_the_matrix(broker: Site, caller: str) -> None:
    wanted = native_cells(caller)
    assert len(wanted) > 90
    with sync.connect(broker.process.address, token=credential_of(caller), timeout=60) as client:
        assert told(wanted, native_marks(client, wanted)) == []


@pytest.mark.parametrize("caller", [*NAMED, FIRST, "nobody"])
def test_the_grpc_doors_obey_the_matrix(broker: Site, caller: str) -> None:
    wanted = grpc_cells(caller)
    addresses = (broker.process.admin_address, broker.process.grpc_address)
    for address, administration in zip(addresses, (True, False), strict=True):
        ours = of_port(wanted, administration=administration)
        assert len(ours) > 20
        with DanubeCalls(address) as calls:
            credential = credential_of(caller)
            calls.fields = [("authorization", f"Bearer {credential}")] if credential else []
            assert told(ours, grpc_marks(calls, ours)) == []
