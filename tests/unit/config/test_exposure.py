"""A start that opens a port to others without asking them anything is refused, unless that is meant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from danube import app
from danube.cli.main import root
from danube.cli.terminal.services import Services
from danube.config.exposure import open_doors, refuse
from danube.config.loading import BrokerConfig, load
from danube.errors import ConfigInvalid, exit_code_of
from danube.host.local_socket import loopback

MEMBER = {"cluster.seed_nodes": "10.0.0.1:7650"}
FILES = {f"cluster.{name}": name for name in ("cert_file", "key_file", "ca_file")}


def config_of(**flags: Any) -> BrokerConfig:
    return load(
        None, {"HOME": "/nowhere"}, {key.replace("__", "."): value for key, value in flags.items()}
    ).config


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"])
def test_only_this_host_reaches_loopback(host: str) -> None:
    assert loopback(host)
    config = config_of(server__host=host)
    refuse(config)
    assert config.only_this_host and config.reflects


@pytest.mark.parametrize(
    "host",
    [
        "0.0.0.0",
        "::",
        "10.0.0.1",
        "broker.example",
        "fe80::1",
        "localhost.example",
        "127.example",
        "::1.example",
    ],
)
def test_a_start_for_other_hosts_is_refused_and_says_what_to_set(host: str) -> None:
    with pytest.raises(ConfigInvalid, match="without encryption or authentication") as caught:
        refuse(config_of(server__host=host))
    assert exit_code_of(caught.value) == 11
    assert "--insecure" in caught.value.hint and "server.insecure" in caught.value.hint
    meant = config_of(server__host=host, server__insecure="true")
    refuse(meant)
    assert not meant.only_this_host and not meant.reflects
    assert config_of(server__host=host, server__insecure="true", grpc__reflection="on").reflects
    assert [key for key, _ in open_doors(config_of(server__host=host, server__insecure="true"))] == [
        "server.host"
    ]


def test_members_that_others_reach_need_certificates() -> None:
    member = {**MEMBER, "cluster.raft_addr": "10.0.0.1:7650"}
    with pytest.raises(ConfigInvalid, match="without certificates"):
        refuse(config_of(**member))
    refuse(config_of(**member, **FILES))
    refuse(config_of(**{**member, "cluster.seed_nodes": ""}))  # no cluster
    etcd = {"cluster.metadata": "etcd://10.0.0.2:2379", "cluster.raft_addr": "10.0.0.1:7650"}
    with pytest.raises(ConfigInvalid, match="without certificates"):
        refuse(config_of(**etcd))


def test_every_open_port_is_named() -> None:
    with pytest.raises(ConfigInvalid) as caught:
        refuse(config_of(server__host="0.0.0.0", **MEMBER, **{"cluster.raft_addr": "a.example:7650"}))
    assert [one.origin for one in caught.value.facts["problems"]] == ["server.host", "cluster.raft_addr"]


@pytest.mark.parametrize("more", [[], ["--detach"]])
def test_the_command_refuses_before_it_makes_anything(tmp_path: Path, more: list[str]) -> None:
    words = ["start", "--host", "0.0.0.0", "--data-dir", str(tmp_path / "data"), *more]
    result = CliRunner().invoke(root, words, obj=Services(environ={}), prog_name="danube")
    assert result.exit_code == 11 and "--insecure" in result.stderr
    assert not (tmp_path / "data").exists()


def test_the_broker_itself_refuses_too(tmp_path: Path) -> None:
    config = config_of(server__host="0.0.0.0", data_dir=str(tmp_path / "data"))
    with pytest.raises(ConfigInvalid, match="listening on"):
        app.start(config, announce=lambda news: None)
    assert not (tmp_path / "data").exists()


def test_the_flag_and_the_key_are_the_same_word() -> None:
    started: list[BrokerConfig] = []

    def start(config: BrokerConfig, announce: object, again: object) -> int:
        started.append(config)
        return 0

    for words, environ in ((["--insecure"], {}), ([], {"DANUBE_SERVER__INSECURE": "true"})):
        services = Services(environ={"HOME": "/nowhere", **environ}, start_broker=start)
        result = CliRunner().invoke(root, ["start", "--host", "0.0.0.0", *words], obj=services)
        assert result.exit_code == 0, result.output
    assert [config.server.insecure for config in started] == [True, True]
