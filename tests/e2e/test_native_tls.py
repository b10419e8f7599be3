"""TLS on every port: clients of all kinds, bad certificates, exchange of certificates under load."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

import danube
import danube.sync
from danube.core.protocol import native as wire
from danube.errors import ConnectionFailed, NotSupported, SubscriptionBusy
from danube.host.tls import TlsFiles
from tests import fork_server
from tests.broker_process import ROOT, Brokers, free_port, wait_until
from tests.certificates import RSA_1024, Authority

NAMES = "IP:127.0.0.1,DNS:localhost"
HALF_DONE_BYTES_MAX = 128 << 20  # of both workers; each holds so many handshakes at once, however many come
ROTATIONS = int(os.environ.get("DANUBE_TLS_ROTATIONS", "10"))


class Site:
    """A broker with TLS, its authority, and that of clients."""

    def __init__(self, place: Path, brokers: Brokers, *, clients: str = "off", workers: int = 1) -> None:
        self.place = place
        self.authority = Authority(place / "servers")
        self.clients = Authority(place / "clients", "clients")
        self.client = self.clients.sign(
            "app", "URI:danube:service_account:app", "extendedKeyUsage=clientAuth"
        )
        self.gone = self.clients.sign("gone", "DNS:gone")
        served = self.authority.sign("server", NAMES)
        self.files = TlsFiles(*(str(place / name) for name in ("cert.pem", "key.pem", "ca.pem", "crl.pem")))
        self.put(served, self.clients.cert)
        shutil.copy(self.clients.revoked(self.gone), self.files.crl_file)
        self.metrics_port = free_port()
        self.broker = brokers.make(workers=workers, environment=self.environment(clients))

    def environment(self, clients: str) -> dict[str, str]:
        given = {"cert_file": self.files.cert_file, "key_file": self.files.key_file}
        if clients != "off":
            given |= {"ca_file": self.files.ca_file, "crl_file": self.files.crl_file}
        return {
            **{f"DANUBE_TLS__{name.upper()}": path for name, path in given.items()},
            "DANUBE_TLS__CLIENT_CERTIFICATES": clients,
            "DANUBE_METRICS__PORT": str(self.metrics_port),
            "DANUBE_LIMITS__SESSION_TIMEOUT": "2s",
            "DANUBE_SERVER__LOCAL_SOCKET": "off",
        }

    def put(self, served: TlsFiles, ca: Path) -> None:
        """Exchange the files one after the other, each at once."""
        for source, target in (
            (served.cert_file, self.files.cert_file),
            (served.key_file, self.files.key_file),
            (ca, self.files.ca_file),
        ):
            os.replace(shutil.copy(source, f"{target}.new"), target)

    @property
    def url(self) -> str:
        return self.broker.address.replace("danube://", "danube+tls://")

    def options(self, shown: TlsFiles | None = None, **more: str) -> danube.TlsOptions:
        given = {"ca_file": str(self.authority.cert), **more}
        if shown is not None:
            given |= {"cert_file": shown.cert_file, "key_file": shown.key_file}
        return danube.TlsOptions(**given)

    def raw(
        self, port: int, shown: TlsFiles | None = None, alpn: str = "danube/1", **versions: ssl.TLSVersion
    ) -> ssl.SSLSocket:
        """A connection without the client, to any port."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for name, version in versions.items():
            setattr(context, name, version)
        context.load_verify_locations(self.authority.cert)
        context.set_alpn_protocols([alpn])
        if shown is not None:
            context.load_cert_chain(shown.cert_file, shown.key_file)
        connection = socket.create_connection(("127.0.0.1", port), 20)
        return context.wrap_socket(connection, server_hostname="127.0.0.1")

    def served(self) -> int | None:
        """The serial number of the certificate that a new connection is shown."""
        with suppress(OSError), self.raw(self.broker.port) as connection:
            return int((connection.getpeercert() or {})["serialNumber"], 16)  # type: ignore[arg-type]
        return None

    def metric(self, name: str) -> float:
        with self.raw(self.metrics_port, self.client, "http/1.1") as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: a\r\n\r\n")
            text = b""
            while part := connection.recv(65_536):
                text += part
        (line,) = (one for one in text.decode().splitlines() if one.startswith(f"{name}{{"))
        return float(line.rpartition(" ")[2])


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    made = Brokers(tmp_path_factory.mktemp("tls-brokers"))
    yield made
    made.kill()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, brokers: Brokers) -> Site:
    """Two workers; nobody shows a certificate."""
    return Site(tmp_path_factory.mktemp("tls"), brokers, workers=2)


