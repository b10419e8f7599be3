"""No secret of a broker that asks everybody who they are appears in what it tells: a corpus of canaries.

Each canary is a secret that the broker is given: in its configuration, as a credential that is good, as one
that is forged, cut or sent to the wrong place, or as a payload.  After good and bad requests with all of them
nothing that people or programs read may hold one: logs at debug level, errors and their tracebacks, metrics,
command lines, the shown configuration, the audit, the metadata.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import traceback
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

import danube
from danube import sync
from danube.cli.broker.secured import prepare
from danube.server.proto import DanubeAdmin_pb2
from tests import fork_server
from tests.broker_process import ROOT, BrokerProcess, free_port
from tests.e2e.authority_site import administrator

CONFIGURED = {
    "DANUBE_AUTH__JWT__SECRET_KEY": "canary-jwt-" + "k" * 32,
    "DANUBE_STORAGE__ACCESS_KEY": "canary-s3-access",
    "DANUBE_STORAGE__SECRET_KEY": "canary-s3-secret",
    "DANUBE_STORAGE__SESSION_TOKEN": "canary-s3-session",
    "DANUBE_STORAGE__CREDENTIALS": "canary-gcs-credentials",
    "AWS_SECRET_ACCESS_KEY": "canary-aws-secret",
    "AWS_SESSION_TOKEN": "canary-aws-session",
    "AZURE_STORAGE_KEY": "canary-azure-key",
}
NOT_VALID = {"DANUBE_CLUSTER__ETCD_PASSWORD": "canary-etcd-password"}  # there is no user that it is of
# Of tokens whose signature, algorithm, kind or length is wrong; each is sent over every door.
_HEADER = "eyJhbGciOiJIUzI1NiIsImtpZCI6IjEifQ"
FORGED = [
    "canary-plain",
    f"{_HEADER}.canarybody.canarysignature",
    "eyJhbGciOiJub25lIn0.canarynone.",
    "eyJraWQiOiJjYW5hcnktdW5rbm93biJ9.canary-unknown-kid.x",
    "a.b.c.canary-too-many-parts",
    "canary-long-" + "x" * 5_000,
    "dnb_canaryid_canarysecret",
    "dnb_canary-broken",
    "canary\u00e9-not-ascii",
    "Bearer canary-twice",
]


class Told:
    """Everything that was told, by where; and the canaries, by what they are."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.canaries: dict[str, str] = CONFIGURED | NOT_VALID
        for number, text in enumerate(FORGED):
            self.canaries[f"forged {number}"] = max(
                (part for part in text.split(".") if "canary" in part), key=len
            )

    def error(self, name: str, error: BaseException) -> None:
        shown = "".join(traceback.format_exception(error)) + repr(error) + repr(vars(error))
        self.texts[f"error {name}"] = shown

    def leaks(self) -> list[tuple[str, str]]:
        return [
            (what, where)
            for what, canary in self.canaries.items()
            for where, text in self.texts.items()
            if canary in text
        ]


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BrokerProcess, Path, int]]:
    data = tmp_path_factory.mktemp("secrets") / "data"
    folder = prepare(data)
    port = free_port()
    settings = ["--config", str(folder / "danube.yml"), "--log-level", "debug", "--metrics-port", str(port)]
    with BrokerProcess(data, workers=1, arguments=settings, environment=CONFIGURED) as broker:
        yield broker, folder, port


def test_no_secret_appears_in_anything_that_is_told(
    secured: tuple[BrokerProcess, Path, int],
) -> None:
    broker, folder, metrics_port = secured
    told = Told()
    _add_files(told, folder)
    _good_requests(told, broker, folder)
    for number, token in enumerate(FORGED):
        _bad_requests(told, broker, folder, number, token)
    _plain_requests(told, broker)
    told.texts["metrics"] = _metrics(folder, metrics_port)
    for pid in broker.pids:
        with suppress(OSError):
            told.texts[f"command line of {pid}"] = Path(f"/proc/{pid}/cmdline").read_text()
    place = ("--data-dir", str(broker.data_dir))
    told.texts["config show"] = _command("config", "show", "--config", str(folder / "danube.yml"))
    told.texts["config check"] = _command("config", "check", exit_code=11, **NOT_VALID)
    told.texts["audit export"] = _command("audit", "export", *place)
    told.texts["audit verify"] = _command("audit", "verify", *place)
    assert broker.stop() == 0
    told.texts["log"] = broker.output_path.read_text(errors="replace")
    for path in (broker.data_dir / "audit", broker.data_dir / "metadata"):
        for one in path.iterdir():
            told.texts[str(one)] = one.read_bytes().decode("utf-8", "replace")
    assert len(told.canaries) >= 30 and len(told.texts) >= 30
    assert "debug" in told.texts["log"].lower() and "danube_" in told.texts["metrics"]
    assert '"login"' in told.texts["audit export"], "the refusals are told, without what was refused"
    assert told.leaks() == []


