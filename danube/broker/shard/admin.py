"""Operations on one partition, which its owner carries out."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from msgspec import UNSET

from danube.broker.operations.arguments import listed, paged
from danube.broker.partition.hosted import HostedPartition, HostedSubscription
from danube.broker.partition.lossy import LossyHost
from danube.broker.partition.subscribing import start_offset
from danube.core.batch.columns import BatchView
from danube.core.dispatch.holed import HoledSubscription
from danube.core.protocol.native import error_frame, result_frame
from danube.core.security import arguments as of
from danube.core.security.operations import unknown
from danube.errors import (
    DanubeError,
    FetchPending,
    InvalidArgument,
    SubscriptionNotFound,
    WrongState,
)
from danube.wal.segments.holes import HoleKind

if TYPE_CHECKING:
    from danube.broker.shard.storage import Storage
    from danube.broker.tiers.worker_tiers import Tiers

SEGMENTS_LISTED_MAX: Final = 2_000  # without pages
_RANGE_BYTES: Final = 16
_REASON_CHARACTERS_MAX: Final = 1024
_PROGRESS: Final = ("subscription", "ack_floor", "left_from", "lag", "damaged", "expired")
Answer = Callable[[Any], None]
NackedRecord = tuple[int, int, str]  # offset, delay_ms (-1: the policy's), reason


def partition_operation(hosted: HostedPartition, op: str, args: Any, now_ns: int) -> Any:
    """Carry out one request; return the value for the RESULT frame."""
    operation = _OPERATIONS.get(op)
    if operation is None:
        raise unknown(op)
    value = operation(hosted, args, now_ns)
    if hosted.metadata is not None and op in ("set_failure_policy", "delete_subscription"):
        failure = None if op == "delete_subscription" else hosted.subscription(args.subscription).core.failure
        hosted.metadata.after_operation(hosted.record, hosted.index, args.subscription, failure)
    return value


def _describe_partition(hosted: HostedPartition, args: of.Nothing, now_ns: int) -> dict[str, Any]:
    return hosted.statistics()


def _partition_ends(hosted: HostedPartition, args: of.Nothing, now_ns: int) -> dict[str, Any]:
    return hosted.ends()


def _row_mark(hosted: HostedPartition, args: of.RowMark, now_ns: int) -> dict[str, Any]:
    """Return the mark of the batch that begins at ``offset``; empty if there is none, or no such batch.

    ``waiting``: it is not acknowledged yet.  Raises FetchPending if the store must be read first.
    """
    offset, end, mark = args.offset, hosted.high_watermark, None
    if hosted.log is not None and hosted.start <= offset < end:
        chunk = hosted.chunk(offset)
        place = chunk.places[chunk.find(offset)] if chunk.places else None
        if place is not None and place.base_offset == offset:
            mark = BatchView(chunk.batch(place)).row_mark
    return {"mark": "" if mark is None else mark.text, "waiting": end <= offset < hosted.core.log_end}


def _storage(hosted: HostedPartition, args: of.Nothing, now_ns: int) -> dict[str, Any]:
    """Return the bytes of the partition in each tier, and those that are only on this host."""
    log, tier = hosted.log, hosted.tier
    local = {"partition": hosted.name, "local_bytes": log.local_bytes if log is not None else 0}
    return local | (tier.statistics() if tier is not None else {"tiered": False})


def _list_segments(hosted: HostedPartition, args: of.Segments, now_ns: int) -> list[Any] | dict[str, Any]:
    """Return uploaded segments with records from ``after_offset`` on.

    Without ``limit`` at most SEGMENTS_LISTED_MAX.
    """
    after = args.after
    if after and not (after.isascii() and after.isdecimal()):
        raise InvalidArgument(f"after={after[:40]!r} is not the `after` of a page")
    tier = hosted.tier
    rows = iter(()) if tier is None else tier.segments(max(args.after_offset, int(after[:20] or 0)))
    found = (row for row in rows if (key := _segment_key(row)) > after and key.startswith(args.prefix))
    limited = found if args.limit else islice(found, SEGMENTS_LISTED_MAX)
    return paged(args, limited, _segment_key, lambda row: row)


def _segment_key(row: dict[str, Any]) -> str:
    """Return a segment's start, as wide as the largest, so that texts are in the order of numbers."""
    return f"{row['start_offset']:020}"


