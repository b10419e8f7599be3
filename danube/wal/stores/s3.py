"""An object store that speaks S3, through the ``minio`` client; the only door to it.

The client signs and sends one request at a time.  Connections and time-outs are ours (``_pool``), retries
are those of :mod:`danube.wal.stores.retries` and no others, parts are those of
:mod:`danube.wal.stores.multipart`. A body is checked on its way in: its SHA-256 is signed over http, its
MD5 is sent over https.  On its way out, status, range and length must be those asked for.

Nothing that a server or the client wrote gets into an error (:mod:`danube.wal.stores.s3_answers`), so no key
or signature does.  Of the client one inner method is used, ``_execute``, since its public ones hide the
requests of a multipart upload.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

import certifi
import minio
import urllib3
from minio.credentials.credentials import Credentials as MinioCredentials
from minio.credentials.providers import AssumeRoleProvider, IamAwsProvider, Provider
from minio.error import InvalidResponseError, S3Error, ServerError

from danube.config.sections import StorageSettings
from danube.errors import ConfigInvalid, ObjectMissing, StoreDamaged, StoreRefused, StoreUnavailable
from danube.host.clock import wall_us
from danube.wal.stores import s3_answers
from danube.wal.stores import s3_answers as s3_errors
from danube.wal.stores.credentials import CredentialSource
from danube.wal.stores.multipart import FileUpload, part_size, run_parallel
from danube.wal.stores.objects import (
    COPY_BYTES,
    PARALLEL,
    PART_BYTES,
    ObjectInfo,
    Progress,
    check_key,
    check_range,
    open_source,
    read_exactly,
    write_exactly,
)
from danube.wal.stores.retries import Retries
from danube.wal.stores.s3_answers import Answer, Upload

CONNECT_TIMEOUT_S: Final = 3.0
READ_TIMEOUT_S: Final = 30.0
REGION: Final = "us-east-1"  # what servers that know no regions expect
DELETED_AT_ONCE: Final = 1_000


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
        pool = _pool(settings.upload_parallel, connect_timeout_s, read_timeout_s)
        self._client = _client(settings, pool, os.environ if environ is None else environ)

    def put(self, key: str, data: bytes) -> None:
        body = bytes(data)
        self.retries.run(lambda: self._ask("put", "PUT", check_key(key), body=body, headers=_binary()))

    def put_file(
        self,
        key: str,
        path: Path,
        *,
        part_bytes: int = PART_BYTES,
        parallel: int = PARALLEL,
        progress: Progress | None = None,
    ) -> None:
        fd, size = open_source(path)
        try:
            data = read_exactly(fd, size, 0, path) if size <= part_size(size, part_bytes) else None
        finally:
            os.close(fd)
        if data is not None:
            self.put(key, data)
            if progress is not None:
                progress(size)
            return
        upload = FileUpload(
            self, self.retries, check_key(key), path,
            part_bytes=part_bytes, parallel=parallel, progress=progress,
        )  # fmt: skip
        upload.run()

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        check_range(start, end)
        if start == end:
            return b""
        try:
            return self.retries.run(lambda: self._get(check_key(key), start, end))
        except StoreDamaged:
            found = self.head(key) if end is None else None
            if found is not None and found.size == start:
                return b""  # S3 has no empty range
            raise

    def get_to(self, key: str, start: int, end: int, fd: int, position: int) -> None:
        check_range(start, end)
        check_key(key)
        step = max(self._part_bytes, -(-(end - start) // 1_000))
        run_parallel(
            (
                partial(self._copy, key, first, min(first + step, end), fd, position + first - start)
                for first in range(start, end, step)
            ),
            self._parallel,
        )

    def head(self, key: str) -> ObjectInfo | None:
        try:
            response = self.retries.run(lambda: self._head(check_key(key)))
        except ObjectMissing:
            return None
        headers = response.headers
        modified_us = s3_answers.http_moment_us(headers.get("Last-Modified", ""))
        length = headers.get("Content-Length", "")
        if not length.isdigit():
            raise StoreUnavailable(f"store {self.name} did not say the length of {key}", store=self.name)
        return ObjectInfo(key, int(length), headers.get("ETag", "").strip('"'), modified_us)

    def list(self, prefix: str, after: str = "") -> Iterator[ObjectInfo]:
        query = {"list-type": "2", "encoding-type": "url", "prefix": self._prefix + prefix}
        if after:
            query["start-after"] = self._prefix + after
        while True:
            answer = self._answer("list", "ListBucketResult", query, prefix)
            for info in answer.objects():
                key = info.key.removeprefix(self._prefix)
                if key > after:
                    yield info._replace(key=key)
            token = answer.text("NextContinuationToken")
            if not answer.truncated or not token:
                return
            query["continuation-token"] = token

    def delete(self, keys: Iterable[str]) -> None:
        names = [self._prefix + check_key(key) for key in keys]
        for first in range(0, len(names), DELETED_AT_ONCE):
            some = names[first : first + DELETED_AT_ONCE]
            self.retries.run(partial(self._delete, some))

    def clean_uploads(self, older_than_us: int) -> int:
        bound_us = wall_us() - older_than_us
        count = 0
        for upload in self._all_uploads():
            if 0 < upload.begun_us <= bound_us:
                key = upload.key.removeprefix(self._prefix)
                try:
                    self.retries.run(partial(self.abort_upload, key, upload.upload_id))
                except ObjectMissing:
                    continue  # completed or aborted meanwhile
                count += 1
        return count

    # The requests of a multipart upload: danube.wal.stores.multipart.PartCalls.

    def find_uploads(self, key: str) -> Sequence[str]:
        whole = self._prefix + key
        found = [upload for upload in self._uploads(whole) if upload.key == whole]
        return [upload.upload_id for upload in sorted(found, key=lambda one: -one.begun_us)]

    def begin_upload(self, key: str) -> str:
        response = self._ask("begin", "POST", key, query={"uploads": ""}, headers=_binary())
        return Answer(response.data, "InitiateMultipartUploadResult").text("UploadId")

    def stored_parts(self, key: str, upload_id: str) -> dict[int, tuple[str, int]]:
        found: dict[int, tuple[str, int]] = {}
        query = {"uploadId": upload_id, "max-parts": "1000"}
        while True:
            answer = Answer(
                self._ask("list parts", "GET", key, query=query).data, "ListPartsResult", "ListPartsResponse"
            )
            found.update((number, (etag, size)) for number, etag, size in answer.parts())
            if not answer.truncated:
                return found
            query["part-number-marker"] = answer.text("NextPartNumberMarker")

    def put_part(self, key: str, upload_id: str, number: int, data: bytes) -> str:
        query = {"uploadId": upload_id, "partNumber": str(number)}
        response = self._ask("put a part of", "PUT", key, query=query, body=data)
        etag = response.headers.get("ETag", "").strip('"')
        if not etag:
            raise StoreUnavailable(f"store {self.name} gave part {number} of {key} no ETag", store=self.name)
        return str(etag)

    def complete_upload(self, key: str, upload_id: str, etags: Sequence[str]) -> None:
        body = s3_answers.completion(etags)
        headers = {"Content-Type": "application/xml"}
        response = self._ask(
            "complete", "POST", key, query={"uploadId": upload_id}, body=body, headers=headers
        )
        # S3 begins its answer with 200 before it knows; a failure is in the body then.
        code = s3_answers.error_code(response.data)
        if code:
            raise s3_errors.failure(self.name, "complete", key, 500, code, response.headers)
        Answer(response.data, "CompleteMultipartUploadResult")

    def abort_upload(self, key: str, upload_id: str) -> None:
        self._ask("abort", "DELETE", key, query={"uploadId": upload_id})

    def _uploads(self, prefix: str) -> Iterator[Upload]:
        query = {"uploads": "", "encoding-type": "url", "max-uploads": "1000", "prefix": prefix}
        while True:
            answer = self._answer("list uploads of", "ListMultipartUploadsResult", query, prefix)
            yield from answer.uploads()
            if not answer.truncated:
                return
            query["key-marker"] = s3_answers.unquoted(answer.text("NextKeyMarker"))
            query["upload-id-marker"] = answer.text("NextUploadIdMarker")

    def _all_uploads(self) -> Iterator[Upload]:
        """Of every key; a MinIO server finds uploads by a whole key or none, not by a prefix."""
        found = [*self._uploads(self._prefix)]
        if not found and self._prefix:
            try:
                found = [*self._uploads("")]
            except StoreRefused:
                pass  # these credentials see the prefix alone
        return (upload for upload in found if upload.key.startswith(self._prefix))

    def _answer(self, doing: str, root: str, query: Mapping[str, str], what: str) -> Answer:
        return self.retries.run(lambda: Answer(self._ask(doing, "GET", query=query, what=what).data, root))

    def _delete(self, names: Sequence[str]) -> None:
        body = s3_answers.deletion(names)
        digest = base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode()
        headers = {"Content-MD5": digest, "Content-Type": "application/xml"}
        response = self._ask("delete", "POST", query={"delete": ""}, body=body, headers=headers)
        for name, code in Answer(response.data, "DeleteResult").failures():
            if code not in ("NoSuchKey", "NoSuchVersion"):
                key = name.removeprefix(self._prefix)
                raise s3_errors.failure(self.name, "delete", key, 200, code, {})

    def _head(self, key: str) -> Any:
        """An answer to HEAD has no body, so a refused one gives no reason: one GET of a byte does."""
        try:
            return self._ask("head", "HEAD", key)
        except (StoreRefused, ObjectMissing):
            try:
                self._ask("head", "GET", key, headers={"Range": "bytes=0-0"}, stream=True).close()
            except StoreDamaged:
                pass  # it is empty, so there is no such range
            raise  # the GET is not refused: then all that is known is what HEAD said

    def _get(self, key: str, start: int, end: int | None) -> bytes:
        with self._open(key, start, end) as (response, size):
            pieces = []
            while size:
                pieces.append(self._read(response, key, size))
                size -= len(pieces[-1])
            return b"".join(pieces)

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
        headers = (
            {} if start == 0 and end is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        )
        response = self._ask("get", "GET", key, headers=headers, stream=True)
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
        found = s3_answers.content_range(given or "")
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
            raise self._unreachable("get", key, error) from None
        if not data:
            raise StoreUnavailable(f"the body of {key} ended early", store=self.name, key=key)
        return data

    def _ask(
        self,
        doing: str,
        method: str,
        key: str = "",
        *,
        query: Mapping[str, str] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        stream: bool = False,
        what: str = "",
    ) -> Any:
        """One request, once; whatever is no success leaves as a DanubeError."""
        what = what or key
        try:
            return self._client._execute(
                method,
                bucket_name=self._bucket,
                object_name=self._prefix + key if key else None,
                body=body,
                headers=dict(headers or {}),
                query_params=dict(query or {}),
                preload_content=not stream,
            )
        except S3Error as error:
            response = error.response
            self._fail(doing, what, response.status, error.code or "", response.headers)
        except InvalidResponseError as error:
            self._fail(doing, what, error._code, "", {})
        except ServerError as error:
            self._fail(doing, what, error.status_code, "", {})
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise self._unreachable(doing, what, error) from None
        except ValueError as error:
            # A document of the client's own parsers: credentials of a role, or an error that is cut XML.
            raise StoreUnavailable(
                f"store {self.name} answered what cannot be read to {doing} {what}",
                why=type(error).__name__, store=self.name, key=what,
            ) from None  # fmt: skip

    def _fail(self, doing: str, what: str, status: int, code: str, headers: Mapping[str, str]) -> NoReturn:
        raise s3_errors.failure(self.name, doing, what, status, code, headers) from None

    def _unreachable(self, doing: str, what: str, error: Exception) -> StoreUnavailable | StoreRefused:
        """In words of ours: messages of the library below hold addresses of objects in memory."""
        message = f"store {self.name} cannot be reached to {doing} {what}"
        if isinstance(error, urllib3.exceptions.SSLError):
            return StoreRefused(
                message, why="TLS failed", hint="check storage.endpoint and SSL_CERT_FILE", store=self.name
            )
        reason = _REASONS.get(type(error).__name__, "the connection broke")
        return StoreUnavailable(message, why=reason, store=self.name, key=what)


_REASONS: Final = {
    "ConnectTimeoutError": "no connection in time",
    "NameResolutionError": "its name is not known",
    "NewConnectionError": "the connection was refused",
    "ReadTimeoutError": "no answer in time",
}


def _binary() -> dict[str, str]:
    return {"Content-Type": "application/octet-stream"}


def _pool(parallel: int, connect_timeout_s: float, read_timeout_s: float) -> urllib3.PoolManager:
    """Connections kept: those of uploads, and as many for downloads beside them."""
    return urllib3.PoolManager(
        timeout=urllib3.Timeout(connect=connect_timeout_s, read=read_timeout_s),
        maxsize=2 * parallel + 8,
        cert_reqs="CERT_REQUIRED",
        ca_certs=os.environ.get("SSL_CERT_FILE") or certifi.where(),
        retries=False,
    )


def _client(settings: StorageSettings, pool: urllib3.PoolManager, environ: Mapping[str, str]) -> minio.Minio:
    source = CredentialSource(settings, environ)
    region = source.region() or REGION
    endpoint = settings.endpoint or f"https://s3.{region}.amazonaws.com"
    scheme, _, host = endpoint.partition("://")
    provider = None if settings.anonymous else _provider(settings, source, pool, endpoint, region)
    try:
        client = minio.Minio(
            host, secure=scheme == "https", region=region, credentials=provider, http_client=pool
        )
    except ValueError:
        raise ConfigInvalid(
            f"storage.endpoint {endpoint!r} or storage.region {region!r} cannot be used", hint="correct them"
        ) from None
    if settings.virtual_host_style:
        client.enable_virtual_style_endpoint()  # type: ignore[no-untyped-call]
    elif settings.endpoint:
        client.disable_virtual_style_endpoint()  # type: ignore[no-untyped-call]
    return client


def _provider(
    settings: StorageSettings, source: CredentialSource, pool: urllib3.PoolManager, endpoint: str, region: str
) -> Provider:
    found = source.current()
    if found is not None and settings.role_arn:
        return AssumeRoleProvider(
            sts_endpoint=settings.endpoint or f"https://sts.{region}.amazonaws.com",
            access_key=found.access_key,
            secret_key=found.secret_key,
            role_arn=settings.role_arn,
            role_session_name="danube",
            region=region,
            http_client=pool,
        )
    if found is not None:
        return _Renewed(source)
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
