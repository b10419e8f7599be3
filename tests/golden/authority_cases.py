"""The matrix of rights as text, and docs/operations.md, both made from the table of operations.

Each row of the table is judged for ten callers and three targets, with requests as clients send them:
structs of the native protocol and messages of gRPC.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_origin

import msgspec
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message_factory import GetMessageClass

from danube.broker.shard.admin import OWNER_OPERATIONS
from danube.core.metadata.commands import (
    Binding,
    Command,
    ConfigureTopicSchema,
    CreateNamespace,
    CreateTopic,
    PutBinding,
    RegisterSchema,
    TopicSchema,
)
from danube.core.metadata.machine import Metadata
from danube.core.partition.policy import TopicPolicy
from danube.core.protocol.native import Admin, Lookup, OpenProducer, Subscribe
from danube.core.security.authority import Authority
from danube.core.security.operations import ADMIN_ROWS, FIRST_TOKEN, GRPC_ROWS, NATIVE_ROWS, Row, judge
from danube.core.security.principals import ANONYMOUS, BOOTSTRAP, INTERNAL, Identity, Principal
from danube.errors import NotAllowed, NotAuthenticated
from danube.server.proto import DanubeAdmin_pb2, DanubeApi_pb2, SchemaRegistry_pb2
from danube.server.proto.pool import POOL

ROOT = Path(__file__).resolve().parents[2]
MATRIX = Path(__file__).resolve().parent / "authority.txt"
OPERATIONS_PAGE = ROOT / "docs" / "operations.md"
LETTERS = "/other/letters"
MODULES = (DanubeAdmin_pb2, DanubeApi_pb2, SchemaRegistry_pb2)


class Target(NamedTuple):
    """Names that a request mentions."""

    says: str
    namespace: str
    topic: str
    subject: str
    schema_id: int


TARGETS = (
    Target("exists", "team", "/team/orders", "team-value", 1),
    Target("missing", "nowhere", "/team/missing", "no-value", 999),
    Target("other", "other", "/other/orders", "other-value", 2),
)
# The column, the role, and where it is bound.
CALLERS: dict[str, tuple[str, str, str] | Identity] = {
    "nobody": ANONYMOUS,
    "other": ("namespace-admin", "namespace", "other"),
    "viewer": ("viewer", "namespace", "team"),
    "auditor": ("viewer", "cluster", ""),
    "producer": ("producer", "namespace", "team"),
    "consumer": ("consumer", "namespace", "team"),
    "ns-admin": ("namespace-admin", "namespace", "team"),
    "admin": ("admin", "cluster", ""),
    "broker": INTERNAL,
    "first": Identity(BOOTSTRAP, "token"),
}


def identity_of(caller: str) -> Identity:
    known = CALLERS[caller]
    return known if isinstance(known, Identity) else Identity(Principal("user", caller), "token")


def site() -> Metadata:
    """Two tenants, each with a topic that follows a subject, and the callers' bindings."""
    machine = Metadata()
    commands: list[Command] = []
    for target in (TARGETS[0], TARGETS[2]):
        commands += [
            CreateNamespace(namespace=target.namespace),
            CreateTopic(topic=target.topic, policy=TopicPolicy(), created_us=1),
            RegisterSchema(
                subject=target.subject, after_revision=0, schema_type="string", definition=b"",
                fingerprint="f", created_us=1, compatibility="none",
            ),
            ConfigureTopicSchema(topic=target.topic, schema=TopicSchema(target.subject)),
        ]  # fmt: skip
    for name, held in CALLERS.items():
        if not isinstance(held, Identity):
            role, scope, resource = held
            commands.append(PutBinding(binding=Binding(name, "user", name, (role,), scope, resource)))
    for command in commands:
        assert machine.check(command)
        machine.apply(machine.version + 1, command)
    return machine


# -- requests -----------------------------------------------------------------------------------------


def admin_request(row: Row, target: Target, more: dict[str, Any]) -> Admin:
    args = {
        "namespace": target.namespace, "topic": target.topic, "subject": target.subject,
        "scope": "topic", "resource": target.topic, "resource_name": target.topic, "id": "new",
        "principal_type": "user", "principal_name": "bob", "role_names": ["producer"], "name": "new", **more,
    }  # fmt: skip
    return Admin(row.name, target.topic if row.name in OWNER_OPERATIONS else "", args)


def native_request(row: Row, target: Target, more: dict[str, Any]) -> Any:
    match row.name:
        case "LOOKUP":
            return Lookup(target.topic, **more)
        case "OPEN_PRODUCER":
            return OpenProducer(f"{target.topic}-part-0", "p")
        case "SUBSCRIBE":
            return Subscribe(f"{target.topic}-part-0", "s", "c", **more)
    return None


def grpc_request(row: Row, target: Target, more: dict[str, Any]) -> Any:
    """A message with every name that the target gives it."""
    if not row.needs:
        return None
    service, _, method = row.name[1:].partition("/")
    described = POOL.FindServiceByName(service).methods_by_name[method].input_type
    message = GetMessageClass(described)()
    binding = {
        "scope": "topic", "resource_name": target.topic, "binding_id": "new", "id": "new",
        "principal_type": "user", "principal_name": "bob", "role_names": ["producer"],
    }  # fmt: skip
    known: dict[str, Any] = {
        "topic": target.topic, "topic_name": target.topic, "base_name": target.topic,
        "name": target.namespace if described.name == "NamespaceRequest" else target.topic,
        "subject": target.subject, "schema_id": target.schema_id, **binding, **more,
    }  # fmt: skip
    for field in described.fields:
        if field.name == "binding":
            names = {one.name for one in field.message_type.fields}
            for name, value in binding.items():
                if name in names:
                    fill(message.binding, field.message_type.fields_by_name[name], value)
        elif field.name == "schema_id" or (field.type == FieldDescriptor.TYPE_STRING and field.name in known):
            fill(message, field, known[field.name])
    return message