@pytest.fixture(scope="module")
def mutual(tmp_path_factory: pytest.TempPathFactory, brokers: Brokers) -> Site:
    """Clients show certificates, of which one is revoked."""
    return Site(tmp_path_factory.mktemp("mutual"), brokers, clients="required")


def danube_command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "danube", *words]
    return fork_server.run(command, cwd=ROOT, environment={**os.environ, **environment})


# -- clients ------------------------------------------------------------------------------------


def test_asyncio_and_blocking_clients_publish_and_consume(site: Site, topic: str) -> None:
    payloads = [bytes([number % 256]) * 5_000 for number in range(2_000)]  # more than a TLS record, a buffer

    async def publish() -> None:
        async with danube.connect(site.url, tls=site.options()) as client:
            await client.admin.create_topic(topic, partitions=4)
            async with client.producer(topic) as producer:
                await producer.send_many(payloads)

    async def consume() -> int:
        found = 0
        async with (
            danube.connect(site.url, tls=site.options()) as client,
            client.consumer(topic, "aio", start="earliest") as consumer,
        ):
            async for batch in consumer.batches():
                found += len(batch)
                await batch.ack()
                if found == 2 * len(payloads):
                    break
        return found

    asyncio.run(publish())
    with danube.sync.connect(site.url, tls=site.options()) as client:
        with client.producer(topic) as producer:
            producer.send_many(payloads)
        with client.consumer(topic, "blocking", start="earliest") as consumer:
            found = []
            for batch in consumer.batches():
                found += map(bytes, batch.payloads)
                batch.ack()
                if len(found) == 2 * len(payloads):
                    break
    assert sorted(found) == sorted(2 * payloads)
    assert asyncio.run(consume()) == 2 * len(payloads)
    spread = [one["connections_total"] for one in _workers(site)]
    assert sum(spread) >= 3 and sum(one["connections_passed"] for one in _workers(site)) == 0


def _workers(site: Site) -> Any:
    with danube.sync.connect(site.url, tls=site.options()) as client:
        return client.admin.status()["workers"]


def test_the_command_line_by_options_and_by_environment(site: Site, topic: str) -> None:
    ca = str(site.authority.cert)
    done = danube_command("produce", topic, "-m", "one", "-s", site.url, "--tls-ca", ca)
    assert done.returncode == 0, done.stderr
    https = site.url.replace("danube+tls", "https")
    given = {"DANUBE_TLS_CA": ca, "DANUBE_TLS_SERVER_NAME": "localhost", "DANUBE_SERVICE_URL": https}
    found = danube_command("consume", topic, "--from", "earliest", "--count", "1", **given)
    assert found.returncode == 0 and "one" in found.stdout, found.stderr
    refused = danube_command("topics", "list", "-s", site.url, "--tls-ca", ca, "--tls-server-name", "other")
    assert refused.returncode == 6 and "for another name" in refused.stderr, refused.stderr
    shown = danube_command("status", "--data-dir", str(site.broker.data_dir), DANUBE_TLS_CA=ca)
    assert shown.returncode == 0 and "topics" in shown.stdout, shown.stderr
    members = danube_command("cluster", "status", "--data-dir", str(site.broker.data_dir), DANUBE_TLS_CA=ca)
    assert members.returncode == 0 and "leader" in members.stdout, members.stderr


