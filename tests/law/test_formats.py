"""Every format that the product stores is known to the readers of `danube verify`."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.law.source import PRODUCT, name_of, product_files, tree

READERS = tuple(sorted((PRODUCT / "wal" / "verify").glob("*.py")))
MAGIC = re.compile(rb"DAN[A-Z]{5}|[A-Z]{3}[0-9]|DNBREG[0-9]{2}")
# Formats that never lie on a disk or in a store.
PASSING = {
    b"DNR1": "frames between members",
    b"DNBREG03": "shared memory of a running broker",
    b"DLT1": "payloads of the load generator",
}


def magics(path: Path) -> Iterator[bytes]:
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Constant) and isinstance(node.value, bytes) and MAGIC.fullmatch(node.value):
            yield node.value


def written() -> dict[bytes, str]:
    return {magic: name_of(path) for path in product_files() if path not in READERS for magic in magics(path)}


def test_every_stored_format_is_known_to_verify() -> None:
    known = {magic for path in READERS for magic in magics(path)}
    unknown = {magic: where for magic, where in written().items() if magic not in known | set(PASSING)}
    assert unknown == {}, "teach danube/wal/verify to read what is written there"


def test_the_law_sees_the_formats() -> None:
    found = set(written())
    assert {b"DANUBSEG", b"DANUBMAN", b"DANUBCUR", b"CUR1", b"DNB1", b"DNL1", b"DNM3", b"DND1"} <= found
    assert set(PASSING) <= found
