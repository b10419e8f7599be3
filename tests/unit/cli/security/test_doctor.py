"""``danube doctor``: each check can fail, and says why; what is looked at is what is there."""

from __future__ import annotations

import os
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from danube.cli.main import root
from danube.cli.security.doctor import BUILT_IN, CHECKS, Patient, examined
from danube.cli.security.looking import Port, Seen, looked_at, open_to_others, processes_below
from danube.cli.terminal.services import Services
from danube.config.loading import load
from danube.core.protocol.native import Kind, Welcome, control_frame
from danube.host.tls import TlsFiles, server_context
from tests.certificates import Authority

SECURE = {
    "DANUBE_AUTH__MODE": "tls", "DANUBE_TLS__CERT_FILE": "c", "DANUBE_TLS__KEY_FILE": "k",
    "DANUBE_TLS__CA_FILE": "a", "DANUBE_AUDIT__MODE": "on",
    "DANUBE_AUTH__JWT__SECRET_KEY": "x" * 40, "DANUBE_LIMITS__CONNECTION_RATE": "200",
    "DANUBE_LIMITS__CONNECTIONS_PER_ADDRESS": "500", "DANUBE_LIMITS__CONNECTIONS_PER_PRINCIPAL": "1000",
}  # fmt: skip
TLS = Port("native", "0.0.0.0", 6660, True, "", None)
GOOD = Seen(7, 1000, 0, True, False, "danube start")


def patient(tmp_path: Path, *, environ: dict[str, str] | None = None, **seen: Any) -> Patient:
    given = SECURE | (environ or {})
    configured = load(None, given, {"data_dir": tmp_path}).config
    return Patient(configured, [TLS], [GOOD], [], True)._replace(**seen)


def verdicts(one: Patient) -> dict[str, tuple[str, str]]:
    return {line["row"]: (line["verdict"], line["why"]) for line in examined(one)}


def test_a_broker_that_others_reach_and_that_is_secured_passes_every_check(tmp_path: Path) -> None:
    assert {verdict for verdict, _ in verdicts(patient(tmp_path)).values()} == {"pass", BUILT_IN}


@pytest.mark.parametrize(
    ("row", "seen", "why"),
    [
        ("S1", {"ports": [TLS._replace(tls=False)]}, "others reach native without TLS"),
        ("S1", {"ports": [TLS, TLS._replace(name="grpc", tls=False)]}, "others reach grpc without TLS"),
        ("S1", {"environ": {"DANUBE_AUTH__MODE": "none"}}, "asks nobody who they are"),
        ("S1", {"ports": [TLS, Port("native", "127.0.0.1", 1, False, "", False)]}, "asks nobody"),
        ("S18", {"ports": [TLS._replace(weak="TLS 1.1")]}, "native takes TLS 1.1"),
        ("S19", {"environ": {"DANUBE_AUTH__MODE": "none"}}, "client_certificates is not required"),
        ("S21", {"ports": [TLS, TLS._replace(name="admin", tls=False)]}, "admin speaks without TLS"),
        ("S22", {"reloads": False}, "does not load changed certificates"),
        ("S23", {"processes": [GOOD, GOOD._replace(pid=8, dumps_core=True)]}, "process 8 writes its memory"),
        ("S24", {"open_paths": [f"/d/{n} has mode 644" for n in range(5)]}, "/d/2 has mode 644, and 2 more"),
        ("S25", {"processes": [GOOD, GOOD._replace(user=0)]}, "runs as root"),
        ("S25", {"processes": [GOOD._replace(capabilities=1)]}, "has capabilities"),
        ("S25", {"processes": [GOOD._replace(confined=False)]}, "may get privileges"),
        ("S32", {"environ": {"DANUBE_LIMITS__CONNECTION_RATE": "0"}}, "no limit: limits.connection_rate"),
        ("S33", {"environ": {"DANUBE_LIMITS__HANDSHAKE_TIMEOUT": "60s"}}, "is 60 s"),
        ("S49", {"environ": {"DANUBE_AUDIT__MODE": "off"}}, "audit.mode is off"),
    ],
)
def test_each_check_fails_and_says_why(tmp_path: Path, row: str, seen: dict[str, Any], why: str) -> None:
    verdict, told = verdicts(patient(tmp_path, **seen))[row]
    assert verdict == "fail" and why in told


def test_the_first_token_is_to_go(tmp_path: Path) -> None:
    (tmp_path / "security").mkdir()
    (tmp_path / "security" / "admin.token").touch()
    verdict, told = verdicts(patient(tmp_path))["S17"]
    assert verdict == "fail" and "admin.token" in told


