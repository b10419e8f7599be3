"""Whose rights a failure policy's dead letters need is written by the broker, whatever the client says."""

from __future__ import annotations

from typing import Any

import pytest

from danube.broker.routing.signing import signed
from danube.core.partition.policy import FailurePolicy
from danube.core.protocol import native as wire
from danube.core.protocol.native import Admin, Frame, FrameDecoder, Kind, Subscribe
from danube.core.security.principals import ANONYMOUS, INTERNAL, Identity, Principal

ADA = Identity(Principal("service_account", "ada"), "token")
PEER = Identity(Principal("broker_internal", "2"), "certificate")
FORGED = FailurePolicy(poison="dead_letter", dead_letter_topic="/default/letters", set_by="user:root")


def through(identity: Identity, kind: Kind, body: Any) -> tuple[Frame, Any]:
    """The frame and body that the broker goes on with."""
    buffer = memoryview(bytearray(wire.control_frame(kind, body, 7, 3)))
    [frame] = FrameDecoder().frames(buffer, 0, len(buffer))
    frame, buffer = signed(identity, frame, buffer)
    return frame, wire.decode_control(buffer[frame.start : frame.end], type(body))


@pytest.mark.parametrize(
    ("identity", "author"), [(ADA, "service_account:ada"), (ANONYMOUS, ""), (INTERNAL, "user:root")]
)
def test_a_consumers_policy_bears_its_name(identity: Identity, author: str) -> None:
    frame, request = through(identity, Kind.SUBSCRIBE, Subscribe("/default/t", "s", "c", failure=FORGED))
    assert request.failure.set_by == author
    assert (frame.kind, frame.correlation, frame.handle) == (Kind.SUBSCRIBE, 7, 3)
    assert request.failure.dead_letter_topic == FORGED.dead_letter_topic


@pytest.mark.parametrize("within", ["failure", "policy"])
def test_so_does_one_that_an_operation_sets(within: str) -> None:
    asked = {"poison": "dead_letter", "set_by": "user:root"}
    args = {"failure": asked} if within == "failure" else {"policy": {"failure": asked, "reliable": True}}
    _, request = through(ADA, Kind.ADMIN, Admin("update_topic", "", {"topic": "/default/t", **args}))
    found = request.args["failure"] if within == "failure" else request.args["policy"]["failure"]
    assert found == {"poison": "dead_letter", "set_by": "service_account:ada"}
    assert request.args["topic"] == "/default/t"


def test_who_changes_a_delay_does_not_answer_for_anothers_topic() -> None:
    args = {"failure": {"ack_timeout_ms": 5, "set_by": "user:root"}}
    _, request = through(ADA, Kind.ADMIN, Admin("set_failure_policy", "/default/t", args))
    assert request.args == {"failure": {"ack_timeout_ms": 5}}


def test_what_another_broker_asks_is_signed_for_whom_it_asks() -> None:
    args = {"failure": {"poison": "dead_letter", "set_by": "user:root"}}
    asked = Admin("set_failure_policy", "/default/t", args, forwarded=True, on_behalf="user:bob")
    _, request = through(INTERNAL, Kind.ADMIN, asked)
    assert request.args["failure"]["set_by"] == "user:bob"
    _, request = through(PEER, Kind.ADMIN, Admin("set_failure_policy", "/default/t", args))
    assert request.args == args, "it passes on what a door of its own has signed"


def test_other_requests_pass_as_they_are() -> None:
    for kind, body in (
        (Kind.SUBSCRIBE, Subscribe("/default/t", "failure", "c")),
        (Kind.ADMIN, Admin("seek", "/default/t", {"subscription": "s"})),
        (Kind.ADMIN, Admin("set_subscription_settings", "", {"failure": None})),
    ):
        assert through(ADA, kind, body)[1] == body