def test_a_hanging_process_loses_its_session_and_a_busy_one_does_not(site: Site, topic: str) -> None:
    code = f"""
import sys, time, danube.sync
with danube.sync.connect({site.url!r}, tls=danube.TlsOptions(ca_file={str(site.authority.cert)!r})) as client:
    with client.consumer({topic!r}, subscription="s", mode="exclusive", start="earliest") as consumer:
        print(consumer.receive(30).payload.decode(), flush=True)
        time.sleep(3600)
"""
    with danube.sync.connect(site.url, tls=site.options()) as client:
        client.admin.create_topic(topic)
        with client.producer(topic) as producer:
            producer.send(b"held")
        holder = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        try:
            assert holder.stdout is not None and holder.stdout.readline() == "held\n"
            time.sleep(4)  # busy for longer than the time-out: its thread answers
            with pytest.raises(SubscriptionBusy), client.consumer(topic, subscription="s", mode="exclusive"):
                pass
            os.kill(holder.pid, signal.SIGSTOP)
            wait_until(lambda: _free(client, topic), 30, "the session of a stopped process ends")
        finally:
            holder.kill()
            holder.communicate()


def test_a_slow_reader_that_answers_no_ping_is_alive(site: Site, topic: str) -> None:
    """Bytes that TLS holds back, beside those of the kernel, do not make it look silent."""
    with danube.sync.connect(site.url, tls=site.options()) as client, client.producer(topic) as producer:
        producer.send_many([bytes(100_000)] * 300)
    wanted = wire.Subscribe(
        partition=topic, subscription="slow", consumer="c", start="earliest",
        credit_records=10_000, credit_bytes=1 << 26, max_unacked=10_000,
    )  # fmt: skip
    with site.raw(site.broker.port) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        connection.sendall(wire.control_frame(wire.Kind.HELLO, wire.Hello(client="test", answers_ping=True)))
        connection.recv(1_000)
        connection.sendall(wire.control_frame(wire.Kind.SUBSCRIBE, wanted, 1, 1))
        for _ in range(40):  # four times as long as a session may be silent
            taken = 0
            while taken < 200_000:
                part = connection.recv(65_536)
                assert part, site.broker.output_tail()
                taken += len(part)
            time.sleep(0.2)
        # From here on it takes nothing, as a process that hangs.
        open_before = site.metric("danube_broker_connections")
        assert open_before >= 1
        wait_until(lambda: site.metric("danube_broker_connections") < open_before, 30, "it is ended")


def _free(client: danube.sync.Client, topic: str) -> bool:
    with suppress(SubscriptionBusy), client.consumer(topic, subscription="s", mode="exclusive") as heir:
        return bool(heir.receive(30).payload == b"held")
    return False


# -- what is wrong ------------------------------------------------------------------------------


def _failure(url: str, options: danube.TlsOptions | None, blocking: bool) -> danube.DanubeError:
    async def dial() -> None:
        async with danube.connect(url, tls=options, connect_timeout=20):
            pass

    with pytest.raises(danube.DanubeError) as caught:
        if blocking:
            with danube.sync.connect(url, tls=options, connect_timeout=20):
                pass
        else:
            asyncio.run(dial())
    return caught.value


