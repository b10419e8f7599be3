"""Answers of S3 word by word: refusals, headers; and the sizes of parts."""

from __future__ import annotations

import pytest

from danube import limits
from danube.config.sections import StorageSettings
from danube.errors import (
    ConfigInvalid,
    DanubeError,
    ObjectMissing,
    StoreDamaged,
    StoreRefused,
    StoreUnavailable,
)
from danube.wal.stores import s3_answers
from danube.wal.stores.s3 import PART_BYTES_LEAST, PARTS_MAX, MinioStore, part_size


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (500, "InternalError", StoreUnavailable),
        (503, "SlowDown", StoreUnavailable),
        (503, "", StoreUnavailable),
        (429, "", StoreUnavailable),
        (502, "", StoreUnavailable),
        (507, "XMinioStorageFull", StoreUnavailable),
        (400, "RequestTimeout", StoreUnavailable),
        (400, "BadDigest", StoreUnavailable),
        (400, "XAmzContentSHA256Mismatch", StoreUnavailable),
        (200, "InternalError", StoreUnavailable),
        (404, "NoSuchKey", ObjectMissing),
        (404, "NoSuchUpload", ObjectMissing),
        (404, "", ObjectMissing),
        (404, "NoSuchBucket", StoreRefused),
        (403, "AccessDenied", StoreRefused),
        (403, "", StoreRefused),
        (401, "", StoreRefused),
        (403, "InvalidAccessKeyId", StoreRefused),
        (403, "SignatureDoesNotMatch", StoreRefused),
        (400, "ExpiredToken", StoreRefused),
        (403, "RequestTimeTooSkewed", StoreRefused),
        (400, "AuthorizationHeaderMalformed", StoreRefused),
        (301, "PermanentRedirect", StoreRefused),
        (301, "", StoreRefused),
        (501, "NotImplemented", StoreRefused),
        (405, "MethodNotAllowed", StoreRefused),
        (416, "InvalidRange", StoreDamaged),
        (416, "", StoreDamaged),
    ],
)
def test_each_refusal_has_its_error(status: int, code: str, expected: type[DanubeError]) -> None:
    error = s3_answers.failure("s3://b", "get", "key", status, code)
    assert type(error) is expected
    assert error.facts["http_status"] == status
    if expected is StoreRefused:
        assert error.hint, "an operator must act: say how"


def test_what_is_no_code_is_not_repeated() -> None:
    error = s3_answers.failure("s3://b", "get", "key", 403, "<AWSAccessKeyId>AKIA1234")
    assert "AKIA" not in f"{error} {error.hint} {error.facts}"


@pytest.mark.parametrize(
    ("text", "seconds"), [("3", 3.0), ("0", 0.0), ("900", 60.0), ("", 0.0), ("Fri, 31 Dec 1999", 0.0)]
)
def test_a_wish_for_a_pause_is_bounded(text: str, seconds: float) -> None:
    wish_s = s3_answers.retry_after_s({"Retry-After": text})
    error = s3_answers.failure("s3://b", "put", "key", 503, "SlowDown", wish_s)
    assert error.facts["retry_after_s"] == seconds


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("bytes 0-99/1000", (0, 100, 1_000)),
        ("bytes 5-5/6", (5, 6, 6)),
        ("bytes */1000", None),
        ("bytes 0-99/*", None),
        ("", None),
        ("items 0-1/2", None),
    ],
)
def test_content_range(text: str, found: tuple[int, int, int] | None) -> None:
    assert s3_answers.content_range(text) == found


def test_a_code_is_read_from_an_error_alone() -> None:
    error = b"<Error><Code>SlowDown</Code></Error>"
    assert s3_answers.code_of(error) == s3_answers.code_of(b'<?xml version="1.0"?>\n' + error) == "SlowDown"
    assert s3_answers.code_of(b"<Error><Code><b>AKIA</b></Code></Error>") == ""
    assert s3_answers.code_of(b"<Other><Code>SlowDown</Code></Other>") == ""
    assert s3_answers.code_of(b"") == ""


def test_part_sizes_keep_to_what_stores_allow() -> None:
    assert part_size(100, 1) == PART_BYTES_LEAST
    assert part_size(10 * limits.GIB, 16 * limits.MIB) == 16 * limits.MIB
    huge = 5 * 1024 * limits.GIB
    assert part_size(huge, 16 * limits.MIB) * PARTS_MAX >= huge
    assert part_size(huge, 16 * limits.MIB) % limits.MIB == 0


@pytest.mark.parametrize("bucket", ["a", "a..b", "alias-s3alias", "10.0.0.1"])
def test_a_bucket_that_minio_does_not_take_is_told_before_it_is_asked(bucket: str) -> None:
    settings = StorageSettings(endpoint="http://127.0.0.1:1", anonymous=True)
    with pytest.raises(ConfigInvalid, match="bucket") as caught:
        MinioStore(settings, bucket, "")
    assert "storage.url" in caught.value.hint
