"""Calls of ``danube-admin``'s commands: one method of one service, 5 s at most."""

from __future__ import annotations

from typing import Any, Final

import click

from danube.cli.terminal.arguments import together
from danube.cli.upstream.endpoint import admin_endpoint
from danube.cli.upstream.root import Channel, Outside, Wrong
from danube.errors import NotFound

TIMEOUT_S: Final = 5.0
_STATUS: Final = "NOT_FOUND"


class AdminLine:
    """Connects to the endpoint when the first call is made."""

    def __init__(self, outside: Outside, endpoint: str) -> None:
        self.outside = outside
        self._endpoint = endpoint
        self._channel: Channel | None = None

    def ask(self, method: str, /, **fields: Any) -> Any:
        """Call ``method``, a ``Service/Method``; raises the error of its status."""
        if self._channel is None:
            self._channel = self._open(self._endpoint)
        return _call(self._channel, method, **fields)

    def tell_success(self, label: str, method: str, /, **fields: Any) -> list[str]:
        """Call a method that answers whether it was done; return the line that says so."""
        return [f"{label}: {str(self.ask(method, **fields).success).lower()}"]

    def ask_other(self, address: str, method: str, /, **fields: Any) -> Any:
        """Call a method at another broker's admin port."""
        channel = self._open(address)
        try:
            return _call(channel, method, **fields)
        finally:
            channel.close()

    def _open(self, address: str) -> Channel:
        return self.outside.open(admin_endpoint(address, self.outside.environ))

    def close(self) -> None:
        if self._channel is not None:
            self._channel.close()


def _call(channel: Channel, method: str, /, **fields: Any) -> Any:
    from danube.cli.upstream.calls import call

    return call(channel, method, TIMEOUT_S, **fields)


def _keep_namespace(context: click.Context, param: click.Parameter, value: str | None) -> None:
    context.meta["namespace"] = value


def _full_name(context: click.Context, param: click.Parameter, value: str) -> str:
    return topic_name(value, context.meta.get("namespace"))


# The command gets ``topic`` as its full name.
topic_argument = together(
    click.option(
        "--namespace",
        is_eager=True,
        expose_value=False,
        callback=_keep_namespace,
        help="Namespace of a topic that is given by its bare name.",
    ),
    click.argument("topic", callback=_full_name, metavar="TOPIC"),
)


def topic_name(text: str, namespace: str | None) -> str:
    """``/ns/topic``, ``ns/topic``, or ``topic`` with a namespace; raises Wrong."""
    if text.startswith("/"):
        return text
    if "/" in text:
        return f"/{text}"
    if not namespace:
        raise Wrong(f"Topic {text!r} has no namespace; write /namespace/{text} or give --namespace.")
    return f"/{namespace.strip('/')}/{text}"


# Some answers are empty for what does not exist.  A check costs a call, so a command makes it only then.


def check_topic_exists(line: AdminLine, topic: str) -> None:
    """Raise NotFound unless a topic, or a partition of it, has this name."""
    namespace = topic[1:].partition("/")[0]
    listed = line.ask("TopicAdmin/ListNamespaceTopics", name=namespace).topics
    if not any(one.name == topic or _partition_of(topic, one.name) for one in listed):
        raise _missing(
            f"topic {topic} does not exist", f"`topics list --namespace {namespace}` tells the names"
        )


def check_namespace_exists(line: AdminLine, namespace: str) -> None:
    """Raise NotFound unless there is this namespace."""
    listed = line.ask("BrokerAdmin/ListNamespaces").namespaces
    if namespace not in listed:
        raise _missing(f"namespace {namespace} does not exist", "`brokers namespaces` tells the names")


def check_broker_exists(line: AdminLine, broker_id: str) -> None:
    """Raise NotFound unless there is a broker with this id."""
    listed = line.ask("BrokerAdmin/ListBrokers").brokers
    if all(one.broker_id != broker_id for one in listed):
        raise _missing(f"there is no broker {broker_id}", "`brokers list` tells the ids")


def _partition_of(topic: str, name: str) -> bool:
    number = name.removeprefix(f"{topic}-part-")
    return number != name and number.isdigit()


def _missing(what: str, hint: str) -> NotFound:
    return NotFound(f"status {_STATUS}: {what}", hint=hint, status=_STATUS)
