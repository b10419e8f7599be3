"""Memory that a client on this host shares: its batches are read, checked and written where they lie.

Between the check of a batch and the log's write nobody holds the client back from changing it.  So this is
for processes of the broker's own user alone, which may change the broker's files as well.  What the client
says (process, descriptor) is not believed: the memory must bear the name that clients give it, its size must
be sealed, and it must begin with the token that came over the connection.

The worker that holds the connection maps the memory, and so does the owner of a partition elsewhere, once
the first batch for it has come: from then on only the place of a batch crosses the ring.
"""

from __future__ import annotations

import fcntl
import hmac
import mmap
import os
import sys
from typing import Final

from danube.core.protocol.native import SHARED_MEMORY_NAME, SHARED_TOKEN_BYTES, ShareMemory
from danube.errors import InvalidArgument
from danube.limits import SHARED_MEMORY_BYTES_MAX

_OPEN: Final = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
_KIND: Final = f"/memfd:{SHARED_MEMORY_NAME}"
_HINT: Final = "the client goes on without"


class ClientMemory:
    """What the client of one connection shares, at the worker that holds the connection."""

    __slots__ = ("offer", "readers", "view")

    def __init__(self, offer: ShareMemory) -> None:
        """Map it; raises what attach() raises."""
        self.view = attach(offer)
        self.offer = offer
        self.readers: dict[int, bool] = {}  # other workers that were asked to map it -> whether they have


def attach(offer: ShareMemory) -> memoryview:
    """Map what a client offers; InvalidArgument where it is something else, or of another user or host."""
    if sys.platform != "linux":
        raise InvalidArgument("memory cannot be shared on this system", hint=_HINT)
    if (
        len(offer.token) != SHARED_TOKEN_BYTES
        or not len(offer.token) <= offer.size <= SHARED_MEMORY_BYTES_MAX
    ):
        raise InvalidArgument(
            f"{offer.size} bytes with a token of {len(offer.token)} cannot be shared",
            why=f"at most {SHARED_MEMORY_BYTES_MAX} bytes and a token of {SHARED_TOKEN_BYTES} can",
        )
    process = f"/proc/{offer.process:d}"
    path = f"{process}/fd/{offer.descriptor:d}"
    try:
        if os.stat(process).st_uid != os.geteuid():
            raise InvalidArgument("memory of another user cannot be shared", hint=_HINT)
        if not os.readlink(path).startswith(_KIND):
            raise InvalidArgument(f"{path} is not memory that a client shares")
        descriptor = os.open(path, _OPEN)
    except OSError as error:
        raise InvalidArgument(
            f"process {offer.process} cannot share memory with the broker", why=str(error), hint=_HINT
        ) from None
    try:
        return _mapped(descriptor, offer)
    except OSError as error:
        raise InvalidArgument("the memory cannot be mapped", why=str(error), hint=_HINT) from None
    finally:
        os.close(descriptor)


def _mapped(descriptor: int, offer: ShareMemory) -> memoryview:
    if os.fstat(descriptor).st_size != offer.size:
        raise InvalidArgument(f"the memory has not {offer.size} bytes")
    if not fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        raise InvalidArgument("the memory could be cut while it is read", hint="seal its size")
    memory = memoryview(mmap.mmap(descriptor, offer.size))
    if not hmac.compare_digest(memory[:SHARED_TOKEN_BYTES], offer.token):
        raise InvalidArgument("the memory does not begin with the token")
    return memory
