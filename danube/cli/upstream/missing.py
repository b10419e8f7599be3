"""Empty and missing things told apart: the calls behind some commands answer both alike.

Each check costs a call, so a command makes it only where the answer was empty.
"""

from __future__ import annotations

from danube.cli.upstream.admin_line import AdminLine
from danube.errors import NotFound

_STATUS = "NOT_FOUND"


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
