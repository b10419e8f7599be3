"""Every format that the product stores is known to the readers of `danube verify`."""

from __future__ import annotations

import ast
import re
from collections import Counter
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


# Modules that write files as a whole: the calls, and the reader that `danube verify` has, or why it has none.
FILE_CALLS = {
    "replace_durably", "replace_or_overwrite", "overwrite", "open_new", "write_bytes", "write_text",
}  # fmt: skip
WRITERS = {
    "danube/broker/audit/writer.py": (3, "read by `danube audit verify`"),
    "danube/broker/mover/copies.py": (1, "deletions"),
    "danube/broker/processes/copied.py": (2, "place, metadata/metadata.log"),
    "danube/broker/processes/data_dir.py": (3, "format, incarnation; of a running broker: pid, state"),
    "danube/broker/processes/unbroken.py": (3, "host"),
    "danube/broker/tiers/inheritance.py": (1, "owner"),
    "danube/broker/tiers/restore.py": (5, "copies, and `complete` of a restore that is under way"),
    "danube/cluster/control/recovery.py": (1, "recovering/plan"),
    "danube/cluster/log/node_files.py": (1, "node_id"),
    "danube/cluster/raft/disk.py": (3, "magics of a journal and its identity"),
    "danube/wal/cold/cache.py": (1, "a cache: read again from the store"),
    "danube/wal/log/cursors.py": (2, "magic of cursors; `subscribed` is empty"),
    "danube/wal/recovery/carry.py": (2, "magic of segments"),
    "danube/wal/recovery/damage.py": (1, "damage.json: for people"),
    "danube/wal/recovery/witness.py": (1, "witnesses/"),
    "danube/wal/segments/descriptors.py": (1, "magic of segments"),
    "danube/wal/segments/local_holes.py": (1, "holes"),
    "danube/wal/segments/merge.py": (1, "magic of segments"),
    "danube/wal/segments/spare.py": (2, "zeros for the next segment"),
    "danube/wal/stores/directory.py": (1, "objects of a store: magics"),
    "danube/wal/tier/binding.py": (1, "store"),
    "danube/wal/tier/uploader.py": (1, "magic of manifests"),
}
STORING = ("danube/broker/", "danube/cluster/", "danube/wal/")
NAME_OF_A_FILE = re.compile(r"_?([A-Z_]+_)?(NAME|FILE)")
# Names of files and folders that no reader of `danube verify` looks into.
UNREAD = {
    "controller": "a process",
    "danube.json": "of a running broker",
    "danube.lock": "the pid in it is for people",
    "danube.pid": "for scripts",
    "merging": "a folder of work that a start throws away",
    "reserve-supervisor": "room on the disk",
}


def storing_files() -> Iterator[Path]:
    return (path for path in product_files() if name_of(path).startswith(STORING) and path not in READERS)


def test_every_module_that_writes_a_file_is_known() -> None:
    found = Counter(
        name_of(path)
        for path in storing_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in FILE_CALLS
    )
    known = {name: calls for name, (calls, _) in WRITERS.items()}
    assert found == known, "teach danube/wal/verify to read what is written there, and name it here"


def named_files() -> dict[str, str]:
    """Constants that name a file, with the module."""
    return {
        node.value.value: name_of(path)
        for path in storing_files()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.AnnAssign)
        and isinstance(node.target, ast.Name)
        and NAME_OF_A_FILE.fullmatch(node.target.id)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def test_every_name_of_a_stored_file_is_known_to_verify() -> None:
    read = {
        node.value
        for path in READERS
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    unknown = {name: where for name, where in named_files().items() if name not in read | set(UNREAD)}
    assert unknown == {}, "teach danube/wal/verify to read that file, or say here why it need not"
    assert {"format", "host", "place", "node_id", "store", "holes", "owner", "deletions"} <= set(
        named_files()
    )
    assert set(UNREAD) <= set(named_files()) - read
