"""Which etcd a broker uses, how it gets in, and when it is refused there."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
import yaml

from danube import app
from danube.broker.clustered.controller import check_cluster
from danube.cluster.control.node import Node, NodeSettings
from danube.cluster.control.recovery import rejoin
from danube.cluster.control.survey import member
from danube.cluster.etcd.calls import EtcdPlace
from danube.cluster.etcd.log import EtcdLog
from danube.cluster.etcd.place import EtcdFormation, check_place, place_of
from danube.cluster.links.transport import bind
from danube.cluster.log.local_log import LocalLog
from danube.cluster.log.node_files import ETCD, NodeRecord, load_node, store_node
from danube.config import loading as config
from danube.config.sections import ClusterConfig, Secret
from danube.core.metadata.commands import CreateNamespace
from danube.errors import (
    ConfigInvalid,
    DanubeError,
    EtcdRefused,
    StorageIncompatible,
    Unavailable,
    WrongState,
)
from tests.broker_process import free_port
from tests.certificates import Authority
from tests.etcd_server import EtcdServer
from tests.s3_server import NoServer


def cluster(server: EtcdServer, prefix: str = "", **options: Any) -> ClusterConfig:
    url = f"etcd://127.0.0.1:{server.port}{prefix.rstrip('/')}"
    return replace(config.load(environ={}).config.cluster, metadata=url, **options)


def problems(**flags: str) -> str:
    keys = {f"cluster.{name}": value for name, value in flags.items()}
    with pytest.raises(ConfigInvalid) as caught:
        config.load(environ={}, flags=keys)
    return f"{caught.value} {caught.value.facts}"


def test_a_url_names_endpoints_a_prefix_and_whether_there_is_tls() -> None:
    keys = {"cluster.metadata": "etcd://127.0.0.1:2379,[::1]:2380/a/b/"}
    loaded = config.load(environ={}, flags=keys).config.cluster
    assert loaded.enabled
    place = place_of(loaded)
    assert place.endpoints == ("http://127.0.0.1:2379", "http://[::1]:2380")
    assert (place.prefix, place.tls, place.compacted) == ("/a/b/", None, True)
    secure = place_of(replace(loaded, metadata="etcds://h:2379", etcd_compact=False))
    assert secure.endpoints == ("https://h:2379",) and secure.tls is not None
    assert (secure.prefix, secure.compacted) == ("/danube/", False)


@pytest.mark.parametrize(
    "url",
    ["http://h:2379", "h:2379", "etcd://", "etcd://h", "etcd://h:2379,", "etcd://h:1/a b", "etcd://h:1/.."],
)
def test_what_is_no_etcd_is_refused(url: str) -> None:
    assert "cluster.metadata" in problems(metadata=url)


def test_a_password_is_never_in_the_url_nor_in_a_complaint() -> None:
    said = problems(metadata="etcd://root:geheim@h:2379")
    assert "etcd_password_file" in said and "geheim" not in said


def test_settings_that_contradict_each_other_are_refused() -> None:
    url = "etcd://127.0.0.1:2379"
    assert "both given" in problems(metadata=url, seed_nodes="127.0.0.1:1")
    assert "both given" in problems(metadata=url, join="127.0.0.1:1")
    assert "both given" in problems(metadata=url, etcd_user="u", etcd_password="p", etcd_password_file="f")
    assert "goes with a password" in problems(metadata=url, etcd_user="u")
    assert "goes with a password" in problems(metadata=url, etcd_password_file="f")
    assert "speaks no TLS" in problems(metadata=url, etcd_ca_file="f")
    assert "etcd_key_file is missing" in problems(metadata="etcds://127.0.0.1:2379", etcd_cert_file="f")
    assert "cannot be reached from other hosts" in problems(metadata="etcd://elsewhere:2379")


def test_files_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    plain = replace(config.load(environ={}).config.cluster, metadata="etcds://h:2379")
    with pytest.raises(ConfigInvalid, match="etcd_password_file"):
        place_of(replace(plain, etcd_user="u", etcd_password_file=str(tmp_path / "none")))
    (tmp_path / "password").write_text("geheim\n")
    read = place_of(replace(plain, etcd_user="u", etcd_password_file=str(tmp_path / "password")))
    assert read.password == "geheim" and "geheim" not in repr(read)
    for name in ("etcd_ca_file", "etcd_cert_file"):
        with pytest.raises(ConfigInvalid, match="TLS files"):
            place_of(replace(plain, **{name: str(tmp_path / "none"), "etcd_key_file": "none"}))


@pytest.fixture
def prefix(etcd_server: EtcdServer) -> str:
    return etcd_server.new_prefix()


def made(server: EtcdServer, prefix: str, name: str = "danube") -> None:
    log: EtcdLog = server.log(prefix)
    log.make_cluster("c1", name)
    log.close()


def test_a_directory_and_an_etcd_that_do_not_belong_together_are_refused(
    etcd_server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    asked = cluster(etcd_server, prefix)
    check_place(asked, tmp_path)
    store_node(tmp_path, NodeRecord("5", "c1", ETCD))
    with pytest.raises(WrongState, match="holds no cluster"):
        check_place(asked, tmp_path)
    made(etcd_server, prefix)
    check_place(asked, tmp_path)
    with pytest.raises(ConfigInvalid, match=r"cluster\.name is 'other'"):
        check_place(replace(asked, name="other"), tmp_path)
    store_node(tmp_path, NodeRecord("5", "c2", ETCD))
    with pytest.raises(WrongState, match="holds cluster c1"):
        check_cluster(asked, tmp_path)
    calls = etcd_server.calls()
    calls.put(f"{prefix}x/leader".encode(), b"")
    calls.close()
    with pytest.raises(StorageIncompatible, match="no cluster's"):
        check_place(cluster(etcd_server, f"{prefix}x"), tmp_path)


def test_an_etcd_that_is_away_is_waited_for(tmp_path: Path) -> None:
    away = replace(config.load(environ={}).config.cluster, metadata=f"etcd://127.0.0.1:{free_port()}")
    check_place(away, tmp_path)


def test_directories_of_another_kind_are_refused(
    etcd_server: EtcdServer, prefix: str, tmp_path: Path
) -> None:
    asked = cluster(etcd_server, prefix)
    alone, voter, waits = tmp_path / "alone", tmp_path / "voter", tmp_path / "etcd"
    with LocalLog(alone / "metadata") as log:
        log.propose(CreateNamespace(namespace="n"))
    with pytest.raises(WrongState, match="was alone"):
        check_cluster(asked, alone)
    (voter / "raft").mkdir(parents=True)
    (voter / "raft" / "raft.log").write_bytes(b"")
    store_node(voter, NodeRecord("5", "c1", "member"))
    with pytest.raises(WrongState, match="without etcd"):
        check_cluster(asked, voter)
    waits.mkdir()
    store_node(waits, NodeRecord("5", "c1", ETCD))
    assert load_node(waits).state == ETCD
    loaded = config.load(environ={}).config
    for config_of in (loaded, replace(loaded, cluster=replace(loaded.cluster, seed_nodes="127.0.0.1:1"))):
        with pytest.raises(WrongState, match="in etcd"):
            app._controller(replace(config_of, data_dir=waits))
    with pytest.raises(WrongState, match="in etcd"):
        member(waits)
    with pytest.raises(WrongState, match="in etcd"):
        rejoin(waits)


def test_a_node_without_raft_waits_for_etcd_and_says_so(tmp_path: Path) -> None:
    endpoint = f"http://127.0.0.1:{free_port()}"

    async def story() -> None:
        settings = NodeSettings(
            data_dir=tmp_path,
            cluster="test",
            raft_addr="127.0.0.1:1",
            etcd=EtcdPlace(endpoints=(endpoint,), prefix="/d/"),
        )
        node = Node(settings, None, print)
        running = asyncio.create_task(node.run(bind("127.0.0.1", 0)))
        try:
            async with asyncio.timeout(10):
                while node.status().waiting is None:
                    await asyncio.sleep(0.01)
            told = node.status().waiting
            assert told is not None and "etcd cannot be reached" in told.why and told.missing == [endpoint]
        finally:
            running.cancel()
            node.stop()

    asyncio.run(story())


def test_a_node_that_was_removed_is_not_added_again(etcd_server: EtcdServer, prefix: str) -> None:
    made(etcd_server, prefix, "test")
    place: EtcdPlace = etcd_server.place(prefix)

    class Nothing:
        applied_index = 0

    def find(record: NodeRecord, address: str) -> dict[str, str]:
        machine: Any = Nothing()
        return asyncio.run(EtcdFormation(place, record, "test", address, machine).find()).members

    assert find(NodeRecord("1"), "h:1") == {"1": "h:1"}
    assert find(NodeRecord("1", "c1", ETCD), "h:2") == {"1": "h:2"}, "at another address"
    assert find(NodeRecord("2", "c1", ETCD), "h:3") == {"1": "h:2"}
    log = etcd_server.log(prefix)
    log.remove_member("1")
    log.close()
    assert find(NodeRecord("1", "c1", ETCD), "h:2") == {}


class Guarded(EtcdServer):
    """An etcd with TLS, which may ask for certificates of its authority."""

    def __init__(self, directory: Path, asked: bool) -> None:
        super().__init__()
        self.asked, self.metrics_port = asked, free_port()
        self.files = Authority(directory).sign("etcd", "IP:127.0.0.1")

    def command(self) -> list[str]:
        files = self.files
        plain = [one.replace("http://127.0.0.1", "https://127.0.0.1") for one in super().command()]
        peer = next(one for one in plain if one.startswith("one="))[len("one=") :]
        return [
            *(one.replace(peer, peer.replace("https", "http")) for one in plain),
            "--cert-file", files.cert_file, "--key-file", files.key_file,
            *(["--trusted-ca-file", files.ca_file, "--client-cert-auth"] if self.asked else []),
            "--listen-metrics-urls", f"http://127.0.0.1:{self.metrics_port}",
        ]  # fmt: skip

    def _answers(self) -> bool:
        give_up = time.monotonic() + 20
        while time.monotonic() < give_up:
            probe = HTTPConnection("127.0.0.1", self.metrics_port, timeout=1)
            with closing(probe), suppress(OSError):
                probe.request("GET", "/health")
                if probe.getresponse().status == 200:
                    return True
            time.sleep(0.05)
        return False


@pytest.fixture
def guarded(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Guarded]:
    try:
        EtcdServer.program()
        server = Guarded(tmp_path / "certificates", request.param)
        server.start()
    except NoServer as error:
        pytest.skip(str(error))
    yield server
    server.stop()


def tls_of(server: Guarded) -> ClusterConfig:
    loaded = config.load(environ={}).config.cluster
    files = server.files
    return replace(
        loaded,
        metadata=f"etcds://127.0.0.1:{server.port}",
        etcd_ca_file=files.ca_file,
        etcd_cert_file=files.cert_file if server.asked else "",
        etcd_key_file=files.key_file if server.asked else "",
    )


def enable_users(secure: ClusterConfig) -> None:
    """From now on only root with the password "geheim" is let in."""
    calls = place_of(secure).calls()
    for path, asked in (
        ("user/add", {"name": "root", "password": "geheim"}),
        ("role/add", {"name": "root"}),
        ("user/grant", {"user": "root", "role": "root"}),
        ("enable", {}),
    ):
        calls._ask(f"/v3/auth/{path}", asked, again=False)
    calls.close()


@pytest.mark.parametrize("guarded", [True], indirect=True)
def test_a_client_certificate_lets_a_broker_in_and_nobody_else(guarded: Guarded, tmp_path: Path) -> None:
    secure = tls_of(guarded)
    place = place_of(secure)
    calls = place.calls()
    calls.check_version()
    EtcdLog(calls, place.prefix).make_cluster("c1", "danube")
    calls.close()
    check_place(secure, tmp_path)
    stranger = place_of(replace(secure, etcd_cert_file="", etcd_key_file="")).calls()
    with pytest.raises(DanubeError):
        stranger.get(b"a")
    stranger.close()
    enable_users(secure)
    named = place_of(replace(secure, etcd_user="root", etcd_password=Secret("geheim"))).calls()
    with pytest.raises(Unavailable, match="CommonName"):
        named.get(b"a")
    named.close()


@pytest.mark.parametrize("guarded", [False], indirect=True)
def test_a_password_over_tls_lets_a_broker_in_and_nobody_else(guarded: Guarded, tmp_path: Path) -> None:
    secure = tls_of(guarded)
    enable_users(secure)
    (tmp_path / "password").write_text("geheim\n")
    let_in = replace(secure, etcd_user="root", etcd_password_file=str(tmp_path / "password"))
    check_place(let_in, tmp_path)
    place = place_of(let_in)
    calls = place.calls()
    EtcdLog(calls, place.prefix).make_cluster("c1", "danube")
    calls.close()
    (tmp_path / "password").write_text("falsch\n")
    for refused in (let_in, secure):
        with pytest.raises(EtcdRefused, match="etcd refuses"):
            check_place(refused, tmp_path)
    started = start_with(let_in, tmp_path / "data")
    assert started.returncode == 5, started.stderr
    assert started.stderr.splitlines() == [
        "error: etcd refuses",
        "  why: etcdserver: authentication failed, invalid user ID or password",
        "  try: check cluster.etcd_user, its password and its role in etcd",
    ]


def start_with(cluster: ClusterConfig, data_dir: Path) -> subprocess.CompletedProcess[str]:
    """Run `danube start` with the etcd settings of ``cluster`` until it ends."""
    named = ("metadata", "etcd_ca_file", "etcd_user", "etcd_password_file")
    settings = {key: str(getattr(cluster, key)) for key in named} | {"raft_addr": "127.0.0.1:0"}
    path = data_dir.parent / "danube.yaml"
    path.write_text(yaml.safe_dump({"cluster": settings}))
    command = [sys.executable, "-m", "danube", "start", "--config", str(path), "--data-dir", str(data_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)