def test_the_search_finds_what_it_looks_for() -> None:
    told = Told()
    told.error("made up", ValueError(FORGED[1]))
    assert told.leaks() == [("forged 1", "error made up")]


def _add_files(told: Told, folder: Path) -> None:
    """Keys of the folder: each line of a private key, the signing key, the administrator's token."""
    for name in ("authority.key", "broker.key", "signing.key", "admin.token"):
        for number, text in enumerate((folder / name).read_text().split("\n")):
            if len(text) >= 32 and not text.startswith("-----"):
                told.canaries[f"{name} {number}"] = text


def _tls(folder: Path) -> danube.TlsOptions:
    return danube.TlsOptions(ca_file=str(folder / "authority.pem"))


def _url(broker: BrokerProcess) -> str:
    return f"danube+tls://localhost:{broker.port}"


def _good_requests(told: Told, broker: BrokerProcess, folder: Path) -> None:
    admin = administrator(_url(broker), folder)
    told.canaries["an administrator's token"] = admin.rsplit(".")[-1]
    with sync.connect(_url(broker), token=admin, tls=_tls(folder)) as client:
        client.admin.create_topic("/default/a")
        issued = client.admin.issue_token("service_account:app")
        made = client.admin.create_api_key("service_account:app", name="key1", description="of a test")
        told.canaries["issued token"] = issued["token"].rsplit(".")[-1]
        told.canaries["API key"] = made["key"].rsplit("_")[-1]
        told.canaries["payload"] = "canary-payload"
        told.canaries["record key"] = "canary-record-key"
        with client.producer("/default/a") as producer:
            producer.send(b"canary-payload", key=b"canary-record-key")
    for name, token in (("token", issued["token"]), ("key", made["key"])):
        with sync.connect(_url(broker), token=token, tls=_tls(folder)) as client:
            with pytest.raises(danube.DanubeError) as caught, client.producer("/default/a"):
                pass  # it has no right
            told.error(f"of {name} without a right", caught.value)
            with pytest.raises(danube.DanubeError) as caught:
                client.admin.delete_topic("/default/a")
            told.error(f"of {name} without a right to delete", caught.value)


def _bad_requests(told: Told, broker: BrokerProcess, folder: Path, number: int, token: str) -> None:
    with (
        pytest.raises(danube.DanubeError) as caught,
        sync.connect(_url(broker), token=token, tls=_tls(folder), connect_timeout=30),
    ):
        pass
    told.error(f"native {number}", caught.value)
    if token.isascii():
        told.texts[f"gRPC {number}"] = _grpc(broker, folder, token)


def _grpc(broker: BrokerProcess, folder: Path, token: str) -> str:
    """What the administration's port answers to this token, and what the client's library tells of it."""
    authority = (folder / "authority.pem").read_bytes()
    address = f"localhost:{broker.admin_port}"
    with grpc.secure_channel(address, grpc.ssl_channel_credentials(authority)) as channel:
        call = channel.unary_unary(
            "/danube_admin.BrokerAdmin/ListNamespaces",
            request_serializer=DanubeAdmin_pb2.Empty.SerializeToString,
            response_deserializer=DanubeAdmin_pb2.NamespaceListResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as caught:
            call(DanubeAdmin_pb2.Empty(), metadata=[("authorization", f"Bearer {token}")], timeout=60)
    error: Any = caught.value
    return f"{error.code()} {error.details()} {error.trailing_metadata()} {error.debug_error_string()}"


def _plain_requests(told: Told, broker: BrokerProcess) -> None:
    """A client that forgets TLS sends its token readably: what the port answers does not repeat it."""
    told.canaries["sent without TLS"] = "canary-without-tls"
    for port in (broker.port, broker.grpc_port, broker.admin_port):
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.sendall(
                b"GET /canary-without-tls HTTP/1.1\r\nAuthorization: canary-without-tls\r\n\r\n"
            )
            with suppress(OSError):
                told.texts[f"plain {port}"] = connection.recv(65_536).decode("latin-1")


def _metrics(folder: Path, port: int) -> str:
    context = ssl.create_default_context(cafile=str(folder / "authority.pem"))
    text = b""
    with (
        socket.create_connection(("127.0.0.1", port), 30) as raw,
        context.wrap_socket(raw, server_hostname="localhost") as connection,
    ):
        connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")
        while part := connection.recv(65_536):
            text += part
    return text.decode()


def _command(*words: str, exit_code: int = 0, **environment: str) -> str:
    command = [sys.executable, "-m", "danube", *words]
    given = {**os.environ, **CONFIGURED, **environment}
    done = fork_server.run(command, cwd=ROOT, environment=given, timeout_s=300)
    assert done.returncode == exit_code, done.stderr
    return done.stdout + done.stderr
