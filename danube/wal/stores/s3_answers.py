"""The XML of S3 answers, as far as Danube asks: lists of objects, uploads and parts, and failed deletes.

Namespaces are ignored: servers differ in them.  A text that is not the document asked for is
StoreUnavailable: it was cut or comes from something between.

What an S3 answer that is no success means for the caller.

The word in the answer's body (its *code*) decides, else the HTTP status.  Nothing that the server wrote
beyond a code of letters is repeated: bodies of refusals name keys and parts of signatures.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any, Final, NamedTuple
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from danube.errors import DanubeError, ObjectMissing, StoreDamaged, StoreRefused, StoreUnavailable
from danube.wal.stores.objects import ObjectInfo

_CONTENT_RANGE = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})\Z")


class Upload(NamedTuple):
    """An unfinished multipart upload; ``begun_us`` is the store's clock."""

    key: str
    upload_id: str
    begun_us: int


class Answer:
    """One parsed document; ``roots`` are the names that its outermost element may have."""

    def __init__(self, data: bytes, *roots: str) -> None:
        try:
            self._element = ElementTree.fromstring(data)  # noqa: S314 - expat bounds the growth of entities
        except ElementTree.ParseError:
            raise StoreUnavailable(
                "the store's answer is not XML", why="it was cut, or is another's"
            ) from None
        self._decoded = self.text("EncodingType") == "url"
        if _name(self._element) not in roots:
            raise StoreUnavailable(f"the store answered {_name(self._element)[:40]} instead of {roots[0]}")

    def text(self, name: str) -> str:
        """Text of a direct child, or empty."""
        return _text(self._element, name)

    @property
    def truncated(self) -> bool:
        return self.text("IsTruncated").lower() == "true"

    def objects(self) -> Iterator[ObjectInfo]:
        for one in self._children("Contents"):
            size, modified = _text(one, "Size"), _text(one, "LastModified")
            yield ObjectInfo(self._key(one), _number(size), _etag(_text(one, "ETag")), moment_us(modified))

    def uploads(self) -> Iterator[Upload]:
        for one in self._children("Upload"):
            yield Upload(self._key(one), _text(one, "UploadId"), moment_us(_text(one, "Initiated")))

    def parts(self) -> Iterator[tuple[int, str, int]]:
        """Number, ETag and size of each part."""
        for one in self._children("Part"):
            number, size = _number(_text(one, "PartNumber")), _number(_text(one, "Size"))
            yield number, _etag(_text(one, "ETag")), size

    def failures(self) -> Iterator[tuple[str, str]]:
        """Key and code of what a delete of many could not delete."""
        for one in self._children("Error"):
            yield self._key(one), _text(one, "Code")

    def _children(self, name: str) -> Iterator[ElementTree.Element]:
        return (child for child in self._element if _name(child) == name)

    def _key(self, element: ElementTree.Element) -> str:
        text = _text(element, "Key")
        return unquote_plus(text) if self._decoded else text


def error_code(data: bytes) -> str:
    """The code of an ``<Error>`` document, else empty."""
    try:
        element = ElementTree.fromstring(data)  # noqa: S314 - as above
    except ElementTree.ParseError:
        return ""
    return _text(element, "Code") if _name(element) == "Error" else ""


def completion(etags: Sequence[str]) -> bytes:
    """The body that joins parts 1, 2, ... to an object."""
    root = ElementTree.Element("CompleteMultipartUpload")
    for number, etag in enumerate(etags, 1):
        part = ElementTree.SubElement(root, "Part")
        ElementTree.SubElement(part, "PartNumber").text = str(number)
        ElementTree.SubElement(part, "ETag").text = f'"{etag}"'
    return ElementTree.tostring(root)


def deletion(keys: Sequence[str]) -> bytes:
    """The body that deletes many objects, answered with the failures alone."""
    root = ElementTree.Element("Delete")
    ElementTree.SubElement(root, "Quiet").text = "true"
    for key in keys:
        ElementTree.SubElement(ElementTree.SubElement(root, "Object"), "Key").text = key
    return ElementTree.tostring(root)


def moment_us(text: str) -> int:
    """Microseconds since 1970 of ``2025-01-31T12:00:00.000Z``; 0 when it is not such a text."""
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1_000_000)
    except ValueError:
        return 0


def http_moment_us(text: str) -> int:
    """Microseconds since 1970 of an HTTP date; 0 when it is not one."""
    try:
        return round(parsedate_to_datetime(text).timestamp() * 1_000_000)
    except ValueError:
        return 0


