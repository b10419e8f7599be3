"""The storage section: its keys, those of upstream's files, contradictions, and secrets that stay hidden."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from danube.cli.main import root
from danube.cli.terminal.services import Services
from danube.config import loading as config
from danube.config.loading import BrokerConfig, load
from danube.config.sections import HIDDEN
from danube.errors import ConfigInvalid

SECRET = "s3cr3t-7f21c0"
UPSTREAM = f"""
storage:
  mode: object_store
  local_wal_root: ./wal
  metadata_prefix: /danube
  durable:
    backend: s3
    root: bucket/prefix
    region: eu-1
    endpoint: http://localhost:9000
    access_key: {SECRET}a
    secret_key: {SECRET}b
    session_token: {SECRET}c
    profile: work
    role_arn: arn:x
    anonymous: false
    virtual_host_style: true
    project: none
  local_retention: {{time_minutes: 2880, size_mb: 20480, check_interval_minutes: 5}}
  wal:
    file_name: wal.log
    cache_capacity: 1024
    rotation: {{max_bytes: 536870912, max_hours: 24}}
    file_sync: {{interval_ms: 5000, max_batch_bytes: 10485760}}
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "danube.yml"
    path.write_text(text)
    return path


def loaded(folder: Path, text: str) -> BrokerConfig:
    return load(written(folder, text), {}, {}).config


def problems(folder: Path, text: str, flags: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigInvalid) as caught:
        load(written(folder, text), {}, flags or {})
    return "\n".join(f"{one.origin}: {one.what} ({one.hint})" for one in caught.value.facts["problems"])


def test_the_keys_of_upstreams_files_are_taken(tmp_path: Path) -> None:
    found = loaded(tmp_path, UPSTREAM)
    storage = found.storage
    assert found.data_dir == tmp_path / "wal"
    assert found.wal.segment_bytes == 536_870_912
    assert (storage.mode, storage.url, storage.region) == ("object_store", "s3://bucket/prefix", "eu-1")
    assert (storage.endpoint, storage.profile, storage.role_arn) == ("http://localhost:9000", "work", "arn:x")
    assert [storage.access_key.reveal(), storage.secret_key.reveal(), storage.session_token.reveal()] == [
        SECRET + letter for letter in "abc"
    ]
    assert (storage.anonymous, storage.virtual_host_style) == (False, True)
    assert (storage.local_retention_ms, storage.local_retention_bytes) == (2 * 86_400_000, 20 << 30)
    assert storage.seal_after_ms == 86_400_000


@pytest.mark.parametrize(
    ("text", "url"),
    [
        ("mode: shared_fs, durable: {root: /srv/danube}", "file:///srv/danube"),
        ("mode: shared_fs, durable: {root: shared}", "file://FOLDER/shared"),
        ("mode: shared_fs, root: /srv/danube", "file:///srv/danube"),
        ("mode: object_store, durable: {backend: gcs, root: b/p}", "gs://b/p"),
        ("mode: object_store, durable: {backend: azblob, root: /b/p/}", "az://b/p"),
        ("mode: object_store, durable: {root: 's3://b/p'}", "s3://b/p"),
        ("mode: object_store, object_store: {backend: s3, root: b}", "s3://b"),
    ],
)
def test_a_root_becomes_the_url_of_its_mode(tmp_path: Path, text: str, url: str) -> None:
    found = loaded(tmp_path, f"storage: {{{text}}}\n")
    assert found.storage.url == url.replace("FOLDER", str(tmp_path))


def test_a_local_root_is_the_data_directory(tmp_path: Path) -> None:
    assert loaded(tmp_path, "storage: {mode: local, root: /srv/wal}\n").data_dir == Path("/srv/wal")
    assert loaded(tmp_path, "storage: {mode: local, local_wal_root: /srv/w}\n").data_dir == Path("/srv/w")


def test_keys_of_other_clouds_have_their_place(tmp_path: Path) -> None:
    text = (
        "storage: {mode: object_store, durable: {backend: azblob, root: c, account_name: me, account_key: k}}"
    )
    found = loaded(tmp_path, text).storage
    assert (found.access_key.reveal(), found.secret_key.reveal()) == ("me", "k")
    text = "storage: {mode: object_store, durable: {backend: gcs, root: c, credentials_path: /g.json}}"
    assert loaded(tmp_path, text).storage.credentials_file == "/g.json"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("mode: object_store", "there is no storage.url"),
        ("url: 's3://b/p'", "storage.mode is local"),
        ("mode: shared_fs, url: 's3://b/p'", "does not go with s3://"),
        ("mode: object_store, url: 'file:///srv'", "does not go with file://"),
        ("mode: tape", "is not one of"),
        ("url: ftp://x", "is not a store"),
        ("endpoint: localhost:9000", "is not an endpoint"),
        ("endpoint: http://localhost:9000/a/b", "is not an endpoint"),
        ("part_size: 1MiB", "below the least allowed"),
        ("merge_below: 1GiB, merge_to: 64MiB", "merge_below is above"),
        ("write_buffer: {backend: valkey, endpoints: [a]}", "write_buffer cannot be had here"),
        ("durable: 3", "storage.durable is a section"),
        ("durable: {backend: tape, root: b}", "storage.durable.backend is not one of"),
        ("durable: {rooot: b}", "did you mean root?"),
        ("wal: {rotation: {max_hours: often}}", "is not a duration"),
        ("durable: {region: [a]}", "takes one value"),
        ("region: a, durable: {region: b}", "storage.region is given twice"),
        ("local_wal_root: /a, cache_root: /b", "data_dir is given twice"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, text: str, told: str) -> None:
    found = problems(tmp_path, f"storage: {{{text}}}\n")
    assert told in found
    assert "danube.yml:1" in found