@pytest.mark.parametrize("blocking", [True, False])
def test_an_error_names_what_is_wrong(site: Site, mutual: Site, tmp_path: Path, blocking: bool) -> None:
    other = str(mutual.authority.cert)
    unknown = _failure(site.url, danube.TlsOptions(ca_file=other), blocking)
    assert "no authority that is known here signed" in unknown.why and "DANUBE_TLS_CA" in unknown.hint
    name = _failure(site.url, site.options(server_name="127.0.0.9"), blocking)
    assert "for another address" in name.why and "server_name" in name.hint
    name = _failure(site.url, site.options(server_name="other"), blocking)
    assert "for another name" in name.why
    plain = _failure(f"danube://127.0.0.1:{site.broker.port}", None, blocking)
    assert isinstance(plain, NotSupported) and "danube+tls://" in plain.hint
    none = _failure(mutual.url, mutual.options(), blocking)
    assert "requires a client certificate" in none.why and "DANUBE_TLS_CERT" in none.hint
    stranger = Authority(tmp_path / "stranger").sign("app", "DNS:app")
    refused = _failure(mutual.url, mutual.options(stranger), blocking)
    assert "does not accept a client's certificate" in refused.why and "tls.ca_file" in refused.hint
    missing = _failure(site.url, danube.TlsOptions(ca_file="/nowhere.pem"), blocking)
    assert "/nowhere.pem" in missing.what
    for error in (unknown, name, none, refused):
        assert isinstance(error, ConnectionFailed) and error.retryable


@pytest.mark.parametrize("blocking", [True, False])
def test_a_port_without_tls_is_told_apart(broker: Any, site: Site, blocking: bool) -> None:
    process = broker(workers=1)
    error = _failure(f"danube+tls://127.0.0.1:{process.port}", site.options(), blocking)
    assert "does not speak TLS" in error.why and "danube://" in error.hint
    grpc = _failure(f"danube+tls://127.0.0.1:{site.broker.grpc_port}", site.options(), blocking)
    assert "gRPC port" in grpc.what


@pytest.mark.parametrize("blocking", [True, False])
def test_an_expired_certificate_of_the_broker(brokers: Brokers, tmp_path: Path, blocking: bool) -> None:
    authority = Authority(tmp_path)
    old = authority.sign("old", NAMES, days=-1)
    given = {"DANUBE_TLS__CERT_FILE": old.cert_file, "DANUBE_TLS__KEY_FILE": old.key_file}
    process = brokers.make(tmp_path / "data", environment=given)
    url = f"danube+tls://127.0.0.1:{process.port}"
    error = _failure(url, danube.TlsOptions(ca_file=str(authority.cert)), blocking)
    assert "has expired" in error.why and "clocks" in error.hint
    process.kill()


def _bad(site: Site) -> dict[str, TlsFiles | None]:
    """Certificates of clients that are not to be accepted."""
    ours, place = site.clients, site.place / "bad"
    stranger = Authority(place / "stranger", "clients")  # the name of the right authority
    leaf = ours.sign("leaf", "DNS:leaf", "basicConstraints=critical,CA:FALSE")
    by_leaf = object.__new__(Authority)
    by_leaf.directory = place
    by_leaf.cert, by_leaf.key = Path(leaf.cert_file), Path(leaf.key_file)
    ca = "basicConstraints=critical,CA:TRUE"
    signs = "keyUsage=critical,keyCertSign,cRLSign"
    between = ours.under("between", ca, signs)
    bounded = ours.under("bounded", f"{ca},pathlen:0", signs)
    too_deep = bounded.under("too-deep", ca, signs)
    cannot = ours.under("cannot", ca, "keyUsage=critical,digitalSignature")
    fenced = ours.under("fenced", ca, signs, "nameConstraints=critical,permitted;DNS:inside")
    return {
        "none": None,
        "self signed": TlsFiles(str(stranger.cert), str(stranger.key)),
        "stranger": stranger.sign("app", "URI:danube:service_account:app"),
        "authority of servers": site.authority.sign("app", "DNS:app"),
        "expired": ours.sign("expired", "DNS:a", days=-1),
        "not yet valid": ours.early("early", "DNS:a"),
        "revoked": site.gone,
        "for servers": ours.sign("servers", "DNS:a", "extendedKeyUsage=serverAuth"),
        "for code": ours.sign("code", "DNS:a", "extendedKeyUsage=codeSigning"),
        "for mail": ours.sign("mail", "DNS:a", "extendedKeyUsage=emailProtection"),
        "for time stamps": ours.sign("stamps", "DNS:a", "extendedKeyUsage=critical,timeStamping"),
        "a key for signing certificates only": ours.sign("signs", "DNS:a", ca, signs),
        "a key for encryption only": ours.sign("crypts", "DNS:a", "keyUsage=critical,dataEncipherment"),
        "unknown critical part": ours.sign("critical", "DNS:a", "1.2.3.4=critical,ASN1:NULL"),
        "signed by no authority": by_leaf.sign("by-leaf", "DNS:a"),
        "authority between is missing": between.sign("lower", "DNS:a"),
        "chain too long": _chained(too_deep.sign("deep", "DNS:a"), too_deep, bounded),
        "authority may not sign": _chained(cannot.sign("may-not", "DNS:a"), cannot),
        "name outside": _chained(fenced.sign("outside", "DNS:outside"), fenced),
        "short key": ours.sign("short", "DNS:a", key=RSA_1024),
        "weak digest": ours.sign("weak", "DNS:a", digest="-sha1"),
        "no key of the issuer named": ours.sign("no-issuer", "DNS:a", "authorityKeyIdentifier=none"),
    }