def fill(message: Any, field: FieldDescriptor, value: Any) -> None:
    if field.is_repeated:
        getattr(message, field.name).extend(value)
    else:
        setattr(message, field.name, value)


# Requests that need more than their row's own permission.
WITH_MORE: dict[str, dict[str, Any]] = {
    "LOOKUP": {"create": True},
    "update_topic": {"policy": {"failure": {"dead_letter_topic": LETTERS}}},
    "set_subscription_settings": {"failure": {"dead_letter_topic": LETTERS}},
    "schema.configure_topic": {"subject": "other-value"},
    "put_binding": {"role_names": ["admin"]},
    "/danube_schema.SchemaRegistry/ConfigureTopicSchema": {"schema_subject": "other-value"},
    "/danube_admin.TopicAdmin/CreateTopic": {"schema_subject": "other-value"},
}


# -- text ---------------------------------------------------------------------------------------------


def outcome(authority: Authority, machine: Metadata, row: Row, identity: Identity, request: Any) -> str:
    try:
        judge(authority, identity, row, request, machine)
    except NotAuthenticated:
        return "?"
    except NotAllowed:
        return "-"
    return "+"


def lines_of(rows: tuple[Row, ...], request_of: Any) -> Iterator[str]:
    machine = site()
    authority = Authority(lambda: machine.access)
    width = max(len(row.name) for row in (*ADMIN_ROWS, *NATIVE_ROWS, *GRPC_ROWS)) + 2
    for row in rows:
        for more in ({}, WITH_MORE.get(row.name)):
            if more is None:
                continue
            cells = [
                "".join(
                    outcome(authority, machine, row, identity_of(caller), request_of(row, target, more))
                    for target in TARGETS
                )
                for caller in CALLERS
            ]
            yield f"{row.name + (' *' if more else ''):{width}}" + "".join(f"{one:>9}" for one in cells)


def matrix() -> str:
    width = max(len(row.name) for row in (*ADMIN_ROWS, *NATIVE_ROWS, *GRPC_ROWS)) + 2
    return "\n".join(
        [
            "# Who may do what.  Made by `python -m tests.golden.write_authority`; reviewed line by line.",
            "# Three marks a cell: a topic (namespace, subject) that exists, one that is missing, and one of",
            "# another namespace.  + allowed  - NotAllowed  ? NotAuthenticated",
            "# Rows on a handle or an id show + for whoever has a credential: they are judged elsewhere.",
            "# A row with * needs more, since the request has:",
            *(f"#     {name} {more}" for name, more in WITH_MORE.items()),
            " " * width + "".join(f"{caller:>9}" for caller in CALLERS),
            *lines_of(ADMIN_ROWS, admin_request),
            *lines_of(NATIVE_ROWS, native_request),
            *lines_of(GRPC_ROWS, grpc_request),
            "",
        ]
    )


def _first_tokens() -> str:
    rows = [row for row in (*NATIVE_ROWS, *ADMIN_ROWS, *GRPC_ROWS) if row.name in FIRST_TOKEN]
    return ", ".join(f"`{row.name.removeprefix('/danube_admin.')}`" for row in rows)


def _answered(result: Any) -> str:
    """The fields of an answer, in words."""
    if result is None:
        return ""
    if get_origin(result) is list:
        return f"list of {_answered(get_args(result)[0])}"
    if not (isinstance(result, type) and issubclass(result, msgspec.Struct)):
        return "pairs of outcome and reason" if get_origin(result) is tuple else "names"
    return ", ".join(one.encode_name for one in msgspec.structs.fields(result)) or "an empty map"


def operations_page() -> str:
    """docs/operations.md."""
    head = (
        "# Operations\n\n"
        "All that can be asked of a broker, and what the caller needs for it. The table is\n"
        "`danube/core/security/operations.py`; `python -m tests.golden.write_authority` writes this page.\n\n"
        "`open` needs no credential, `signed in` any credential. What destroys cannot be undone.\n"
        "A failure policy that names a dead-letter topic needs Produce on that topic as well. A topic that\n"
        "is configured with a subject needs the right to read the subject.\n\n"
        f"The [first token](security.md#tokens) may ask for nothing but {_first_tokens()}.\n"
    )
    parts = [head]
    for title, rows in (
        ("Operations of ADMIN", ADMIN_ROWS), ("Frames of native clients", NATIVE_ROWS),
        ("Methods of gRPC", GRPC_ROWS),
    ):  # fmt: skip
        parts.append(f"\n## {title}\n\n| | does | effect | needs | on |\n|---|---|---|---|---|\n")
        parts += [
            f"| `{row.name}` | {row.says} | {row.effect} | {row.permission} | {row.where} |\n" for row in rows
        ]
    parts.append(
        "\n## Arguments of ADMIN\n\n"
        "`?` may be missing, or nil. Arguments that a broker does not know are ignored. `http` and `mcp`\n"
        "are names for doors to come; nothing answers there yet.\n\n"
        "| | arguments | answers | http | mcp |\n|---|---|---|---|---|\n"
    )
    for row in ADMIN_ROWS:
        names = [f"{one.name}{'' if one.required else '?'}" for one in msgspec.structs.fields(row.args)]
        http = f"`{' '.join(row.http)}`" if row.http else ""
        tool = f"`{row.mcp}`" if row.mcp else ""
        parts.append(f"| `{row.name}` | {', '.join(names)} | {_answered(row.result)} | {http} | {tool} |\n")
    return "".join(parts)
