"""SUBSCRIBE: find or create the subscription, add the consumer, answer its start offset."""

from __future__ import annotations

from danube.broker.api import Session
from danube.broker.partition.chunks import Chunk
from danube.broker.partition.hosted import (
    HostedConsumer,
    HostedPartition,
    HostedSubscription,
    failure_for,
    max_unacked_for,
)
from danube.broker.partition.limits import check_consumer
from danube.broker.partition.lossy import LossyHost
from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.grants import JoinResult, Mode
from danube.core.dispatch.holed import HoledSubscription
from danube.core.dispatch.lossy import LossySubscription
from danube.core.protocol.native import Subscribe, Subscribed
from danube.errors import (
    DanubeError,
    Fenced,
    InvalidArgument,
    OffsetOutOfRange,
    SubscriptionBusy,
    SubscriptionNotFound,
)
from danube.ids import check_label
from danube.limits import DELIVER_CREDIT_BYTES_MAX, MAX_UNACKED_LIMIT, SUBSCRIPTIONS_PER_PARTITION_MAX

LOSSY_BYTES_MAX = 32 * 1024 * 1024
LOSSY_RECORDS_MAX = 1_000_000


def start_offset(hosted: HostedPartition, kind: str, value: int) -> int:
    """Return the offset of a start position: earliest, latest, offset or time (microseconds).

    Raises FetchPending if the object store must be read first; call again when the fetch is ready.
    """
    log = hosted.log
    if log is None or kind == "latest":
        return hosted.high_watermark
    if kind == "earliest":
        return hosted.start
    if kind == "time":
        cold = None if hosted.tier is None else hosted.tier.offset_at_time(value)
        return min(log.offset_at_time(value) if cold is None else cold, hosted.high_watermark)
    if kind != "offset":
        raise InvalidArgument(f"start {kind!r} is not known", hint="use earliest, latest, offset or time")
    if not log.start <= value <= hosted.high_watermark and not hosted.start <= value <= log.start:
        raise OffsetOutOfRange(
            f"offset {value} is not in {hosted.name}",
            why=f"it holds {hosted.start} .. {hosted.high_watermark}",
            hint="start at earliest or latest",
            start=hosted.start,
            end=hosted.high_watermark,
        )
    hole = hosted.hole_at(value)
    if hole is not None and value > hole.start:
        raise OffsetOutOfRange(
            f"offset {value} of {hosted.name} is of a history that is gone",
            why=f"records end at {hole.start} and go on at {hole.end}: the log was restored from a copy",
            hint=f"start at {hole.start} or {hole.end}, or at earliest or latest",
            start=hole.start,
            end=hole.end,
        )
    return value


def check_request(request: Subscribe) -> Mode:
    """Check the names and numbers of a request; return the mode."""
    check_label(request.subscription, "subscription")
    check_label(request.consumer, "consumer")
    if (
        min(request.credit_records, request.credit_bytes) < 0
        or not 0 <= request.max_unacked <= MAX_UNACKED_LIMIT
    ):
        raise InvalidArgument(f"credits are not negative and max_unacked is 0 .. {MAX_UNACKED_LIMIT}")
    if request.failure is not None:
        request.failure.check()
    return Mode.parse(request.mode)


