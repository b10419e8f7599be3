"""An object store that speaks S3, through the ``minio`` client; the only door to it.

minio signs, cuts files into parts and reads the answers.  Between it and the network lies :class:`_Requests`
with our connections, time-outs and retries (:mod:`danube.wal.stores.retries`), of a part as of any request.
An answer that is no success becomes an error of ours before minio sees it.  So nothing that a server wrote
gets into an error, and no key or signature does.

A body is checked on its way in: its SHA-256 is signed over http, its MD5 is sent over https.  On its way out,
status, range and length must be those asked for.

An upload that was cut begins anew.  Its parts stay at the store until ``clean_uploads`` drops them, for which
minio has no public call: the two inner ones there are the only ones that are used.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any, Final
from xml.etree.ElementTree import ParseError

import certifi
import minio
import urllib3
from minio.credentials.credentials import Credentials as MinioCredentials
from minio.credentials.providers import AssumeRoleProvider, IamAwsProvider, Provider
from minio.deleteobjects import DeleteObject
from minio.error import MinioException
from minio.helpers import check_bucket_name

from danube.config.sections import StorageSettings
from danube.errors import (
    ConfigInvalid,
    DanubeError,
    ObjectMissing,
    StoreDamaged,
    StoreRefused,
    StoreUnavailable,
)
from danube.host.clock import wall_us
from danube.limits import MIB
from danube.wal.stores.credentials import CredentialSource
from danube.wal.stores.objects import (
    AS_USUAL,
    COPY_BYTES,
    ObjectInfo,
    Progress,
    Putting,
    check_key,
    check_range,
    open_source,
    read_exactly,
    write_exactly,
)
from danube.wal.stores.refused_tls import openssl_failure
from danube.wal.stores.retries import Retries
from danube.wal.stores.s3_answers import code_of, content_range, failure, retry_after_s

CONNECT_TIMEOUT_S: Final = 3.0
READ_TIMEOUT_S: Final = 30.0
REGION: Final = "us-east-1"  # servers without regions expect this name
PARTS_MAX: Final = 10_000
PART_BYTES_LEAST: Final = 5 * MIB  # of every part but the last, says S3
_SUCCESS: Final = (200, 204, 206)
_RESULT: Final = re.compile(rb"\s*(<\?[^>]*>)?\s*<(\w+:)?\w+Result[\s/>]")
_GONE: Final = frozenset({"NoSuchKey", "NoSuchVersion"})
_REASONS: Final = {
    "ConnectTimeoutError": "no connection in time",
    "NameResolutionError": "its name is not known",
    "NewConnectionError": "the connection was refused",
    "ReadTimeoutError": "no answer in time",
}


class MinioStore:
    """Objects below ``prefix`` in a bucket, which must exist."""

    def __init__(
        self,
        settings: StorageSettings,
        bucket: str,
        prefix: str,
        *,
        retries: Retries | None = None,
        environ: Mapping[str, str] | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        read_timeout_s: float = READ_TIMEOUT_S,
    ) -> None:
        self.name = f"s3://{bucket}" + (f"/{prefix}" if prefix else "")
        self.retries = retries or Retries()
        self._bucket = bucket
        self._prefix = prefix + "/" if prefix else ""
        self._parallel = settings.upload_parallel
        self._part_bytes = settings.part_bytes
        options = {
            "timeout": urllib3.Timeout(connect=connect_timeout_s, read=read_timeout_s),
            "maxsize": 2 * settings.upload_parallel + 8,  # those of uploads, and as many for downloads
            "cert_reqs": "CERT_REQUIRED",
            "ca_certs": os.environ.get("SSL_CERT_FILE") or certifi.where(),
        }
        self._requests = _Requests(self.retries, options)
        self._make_client = _client_maker(settings, os.environ if environ is None else environ, options)
        self._client = self._make_client(self._requests)
        try:
            check_bucket_name(bucket)
        except ValueError:
            hint = "correct the bucket in storage.url"
            raise ConfigInvalid(
                f"bucket {bucket!r} cannot be used", why="minio takes no such name", hint=hint
            ) from None

    def put(self, key: str, data: bytes) -> None:
        name, size = self._prefix + check_key(key), len(data)
        with self._asking("put", key):
            self._client.put_object(
                self._bucket, name, BytesIO(data), size, part_size=max(size, PART_BYTES_LEAST)
            )

    def put_file(self, key: str, path: Path, how: Putting = AS_USUAL) -> None:
        name = self._prefix + check_key(key)
        fd, size = open_source(path)
        source = _Source(fd, size, path, how.progress)
        client = self._make_client(_UploadRequests(self._requests, source))
        try:
            with self._asking("put", key):
                client.put_object(
                    self._bucket, name, source, size,  # type: ignore[arg-type]
                    part_size=part_size(size, how.part_bytes), num_parallel_uploads=how.parallel,
                )  # fmt: skip
        except ObjectMissing as error:  # the upload: it was ended, or is complete and that answer was lost
            found = self.head(key)
            if found is None or found.size != size:
                raise StoreUnavailable(
                    f"the upload of {key} was ended by somebody else", why=error.what, key=key
                ) from None
        finally:
            os.close(fd)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(start, end)
        check_key(key)
        if start == end:
            return b""
        try:
            return self.retries.run(lambda: self._get(key, start, end))
        except StoreDamaged:
            found = self.head(key) if end is None else None
            if found is not None and found.size == start:
                return b""  # S3 has no empty range
            raise

    def get_to(self, key: str, start: int, end: int, fd: int, position: int) -> None:
        check_range(start, end)
        check_key(key)
        step = max(self._part_bytes, -(-(end - start) // 1_000))
        copies = [
            partial(self._copy, key, first, min(first + step, end), fd, position + first - start)
            for first in range(start, end, step)
        ]
        _run_parallel(copies, self._parallel)

    def head(self, key: str) -> ObjectInfo | None:
        """An answer to HEAD has no body, so a refused one gives no reason: one GET of a byte does."""
        name = self._prefix + check_key(key)
        try:
            try:
                with self._asking("head", key):
                    found = self._client.stat_object(self._bucket, name)
            except (StoreRefused, ObjectMissing):
                self.retries.run(lambda: self._get_byte(key))
                raise  # the GET is not refused, so only the status of HEAD is known
        except ObjectMissing:
            return None
        if "Content-Length" not in (found.metadata or {}):
            raise StoreUnavailable(f"store {self.name} did not say the length of {key}", store=self.name)
        return _info(key, found)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        start_after = self._prefix + after if after else None
        with self._asking("list", prefix):
            for one in self._client.list_objects(
                self._bucket, self._prefix + prefix, recursive=True, start_after=start_after
            ):
                key = one.object_name.removeprefix(self._prefix)
                if key > after:
                    yield _info(key, one)

    def delete(self, keys: Iterable[str]) -> None:
        names = [DeleteObject(self._prefix + check_key(key)) for key in keys]
        with self._asking("delete", ""):
            for error in self._client.remove_objects(self._bucket, names):
                if error.code not in _GONE:
                    key = (error.name or "").removeprefix(self._prefix)
                    raise failure(self.name, "delete", key, 200, error.code)

    def clean_uploads(self, older_than_us: int) -> int:
        bound_us = wall_us() - older_than_us
        count = 0
        for upload in self._unfinished():
            if 0 < _us(upload.initiated_time) <= bound_us:
                try:
                    with self._asking("abort", upload.object_name.removeprefix(self._prefix)):
                        self._client._abort_multipart_upload(
                            self._bucket, upload.object_name, upload.upload_id
                        )
                except ObjectMissing:
                    continue  # completed or aborted meanwhile
                count += 1
        return count

    def _unfinished(self) -> Iterator[Any]:
        """Unfinished uploads below the prefix; a MinIO server finds them by a whole key or none."""
        found = [*self._uploads(self._prefix)]
        if not found and self._prefix:
            try:
                found = [*self._uploads("")]
            except StoreRefused:
                pass  # these credentials see the prefix alone
        return (upload for upload in found if upload.object_name.startswith(self._prefix))

    def _uploads(self, prefix: str) -> Iterator[Any]:
        marker = None
        while True:
            with self._asking("list uploads of", prefix):
                page = self._client._list_multipart_uploads(self._bucket, prefix=prefix, key_marker=marker)
            yield from page.uploads
            marker = page.next_key_marker
            if not page.is_truncated or not marker:
                return

    def _get(self, key: str, start: int, end: int | None) -> bytes:
        with self._open(key, start, end) as (response, size):
            pieces = []
            while size:
                pieces.append(self._read(response, key, size))
                size -= len(pieces[-1])
            return b"".join(pieces)

    def _get_byte(self, key: str) -> None:
        try:
            with self._asking("head", key):
                self._client.get_object(self._bucket, self._prefix + key, 0, 1).close()
        except StoreDamaged:
            pass  # it is empty, so there is no such range

    def _copy(self, key: str, start: int, end: int, fd: int, position: int) -> None:
        """Copy a range; after a failure half-way the rest is asked for, of the same content."""
        done, etag = start, ""

        def copy() -> None:
            nonlocal done, etag
            with self._open(key, done, end) as (response, _):
                found = response.headers.get("ETag", "")
                if etag and found != etag:
                    raise StoreDamaged(f"object {key} was replaced", store=self.name, key=key)
                etag = found
                while done < end:
                    data = self._read(response, key, end - done)
                    write_exactly(fd, data, position + done - start)
                    done += len(data)

        self.retries.run(copy)

    @contextmanager
    def _open(self, key: str, start: int, end: int | None) -> Iterator[tuple[Any, int]]:
        """The answer to a GET and how many bytes it holds; the connection is kept if all were read."""
        with self._asking("get", key):
            length = 0 if end is None else end - start
            response = self._client.get_object(self._bucket, self._prefix + key, start, length)
        try:
            yield response, self._length(response, key, start, end)
        except BaseException:
            response.close()
            raise
        response.release_conn()

    def _length(self, response: Any, key: str, start: int, end: int | None) -> int:
        """Bytes of the body, which must be those asked for."""
        given, length = response.headers.get("Content-Range"), response.headers.get("Content-Length", "")
        if not length.isdigit():
            raise StoreUnavailable(f"store {self.name} did not say the length of {key}", store=self.name)
        size = int(length)
        wanted = None if end is None else end - start
        if given is None and start == 0 and wanted in (None, size):
            return size
        found = content_range(given or "")
        if found is None or found[0] != start or found[1] - start != size:
            raise StoreUnavailable(
                f"store {self.name} answered another range of {key}",
                why="not the one asked for",
                store=self.name,
            )
        if wanted not in (None, size):
            raise StoreDamaged(
                f"object {key} ends at {found[2]}", why=f"{end} was asked for", store=self.name, key=key
            )
        return size

    def _read(self, response: Any, key: str, size: int) -> bytes:
        try:
            data: bytes = response.read(min(COPY_BYTES, size))
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._in_words(_unreachable(error), "get", key) from None
        if not data:
            raise StoreUnavailable(f"the body of {key} ended early", store=self.name, key=key)
        return data

    @contextmanager
    def _asking(self, doing: str, what: str) -> Iterator[None]:
        """Turn every failure into a DanubeError that names the request."""
        try:
            yield
        except DanubeError as error:
            raise self._in_words(error, doing, what) from None
        except (urllib3.exceptions.HTTPError, OSError) as error:  # of who gives credentials
            raise self._in_words(_unreachable(error), doing, what) from None
        except (MinioException, ParseError, ValueError) as error:
            # A document of the client's own parsers: credentials of a role, or an answer that is cut XML.
            raise StoreUnavailable(
                f"store {self.name} answered what cannot be read to {doing} {what}",
                why=type(error).__name__, store=self.name, key=what,
            ) from None  # fmt: skip

    def _in_words(self, error: DanubeError, doing: str, what: str) -> DanubeError:
        """Return the error of a request, with the store and the request in its facts."""
        facts = error.facts
        if "http_status" in facts and not facts["store"]:
            wish_s = facts.get("retry_after_s", 0.0)
            return failure(self.name, doing, what, facts["http_status"], facts["s3_code"], wish_s)
        if "unreachable" in facts:
            told = f"store {self.name} cannot be reached to {doing} {what}"
            return type(error)(told, why=error.why, hint=error.hint, store=self.name, key=what)
        return error


class _Requests(urllib3.PoolManager):
    """Requests of one store.  If an answer is read as a stream, its reader retries the request."""

    def __init__(self, retries: Retries, options: dict[str, Any]) -> None:
        super().__init__(retries=False, **options)
        self._retries = retries

    def urlopen(self, method: str, url: str, *_: Any, **options: Any) -> Any:
        once = partial(self._once, method, url, options)
        return self._retries.run(once) if options.get("preload_content", True) else once()

    def _once(self, method: str, url: str, options: dict[str, Any]) -> Any:
        """A success; the facts of another answer are complete but for the store."""
        try:
            response = super().urlopen(method, url, redirect=False, **options)
            status = response.status
            body = b"" if status in _SUCCESS and method != "POST" else response.data
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise _unreachable(error) from None
        if status == 200 and method == "POST" and not _RESULT.match(body):
            status = 500  # S3 begins its answer with 200 before it knows
        if status in _SUCCESS:
            return response
        raise failure("", "", "", status, code_of(body), retry_after_s(response.headers))


class _Source:
    """A file that minio reads and cuts into parts.

    A read that fails gives zeros and is told by the next request of its upload.  From a failing read minio
    would leave its pool of threads behind, each with a part.
    """

    def __init__(self, fd: int, size: int, path: Path, progress: Progress) -> None:
        self.failed: Exception | None = None
        self._fd, self._size, self._path, self._progress = fd, size, path, progress
        self._position = 0

    def read(self, size: int) -> bytes:
        size = min(size, self._size - self._position)
        if self.failed is None:
            try:
                data = read_exactly(self._fd, size, self._position, self._path)
                self._position += size
                if size:
                    self._progress(size)
                return data
            except Exception as error:
                self.failed = error
        return bytes(size)


class _UploadRequests(urllib3.PoolManager):
    """Requests of one upload: none but that which aborts it goes out once its file cannot be read.

    An abort that fails hides no error: the parts stay for ``clean_uploads``.
    """

    def __init__(self, requests: _Requests, source: _Source) -> None:
        super().__init__()
        self._requests = requests
        self._source = source

    def urlopen(self, method: str, url: str, *_: Any, **options: Any) -> Any:
        if self._source.failed is not None and method != "DELETE":
            raise self._source.failed
        try:
            return self._requests.urlopen(method, url, **options)
        except DanubeError:
            if method != "DELETE":
                raise
            return urllib3.HTTPResponse(status=204)


def part_size(size: int, wanted: int) -> int:
    """Return the size of a part: the wanted one, within a store's limits for a file of ``size`` bytes."""
    least = -(-size // PARTS_MAX)
    return max(wanted, PART_BYTES_LEAST, -(-least // MIB) * MIB)


def _run_parallel(calls: Sequence[Callable[[], None]], parallel: int) -> None:
    """Run the calls, ``parallel`` at a time; after one failed no further one begins, and it is raised."""
    if len(calls) == 1:
        return calls[0]()
    with ThreadPoolExecutor(parallel, thread_name_prefix="store") as pool:
        futures = [pool.submit(call) for call in calls]
        try:
            for future in futures:
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _unreachable(error: Exception) -> StoreUnavailable | StoreRefused:
    """In words of ours: messages of the library below hold addresses of objects in memory."""
    if isinstance(error, urllib3.exceptions.MaxRetryError):  # of the pool that asks for credentials
        error = error.reason or error
    if isinstance(error, urllib3.exceptions.SSLError):
        why, hint = openssl_failure(error.args[0] if error.args else None)
        return StoreRefused("unreachable", why=why, hint=hint, unreachable=True)
    why = _REASONS.get(type(error).__name__, "the connection broke")
    return StoreUnavailable("unreachable", why=why, unreachable=True)


def _info(key: str, found: Any) -> ObjectInfo:
    return ObjectInfo(key, found.size, found.etag or "", _us(found.last_modified))


def _us(moment: Any) -> int:
    return 0 if moment is None else round(moment.timestamp() * 1_000_000)


def _client_maker(
    settings: StorageSettings, environ: Mapping[str, str], options: dict[str, Any]
) -> Callable[[urllib3.PoolManager], minio.Minio]:
    """Return a maker of clients with the same credentials; ConfigInvalid when none can be made."""
    source = CredentialSource(settings, environ)
    region = source.region() or REGION
    endpoint = settings.endpoint or f"https://s3.{region}.amazonaws.com"
    scheme, _, host = endpoint.partition("://")
    provider = None if settings.anonymous else _provider(settings, source, options, endpoint, region)

    def make(requests: urllib3.PoolManager) -> minio.Minio:
        client = minio.Minio(
            host, secure=scheme == "https", region=region, credentials=provider, http_client=requests
        )
        if settings.virtual_host_style:
            client.enable_virtual_style_endpoint()  # type: ignore[no-untyped-call]
        elif settings.endpoint:
            client.disable_virtual_style_endpoint()  # type: ignore[no-untyped-call]
        return client

    try:
        make(urllib3.PoolManager())
    except ValueError:
        raise ConfigInvalid(
            f"storage.endpoint {endpoint!r} or storage.region {region!r} cannot be used", hint="correct them"
        ) from None
    return make


def _provider(
    settings: StorageSettings, source: CredentialSource, options: dict[str, Any], endpoint: str, region: str
) -> Provider:
    found = source.current()
    if found is not None and not settings.role_arn:
        return _Renewed(source)
    pool = urllib3.PoolManager(retries=urllib3.Retry(3, backoff_factor=0.2), **options)
    if found is not None:
        return AssumeRoleProvider(
            sts_endpoint=settings.endpoint or f"https://sts.{region}.amazonaws.com",
            access_key=found.access_key,
            secret_key=found.secret_key,
            role_arn=settings.role_arn,
            role_session_name="danube",
            region=region,
            http_client=pool,
        )
    if settings.endpoint:
        raise StoreRefused(
            f"there are no credentials for {settings.endpoint}",
            hint="set storage.access_key_file and storage.secret_key_file, or AWS_ACCESS_KEY_ID and its"
            " companion, or storage.profile; storage.anonymous for a public bucket",
        )
    return IamAwsProvider(http_client=pool, region=region, role_arn=settings.role_arn or None)


class _Renewed(Provider):
    """Keys and files, looked at before each request."""

    def __init__(self, source: CredentialSource) -> None:
        self._source = source

    def retrieve(self) -> MinioCredentials:
        found = self._source.current()
        if found is None:
            raise StoreRefused("the credentials of the store are gone", hint="put them back")
        return MinioCredentials(found.access_key, found.secret_key, found.session_token or None)
