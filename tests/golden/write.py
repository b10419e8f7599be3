"""Write the golden vectors anew: ``python -m tests.golden.write``.

Only a new format version may change a vector that exists; the difference is reviewed like code.
Compressed vectors are written when they are missing, since only reading them is pinned.
"""

from __future__ import annotations

import json
from typing import Any

from tests.golden.cases import (
    COMPRESSED,
    COMPRESSED_CASE,
    FOLDER,
    describe,
    hashes,
    stored,
    vectors,
)


def main() -> None:
    """Write a .bin and a .json for each vector, and hashes.json."""
    batches = vectors()
    for name, kind in COMPRESSED.items():
        path = FOLDER / f"{name}.bin"
        batches[name] = path.read_bytes() if path.exists() else stored(COMPRESSED_CASE, kind)
    for name, batch in batches.items():
        (FOLDER / f"{name}.bin").write_bytes(batch)
        _write_json(name, describe(batch))
    _write_json("hashes", hashes())
    print(f"{len(batches)} vectors in {FOLDER}")


def _write_json(name: str, value: dict[str, Any]) -> None:
    text = json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
