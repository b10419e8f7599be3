"""``danube security``: what is asked of the broker, and where secrets go."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from danube.cli.main import root
from danube.cli.security.access import place_of
from danube.cli.terminal.services import Services

APP = "service_account:app"


class Admin:
    """Notes what it is asked, and answers what it is told to."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            self.calls.append((name, *given, named))
            return self.answers.get(name)

        return call


class Line:
    def __init__(self) -> None:
        self.admin = Admin()

    @contextmanager
    def connect(self, url: str, **options: Any) -> Iterator[Any]:
        yield self

    def __call__(self, *words: str | Path, exit_code: int = 0) -> Result:
        services = Services(connect=self.connect, environ={})
        result = CliRunner().invoke(root, ["security", *map(str, words)], obj=services)
        assert result.exit_code == exit_code, result.output
        return result


@pytest.fixture
def danube(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Line:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return Line()


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("cluster", ("cluster", "")),
        ("/default", ("namespace", "default")),
        ("/default/orders", ("topic", "/default/orders")),
        ("orders", ("topic", "/default/orders")),
    ],
)
def test_a_resource_is_written_in_one_word(text: str, place: tuple[str, str]) -> None:
    assert place_of(text) == place


def test_roles_and_bindings(danube: Line) -> None:
    danube("roles", "create", "writer", "Produce", "Lookup")
    danube("bindings", "create", "b", APP, "--role", "writer", "--role", "viewer", "--on", "/default")
    danube("bindings", "delete", "b", "--on", "/default/orders")
    danube("roles", "delete", "writer")
    assert danube.admin.calls == [
        ("put_role", "writer", ["Produce", "Lookup"], {}),
        ("put_binding", "b", APP, ["writer", "viewer"], "namespace", "default", {}),
        ("delete_binding", "b", "topic", "/default/orders", {}),
        ("delete_role", "writer", {}),
    ]
    danube.admin.answers["roles"] = [{"name": "admin", "permissions": ["View"], "system": True}]
    assert "admin" in danube("roles", "list").stdout
    danube.admin.answers["bindings"] = [
        {"id": "b", "principal_type": "user", "principal_name": "ann", "role_names": ["r"],
         "scope": "cluster", "resource_name": ""}
    ]  # fmt: skip
    assert "user:ann" in danube("bindings", "list").stdout


def test_a_secret_stands_alone_on_standard_output_or_in_a_file_of_its_owner(
    danube: Line, tmp_path: Path
) -> None:
    made = {"token": "abc.def.ghi", "id": "7", "principal": APP, "expires_us": 1_795_855_243_000_000}
    danube.admin.answers["issue_token"] = made
    danube.admin.answers["create_api_key"] = {"key": "dnb_1_x", "id": "1", "principal": APP, "expires_us": 0}
    shown = danube("tokens", "issue", APP, "--ttl", "12h")
    assert shown.stdout == "abc.def.ghi\n" and "2026-11-28" in shown.stderr
    assert danube.admin.calls[-1] == ("issue_token", APP, {"ttl_s": 43_200})
    assert danube("keys", "create", APP).stdout == "dnb_1_x\n"
    before = os.umask(0)
    try:
        said = danube("tokens", "issue", "--file", tmp_path / "token").output
    finally:
        os.umask(before)
    assert "abc" not in said and (tmp_path / "token").read_text() == "abc.def.ghi\n"
    assert (tmp_path / "token").stat().st_mode & 0o777 == 0o600
    assert json.loads(danube("keys", "create", APP, "-o", "json").stdout)["key"] == "dnb_1_x"
    danube("tokens", "issue", "--ttl", "1ms", exit_code=2)


def test_keys_and_revocations_are_listed_and_deleted(danube: Line) -> None:
    danube.admin.answers["api_keys"] = [
        {"id": "1", "principal": APP, "created_us": 1_795_855_243_000_000, "expires_us": 0, "description": ""}
    ]
    assert "2026-11-28" in danube("keys", "list").stdout
    assert json.loads(danube("keys", "list", "-o", "json").stdout)[0]["expires_us"] == 0
    danube.admin.answers["revoke"] = {"kind": "token", "value": "7", "end_us": 1_795_855_243_000_000}
    assert "2026-11-28" in danube("revoke", "token", "7", "--reason", "lost").stdout
    danube.admin.answers["revocations"] = [
        {"kind": "token", "value": "7", "end_us": 1, "before_us": 0, "reason": ""}
    ]
    assert "token" in danube("revocations", "list").stdout
    danube("revocations", "delete", "token", "7")
    danube("keys", "delete", "1")
    assert danube.admin.calls[-2:] == [("delete_revocation", "token", "7", {}), ("delete_api_key", "1", {})]
    danube("revoke", "everything", "7", exit_code=2)


def test_can_answers_yes_or_no_and_why(danube: Line) -> None:
    danube.admin.answers["can"] = {"allowed": True, "reason": "role writer of binding b"}
    assert danube("can", APP, "produce", "/default/orders").stdout == "yes: role writer of binding b\n"
    assert danube.admin.calls[-1] == (
        "can",
        "produce",
        "/default/orders",
        {"scope": "topic", "principal": APP, "groups": ()},
    )
    danube.admin.answers["can"] = {"allowed": False, "reason": "no binding"}
    assert danube("can", "me", "View", exit_code=5).stdout == "no: no binding\n"
    assert danube.admin.calls[-1] == ("can", "View", "", {"scope": "cluster", "principal": "", "groups": ()})
    danube("can", APP, "View", "--group", "a", "--group", "b", exit_code=5)
    assert danube.admin.calls[-1][-1] == {"scope": "cluster", "principal": APP, "groups": ("a", "b")}
    assert json.loads(danube("can", "me", "View", "-o", "json", exit_code=5).stdout)["allowed"] is False
    assert "no principal" in danube("can", "alice", "View", exit_code=2).stderr
