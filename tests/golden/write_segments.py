"""Write the vectors of segments anew: ``python -m tests.golden.write_segments``.

Only a new format version may change a vector that exists; the difference is reviewed like code.
"""

from __future__ import annotations

import json

from tests.golden.segment_cases import FOLDER, describe, vectors


def main() -> None:
    """Write a .seg and a .json for each vector."""
    FOLDER.mkdir(exist_ok=True)
    for name, data in vectors().items():
        (FOLDER / f"{name}.seg").write_bytes(data)
        text = json.dumps(describe(data), indent=1, ensure_ascii=False, sort_keys=True)
        (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    print(f"{len(vectors())} vectors in {FOLDER}")


if __name__ == "__main__":
    main()