def _chained(files: TlsFiles, *above: Authority) -> TlsFiles:
    with open(files.cert_file, "a") as chain:
        chain.writelines(one.cert.read_text() for one in above)
    return files


@pytest.fixture(scope="module")
def bad(mutual: Site) -> dict[str, TlsFiles | None]:
    return _bad(mutual)


def _greeted(connection: ssl.SSLSocket) -> bool:
    """Whether the broker answers HELLO."""
    with suppress(OSError):
        connection.sendall(wire.control_frame(wire.Kind.HELLO, wire.Hello(client="test")))
        return bool(connection.recv(1))
    return False


BAD = (
    "none", "self signed", "stranger", "authority of servers", "expired", "not yet valid", "revoked",
    "for servers", "for code",
    "for mail", "for time stamps", "a key for signing certificates only", "a key for encryption only",
    "unknown critical part", "signed by no authority", "authority between is missing", "chain too long",
    "authority may not sign", "name outside", "short key", "weak digest", "no key of the issuer named",
)  # fmt: skip


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("kind", BAD)
def test_a_bad_certificate_is_refused(
    mutual: Site, bad: dict[str, TlsFiles | None], kind: str, version: ssl.TLSVersion
) -> None:
    versions = {"minimum_version": version, "maximum_version": version}
    try:
        with _lax(mutual, bad[kind], **versions) as connection:
            assert not _greeted(connection), "the broker has greeted"
    except OSError:
        pass  # with TLS 1.2 the handshake itself fails
    with mutual.raw(mutual.broker.port, mutual.client, **versions) as connection:
        assert _greeted(connection), "and the right one is accepted"


