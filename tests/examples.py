"""How much a property test tries: a third in every run, all of it with DANUBE_EXAMPLES=all.

Every run of one tree tries the same examples (docs/testing.md), so more of them find a fault once or never.
"""

from __future__ import annotations

import os
from typing import Final

_ALL: Final = os.environ.get("DANUBE_EXAMPLES", "") == "all"


def examples(count: int) -> int:
    """Return how many of ``count`` examples, lives or walks this run tries."""
    return count if _ALL else max(1, count // 3)
