"""Offers staged objects to a running broker until each is installed in a manifest or refused.

Repeating an offer changes nothing, so after the end of a worker, the mover, the connection or this job the
next offer continues.  A refused object is named by no manifest, and the broker sweeps it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import accumulate, takewhile
from typing import Final, NamedTuple

import msgspec

from danube.core.partition.policy import TopicPolicy
from danube.errors import CallerError, DanubeError, TopicNotFound, WrongState
from danube.limits import CONTROL_BYTES_MAX
from danube.spark.history.access import BrokerAccess
from danube.spark.history.tail import asked
from danube.wal.tier.manifest import Manifest
from danube.wal.tier.staged import Staged, encode_staged

OFFERED_MAX: Final = 128  # in one question
OFFERED_BYTES_MAX: Final = CONTROL_BYTES_MAX // 2
_PAUSE_FIRST_S: Final = 0.1
_PAUSE_MAX_S: Final = 1.0

INSTALLED: Final = "installed"
REFUSED: Final = "refused"
UNANSWERED: Final = "unanswered"
_WAITING: Final = "waiting"


class Outcome(NamedTuple):
    """``word`` is one of INSTALLED, REFUSED and UNANSWERED; ``why`` is empty for the first."""

    word: str
    why: str


class LiveBroker:
    """The broker that owns the manifests; used in ``with``.

    ``wait_s``: how long it may go without settling anything before the rest counts as unanswered.
    """

    def __init__(self, url: str, access: BrokerAccess, wait_s: float) -> None:
        self._client = access.connect(url, name="danube compact", reconnect_timeout=max(1.0, wait_s))
        self._wait_s = wait_s

    def __enter__(self) -> LiveBroker:
        self._client.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def unwilling(self, manifest: Manifest, *, keys: bool) -> str:
        """Return why no object of a partition should be staged; empty if it may.

        Raises the broker's errors.
        """
        try:
            topic = self._client.admin.topic(manifest.topic)
        except TopicNotFound:
            return "the broker does not have the topic"
        if topic.topic_id != manifest.topic_id or manifest.partition >= topic.partition_count:
            return "the broker's topic of this name is another one: it was deleted and made again"
        if keys and not msgspec.convert(topic.policy, TopicPolicy).compacts:
            return "its policy `cleanup` is delete; `danube topics update --cleanup compact` changes it"
        deadline_s = time.monotonic() + self._wait_s
        while True:
            try:
                self._ask(topic.partitions[manifest.partition], manifest.topic_id, [])
                return ""
            except WrongState as error:
                return str(error)
            except DanubeError as error:
                if not error.retryable or time.monotonic() > deadline_s:
                    raise
                time.sleep(_PAUSE_MAX_S)

    def install(self, manifest: Manifest, objects: Sequence[Staged]) -> list[Outcome]:
        """Offer the objects of one partition; return the outcome of each, in their order."""
        partition = self._client.admin.topic(manifest.topic).partitions[manifest.partition]
        settled: dict[bytes, Outcome] = {}
        left = list(objects)
        why, pause_s = "", _PAUSE_FIRST_S
        deadline_s = time.monotonic() + self._wait_s
        while left and time.monotonic() < deadline_s:
            offered = _first_of(left)
            try:
                answers = self._ask(partition, manifest.topic_id, offered)
            except CallerError as error:
                answers = [(REFUSED, str(error))] * len(offered)
            except DanubeError as error:
                if not error.retryable:
                    raise
                answers = [(_WAITING, str(error))] * len(offered)
            before = len(settled)
            for one, (word, reason) in zip(offered, answers, strict=True):
                if word == _WAITING:
                    why = reason or why
                else:
                    settled[one.made.content_hash] = Outcome(word, reason)
            left = [one for one in left if one.made.content_hash not in settled]
            if len(settled) > before:
                deadline_s, pause_s = time.monotonic() + self._wait_s, _PAUSE_FIRST_S
            elif left:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        unanswered = Outcome(UNANSWERED, why or "the broker examines it still")
        return [settled.get(one.made.content_hash, unanswered) for one in objects]

    def _ask(self, partition: str, topic_id: int, offered: Sequence[Staged]) -> list[tuple[str, str]]:
        facts = {"topic_id": topic_id, "objects": encode_staged(offered)}
        answers = asked(self._client, "install_staged", partition, None, **facts)
        return [(str(word), str(why)) for word, why in answers]


def _first_of(objects: Sequence[Staged]) -> list[Staged]:
    """Return as many objects as fit one question, at least one."""
    sizes = accumulate(len(encode_staged([one])) for one in objects[:OFFERED_MAX])
    count = sum(1 for _ in takewhile(lambda size: size <= OFFERED_BYTES_MAX, sizes))
    return list(objects[: max(1, count)])