def _lax(site: Site, shown: TlsFiles | None, **versions: ssl.TLSVersion) -> ssl.SSLSocket:
    """A client whose own library takes weak keys and digests."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for name, value in versions.items():
        setattr(context, name, value)
    context.set_ciphers("DEFAULT:@SECLEVEL=0")
    context.load_verify_locations(site.authority.cert)
    if shown is not None:
        context.load_cert_chain(shown.cert_file, shown.key_file)
    connection = socket.create_connection(("127.0.0.1", site.broker.port), 20)
    return context.wrap_socket(connection, server_hostname="127.0.0.1")


def test_optional_certificates(brokers: Brokers, tmp_path: Path) -> None:
    here = Site(tmp_path, brokers, clients="optional")
    stranger = Authority(tmp_path / "stranger").sign("app", "DNS:app")
    for shown in (None, here.client):
        with danube.sync.connect(here.url, tls=here.options(shown)) as client:
            assert client.admin.list_topics() == []
    for refused in (stranger, here.gone):
        assert "does not accept" in _failure(here.url, here.options(refused), True).why
    here.broker.kill()


# -- every port ---------------------------------------------------------------------------------

PORTS = {"native": "danube/1", "grpc": "h2", "admin": "h2", "metrics": "http/1.1"}


def _port(site: Site, name: str) -> int:
    ports = {"native": site.broker.port, "grpc": site.broker.grpc_port, "admin": site.broker.admin_port}
    return ports.get(name, site.metrics_port)


@pytest.mark.parametrize("name", PORTS)
def test_greetings_of_every_kind_on_every_port(site: Site, name: str) -> None:
    port, protocol = _port(site, name), PORTS[name]
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        versions = {"minimum_version": version, "maximum_version": version}
        for alpn, chosen in ((protocol, protocol), ("other", None)):
            with site.raw(port, alpn=alpn, **versions) as connection:
                assert connection.selected_alpn_protocol() == chosen
                assert connection.version() == version.name.replace("_", ".")
                assert connection.compression() is None
    refuses_what_is_weak(port)
    for plain in (
        b"GET / HTTP/1.1\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x80\x2e\x01\x03\x01\x00\x15",
    ):
        with closing(socket.create_connection(("127.0.0.1", port), 20)) as connection:
            connection.sendall(plain)
            answer = connection.recv(4_096)
            assert b"TLS" in answer if name in ("native", "metrics") else answer == b""


def refuses_what_is_weak(port: int, *shown: str) -> None:
    """Old versions, and ciphers without forward secrecy or authenticated encryption; no renegotiation."""
    for words in (
        ("-tls1",), ("-tls1_1",), ("-tls1_2", "-cipher", "AES128-SHA256:@SECLEVEL=0"),
        ("-tls1_2", "-cipher", "ECDHE-ECDSA-AES128-SHA:@SECLEVEL=0"),
        ("-tls1_2", "-cipher", "ALL:eNULL:@SECLEVEL=0:!ECDHE"),
    ):  # fmt: skip
        assert not _openssl_connects(port, *words, *shown), words
    assert _openssl_connects(port, "-tls1_2", *shown)
    assert not _renegotiates(port, *shown)


def _openssl_connects(port: int, *words: str) -> bool:
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-brief", *words]
    return subprocess.run(command, input=b"", capture_output=True, timeout=30, check=False).returncode == 0


def _renegotiates(port: int, *shown: str) -> bool:
    command = ["openssl", "s_client", "-connect", f"127.0.0.1:{port}", "-tls1_2", *shown]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as it:
        assert it.stdin is not None and it.stdout is not None
        while b"Verify return code" not in it.stdout.readline():
            pass
        with suppress(OSError):
            it.stdin.write(b"R\n")
            it.stdin.flush()
        time.sleep(0.5)
        with suppress(OSError):
            it.stdin.close()
        said = it.stdout.read()
    assert b"RENEGOTIATING" in said
    return it.returncode == 0 and b"no renegotiation" not in said


def test_metrics_are_served_by_tls(site: Site) -> None:
    assert site.metric("danube_tls_reload_failed") == 0
    assert site.metric("danube_broker_tls_handshakes_failed_total") >= 0


def test_the_unix_socket_stays_plain(brokers: Brokers, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    files = authority.sign("server", NAMES)
    given = {
        "DANUBE_TLS__CERT_FILE": files.cert_file,
        "DANUBE_TLS__KEY_FILE": files.key_file,
        "DANUBE_SERVER__LOCAL_SOCKET": "on",
    }
    process = brokers.make(tmp_path / "data", environment=given, workers=2)
    with danube.sync.connect(process.address) as client, client.producer("/default/near") as producer:
        producer.send(b"by the Unix socket")
    with danube.sync.connect(
        f"danube+tls://127.0.0.1:{process.port}", tls=danube.TlsOptions(ca_file=str(authority.cert))
    ) as client:
        assert [one.topic for one in client.admin.list_topics()] == ["/default/near"]
    process.kill()


def test_half_done_handshakes_are_bounded(site: Site) -> None:
    """Hundreds greet by half, and a client gets in all the same; none is left after five seconds."""
    count = int(os.environ.get("DANUBE_TLS_HALF_DONE", "600"))
    before, resident = _descriptors(site), _resident_bytes(site)
    with ExitStack() as stack:
        for number in range(count):
            half = stack.enter_context(closing(socket.create_connection(("127.0.0.1", site.broker.port), 20)))
            half.sendall((b"", b"\x16\x03", b"\x16\x03\x01\x02\x00\x01")[number % 3])
            if number % 200 == 199:
                with danube.sync.connect(site.url, tls=site.options()) as client:
                    assert client.connected
        assert _descriptors(site) <= before + 2 * 1_000 + 50
        assert _resident_bytes(site) < resident + HALF_DONE_BYTES_MAX
        wait_until(lambda: _descriptors(site) <= before + 10, 30, "all half-done handshakes are ended")


def _resident_bytes(site: Site) -> int:
    return sum(psutil.Process(pid).memory_info().rss for pid in site.broker.worker_pids)


def _descriptors(site: Site) -> int:
    return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in site.broker.worker_pids)


# -- exchange of certificates -------------------------------------------------------------------


class Load:
    """Clients that publish without pause: one stays connected, others connect for each record."""

    def __init__(self, site: Site, ca_file: Path, topic: str) -> None:
        self.sent, self.dials, self.errors = 0, 0, list[BaseException]()
        self._options = danube.TlsOptions(
            ca_file=str(ca_file), cert_file=str(site.place / "app.pem"), key_file=str(site.place / "app.key")
        )
        self._url, self._topic = site.url, topic
        self._over = threading.Event()
        works = (self._stay, self._dial, self._dial)
        self._threads = [threading.Thread(target=self._run, args=(work,), daemon=True) for work in works]

    def _run(self, work: Any) -> None:
        try:
            while not self._over.is_set():
                work()
        except BaseException as error:
            self.errors.append(error)

    def _client(self) -> danube.sync.Client:
        # No second attempt: a dial that fails is an error of this test.
        return danube.sync.connect(self._url, tls=self._options, reconnect_timeout=0, connect_timeout=30)

    def _stay(self) -> None:
        with self._client() as client, client.producer(self._topic) as producer:
            while not self._over.is_set():
                producer.send(b"stays")
                self.sent += 1

    def _dial(self) -> None:
        with self._client() as client, client.producer(self._topic) as producer:
            producer.send(b"dials")
        self.dials += 1

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)


def _install(source: TlsFiles, cert: Path, key: Path) -> None:
    """Exchange a client's certificate: a folder of links, as in Kubernetes, would do it at once."""
    os.replace(shutil.copy(source.cert_file, f"{cert}.new"), cert)
    os.replace(shutil.copy(source.key_file, f"{key}.new"), key)


