"""``danube security init``: what it makes, for whose eyes, and that a broker takes it."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from danube.cli.main import root
from danube.cli.terminal.services import Services
from danube.config.auth import credentials_of, keys_of
from danube.config.exposure import refuse
from danube.config.loading import BrokerConfig, load
from danube.core.security.principals import BOOTSTRAP


def init(data: Path, *words: str, exit_code: int = 0) -> Result:
    command = ["security", "init", "--data-dir", str(data), *words]
    result = CliRunner().invoke(root, command, obj=Services(environ={}))
    assert result.exit_code == exit_code, result.output
    return result


def test_what_it_makes_is_a_configuration_that_asks_everybody(tmp_path: Path) -> None:
    said = init(tmp_path / "data", "--host", "broker.example").stdout
    folder = tmp_path / "data" / "security"
    assert f"danube start --secure --data-dir {tmp_path / 'data'}" in said
    config = load(
        folder / "danube.yml", {}, {"data_dir": str(tmp_path / "data"), "server.host": "0.0.0.0"}
    ).config
    refuse(config)  # it may listen for other hosts
    assert config.auth.mode == "token" and config.tls.cert_file and config.audit.mode == "on"
    credentials = credentials_of(config.auth, keys_of(config.auth, short_allowed=False))
    now_us = time.time_ns() // 1000
    identity = credentials.check((folder / "admin.token").read_text().strip(), now_us)
    assert identity.principal == BOOTSTRAP and identity.token_id and not config.auth.super_admins
    assert 86_000 < (identity.expires_us - now_us) / 1e6 < 86_401
    assert (folder / "admin.token").read_text().strip() not in said


def test_secrets_are_the_owners_alone_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        init(tmp_path / "data")
    finally:
        os.umask(before)
    folder = tmp_path / "data" / "security"
    assert folder.parent.stat().st_mode & 0o777 == 0o700  # logs and records of the broker lie in it
    modes = {path.name: oct(path.stat().st_mode & 0o777) for path in folder.iterdir()}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {name for name, mode in modes.items() if mode != "0o600"} == {"authority.pem", "broker.pem"}


def test_keys_stay_and_the_token_is_made_anew(tmp_path: Path) -> None:
    init(tmp_path / "data")
    folder = tmp_path / "data" / "security"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    init(tmp_path / "data")
    assert {name for name, content in before.items() if (folder / name).read_bytes() != content} == {
        "admin.token"
    }


def test_a_new_token_is_of_the_key_that_signs_now(tmp_path: Path) -> None:
    data = tmp_path / "data"
    init(data)
    settings = data / "security" / "danube.yml"
    new = data / "security" / "new.key"
    new.write_text("n" * 40)
    new.chmod(0o600)
    settings.write_text(
        settings.read_text().replace("signing.key", "new.key").replace("kid: '1'", "kid: '2'")
    )
    init(data)
    auth = load(settings, {}, {"data_dir": str(data)}).config.auth
    credentials = credentials_of(auth, keys_of(auth, short_allowed=False))
    token = (data / "security" / "admin.token").read_text().strip()
    assert credentials.check(token, time.time_ns() // 1000).key_id == "2"


def test_a_path_that_the_configuration_cannot_name_is_refused(tmp_path: Path) -> None:
    assert "no path with blanks" in init(tmp_path / "a b", exit_code=2).stderr
    assert not (tmp_path / "a b").exists()


def start(data: Path, *words: str, exit_code: int = 0) -> tuple[Result, list[BrokerConfig]]:
    started: list[BrokerConfig] = []

    def note_it(config: BrokerConfig, announce: object, again: object) -> int:
        started.append(config)
        return 0

    services = Services(environ={}, start_broker=note_it)
    result = CliRunner().invoke(root, ["start", "--data-dir", str(data), *words], obj=services)
    assert result.exit_code == exit_code, result.output
    return result, started


def test_a_secure_start_makes_the_folder_once_and_says_what_comes_next(tmp_path: Path) -> None:
    said, (config,) = start(tmp_path / "data", "--secure", "--native-port", "7000", "--host", "0.0.0.0")
    assert config.asks_clients and config.tls.cert_file and config.server.native_port == 7000
    assert (
        said.stderr.count("danube security") == 5
        and "--role admin" in said.stderr
        and "localhost:7000" in said.stderr
    )
    token = (tmp_path / "data" / "security" / "admin.token").read_text()
    said, (config,) = start(tmp_path / "data", "--secure")
    assert "danube security" not in said.stderr and config.asks_clients
    assert (tmp_path / "data" / "security" / "admin.token").read_text() == token and token not in said.output


def test_a_secured_directory_is_not_served_to_everybody(tmp_path: Path) -> None:
    init(tmp_path / "data")
    said, started = start(tmp_path / "data", exit_code=11)
    assert "--secure" in said.stderr and not started
    assert len(start(tmp_path / "data", "--insecure")[1]) == 1


def test_a_secure_start_takes_no_other_configuration(tmp_path: Path) -> None:
    (tmp_path / "danube.yml").write_text("workers: 1\n")
    said, _ = start(tmp_path / "data", "--secure", "--config", str(tmp_path / "danube.yml"), exit_code=2)
    assert "of its own" in said.stderr


@pytest.mark.parametrize("name", ["a:b", "a#b", "it's", "[x]", "*y", "ünï", "&z", "{q}"])
def test_a_path_with_letters_of_yaml_is_written_so_that_it_is_read(tmp_path: Path, name: str) -> None:
    data = tmp_path / name
    init(data)
    config = load(data / "security" / "danube.yml", {}, {"data_dir": str(data)}).config
    assert config.tls.cert_file == str(data / "security" / "broker.pem")
    assert keys_of(config.auth, short_allowed=False)


@pytest.mark.parametrize("name", ["a b", "a,b"])
def test_a_path_that_the_setting_cannot_hold_is_refused_before_anything_is_made(
    tmp_path: Path, name: str
) -> None:
    assert "cannot hold keys" in init(tmp_path / name, exit_code=2).stderr
    assert not (tmp_path / name).exists()
