"""What S3 answers, word by word: documents, refusals, headers."""

from __future__ import annotations

import pytest

from danube.errors import DanubeError, ObjectMissing, StoreDamaged, StoreRefused, StoreUnavailable
from danube.wal.stores import s3_answers
from danube.wal.stores import s3_answers as s3_errors
from danube.wal.stores.s3_answers import Answer

NAMESPACE = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'


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
    error = s3_errors.failure("s3://b", "get", "key", status, code, {})
    assert type(error) is expected
    assert error.facts["http_status"] == status
    if expected is StoreRefused:
        assert error.hint, "an operator must act: say how"


def test_what_is_no_code_is_not_repeated() -> None:
    error = s3_errors.failure("s3://b", "get", "key", 403, "<AWSAccessKeyId>AKIA1234", {})
    assert "AKIA" not in f"{error} {error.hint} {error.facts}"


@pytest.mark.parametrize(
    ("text", "seconds"), [("3", 3.0), ("0", 0.0), ("900", 60.0), ("", 0.0), ("Fri, 31 Dec 1999", 0.0)]
)
def test_a_wish_for_a_pause_is_bounded(text: str, seconds: float) -> None:
    error = s3_errors.failure("s3://b", "put", "key", 503, "SlowDown", {"Retry-After": text})
    assert error.facts["retry_after_s"] == seconds


@pytest.mark.parametrize("namespace", [NAMESPACE, ""])
def test_a_list_of_objects_is_read(namespace: str) -> None:
    text = (
        f"<ListBucketResult {namespace}><IsTruncated>true</IsTruncated><EncodingType>url</EncodingType>"
        "<NextContinuationToken>t=1</NextContinuationToken>"
        "<Contents><Key>a%2Fb+c</Key><Size>7</Size><ETag>&quot;e1&quot;</ETag>"
        "<LastModified>2025-01-31T12:00:00.500Z</LastModified></Contents></ListBucketResult>"
    )
    answer = Answer(text.encode(), "ListBucketResult")
    assert [tuple(info) for info in answer.objects()] == [("a/b c", 7, "e1", 1_738_324_800_500_000)]
    assert answer.truncated
    assert answer.text("NextContinuationToken") == "t=1"


def test_keys_that_are_not_encoded_are_taken_as_they_are() -> None:
    text = "<ListBucketResult><Contents><Key>a%2Fb+c</Key><Size>7</Size></Contents></ListBucketResult>"
    assert [info.key for info in Answer(text.encode(), "ListBucketResult").objects()] == ["a%2Fb+c"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not xml",
        "<ListBucketResult><Contents>",
        "<html></html>",
        "<Error><Code>SlowDown</Code></Error>",
        "<ListBucketResult><Contents><Key>a</Key><Size>many</Size></Contents></ListBucketResult>",
    ],
)
def test_another_document_is_an_answer_to_ask_again_for(text: str) -> None:
    with pytest.raises(StoreUnavailable):
        list(Answer(text.encode(), "ListBucketResult").objects())


def test_bodies_that_are_sent_are_read_back() -> None:
    body = s3_answers.completion(["e1", "e2"])
    assert [(number, etag) for number, etag, _ in _parts(body)] == [(1, "e1"), (2, "e2")]
    assert b"<Quiet>true</Quiet><Object><Key>a&amp;b</Key></Object>" in s3_answers.deletion(["a&b"])


def _parts(body: bytes) -> list[tuple[int, str, int]]:
    sized = body.replace(b"</Part>", b"<Size>0</Size></Part>")
    return list(Answer(sized, "CompleteMultipartUpload").parts())


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


def test_times_that_cannot_be_read_are_zero() -> None:
    assert s3_answers.moment_us("yesterday") == 0
    assert s3_answers.http_moment_us("yesterday") == 0
    assert s3_answers.http_moment_us("Fri, 31 Jan 2025 12:00:00 GMT") == 1_738_324_800_000_000
    assert s3_answers.error_code(b"<Error><Code>SlowDown</Code></Error>") == "SlowDown"
    assert s3_answers.error_code(b"<Other><Code>SlowDown</Code></Other>") == ""
    assert s3_answers.error_code(b"") == ""
