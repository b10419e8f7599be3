"""Google Cloud Storage and Azure Blob through ``obstore``; the only door to it.

obstore cuts files into parts and sends them in parallel by itself, so a file is one request here, tried again
as a whole; its own retries are off.  It cannot list the remains of an interrupted upload: Azure drops
uncommitted blocks after a week, and a Google bucket needs a life-cycle rule (AbortIncompleteMultipartUpload).
Errors contain no text of the library.

docs/adr/0062-stores-by-libraries.md names the functions that obstore lacks and this module adds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore

from danube.config.sections import StorageSettings
from danube.errors import (
    ConfigInvalid,
    DanubeError,
    ObjectMissing,
    StoreDamaged,
    StoreRefused,
    StoreUnavailable,
)
from danube.wal.stores.credentials import CredentialSource
from danube.wal.stores.objects import (
    AS_USUAL,
    COPY_BYTES,
    ObjectInfo,
    Putting,
    check_key,
    check_range,
    open_source,
    write_exactly,
)
from danube.wal.stores.refused_tls import rustls_failure
from danube.wal.stores.retries import Retries
from danube.wal.stores.s3_answers import hint_for

T = TypeVar("T")

CONNECT_TIMEOUT_S: Final = 3.0
REQUEST_TIMEOUT_S: Final = 120.0
DELETED_AT_ONCE: Final = 1_000
_STATUS: Final = re.compile(r"status(?: code)?: ([0-9]{3})")
_BUCKET_GONE: Final = re.compile(
    r"NoSuchBucket|ContainerNotFound|specified (?:container|bucket) does not exist"
)
_CODE: Final = re.compile(r"<Code>([A-Za-z]{1,64})</Code>|\"reason\": ?\"([A-Za-z]{1,64})\"")
_BEYOND: Final = re.compile(r"Wanted range|range was invalid|InvalidRange|status code: 416")
_REFUSALS: Final = (
    exceptions.PermissionDeniedError,
    exceptions.UnauthenticatedError,
    exceptions.InvalidPathError,
    exceptions.NotSupportedError,
    PermissionError,
)


def open_cloud(settings: StorageSettings, scheme: str, bucket: str, prefix: str) -> CloudStore:
    """The store of ``gs://bucket/prefix`` or ``az://container/prefix``; it is not asked anything yet."""
    name = f"{scheme}://{bucket}" + (f"/{prefix}" if prefix else "")
    source = CredentialSource(settings)
    options: dict[str, Any] = {
        "prefix": prefix or None,
        "client_options": {
            "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
            "timeout": timedelta(seconds=REQUEST_TIMEOUT_S),
            "allow_http": settings.endpoint.startswith("http://"),
        },
        "retry_config": {"max_retries": 0},
    }
    try:
        if scheme == "gs":
            inner: Any = GCSStore(bucket, config=_google(settings), **options)
        else:
            inner = AzureStore(bucket, config=_azure(settings, source), **options)
    except (exceptions.BaseError, ValueError, OSError):
        raise ConfigInvalid(
            f"store {name} cannot be set up", why="its keys are not of the right form", hint="check storage"
        ) from None
    return CloudStore(inner, name)


def _google(settings: StorageSettings) -> Any:
    given = {
        "base_url": settings.endpoint,
        "service_account_key": settings.credentials.reveal(),
        "application_credentials": settings.credentials_file,
    }
    config: dict[str, Any] = {name: text for name, text in given.items() if text}
    return config | ({"skip_signature": True} if settings.anonymous else {})


def _azure(settings: StorageSettings, source: CredentialSource) -> Any:
    given = {
        "endpoint": settings.endpoint,
        "account_name": source.text_of("access_key"),
        "account_key": source.text_of("secret_key"),
        "sas_key": source.text_of("session_token"),
    }
    config: dict[str, Any] = {name: text for name, text in given.items() if text}
    return config | ({"skip_signature": True} if settings.anonymous else {})


