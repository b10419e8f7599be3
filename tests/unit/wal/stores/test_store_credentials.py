"""Where a store's credentials come from, that renewed ones are seen, and that none is ever told."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from danube.config.sections import Secret, StorageSettings
from danube.errors import StoreRefused
from danube.wal.stores.credentials import Credentials, CredentialSource

SECRET = "s3cr3t-7f21c0"
PROFILES = f"""
[default]
aws_access_key_id = default-key
aws_secret_access_key = {SECRET}
region = eu-default
[work]
aws_access_key_id = work-key
aws_secret_access_key = {SECRET}
aws_session_token = work-token
[half]
aws_access_key_id = half-key
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(PROFILES)
    (tmp_path / ".aws" / "config").write_text("[profile work]\nregion = eu-work\n")
    return tmp_path


def source(home: Path, environ: dict[str, str] | None = None, **settings: Any) -> CredentialSource:
    return CredentialSource(StorageSettings(**settings), {"HOME": str(home)} | (environ or {}))


AWS = {"AWS_ACCESS_KEY_ID": "env-key", "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": "env-token"}


def test_the_nearest_source_wins(home: Path) -> None:
    given = {"access_key": Secret("given-key"), "secret_key": Secret(SECRET)}
    assert source(home, AWS, profile="work", **given).current() == Credentials("given-key", SECRET)
    assert source(home, AWS, profile="work").current() == Credentials("work-key", SECRET, "work-token")
    assert source(home, AWS).current() == Credentials("env-key", SECRET, "env-token")
    assert source(home).current() == Credentials("default-key", SECRET)
    assert source(home, {"AWS_PROFILE": "work"}).current() == Credentials("work-key", SECRET, "work-token")
    assert source(home / "none").current() is None
    assert source(home, AWS, anonymous=True, **given).current() is None


def test_half_an_environment_is_none(home: Path) -> None:
    found = source(home, {"AWS_ACCESS_KEY_ID": "env-key"}).current()
    assert found == Credentials("default-key", SECRET)


def test_the_files_of_profiles_may_lie_elsewhere(home: Path) -> None:
    (home / "other").write_text(PROFILES.replace("work-key", "other-key"))
    environ = {"AWS_SHARED_CREDENTIALS_FILE": str(home / "other"), "AWS_PROFILE": "work"}
    found = source(home, environ).current()
    assert found is not None and found.access_key == "other-key"
    (home / "config").write_text("[profile work]\nregion = eu-other\n")
    assert source(home, environ | {"AWS_CONFIG_FILE": str(home / "config")}).region() == "eu-other"


def test_the_region_has_its_own_order(home: Path) -> None:
    assert source(home, {"AWS_REGION": "eu-env"}, region="eu-given").region() == "eu-given"
    assert source(home, {"AWS_REGION": "eu-env", "AWS_DEFAULT_REGION": "x"}).region() == "eu-env"
    assert source(home, {"AWS_DEFAULT_REGION": "eu-second"}).region() == "eu-second"
    assert source(home, profile="work").region() == "eu-work"
    assert source(home).region() == "eu-default"
    assert source(home / "none").region() == ""


def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    for name, text in (("a", "key-1\n"), ("s", f"{SECRET}\n"), ("t", "token-1")):
        (tmp_path / name).write_text(text)
    files = {
        "access_key_file": str(tmp_path / "a"),
        "secret_key_file": str(tmp_path / "s"),
        "session_token_file": str(tmp_path / "t"),
    }
    made = source(tmp_path, AWS, **files)
    assert made.current() == Credentials("key-1", SECRET, "token-1")
    (tmp_path / "new").write_text("key-22")
    os.rename(tmp_path / "new", tmp_path / "a")
    assert made.current() == Credentials("key-22", SECRET, "token-1")


def test_an_unchanged_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from danube.host import files

    (tmp_path / "s").write_text(SECRET)
    read: list[Path] = []
    plain = files.read_bounded
    monkeypatch.setattr(files, "read_bounded", lambda path, size: read.append(path) or plain(path, size))
    made = source(tmp_path, access_key=Secret("key"), secret_key_file=str(tmp_path / "s"))
    for _ in range(5):
        assert made.current() is not None
    assert len(read) == 1


def broken_sources(home: Path) -> list[CredentialSource]:
    (home / "unreadable").mkdir()
    (home / "large").write_text(SECRET * 10_000)
    (home / "odd").write_text(f"aws_secret_access_key {SECRET}\n[[[")
    key = {"access_key": Secret("given-key")}
    return [
        source(home, **key),
        source(home, secret_key=Secret(SECRET)),
        source(home, secret_key_file=str(home / "none"), **key),
        source(home, secret_key_file=str(home / "unreadable"), **key),
        source(home, secret_key_file=str(home / "large"), **key),
        source(home, profile="unknown"),
        source(home, profile="half"),
        source(home, {"AWS_PROFILE": "unknown"}),
        source(home, {"AWS_SHARED_CREDENTIALS_FILE": str(home / "none")}, profile="work"),
        source(home, {"AWS_SHARED_CREDENTIALS_FILE": str(home / "odd")}, profile="work"),
    ]


def test_a_source_that_is_asked_for_and_fails_is_named_without_its_content(home: Path) -> None:
    for made in broken_sources(home):
        with pytest.raises(StoreRefused) as caught:
            made.current()
        error = caught.value
        assert error.hint
        told = f"{error!r} {error} {error.hint} {error.facts} {error.__context__!r}"
        assert error.__suppress_context__ or error.__context__ is None
        assert SECRET not in told


def test_a_secret_does_not_show_itself() -> None:
    settings = StorageSettings(secret_key=Secret(SECRET), access_key=Secret("AKIA-1"))
    credentials = Credentials("AKIA-1", SECRET, "token")
    for text in (
        repr(settings),
        str(settings),
        repr(credentials),
        f"{credentials}",
        f"{settings.secret_key}",
    ):
        assert SECRET not in text
        assert "AKIA-1" not in text
    assert settings.secret_key.reveal() == SECRET
    assert Secret("a") == Secret("a") != Secret("b")
    assert Secret("a") != "a"
    assert len({Secret("a"), Secret("a")}) == 1
    assert not Secret("")