def test_certificates_and_authorities_are_exchanged_under_load(
    brokers: Brokers, tmp_path: Path, topic: str
) -> None:
    """Certificate, key and authority of the broker and of its clients in turn; no request fails."""
    here = Site(tmp_path, brokers, clients="required", workers=2)
    trusted = tmp_path / "trusted.pem"  # what clients trust: the former and the present authority
    shutil.copy(here.authority.cert, trusted)
    shutil.copy(here.client.cert_file, tmp_path / "app.pem")
    shutil.copy(here.client.key_file, tmp_path / "app.key")
    authority, began = here.authority, time.monotonic()
    with Load(here, trusted, topic) as load:
        wait_until(lambda: bool(load.dials > 2 and load.sent) or bool(load.errors), 60, "load")
        for number in range(ROTATIONS):
            if number % 3 == 2:  # a new authority: clients trust both before the broker shows the new one
                former, authority = authority, Authority(tmp_path / f"servers-{number}")
                both = former.cert.read_text() + authority.cert.read_text()
                (tmp_path / "both.pem").write_text(both)
                os.replace(tmp_path / "both.pem", trusted)
                here.authority.cert.write_text(both)
            served = authority.sign(f"served-{number}", NAMES)
            before = _sole(here)
            here.put(served, here.clients.cert)
            os.kill(here.broker.pid, signal.SIGHUP)
            wait_until(lambda before=before: _sole(here) not in (None, before), 30, "the new one is shown")  # type: ignore[misc]
            assert not load.errors, load.errors
    seconds = time.monotonic() - began
    print(f"{ROTATIONS} exchanges, {load.sent} sends, {load.dials} dials in {seconds:.1f} s")
    assert not load.errors, load.errors
    assert load.sent > ROTATIONS and load.dials > ROTATIONS
    here.broker.kill()


