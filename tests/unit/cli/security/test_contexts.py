"""Contexts: which broker a command asks, and which broker gets which token."""

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
from danube.cli.terminal import contexts
from danube.cli.terminal.services import Services
from danube.errors import ConfigInvalid, InvalidArgument, NotAuthenticated, NotFound, StorageFailed

PROD = "danube+tls://prod.example:6660"


class Line:
    """Runs ``danube`` in a home of its own; notes with what it connects."""

    def __init__(self, environ: dict[str, str]) -> None:
        self.environ = environ
        self.connected: list[tuple[str, dict[str, Any], str]] = []
        self.refuses: Exception | None = None
        self.terminal = False

    @contextmanager
    def connect(self, url: str, **options: Any) -> Iterator[Any]:
        self.connected.append((url, options, os.environ.get("DANUBE_TOKEN_FILE", "")))
        if self.refuses is not None:
            raise self.refuses
        yield self

    @property
    def admin(self) -> Any:
        return self

    def cluster(self, op: str, **arguments: Any) -> list[dict[str, Any]]:
        return [{"broker_id": "1"}]

    def __call__(self, *words: str | Path, input: str = "", exit_code: int = 0) -> Result:
        services = Services(connect=self.connect, environ=self.environ, can_ask=lambda: self.terminal)
        result = CliRunner().invoke(root, [str(word) for word in words], input=input, obj=services)
        assert result.exit_code == exit_code, result.output
        return result


@pytest.fixture
def danube(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Line:
    for name in (*contexts.VARIABLES.values(), contexts.CHOICE, "DANUBE_TOKEN"):
        monkeypatch.setenv(name, "")  # so that it is restored afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return Line({"XDG_CONFIG_HOME": str(tmp_path)})


def test_the_first_context_is_in_use_until_another_is_chosen(danube: Line, tmp_path: Path) -> None:
    assert "in use" in danube("context", "add", "prod", "--url", PROD).stdout
    danube("context", "add", "test", "--url", "127.0.0.1:7000")
    danube("brokers", "list")
    assert danube.connected[-1][0] == PROD
    danube("context", "use", "test")
    rows = json.loads(danube("context", "list", "-o", "json").stdout)
    assert [(row["name"], row["current"], row["url"]) for row in rows] == [
        ("prod", False, PROD), ("test", True, "danube://127.0.0.1:7000")
    ]  # fmt: skip
    danube("context", "add", "third", "--url", PROD, "--use")
    assert contexts.read(danube.environ).current == "third"
    danube("context", "delete", "third")
    assert contexts.read(danube.environ).current == ""


def test_a_context_is_chosen_for_one_command(danube: Line) -> None:
    danube("context", "add", "prod", "--url", PROD)
    danube("context", "add", "test", "--url", "danube://127.0.0.1:7000")
    danube("--context", "test", "brokers", "list")
    assert danube.connected[-1][0] == "danube://127.0.0.1:7000"
    assert "did you mean test" in danube("--context", "tset", "brokers", "list", exit_code=3).stderr


def test_files_of_a_context_become_what_the_client_reads(danube: Line, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("token", "ca", "cert", "key")]
    words = zip(("--token-file", "--tls-ca", "--tls-cert", "--tls-key"), files, strict=True)
    added = danube("context", "add", "prod", "--url", PROD, *[word for pair in words for word in pair])
    assert added.stderr.count("is not there yet") == 4
    environ: dict[str, str] = dict(danube.environ)
    contexts.apply(environ, None)
    assert [environ[contexts.VARIABLES[key]] for key in ("token_file", "tls_ca", "tls_cert", "tls_key")] == [
        str(file) for file in files
    ]


def test_a_token_is_shown_to_the_broker_of_its_context_alone(danube: Line, tmp_path: Path) -> None:
    """Neither a flag nor a variable with another address brings the token along."""
    danube("context", "add", "prod", "--url", PROD, "--token-file", tmp_path / "token")
    danube("brokers", "list")
    assert danube.connected[-1] == (PROD, {}, str(tmp_path / "token"))
    _forget()
    danube("brokers", "list", "-s", "danube+tls://other.example:6660")
    assert danube.connected[-1] == ("danube+tls://other.example:6660", {}, "")
    _forget()
    danube("brokers", "list", "-s", PROD)
    assert danube.connected[-1] == (PROD, {}, str(tmp_path / "token"))
    _forget()
    os.environ["DANUBE_SERVICE_URL"] = "danube://127.0.0.1:1"
    danube("brokers", "list")
    assert danube.connected[-1] == ("danube://127.0.0.1:1", {}, "")


def _forget() -> None:
    """A command is a process of its own; here they share one."""
    for name in contexts.VARIABLES.values():
        os.environ.pop(name, None)


def test_what_the_user_has_set_stays(danube: Line, tmp_path: Path) -> None:
    danube("context", "add", "prod", "--url", PROD, "--token-file", tmp_path / "token")
    environ = danube.environ | {"DANUBE_TOKEN": "mine"}
    contexts.apply(environ, None)
    assert "DANUBE_TOKEN_FILE" not in environ and environ["DANUBE_SERVICE_URL"] == PROD
    environ = danube.environ | {"DANUBE_SERVICE_URL": "danube://other:1"}
    contexts.apply(environ, "prod")  # said by name: it goes before the variable
    assert environ["DANUBE_SERVICE_URL"] == PROD


def test_an_error_says_that_the_address_is_the_contexts(danube: Line) -> None:
    from danube.errors import ConnectionFailed

    danube("context", "add", "prod", "--url", PROD)
    danube.refuses = ConnectionFailed("no")
    assert "the context in use" in danube("brokers", "list", exit_code=6).stderr


# -- login --------------------------------------------------------------------------------------------------


def test_login_stores_a_token_for_its_owners_eyes_alone(danube: Line, tmp_path: Path) -> None:
    danube("context", "add", "prod", "--url", PROD)
    before = os.umask(0)
    try:
        said = danube("login", input="dnb_1_secret\n").stdout
    finally:
        os.umask(before)
    assert danube.connected[-1][0] == PROD and danube.connected[-1][1]["token"] == "dnb_1_secret"
    path = Path(contexts.read(danube.environ).by_name["prod"]["token_file"])
    assert path.read_text() == "dnb_1_secret\n" and "dnb_1_secret" not in said
    assert {oct(one.stat().st_mode & 0o777) for one in (path, contexts.file_of(danube.environ))} == {"0o600"}
    danube("context", "delete", "prod")
    assert not path.exists()


def test_a_token_that_the_broker_refuses_is_not_stored(danube: Line) -> None:
    danube("context", "add", "prod", "--url", PROD)
    danube.refuses = NotAuthenticated("no")
    danube("login", input="dnb_1_secret", exit_code=5)
    assert "token_file" not in contexts.read(danube.environ).by_name["prod"]
    danube("login", "prod", "--unchecked", input="dnb_1_secret")
    assert "token_file" in contexts.read(danube.environ).by_name["prod"]


def test_a_terminal_is_prompted_and_shows_nothing(danube: Line) -> None:
    danube("context", "add", "prod", "--url", PROD)
    danube.terminal = True
    assert "secret" not in danube("login", "--unchecked", input="dnb_1_secret\n").output


@pytest.mark.parametrize("text", ["", "a\nb", "a\x00b", "\u00e4", "a" * 8_193])
def test_what_is_no_token_is_not_stored(danube: Line, text: str) -> None:
    danube("context", "add", "prod", "--url", PROD)
    assert "no token" in danube("login", "--unchecked", input=text, exit_code=2).stderr


def test_login_needs_a_context(danube: Line) -> None:
    assert "no context is in use" in danube("login", input="x", exit_code=2).stderr
    danube("login", "prod", input="x", exit_code=3)


# -- the file -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{}",
        '{"current": 1, "contexts": {}}',
        '{"current": "", "contexts": {"a": {"b": "c"}}}',
        '{"current": "", "contexts": {"a": {"url": 1}}}',
        '{"current": "", "contexts": []}',
    ],
)
def test_a_file_that_is_none_of_contexts_is_an_error(danube: Line, content: str) -> None:
    path = contexts.file_of(danube.environ)
    path.parent.mkdir(parents=True)
    path.write_text(content)
    with pytest.raises(ConfigInvalid, match="no file of contexts"):
        contexts.read(danube.environ)


