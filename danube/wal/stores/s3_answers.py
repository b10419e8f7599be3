"""Meaning of a failed S3 answer for the caller.

The word in the answer's body (its *code*) decides, else the HTTP status.  Nothing that the server wrote
beyond a code of letters is repeated: bodies of refusals name keys and parts of signatures.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from danube.errors import DanubeError, ObjectMissing, StoreDamaged, StoreRefused, StoreUnavailable

_CONTENT_RANGE: Final = re.compile(r"bytes ([0-9]{1,19})-([0-9]{1,19})/([0-9]{1,19})\Z")
_CODE_ELEMENT: Final = re.compile(rb"<Error[\s>].*?<Code>([A-Za-z0-9]{1,64})</Code>", re.DOTALL)
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


def code_of(body: bytes) -> str:
    """The code of an ``<Error>`` document, else empty."""
    found = _CODE_ELEMENT.search(body)
    return found[1].decode() if found else ""


def content_range(text: str) -> tuple[int, int, int] | None:
    """First byte, end and the object's size of ``bytes 0-99/1000``: (0, 100, 1000)."""
    match = _CONTENT_RANGE.match(text)
    return (int(match[1]), int(match[2]) + 1, int(match[3])) if match else None


def failure(
    store: str, doing: str, key: str, status: int, code: str | None, wish_s: float = 0.0
) -> DanubeError:
    """The error for an answer with this HTTP status and S3 code (empty when it had none).

    ``doing`` is the request in words, such as ``put``; ``wish_s`` a pause that the store asked for.
    """
    code = code if code and _CODE.match(code) else ""
    what = f"store {store} answered {status}{' ' + code if code else ''} to {doing} {key}".rstrip()
    facts: dict[str, Any] = {"store": store, "key": key, "http_status": status, "s3_code": code}
    if code in _MISSING or (status == 404 and not code):
        return ObjectMissing(f"there is no object {key}", why=f"{store} answered {code or status}", **facts)
    if code == "InvalidRange" or status == 416:
        return StoreDamaged(f"object {key} is shorter than the range asked for", **facts)
    if code in _AGAIN or status in (408, 429) or (status >= 500 and status != 501):
        return StoreUnavailable(what, retry_after_s=wish_s, **facts)
    return StoreRefused(what, hint=hint_for(status, code), **facts)


def hint_for(status: int, code: str = "") -> str:
    """Return advice for a refusal with this HTTP status and code ("" when it had none)."""
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