def _find_or_make(hosted: HostedPartition, request: Subscribe, mode: Mode) -> HostedSubscription | LossyHost:
    name = request.subscription
    host = hosted.lossy.get(name) or hosted.subscriptions.get(name)
    if host is not None:
        if host.temporary != request.temporary:
            raise SubscriptionBusy(
                f"subscription {name!r} is {'temporary' if host.temporary else 'no temporary one'}",
                why="a temporary one goes with its last consumer",
                hint="use another subscription name",
            )
        if host.core.mode is not mode and (host.links or not hosted.reliable):
            raise SubscriptionBusy(
                f"subscription {name!r} is {host.core.mode.label}",
                why=f"a consumer asked for {mode.label}",
                hint="use the same mode, or another subscription name",
            )
        if host.core.mode is mode:
            return host
        raise SubscriptionBusy(
            f"subscription {name!r} was made as {host.core.mode.label}", hint="delete it to change its mode"
        )
    if not hosted.reliable:
        if len(hosted.lossy) >= SUBSCRIPTIONS_PER_PARTITION_MAX:
            raise InvalidArgument(
                f"{hosted.name} has {SUBSCRIPTIONS_PER_PARTITION_MAX} subscriptions already"
            )
        lossy = LossySubscription(
            name, mode, bytes_max=LOSSY_BYTES_MAX, records_max=LOSSY_RECORDS_MAX, key_of=Chunk.key_at
        )
        made = hosted.lossy[name] = LossyHost(hosted, lossy)
        made.temporary = request.temporary
        return made
    hosted.read_metadata()  # another worker may just have committed settings of the subscription
    kind = request.start
    if request.temporary:
        pass  # nothing of an earlier one was kept
    elif hosted.cursors is not None and (hosted.cursors.damage or name in hosted.cursors.lost):
        kind = "earliest"  # its cursor may be lost: repeat records rather than skip them
    elif request.epoch and not _may_be_lost(hosted, request.epoch):
        raise SubscriptionNotFound(
            f"subscription {name!r} of {hosted.name} was deleted",
            why="a consumer comes back to it",
            hint="open a new consumer, which makes the subscription anew where it says",
        )
    offset = start_offset(hosted, kind, request.start_value)
    core = HoledSubscription(
        name,
        mode,
        CursorState.at(mode, offset, max_unacked=request.max_unacked, failure=request.failure),
        max_unacked=max_unacked_for(hosted, name, request.max_unacked),
        failure=failure_for(hosted.record, name, request.failure),
    )
    added = hosted.add_subscription(name, core)
    added.temporary = request.temporary
    return added


def _may_be_lost(hosted: HostedPartition, epoch: int) -> bool:
    """Return whether an owner of another epoch may have made the subscription, and its cursor was lost."""
    return hosted.budget is not None and epoch != hosted.core.epoch


def subscribe(
    hosted: HostedPartition, session: Session, handle: int, request: Subscribe, consumer_id: int, now_ns: int
) -> Subscribed:
    """Add a consumer to a subscription; an error changes nothing."""
    mode = check_request(request)
    if handle in session.consumers or handle in session.producers or handle == 0:
        raise InvalidArgument(f"handle {handle} is in use on this connection")
    hosted.follow_metadata()
    if hosted.limits is not None:
        check_consumer(hosted, hosted.limits, request.subscription, request.consumer)
    known = request.subscription in hosted.subscriptions or request.subscription in hosted.lossy
    host = _find_or_make(hosted, request, mode)
    try:
        joined: JoinResult = host.core.join(
            consumer_id, request.consumer, filters=request.filters, now_ns=now_ns
        )
    except DanubeError:
        if not known:
            hosted.subscriptions.pop(request.subscription, None)
            hosted.lossy.pop(request.subscription, None)
        raise
    if joined.displaced is not None:
        _displace(host, joined.displaced)
    link = HostedConsumer(session, handle, consumer_id, request.consumer, hosted, request.subscription)
    link.credit_bytes = min(request.credit_bytes, DELIVER_CREDIT_BYTES_MAX)
    if request.epoch and isinstance(host, HostedSubscription) and not host.sought:
        link.earlier_end = hosted.high_watermark
    host.links[consumer_id] = link
    session.consumers[handle] = link
    floor, ack_timeout_ms = hosted.high_watermark, 0
    if isinstance(host, HostedSubscription):
        floor, ack_timeout_ms = host.core.ack_floor, host.core.failure.ack_timeout_ms
        if request.paced:
            host.core.pace(consumer_id, now_ns)
    host.core.credit(consumer_id, request.credit_records)
    host.update_ready(link)
    return Subscribed(
        joined.active, floor, hosted.high_watermark, hosted.core.epoch, ack_timeout_ms, host.temporary
    )


def _displace(host: HostedSubscription | LossyHost, consumer_id: int) -> None:
    """Close the handle of an older connection with the same consumer."""
    old = host.links.pop(consumer_id, None)
    if old is None:
        return
    old.session.consumers.pop(old.handle, None)
    old.session.send_error(
        Fenced("a consumer of the same name has taken over", hint="use another consumer name"), 0, old.handle
    )