@pytest.mark.parametrize(
    "text",
    [
        f'secret_key: "{SECRET}\\t"',
        f'access_key: "{SECRET}\\t"',
        f'session_token: "{SECRET}\\t"',
        f"url: 's3://user:{SECRET}@bucket'",
        f"endpoint: 'http://user:{SECRET}@host'",
        f"endpoint: 'http://host/?{SECRET}'",
    ],
)
def test_a_complaint_does_not_repeat_a_secret(tmp_path: Path, text: str) -> None:
    found = problems(tmp_path, f"storage: {{{text}}}\n")
    assert SECRET not in found
    said = CliRunner().invoke(
        root, ["config", "check", "--config", str(tmp_path / "danube.yml")], obj=Services()
    )
    assert said.exit_code != 0
    assert SECRET not in said.output + repr(said.exception)


@pytest.mark.parametrize("output", ["yaml", "json", "table"])
def test_config_show_hides_secrets(tmp_path: Path, output: str) -> None:
    path = written(tmp_path, UPSTREAM)
    words = ["config", "show", "--origin", "--config", str(path), "-o", output]
    said = CliRunner().invoke(root, words, obj=Services(environ={}))
    assert said.exit_code == 0
    assert SECRET not in said.output
    assert said.output.count(HIDDEN) == 3


def test_a_mask_is_not_taken_for_a_secret(tmp_path: Path) -> None:
    found = problems(tmp_path, f"storage: {{secret_key: '{HIDDEN}'}}\n")
    assert "in place of a secret" in found


def test_a_configuration_does_not_show_its_secrets(tmp_path: Path) -> None:
    found = load(written(tmp_path, UPSTREAM), {}, {})
    assert SECRET not in f"{found!r} {found.config} {config.values(found.config)}"
    assert SECRET in json.dumps(config.values(found.config, secrets_shown=True))


def test_a_detached_broker_gets_the_secrets_all_the_same(tmp_path: Path) -> None:
    from danube.cli.broker import detached

    found = loaded(tmp_path, UPSTREAM)
    environ = {
        name: text for name, text in detached._environment(found).items() if name.startswith("DANUBE_")
    }
    assert load(None, environ, {}).config == found
    assert SECRET not in " ".join(detached._flags(found)), "every process sees the arguments"


def test_secrets_come_from_the_environment() -> None:
    environ = {"DANUBE_STORAGE__SECRET_KEY": SECRET, "DANUBE_STORAGE__ACCESS_KEY_FILE": "/run/key"}
    storage = load(None, environ, {}).config.storage
    assert (storage.secret_key.reveal(), storage.access_key_file) == (SECRET, "/run/key")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (
            ["--storage", "s3://b/p", "--s3-endpoint", "http://h:9000"],
            ("object_store", "s3://b/p", "http://h:9000"),
        ),
        (["--storage", "file:///srv"], ("shared_fs", "file:///srv", "")),
        ([], ("local", "", "")),
    ],
)
def test_start_takes_the_store_as_flags(
    tmp_path: Path, words: list[str], expected: tuple[str, str, str]
) -> None:
    started: list[BrokerConfig] = []

    def start(given: BrokerConfig, tell: Any, again: Any) -> int:
        started.append(given)
        return 0

    words = ["start", "--data-dir", str(tmp_path), *words]
    said = CliRunner().invoke(root, words, obj=Services(environ={}, start_broker=start))
    assert said.exit_code == 0, said.output
    storage = started[0].storage
    assert (storage.mode, storage.url, storage.endpoint) == expected


def test_a_wrong_flag_is_named(tmp_path: Path) -> None:
    words = ["start", "--data-dir", str(tmp_path), "--storage", "s4://b"]
    said = CliRunner().invoke(root, words, obj=Services(environ={}))
    assert said.exit_code != 0
    error = said.exception
    text = said.output + (repr(error) if isinstance(error, ConfigInvalid) else "")
    assert "flag --storage" in text
    assert "storage.url" in text