def test_what_does_not_apply_to_loopback_is_left_out(tmp_path: Path) -> None:
    near = Port("native", "127.0.0.1", 6660, False, "", False)
    found = verdicts(patient(tmp_path, ports=[near], environ={"DANUBE_AUTH__MODE": "none"}))
    assert {row for row, (verdict, _) in found.items() if verdict == "-"} == {
        "S18", "S19", "S21", "S22", "S32", "S49"
    }  # fmt: skip
    assert not any(verdict == "fail" for verdict, _ in found.values())


def test_rows_stand_once_and_in_order() -> None:
    rows = [row for row, _, _ in CHECKS]
    assert len(set(rows)) == len(rows)
    assert rows == sorted(rows, key=lambda row: int(row[1:].partition("-")[0]))


# -- ports ------------------------------------------------------------------------------------------


@contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """The address of a port whose connections get ``answer``."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with closing(connection):
                    try:
                        answer(connection)
                    except OSError:
                        pass

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        server.shutdown(socket.SHUT_RDWR)
        thread.join(10)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> TlsFiles:
    return Authority(tmp_path_factory.mktemp("doctor")).sign("server", "IP:127.0.0.1")


def tls_of(context: ssl.SSLContext) -> Callable[[socket.socket], None]:
    def answer(connection: socket.socket) -> None:
        with context.wrap_socket(connection, server_side=True) as wrapped:
            wrapped.recv(1)

    return answer


def test_a_port_of_ours_is_strong(files: TlsFiles) -> None:
    with serving(tls_of(server_context(files, ["danube/1"], "off"))) as address:
        (port,) = looked_at({"native": address})
    assert port.tls and port.weak == "" and port.asks is None


def test_a_port_with_weak_ciphers_is_told(files: TlsFiles) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert_file, files.key_file)
    context.set_ciphers("ECDHE-ECDSA-AES128-SHA:@SECLEVEL=0")
    with serving(tls_of(context)) as address:
        (port,) = looked_at({"grpc": address})
    assert port.tls and port.weak == "ciphers without authenticated encryption"


@pytest.mark.filterwarnings("ignore:.*TLSv1:DeprecationWarning")
def test_a_port_with_an_old_version_is_told(files: TlsFiles) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(files.cert_file, files.key_file)
    context.minimum_version = ssl.TLSVersion.TLSv1
    context.set_ciphers("ALL:@SECLEVEL=0")
    with serving(tls_of(context)) as address:
        (port,) = looked_at({"grpc": address})
    assert port.tls and port.weak == "TLS 1.1"


@pytest.mark.parametrize(
    ("said", "asks"),
    [
        (control_frame(Kind.WELCOME, Welcome(), 1), False),
        (control_frame(Kind.ERROR, None, 1), True),
        (b"", False),
    ],
)
def test_whether_a_native_port_asks(said: bytes, asks: bool) -> None:
    def answer(connection: socket.socket) -> None:
        if connection.recv(1_000)[:1] != b"\x16":
            connection.sendall(said)

    with serving(answer) as address:
        (port,) = looked_at({"native": address})
    assert (port.tls, port.asks) == (False, asks)


def test_what_does_not_answer_or_is_no_address_is_left_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        gone = server.getsockname()[1]
    assert looked_at({"native": f"127.0.0.1:{gone}", "socket": "@danube", "admin": ""}) == []


# -- processes and files ----------------------------------------------------------------------------


def test_processes_are_told_with_all_that_they_started() -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    try:
        found = {one.pid: one for one in processes_below(os.getpid())}
        assert {os.getpid(), child} <= set(found)
        one = found[child]
        assert one.user == os.geteuid() and "python" in one.words
    finally:
        os.close(reading)
        os.close(writing)
        os.waitpid(child, 0)
    assert child not in {one.pid for one in processes_below(os.getpid())}


def test_what_others_reach_in_a_directory_is_named(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(0o700)
    for name, mode in (("shut", 0o600), ("read", 0o644), ("written", 0o620)):
        (data / name).touch()
        (data / name).chmod(mode)
    mine = os.geteuid()
    assert list(open_to_others(data, mine)) == [f"{data / 'written'} has mode 620"]
    (data / "link").symlink_to("/etc/passwd")
    assert f"{data / 'link'} is a link" in list(open_to_others(data, mine))
    data.chmod(0o755)
    found = list(open_to_others(data, mine))
    assert f"{data} has mode 755" in found and f"{data / 'read'} has mode 644" in found and len(found) == 4
    assert f"{data / 'shut'} belongs to user {mine}" in list(open_to_others(data, mine + 1))


def test_without_a_broker_there_is_nothing_to_look_at(tmp_path: Path) -> None:
    result = CliRunner().invoke(root, ["doctor", "--data-dir", str(tmp_path)], obj=Services(environ={}))
    assert result.exit_code == 3 and "no broker runs" in result.stderr
