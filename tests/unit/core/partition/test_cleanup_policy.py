"""What a topic's cleanup says, and that no other policy is stored in other bytes for it."""

from __future__ import annotations

import pytest

from danube.broker.operations.topics import policy_from
from danube.core.partition.policy import TopicPolicy
from danube.errors import InvalidArgument


def test_what_each_cleanup_means() -> None:
    meaning = {
        cleanup: (policy.compacts, policy.expires)
        for cleanup in ("delete", "compact", "compact_delete")
        for policy in [policy_from({"cleanup": cleanup}, TopicPolicy())]
    }
    assert meaning == {"delete": (False, True), "compact": (True, False), "compact_delete": (True, True)}


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"cleanup": "shrink"}, "not known"),
        ({"cleanup": "compact", "reliable": False, "durability": "memory"}, "non-reliable"),
        ({"tombstone_retention_ms": -1}, "negative"),
    ],
)
def test_what_cannot_be_kept_is_refused(fields: dict[str, object], why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        policy_from(fields, TopicPolicy())
