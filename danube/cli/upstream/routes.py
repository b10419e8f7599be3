"""Routes of ``danube-cli`` to the broker of a topic: lookup, redirect and retries, as official clients do.

A call that ended with UNAVAILABLE, DEADLINE_EXCEEDED or RESOURCE_EXHAUSTED is tried again, five times
at most, after 200 ms, 400 ms ... (at most 5 s, of which 50-100 % is waited), with a new lookup before
each try.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from danube.cli.upstream.calls import call
from danube.cli.upstream.endpoint import read_endpoint
from danube.cli.upstream.grpc_channel import RETRIED, status_of
from danube.cli.upstream.root import Channel, Outside
from danube.errors import DanubeError
from danube.server.proto import DanubeApi_pb2 as pb

Result = TypeVar("Result")

RETRIES: Final = 5
_STEP_S: Final = 0.2
_DELAY_MAX_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Route:
    """The broker that serves a topic: its channel, and the URL that messages name it by."""

    channel: Channel
    broker_url: str


class Routes:
    """One channel for each broker; the first is the one whose address the user gave."""

    def __init__(self, outside: Outside, address: str) -> None:
        self._outside = outside
        self._address = address
        self._channels: dict[str, Channel] = {}
        self._request_ids = itertools.count(1)
        self._random = random.Random()  # noqa: S311 - spreads retries, guards nothing

    def request_id(self) -> int:
        return next(self._request_ids)

    @property
    def entry(self) -> Channel:
        return self._channel(self._address)

    def _channel(self, address: str) -> Channel:
        target = read_endpoint(address)
        channel = self._channels.get(address)
        if channel is None:
            channel = self._channels[address] = self._outside.open(target)
        return channel

    def lookup(self, topic: str) -> Route:
        """Return the broker of a topic; the first broker itself while none claims the topic."""
        try:
            found = call(self.entry, "Discovery/TopicLookup", request_id=self.request_id(), topic=topic)
        except DanubeError:
            return Route(self.entry, self._address)
        if found.response_type == pb.TopicLookupResponse.Failed or not found.connect_url:
            return Route(self.entry, self._address)
        return Route(self._channel(found.connect_url), found.broker_url)

    def partitions(self, topic: str) -> list[str]:
        """Physical names of a topic; its own where the broker names none."""
        found = call(self.entry, "Discovery/TopicPartitions", request_id=self.request_id(), topic=topic)
        return list(found.partitions) or [topic]

    def retrying(self, topic: str, attempt: Callable[[Route], Result]) -> tuple[Route, Result]:
        """Make a call at the topic's broker, again where that may help; the route that answered too."""
        tried = 0
        while True:
            tried += 1
            route = self.lookup(topic)
            try:
                return route, attempt(route)
            except DanubeError as error:
                self.pause_after(error, tried)

    def pause_after(self, error: DanubeError, tried: int) -> None:
        """Wait before another try, or raise the error if none may help; ``tried`` counts from 1."""
        if status_of(error) not in RETRIED or tried > RETRIES:
            raise error
        self.pause(tried)

    def pause(self, tried: int) -> None:
        """Wait before another try; ``tried`` counts from 1."""
        self._outside.sleep(min(_STEP_S * tried, _DELAY_MAX_S) * self._random.uniform(0.5, 1.0))

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()
