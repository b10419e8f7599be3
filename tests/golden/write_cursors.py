"""Write the vectors of cursor files anew: ``python -m tests.golden.write_cursors``.

Only a new format version may change a vector that exists; the difference is reviewed like code.
"""

from __future__ import annotations

import json

from tests.golden.cursor_cases import FOLDER, describe, vectors


def main() -> None:
    """Write a .bin and a .json for each vector."""
    FOLDER.mkdir(exist_ok=True)
    for name, data in vectors().items():
        (FOLDER / f"{name}.bin").write_bytes(data)
        text = json.dumps(describe(data), indent=1, ensure_ascii=False, sort_keys=True)
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(f"{len(vectors())} vectors in {FOLDER}")


if __name__ == "__main__":
    main()
