"""Places of stored data on the command line: a directory, a file, a store, or one object in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from danube.cli.broker.here import Here, store_flags
from danube.cli.terminal.arguments import together
from danube.errors import InvalidArgument, NotFound, StorageFailed, StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from danube.wal.stores.objects import ObjectStore

_ROOTS = ("partitions/", "metadata/", "store.json")


# The options that it takes to reach a store besides its address.
store_options = together(
    click.option(
        "--config",
        "file",
        type=click.Path(path_type=Path),
        envvar="DANUBE_CONFIG",
        help="Configuration with the store's endpoint and credentials; also DANUBE_CONFIG.",
    ),
    click.option(
        "--s3-endpoint", metavar="URL", help="Endpoint of an S3 server other than Amazon's: http://host:port."
    ),
)


def store_at(here: Here, url: str, endpoint: str | None) -> ObjectStore:
    """The store at ``url``; credentials as for `danube start`."""
    from danube.wal.stores.opening import open_store

    return open_store(here.load(store_flags(url, endpoint)).storage)


@contextmanager
def reading() -> Iterator[None]:
    """Turn a store's refusal or silence into StorageFailed: exit code 12 and not 6."""
    try:
        yield
    except (StoreUnavailable, StoreRefused) as error:
        raise StorageFailed(error.what, why=error.why, hint=error.hint, **error.facts) from error


def remote(place: str) -> bool:
    """Whether a place is a store's address and not a path."""
    return "://" in place


def split_key(address: str) -> tuple[str, str]:
    """``(store, key)`` of one object's address; InvalidArgument if it names no object."""
    for root in _ROOTS:
        before, found, after = address.rpartition(f"/{root}")
        if found and (after or root == "store.json"):
            return before, root + after
    raise InvalidArgument(
        f"{address} names no object of a store",
        hint="write s3://bucket/prefix/partitions/.../manifest-0000000001-0000000001",
    )


def directory_at(place: str) -> tuple[Path, str]:
    """``(directory, store address)``; the address is empty if the directory is a broker's."""
    path = Path(place)
    if not path.is_dir():
        raise NotFound(f"there is no directory {place}", hint="name a broker's data directory or a store")
    store = f"file://{os.path.abspath(path)}" if (path / "store.json").is_file() else ""
    return path, store


def told(problem: Any) -> dict[str, Any]:
    """The documented JSON of what is wrong with stored bytes."""
    return {
        "kind": problem.kind.value,
        "byte": problem.position if problem.position >= 0 else None,
        "offsets": [problem.start, problem.end] if problem.end > problem.start else None,
        "what": problem.what,
    }
