"""The XML of S3 answers, as far as Danube asks: lists of objects, uploads and parts, and failed deletes.

Namespaces are ignored: servers differ in them.  A text that is not the document asked for is
StoreUnavailable: it was cut or comes from something between.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import NamedTuple
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from danube.errors import StoreUnavailable
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