def _list_subscriptions(hosted: HostedPartition, args: of.Page, now_ns: int) -> list[Any] | dict[str, Any]:
    hosts: list[tuple[str, HostedSubscription | LossyHost]] = [
        *hosted.subscriptions.items(),
        *hosted.lossy.items(),
    ]
    return listed(
        args,
        hosts,
        lambda one: one[0],
        lambda one: {"subscription": one[0], "partition": hosted.name, **one[1].statistics(now_ns)},
    )


def _describe_subscription(hosted: HostedPartition, args: of.Subscription, now_ns: int) -> dict[str, Any]:
    name = args.subscription
    host = hosted.lossy.get(name) or hosted.subscription(name)
    return {"subscription": name, "partition": hosted.name, **host.statistics(now_ns)}


def _subscription_progress(hosted: HostedPartition, args: of.Subscription, now_ns: int) -> dict[str, Any]:
    facts = _describe_subscription(hosted, args, now_ns)
    return {name: facts[name] for name in _PROGRESS if name in facts}


def _seek(hosted: HostedPartition, args: of.Seek, now_ns: int) -> dict[str, Any]:
    host = hosted.subscription(args.subscription)
    offset = start_offset(hosted, args.kind, 0 if args.value is UNSET else args.value)
    host.seek(offset, now_ns)
    return {"offset": offset, "lag": hosted.lag_from(offset)}


def _offset_at(hosted: HostedPartition, args: of.Start, now_ns: int) -> dict[str, Any]:
    """Return the offset of a start position now; raises FetchPending if the store must be read first."""
    return {"offset": start_offset(hosted, args.kind, args.value)}


def _delete_subscription(hosted: HostedPartition, args: of.Subscription, now_ns: int) -> None:
    name = args.subscription
    host = hosted.lossy.get(name) or hosted.subscriptions.get(name)
    lost = hosted.cursors is not None and name in hosted.cursors.lost
    if host is None and not lost:
        raise SubscriptionNotFound(f"subscription {name!r} does not exist on {hosted.name}")
    if host is not None and host.links:
        raise WrongState(
            f"subscription {name!r} has {len(host.links)} consumers connected",
            hint="stop them first, then delete it",
        )
    hosted.lossy.pop(name, None)
    known = hosted.subscriptions.pop(name, None) is not None
    if (known or lost) and hosted.cursors is not None:
        hosted.cursors.remove(name)
        hosted.cursors.write()


def _unblock(hosted: HostedPartition, args: of.Subscription, now_ns: int) -> dict[str, Any]:
    return {"unblocked": hosted.subscription(args.subscription).core.unblock(now_ns)}


def _set_failure_policy(hosted: HostedPartition, args: of.FailureChange, now_ns: int) -> None:
    host = hosted.subscription(args.subscription)
    args.failure.check()
    host.core.set_failure(args.failure)


def _settle(hosted: HostedPartition, args: of.Settlement, now_ns: int) -> dict[str, Any]:
    """Settle acks and nacks that name no consumer, for any consumer that has the records in flight.

    Records that are not in flight or are settled already are left unchanged, and so is a non-reliable
    subscription.
    """
    if len(args.acks) % _RANGE_BYTES:
        raise InvalidArgument("acks is not a list of ranges", why=f"it has {len(args.acks)} bytes")
    if hosted.reliable:
        settle(hosted, hosted.subscription(args.subscription).core, args.acks, args.nacks, now_ns)
    return {}