class CloudStore:
    """One of obstore's stores that lists by ascending key, behind our port."""

    def __init__(self, inner: Any, name: str, *, retries: Retries | None = None) -> None:
        self.name = name
        self.retries = retries or Retries()
        self._inner = inner

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        body = bytes(data)
        self._run("put", key, lambda: obstore.put(self._inner, key, body, use_multipart=False))

    def put_file(self, key: str, path: Path, how: Putting = AS_USUAL) -> None:
        check_key(key)
        fd, size = open_source(path)

        def put() -> None:
            with open(fd, "rb", closefd=False) as file:
                file.seek(0)
                obstore.put(
                    self._inner,
                    key,
                    file,
                    use_multipart=size > how.part_bytes,
                    chunk_size=how.part_bytes,
                    max_concurrency=how.parallel,
                )

        with open(fd, "rb"):
            self._run("put", key, put)
        how.progress(size)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(start, end)
        check_key(key)
        return self._run("get", key, lambda: b"".join(self._pieces(key, start, end)))

    def get_to(self, key: str, start: int, end: int, fd: int, position: int) -> None:
        check_range(start, end)
        check_key(key)

        def copy() -> None:
            place = position
            for piece in self._pieces(key, start, end):
                write_exactly(fd, piece, place)
                place += len(piece)

        self._run("get", key, copy)

    def head(self, key: str) -> ObjectInfo | None:
        try:
            return _info(self._run("head", check_key(key), lambda: self._head(key)))
        except ObjectMissing:
            return None

    def _head(self, key: str) -> Any:
        """An answer to HEAD has no body, so a refused one gives no reason: one GET of a byte does."""
        try:
            return obstore.head(self._inner, key)
        except (exceptions.BaseError, OSError) as error:
            if isinstance(self._failure("head", key, error), StoreUnavailable):
                raise
            try:
                obstore.get_range(self._inner, key, start=0, end=1)
            except (exceptions.BaseError, OSError) as reason:
                if _BEYOND.search(str(reason)) is None:
                    raise reason from None
            raise  # the GET is not refused, so only the status of HEAD is known

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        listing = _Listing(self._inner, prefix, after)
        while page := self._run("list", prefix, listing.next_page):
            for info in page:
                if info.key.startswith(prefix) and info.key > after:
                    yield info

    def delete(self, keys: Iterable[str]) -> None:
        names = [check_key(key) for key in keys]
        for first in range(0, len(names), DELETED_AT_ONCE):
            some = names[first : first + DELETED_AT_ONCE]
            try:
                self._run("delete", some[0], lambda some=some: obstore.delete(self._inner, some))  # type: ignore[misc]
            except ObjectMissing:
                for name in some:  # the bulk call stops at the first that is not there
                    self._delete(name)

    def clean_uploads(self, older_than_us: int) -> int:
        return 0  # see above: the cloud's own rules

    def _delete(self, key: str) -> None:
        try:
            self._run("delete", key, lambda: obstore.delete(self._inner, [key]))
        except ObjectMissing:
            pass

    def _pieces(self, key: str, start: int, end: int | None) -> Iterator[bytes]:
        """The bytes of a range, whose length is checked before the first and after the last."""
        if start == end:
            self._check_end(key, _info(obstore.head(self._inner, key)).size, start)
            return
        options: Any = {"range": {"offset": start} if end is None else (start, end)}
        try:
            answer = obstore.get(self._inner, key, options={} if end is None and not start else options)
        except exceptions.BaseError as error:
            if _BEYOND.search(str(error)) is None:
                raise
            self._check_end(key, _info(obstore.head(self._inner, key)).size, start if end is None else end)
            if end is None:
                return  # from the very end on
            raise
        self._check_end(key, answer.meta["size"], start if end is None else end)
        wanted = answer.meta["size"] - start if end is None else end - start
        for piece in answer.stream(min_chunk_size=COPY_BYTES):
            wanted -= len(piece)
            yield bytes(piece)
        if wanted:
            raise StoreUnavailable(f"the body of {key} ended early", store=self.name, key=key)

    def _check_end(self, key: str, size: int, end: int) -> None:
        if end > size:
            raise StoreDamaged(
                f"object {key} ends at {size}", why=f"{end} was asked for", store=self.name, key=key
            )

    def _run(self, doing: str, key: str, request: Callable[[], T]) -> T:
        def once() -> T:
            try:
                return request()
            except DanubeError:
                raise
            except (exceptions.BaseError, OSError, ValueError) as error:
                raise self._failure(doing, key, error) from None

        return self.retries.run(once)

    def _failure(self, doing: str, key: str, error: Exception) -> DanubeError:
        what = f"store {self.name} failed to {doing} {key}"
        if _BUCKET_GONE.search(str(error)):
            return StoreRefused(
                what,
                why="there is no such bucket",
                hint="make the bucket, or check storage.url",
                store=self.name,
            )
        if isinstance(error, FileNotFoundError | exceptions.NotFoundError):
            if doing == "put":  # an upload in parts that the cloud has forgotten
                return StoreUnavailable(
                    what, why="the upload is not known there any more", store=self.name, key=key
                )
            return ObjectMissing(f"there is no object {key}", store=self.name, key=key)
        tls = rustls_failure(str(error))
        if tls is not None:
            return StoreRefused(what, why=tls.why, hint=tls.hint, store=self.name)
        found = _STATUS.search(str(error))
        status = int(found[1]) if found else 0
        why = f"it answered {status}" if status else type(error).__name__
        if isinstance(error, _REFUSALS) or (400 <= status < 500 and status not in (408, 429)):
            word = _CODE.search(str(error))
            code = next(filter(None, word.groups()), "") if word else ""
            hint = hint_for(status or 403, code)
            return StoreRefused(what, why=f"{why} {code}".rstrip(), hint=hint, store=self.name)
        return StoreUnavailable(what, why=why, store=self.name, key=key)


class _Listing:
    """Pages of a list; after a failure it goes on behind the last key it had."""

    def __init__(self, inner: Any, prefix: str, after: str) -> None:
        self._inner = inner
        self._folder = prefix.rpartition("/")[0] or None  # obstore takes whole parts of a key alone
        self._offset = after
        self._pages: Any = None

    def next_page(self) -> Sequence[ObjectInfo]:
        """The next objects, ascending; empty at the end."""
        if self._pages is None:
            found = obstore.list(self._inner, self._folder, offset=self._offset or None, chunk_size=1_000)
            self._pages = iter(found)
        try:
            page = sorted(_info(one) for one in next(self._pages, ()))
        except BaseException:
            self._pages = None
            raise
        if page:
            self._offset = page[-1].key
        return page


def _info(one: Any) -> ObjectInfo:
    modified_us = round(one["last_modified"].timestamp() * 1_000_000)
    return ObjectInfo(one["path"], one["size"], (one["e_tag"] or "").strip('"'), modified_us)
