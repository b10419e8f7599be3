"""Records that were granted and could not be sent, because their bytes are not at hand yet."""

from __future__ import annotations

import numpy as np

from danube.core.dispatch.consumers import Consumers
from danube.core.dispatch.grants import Grant, Offsets
from danube.core.dispatch.window import IN_FLIGHT, READY, Window


def take_back(window: Window, consumers: Consumers, grant: Grant, start: int) -> int:
    """Make what of ``grant`` lies at or above ``start`` ready again; return how many records that are.

    Their delivery does not count and the consumer has its credit again.  What is not in flight at
    that consumer any more is left as it is.
    """
    consumer = consumers.by_id.get(grant.consumer_id)
    if consumer is None:
        return 0
    if grant.offsets is None:
        offsets = np.arange(start, grant.end, dtype=np.int64)
    else:
        offsets = grant.offsets[grant.offsets >= start]
    offsets = offsets[(offsets >= window.floor) & (offsets < window.next)]
    index = offsets & window.mask
    offsets = offsets[(window.state[index] == IN_FLIGHT) & (window.owner[index] == consumer.seat)]
    forget_delivery(window, offsets)
    consumers.return_credit(grant.consumer_id, len(offsets))
    return len(offsets)


def forget_delivery(window: Window, offsets: Offsets) -> None:
    """Records in flight are ready again as if not granted."""
    window.deliveries[offsets & window.mask] -= np.uint16(1)
    window.move(offsets, READY)
