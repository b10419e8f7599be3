"""Failure policies are signed: the broker writes into each whose rights its dead letters need.

What a client writes there is replaced.  The broker itself passes on what others have signed.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from danube.broker.routing.judging import asking
from danube.core.protocol import native as wire
from danube.core.protocol.native import Admin, Frame, FrameDecoder, Kind, Subscribe
from danube.core.security.principals import Identity

_CHOOSES: Final = ("poison", "dead_letter_topic")


def signed(identity: Identity, frame: Frame, buffer: memoryview) -> tuple[Frame, memoryview]:
    """Return a SUBSCRIBE or an ADMIN with the failure policy signed that it sets, if it sets one."""
    body = bytes(buffer[frame.start : frame.end])
    if b"failure" not in body:
        return frame, buffer
    request: Subscribe | Admin
    if frame.kind == Kind.SUBSCRIBE:
        request = wire.decode_control(body, Subscribe)
        if request.failure is None or identity.how == "internal":
            return frame, buffer
        request.failure = msgspec.structs.replace(request.failure, set_by=identity.author)
    else:
        request = wire.decode_control(body, Admin)
        asker = asking(identity, request)
        if asker.how == "internal" or asker.principal.kind == "broker_internal":
            return frame, buffer
        request.args = _with_author(request.args, asker.author)
    again = wire.control_frame(Kind(frame.kind), request, frame.correlation, frame.handle)
    written = memoryview(bytearray(again))
    [one] = FrameDecoder().frames(written, 0, len(written))
    return one, written


def _with_author(args: dict[str, Any], author: str) -> dict[str, Any]:
    """Return arguments with the policy in ``failure`` or ``policy.failure`` signed.

    Whoever changes neither the topic nor that letters go there leaves the signature as it is.
    """
    args = dict(args)
    if isinstance(policy := args.get("policy"), dict):
        args["policy"] = _with_author(policy, author)
    if isinstance(failure := args.get("failure"), dict):
        failure = {name: value for name, value in failure.items() if name != "set_by"}
        if any(name in failure for name in _CHOOSES):
            failure["set_by"] = author
        args["failure"] = failure
    return args
