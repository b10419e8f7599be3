"""Fixtures for all tests: a real broker, and one seed that everything random comes from."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests import fork_server, marks, processor_seconds
from tests.broker_process import BrokerProcess, Brokers
from tests.cloud_servers import azure_server as azure_server
from tests.cloud_servers import google_server as google_server
from tests.etcd_server import etcd_server as etcd_server
from tests.kernel_fixtures import kernels_or_twins as kernels_or_twins
from tests.kernel_fixtures import with_kernels as with_kernels
from tests.s3_server import pytest_sessionfinish as pytest_sessionfinish
from tests.s3_server import pytest_terminal_summary as pytest_terminal_summary
from tests.s3_server import pytest_testnodedown as pytest_testnodedown
from tests.s3_server import s3_server as s3_server

_SEED = 20_261_121
# Files that one process of a run of several takes one after the other: tests of time, and tests that share a
# Spark session.  The longest group begins first, and all other files follow one by one.
_GROUPS = (
    ("clusters", "tests/e2e/test_cluster_"),
    ("brokers", "tests/e2e/"),
    ("crashes", "tests/crash/"),
    ("spark", "tests/spark/"),
    ("law", "tests/law/"),  # each reads all sources, which a process parses once
)
_ORDER = ("spark", "crashes", "brokers", "clusters")
# In those folders, but no tests of time and without a session: these files go to whichever process is free.
_FREE = (
    "tests/compat/",
    "tests/e2e/test_clouds",
    "tests/e2e/test_cluster_script",
    "tests/e2e/test_compaction",
    "tests/e2e/test_grpc_",
    "tests/e2e/test_h2spec",
    "tests/e2e/test_load",
    "tests/e2e/test_main_job",
    "tests/e2e/test_native_door",
    "tests/e2e/test_schema_registry",
    "tests/e2e/test_subscriptions",
    "tests/e2e/test_typed_values",
    "tests/e2e/test_upstream_commands",
    "tests/e2e/test_verify",
    "tests/law/test_static",
    "tests/spark/test_compact_live",
    "tests/spark/test_decode",
    "tests/spark/test_read_local",
    "tests/spark/test_replay.py",
    "tests/spark/test_validate.py",
)

_seed_key = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--seed", default=str(_SEED), help="of everything random: a number, or 'random' to search"
    )
    parser.addoption("--exec", action="store_true", help="fork no process of a test: start each as users do")
    parser.addoption("--processor", metavar="FILE", help="write the processor time of each test there")
    parser.addoption("--quick", action="store_true", help="only tests that are marked quick (tests/marks.py)")


def pytest_configure(config: pytest.Config) -> None:
    # A shell that runs this in the background lets it, and all that it starts, ignore SIGINT.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    config.pluginmanager.register(marks)
    config.pluginmanager.register(processor_seconds)
    if not config.option.exec:
        fork_server.enable()
    if config.option.seed == "random":
        config.option.seed = str(random.SystemRandom().randrange(2**32))  # processes of the run get it too
    given = config.option.seed
    config.stash[_seed_key] = int(given)
    # Two runs of one tree tell the same; what searches for faults says so.
    settings.register_profile("danube", deadline=None, print_blob=True, derandomize=given == str(_SEED))
    settings.load_profile("danube")


def pytest_unconfigure() -> None:
    fork_server.disable()


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.stash[_seed_key]} (repeat with --seed)"


def _group_of(file: str) -> str:
    """Return the group of a file; a file that is free is its own."""
    if file.startswith(_FREE):
        return file
    return next((group for group, beginning in _GROUPS if file.startswith(beginning)), file)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a run of several processes long groups begin first, so that none of them ends alone."""
    if hasattr(config, "workerinput"):
        places = {group: place for place, group in enumerate(_ORDER)}
        items.sort(key=lambda item: places.get(_group_of(item.nodeid.partition("::")[0]), len(places)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups and files stay whole, and begin in the order of collection."""
    from xdist.scheduler import LoadFileScheduling

    class OfGroups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group_of(nodeid.partition("::")[0])

    config.option.loadscopereorder = False
    return OfGroups(config, log)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """This run's seed, mixed with the test's name."""
    return random.Random(f"{request.config.stash[_seed_key]} {request.node.name}").randrange(2**32)


@pytest.fixture
def source(seed: int) -> random.Random:
    """A random source that depends on the run's seed and the test's name alone."""
    return random.Random(seed)


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Callable[..., BrokerProcess]]:
    """Start real brokers: ``broker(workers=2, arguments=[...])``; all are killed after the test.

    Each gets a data directory of its own unless ``data_dir`` says otherwise; ``start=False`` only
    prepares it.
    """
    brokers = Brokers(tmp_path)
    yield brokers.make
    brokers.kill()