def settle(
    hosted: HostedPartition, core: HoledSubscription, acks: bytes, nacks: list[NackedRecord], now_ns: int
) -> None:
    """Ack ranges (uint64[n][2] as bytes) and nack records, for any consumer that has them in flight."""
    if acks:
        acked = core.ack(None, np.frombuffer(acks, "<u8").reshape(-1, 2), now_ns)
        hosted.counters.add("acks_in", acked.acked)
    for offset, delay_ms, reason in nacks:
        if 0 <= offset < of.OFFSET_MAX:
            core.nack(
                None, np.array([[offset, offset + 1]]), delay_ms, reason[:_REASON_CHARACTERS_MAX], now_ns
            )
    if nacks:
        hosted.counters.add("nacks", len(nacks))


def answered_later(
    hosted: HostedPartition, op: str, args: Any, storage: Storage, tiers: Tiers | None, answer: Answer
) -> bool:
    """Begin an operation that is answered later; return False, without an effect, for any other one.

    ``seal`` answers the end offset of sealed records.  ``install_staged`` answers the mover's outcome of each
    object that a job made: ``installed``, ``waiting`` or ``refused``, and why.  ``accept_loss`` gives up open
    holes; it raises FetchPending until the manifest has them.
    """
    if op not in _LATER:
        return False
    if op == "seal":
        storage.seal(hosted, lambda end: answer(end if isinstance(end, DanubeError) else {"sealed_end": end}))
    elif op == "accept_loss":
        answer(_accept_loss(hosted, tiers, args))
    else:  # install_staged
        if tiers is None or hosted.tier is None:
            raise WrongState(f"{hosted.name} is in no object store", hint="see storage.mode")
        tiers.staged.ask(hosted, args.topic_id, args.objects, answer)
    return True


def _accept_loss(hosted: HostedPartition, tiers: Tiers | None, args: of.Loss) -> dict[str, Any]:
    """Give up the open holes that begin below ``end_offset`` (default: all), or only list them.

    The answer has all holes that are then given up.
    """
    tier = hosted.tier
    if tiers is None or tier is None:
        raise WrongState(f"{hosted.name} is in no object store", why="so it has no holes")
    end_offset = args.end_offset
    waiting = tier.open_holes(end_offset)
    if args.dry_run:
        return {"partition": hosted.name, "holes": [hole.described() for hole in waiting]}
    if waiting:
        tiers.give_up(tier, end_offset)
        raise FetchPending(
            f"holes of {hosted.name} are being given up",
            why=tier.error, ready=lambda: not tier.open_holes(end_offset), hint="it goes on by itself",
        )  # fmt: skip
    manifest = tier.manifest
    holes = manifest.all_holes() if manifest is not None else []
    given_up = [hole.described() for hole in holes if hole.kind is HoleKind.GIVEN_UP]
    return {"partition": hosted.name, "holes": given_up}


def reply_frame(value: Any, correlation: int) -> bytes:
    """Return the frame that answers a request with a value or an error."""
    if isinstance(value, DanubeError):
        return error_frame(value, correlation)
    return result_frame(value, correlation)


# Operations that are answered later.
_LATER = frozenset({"seal", "accept_loss", "install_staged"})
# Operations that change cursors; they are answered when the change is on disk.
CURSOR_OPERATIONS = frozenset({"seek", "delete_subscription", "unblock", "set_failure_policy"})

_OPERATIONS: dict[str, Callable[[HostedPartition, Any, int], Any]] = {
    "describe_partition": _describe_partition,
    "partition_ends": _partition_ends,
    "row_mark": _row_mark,
    "storage": _storage,
    "list_segments": _list_segments,
    "list_subscriptions": _list_subscriptions,
    "describe_subscription": _describe_subscription,
    "subscription_progress": _subscription_progress,
    "offset_at": _offset_at,
    "seek": _seek,
    "delete_subscription": _delete_subscription,
    "unblock": _unblock,
    "set_failure_policy": _set_failure_policy,
    "settle": _settle,
}
OWNER_OPERATIONS = frozenset(_OPERATIONS) | _LATER