def test_files_that_cannot_be_read_or_written_are_errors(danube: Line, tmp_path: Path) -> None:
    (tmp_path / "danube" / "contexts.json").mkdir(parents=True)
    with pytest.raises(ConfigInvalid, match="cannot be read"):
        contexts.read(danube.environ)
    with pytest.raises(StorageFailed, match="cannot be written"):
        contexts.write(danube.environ, contexts.Contexts("", {}))
    (tmp_path / "file").touch()
    assert contexts.read({"XDG_CONFIG_HOME": str(tmp_path / "file")}).by_name == {}


def test_a_home_of_another_user_has_no_contexts(danube: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `runuser`, which keeps HOME, or in a unit with ProtectHome: commands go on as without any."""

    def refuse(*_: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert contexts.read(danube.environ).by_name == {}


def test_the_folder_follows_xdg_and_home() -> None:
    assert contexts.folder({"XDG_CONFIG_HOME": "/x", "HOME": "/h"}) == Path("/x/danube")
    assert contexts.folder({"XDG_CONFIG_HOME": "x", "HOME": "/h"}) == Path("/h/.config/danube")


@pytest.mark.parametrize("name", ["", "../a", "a/b", ".a", "a b", "\u00e4", "a" * 65])
def test_names_that_are_none(name: str) -> None:
    with pytest.raises(InvalidArgument, match="name of a context"):
        contexts.check_name(name)


def test_what_is_missing_is_an_error(danube: Line) -> None:
    with pytest.raises(NotFound, match="no context"):
        contexts.Contexts("", {}).get("a")
    danube("context", "use", "a", exit_code=3)
    danube("context", "delete", "a", exit_code=3)
    danube("context", "add", "a", "--url", PROD, "--tls-cert", "c", exit_code=2)
    danube("context", "add", "a", "--url", "ftp://x", exit_code=2)