def content_range(text: str) -> tuple[int, int, int] | None:
    """First byte, end and the object's size of ``bytes 0-99/1000``: (0, 100, 1000)."""
    match = _CONTENT_RANGE.match(text)
    return (int(match[1]), int(match[2]) + 1, int(match[3])) if match else None


def unquoted(text: str) -> str:
    return unquote_plus(text)


def _name(element: ElementTree.Element) -> str:
    return element.tag.rpartition("}")[2]


def _text(element: ElementTree.Element, name: str) -> str:
    return next(((child.text or "") for child in element if _name(child) == name), "")


def _etag(text: str) -> str:
    return text.strip('"')


def _number(text: str) -> int:
    if not text.isdigit():
        raise StoreUnavailable("the store's answer has no number where one belongs")
    return int(text)


_MISSING: Final = frozenset({"NoSuchKey", "NoSuchUpload", "NoSuchVersion"})
_AGAIN: Final = frozenset(
    {
        "BadDigest", "BandwidthLimitExceeded", "IncompleteBody", "InternalError", "InvalidDigest",
        "OperationAborted", "RequestTimeout", "RequestTimeoutException", "ServiceUnavailable", "SlowDown",
        "SlowDownRead", "SlowDownWrite", "Throttling", "ThrottlingException", "TooManyRequests",
        "XAmzContentChecksumMismatch", "XAmzContentSHA256Mismatch",
    }
)  # fmt: skip
_HINT: Final[Mapping[str, str]] = {
    "NoSuchBucket": "create the bucket, or correct storage.url",
    "AccessDenied": "give this user read, write, list and delete rights on the bucket",
    "AllAccessDisabled": "give this user read, write, list and delete rights on the bucket",
    "AuthorizationHeaderMalformed": "set storage.region to the bucket's region",
    "PermanentRedirect": "set storage.region to the bucket's region",
    "ExpiredToken": "renew the credentials; files and profiles are read again by themselves",
    "TokenRefreshRequired": "renew the credentials; files and profiles are read again by themselves",
    "InvalidAccessKeyId": "check the access key",
    "SignatureDoesNotMatch": "check the secret key",
    "RequestTimeTooSkewed": "set this host's clock: it differs from the store's",
    "InvalidBucketName": "correct the bucket in storage.url",
    # Of Azure
    "AuthenticationFailed": "check the account's key, and this host's clock",
    "InvalidAuthenticationInfo": "renew the credentials",
    "AuthorizationFailure": "give this account read, write, list and delete rights on the container",
    "AuthorizationPermissionMismatch": "give this account read, write, list and delete rights there",
    "ContainerNotFound": "create the container, or correct storage.url",
}
_CODE: Final = re.compile(r"[A-Za-z][A-Za-z0-9]{0,63}\Z")
_RETRY_AFTER_S_MAX: Final = 60.0


def failure(
    store: str, doing: str, key: str, status: int, code: str, headers: Mapping[str, str]
) -> DanubeError:
    """The error for an answer with this HTTP status and S3 code ("" when it had none).

    ``doing`` is the request in words, such as ``put``.
    """
    code = code if _CODE.match(code) else ""
    what = f"store {store} answered {status}{' ' + code if code else ''} to {doing} {key}".rstrip()
    facts: dict[str, Any] = {"store": store, "key": key, "http_status": status, "s3_code": code}
    if code in _MISSING or (status == 404 and not code):
        return ObjectMissing(f"there is no object {key}", why=f"{store} answered {code or status}", **facts)
    if code == "InvalidRange" or status == 416:
        return StoreDamaged(f"object {key} is shorter than the range asked for", **facts)
    if code in _AGAIN or status in (408, 429) or (status >= 500 and status != 501):
        return StoreUnavailable(what, retry_after_s=retry_after_s(headers), **facts)
    return StoreRefused(what, hint=hint_for(status, code), **facts)


def hint_for(status: int, code: str = "") -> str:
    """What helps against a refusal with this HTTP status and code ("" when it had none)."""
    if code in _HINT:
        return _HINT[code]
    if status in (301, 307, 308, 400):
        return "check storage.region, storage.endpoint and the credentials"
    if status in (401, 403):
        return "check the credentials and their rights on the bucket"
    return "check storage.url and storage.endpoint"


def retry_after_s(headers: Mapping[str, str]) -> float:
    """Seconds of a Retry-After header, at most a minute; 0 when there is none that is a number."""
    text = headers.get("Retry-After", "") or ""
    return min(float(text), _RETRY_AFTER_S_MAX) if text.isdigit() else 0.0