def _sole(site: Site) -> int | None:
    """The certificate that all of a number of new connections are shown, by both workers."""
    found = set()
    for _ in range(8):
        with suppress(OSError), site.raw(site.broker.port, site.client) as connection:
            found.add(int((connection.getpeercert() or {})["serialNumber"], 16))  # type: ignore[arg-type]
    return found.pop() if len(found) == 1 else None


def test_a_former_authority_of_clients_is_refused_after_the_exchange(
    brokers: Brokers, tmp_path: Path, topic: str
) -> None:
    """By itself, within five seconds; a connection that exists goes on, and no session is resumed."""
    here = Site(tmp_path, brokers, clients="required")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.load_verify_locations(here.authority.cert)
    context.load_cert_chain(here.client.cert_file, here.client.key_file)

    def resume(session: ssl.SSLSession | None) -> ssl.SSLSocket:
        plain = socket.create_connection(("127.0.0.1", here.broker.port), 20)
        return context.wrap_socket(plain, server_hostname="127.0.0.1", session=session)

    with (
        danube.sync.connect(here.url, tls=here.options(here.client)) as client,
        client.producer(topic) as stays,
    ):
        with resume(None) as first:
            assert _greeted(first)
            session = first.session
        new = Authority(tmp_path / "new", "clients")
        shown = new.sign("app", "DNS:app")
        shutil.copy(new.revoked(), here.files.crl_file + ".new")
        os.replace(here.files.crl_file + ".new", here.files.crl_file)
        shutil.copy(new.cert, here.files.ca_file + ".new")
        os.replace(here.files.ca_file + ".new", here.files.ca_file)

        def accepted() -> bool:
            with suppress(OSError), here.raw(here.broker.port, shown) as connection:
                return _greeted(connection)
            return False

        wait_until(accepted, 20, "the new authority is in use")
        assert "does not accept" in _failure(here.url, here.options(here.client), True).why
        with pytest.raises(OSError), resume(session) as again:
            if not _greeted(again):
                raise OSError("refused")
        stays.send(b"goes on")
    here.broker.kill()


def test_files_that_cannot_be_used_change_nothing_and_are_told(site: Site) -> None:
    before = site.served()
    good = Path(site.files.cert_file).read_bytes()
    told = danube_command("reload", "--data-dir", str(site.broker.data_dir))
    assert told.returncode == 0, told.stderr
    try:
        Path(site.files.cert_file).write_text("no certificate")
        os.kill(site.broker.pid, signal.SIGHUP)
        wait_until(lambda: site.metric("danube_tls_reload_failed") == 1, 20, "the metric tells it")
        assert site.served() == before
        assert f"TLS cannot use {site.files.cert_file}" in site.broker.output_tail(20_000)
    finally:
        Path(site.files.cert_file).write_bytes(good)
    wait_until(lambda: site.metric("danube_tls_reload_failed") == 0, 20, "and that it is over")
    assert site.broker.running


def test_a_broker_without_certificates_has_nothing_to_reload(broker: Any) -> None:
    process = broker(workers=1)
    done = danube_command("reload", "--data-dir", str(process.data_dir))
    assert done.returncode == 4 and "tls.cert_file" in done.stderr
    assert process.running
