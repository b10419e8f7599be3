"""Opening of a store by its URL: ``s3://bucket/prefix``, ``file:///folder``, ``gs://``, ``az://``."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from danube.config.sections import StorageSettings, StoreUrl, split_store_url
from danube.errors import ConfigInvalid
from danube.wal.stores.objects import ObjectStore


def open_store(settings: StorageSettings) -> ObjectStore:
    """The store that the settings name.

    ConfigInvalid when they cannot be used as they are; StoreRefused when a directory is not there or
    credentials cannot be found.  S3, Google and Azure are not asked anything yet.
    """
    parts = check_store_url(settings.url)
    if parts.scheme == "file":
        from danube.wal.stores.directory import LocalStore

        return LocalStore(Path(parts.path))
    bucket, prefix = parts.bucket, parts.path
    if parts.scheme == "s3":
        from danube.wal.stores.s3 import MinioStore

        made = MinioStore(settings, bucket, prefix)
    else:
        made = _cloud_store().open_cloud(settings, parts.scheme, bucket, prefix)
    store: ObjectStore = made
    return store


def _cloud_store() -> Any:
    try:
        return importlib.import_module("danube.wal.stores.cloud")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "obstore":
            raise
        raise ConfigInvalid(
            "this store needs the package obstore",
            why="it is not installed",
            hint="pip install 'danube-broker[cloud]'",
        ) from None


def check_store_url(url: str) -> StoreUrl:
    """The parts of a store's URL; ConfigInvalid if it cannot be one."""
    try:
        return split_store_url(url)
    except ValueError as error:
        shown = url.rpartition("@")[2]  # a password does not belong there, and is not repeated
        raise ConfigInvalid(
            f"storage.url {shown!r} cannot be used", why=f"it {error}", hint="check storage.url"
        ) from None
