"""Keys of tokens are exchanged under load, and a key that goes takes all that it opened along."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

from danube import sync
from danube.core.security.principals import Principal
from danube.errors import DanubeError, NotAllowed, NotAuthenticated
from danube.host import clock
from danube.host.credentials import Credentials, Key, load_key
from tests import fork_server
from tests.broker_process import ROOT, Brokers, free_port, wait_until
from tests.e2e.grpc_parts import OK, DanubeCalls
from tests.grpc_client import GrpcError

ROTATIONS = int(os.environ.get("DANUBE_KEY_ROTATIONS", "6"))  # each takes a second or two
GENEROUS_S = 60.0  # what ends within 5 s; a slow and loaded machine gets more
TTL_S = 25  # so near its end that a session asks for another token each second
ALGORITHMS = ("HS256", "ES256", "EdDSA")
ROOT_USER = Principal("user", "root")
APP = Principal("service_account", "app")


class Site:
    """A broker with a configuration file, and the operator who exchanges the keys that it names."""

    def __init__(self, place: Path, brokers: Brokers, workers: int, *names: str) -> None:
        self.place, self.file = place, place / "danube.yml"
        self.keys: dict[str, Key] = {}
        self.count = 0  # of exchanges since the start of the broker
        for name in names:
            self.make(name)
        self.write(*names)
        self.metrics_port = free_port()
        self.broker = brokers.make(
            workers=workers,
            arguments=["--config", str(self.file), "--metrics-port", str(self.metrics_port)],
        )

    def make(self, name: str, algorithm: str = "HS256") -> None:
        """Write the file of a key, in the place of the one that is there."""
        content = secrets.token_hex(32).encode()
        if algorithm != "HS256":
            private = (
                ec.generate_private_key(ec.SECP256R1())
                if algorithm == "ES256"
                else ed25519.Ed25519PrivateKey.generate()
            )
            content = private.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        path = self.place / f"{name}.key"
        new = path.with_suffix(".new")
        new.write_bytes(content)
        new.chmod(0o600)
        os.replace(new, path)
        self.keys[name] = load_key(name, algorithm, str(path), signs=True)

    def write(self, *names: str, signs: str = "") -> None:
        """Name these keys in the configuration; the broker does not look before it is told to."""
        lines = ["auth:", "  mode: token", "  super_admins: [user:root, service_account:app]", "  jwt:"]
        lines.append("    keys:")
        for name in names:
            use = "sign" if name == (signs or names[0]) else "check"
            algorithm = self.keys[name].algorithm
            lines.append(
                f"      - {{kid: {name}, alg: {algorithm}, file: {self.place}/{name}.key, use: {use}}}"
            )
        new = self.file.with_suffix(".new")
        new.write_text("\n".join(lines) + "\n")
        os.replace(new, self.file)

    def reload(self) -> None:
        os.kill(self.broker.pid, signal.SIGHUP)

    def token(self, name: str, principal: Principal = APP, ttl_s: int = 3_600) -> str:
        return Credentials([self.keys[name]]).sign(
            principal, ttl_s, clock.wall_us(), jti=secrets.token_hex(8)
        )

    def connect(self, token: Any, reconnect_timeout: float = 0) -> sync.Client:
        """Return a client; without a time to reconnect in, the end of its connection is an error."""
        return sync.connect(
            self.broker.address,
            token=token,
            timeout=30,
            connect_timeout=30,
            reconnect_timeout=reconnect_timeout,
        )

    def refuses(self, token: str) -> bool:
        try:
            with self.connect(token):
                return False
        except NotAuthenticated:
            return True

    def metric(self, name: str) -> float:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics", timeout=30) as page:
            (line,) = (one for one in page.read().decode().splitlines() if one.startswith(f"{name}{{"))
        return float(line.rpartition(" ")[2])


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    brokers = Brokers(tmp_path)
    yield lambda workers, *names: Site(tmp_path, brokers, workers, *names)
    brokers.kill()


# -- under load -------------------------------------------------------------------------------------


class Tokens:
    """Tokens of one part of the load, always of the newest key.

    ``steady`` is the number of the oldest key that any token in use may be of.
    """

    def __init__(self, load: Load, stays: bool) -> None:
        self._load, self._stays = load, stays
        self.steady = load.number
        self._given = self._before = load.number

    def __call__(self) -> str:
        with self._load.lock:
            self._given = self._load.number
            if not self._stays:
                self.steady = self._given
            return self._load.site.token(f"k{self._given}", ttl_s=TTL_S)

    def used(self) -> None:
        """Note a request that was answered.

        A session has sent the token that it was given, before the second request that follows.
        """
        with self._load.lock:
            self.steady, self._before = self._before, self._given


class Load:
    """Publish, consume, connections that come and go, and gRPC calls, without pause and without a retry."""

    def __init__(self, site: Site, topic: str) -> None:
        self.site, self.lock = site, threading.Lock()
        self.number = 1  # of the newest key that every worker knows
        self.counts = dict.fromkeys(("publish", "consume", "dial", "grpc"), 0)
        self.errors: list[BaseException] = []
        self._topic = topic
        self._over = threading.Event()
        works = {"publish": self._publish, "consume": self._consume, "dial": self._dial, "grpc": self._grpc}
        self._tokens = {name: Tokens(self, stays=name in ("publish", "consume")) for name in works}
        self._threads = [
            threading.Thread(target=self._run, args=(name, work), daemon=True) for name, work in works.items()
        ]

    @property
    def steady(self) -> int:
        with self.lock:
            return min(one.steady for one in self._tokens.values())

    def _run(self, name: str, work: Callable[[Tokens, Callable[[], None]], None]) -> None:
        tokens = self._tokens[name]

        def count() -> None:
            self.counts[name] += 1
            tokens.used()

        try:
            work(tokens, count)
        except BaseException as error:
            self.errors.append(error)

    def _publish(self, tokens: Tokens, count: Callable[[], None]) -> None:
        with self.site.connect(tokens) as client, client.producer(self._topic) as producer:
            while not self._over.is_set():
                producer.send(b"native")
                count()

    def _consume(self, tokens: Tokens, count: Callable[[], None]) -> None:
        with self.site.connect(tokens) as client, client.consumer(self._topic, "rotation") as consumer:
            while not self._over.is_set():
                consumer.receive(timeout=GENEROUS_S).ack()
                count()

    def _dial(self, tokens: Tokens, count: Callable[[], None]) -> None:
        while not self._over.is_set():
            with self.site.connect(tokens()) as client, client.producer(self._topic) as producer:
                producer.send(b"dials")
            count()

    def _grpc(self, tokens: Tokens, count: Callable[[], None]) -> None:
        with closing(DanubeCalls(self.site.broker.grpc_address)) as calls:
            producer_id = 0
            while not self._over.is_set():
                calls.fields = [("authorization", f"Bearer {tokens()}")]
                producer_id = producer_id or calls.create(self._topic)
                calls.send(self._topic, producer_id, b"grpc")
                count()

    def __enter__(self) -> None:
        for thread in self._threads:
            thread.start()
        self.until(lambda: all(count > 2 for count in self.counts.values()), "all of the load goes on")

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(GENEROUS_S)

    def until(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: bool(self.errors) or condition(), GENEROUS_S, what)
        assert not self.errors, self.errors


@pytest.mark.parametrize("workers", [1, 2])
def test_keys_are_exchanged_under_load(made: Callable[..., Site], topic: str, workers: int) -> None:
    """Each exchange adds the key after next, signs with the next, and removes one that nobody uses."""
    site = made(workers, "k1", "k0")
    load = Load(site, topic)
    operator = Tokens(load, stays=True)
    with site.connect(operator) as admin:
        admin.admin.create_topic(topic)
        began = time.monotonic()
        with load:
            for number in range(2, ROTATIONS + 2):
                site.make(f"k{number}", ALGORITHMS[number % 3])
                names = [f"k{one}" for one in (number, number - 1, number - 2)]
                site.write(*names, signs=f"k{number - 1}")

                def moved(number: int = number) -> bool:
                    admin.admin.status()
                    operator.used()
                    return min(load.steady, operator.steady) >= number - 2

                load.until(moved, f"nobody uses k{number - 3} any more")
                site.reload()
                load.until(lambda number=number: exchanged(admin, number - 1), "every worker has it")  # type: ignore[misc]
                issued = str(admin.admin.issue_token(ttl_s=60)["token"])
                assert Credentials([site.keys[f"k{number - 1}"]]).examine(issued, clock.wall_us())
                with site.connect(issued) as client:
                    assert client.connected
                with load.lock:
                    load.number = number
        seconds = time.monotonic() - began
        print(f"{ROTATIONS} exchanges in {seconds:.0f} s on {workers} workers, {load.counts}")
        assert not load.errors, load.errors
        assert all(count > ROTATIONS for count in load.counts.values()), load.counts
        assert all(site.refuses(site.token(f"k{number}")) for number in range(2))
        assert site.metric("danube_auth_keys_reload_failed") == 0


def exchanged(admin: sync.Client, count: int) -> bool:
    return all(one["keys_reloads"] == count for one in admin.admin.status()["workers"])


# -- a key that goes --------------------------------------------------------------------------------


def revoke(site: Site) -> None:
    """Take a key back, as an operator would."""
    command = [sys.executable, "-m", "danube", "security", "revoke", "signing_key", "bad"]
    environment = {**os.environ, "DANUBE_TOKEN": site.token("good", ROOT_USER)}
    done = fork_server.run(
        [*command, "-s", site.broker.address, "--reason", "stolen"], cwd=ROOT, environment=environment
    )
    assert done.returncode == 0, done.stderr


def remove(site: Site) -> None:
    site.write("good")
    site.reload()


def replace(site: Site) -> None:
    """Put another key of the same name, and tell nobody."""
    site.make("bad")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("take", [revoke, remove, replace], ids=lambda take: take.__name__)
def test_a_key_that_goes_ends_all_that_its_tokens_opened(
    made: Callable[..., Site], topic: str, take: Callable[[Site], None], workers: int
) -> None:
    site = made(workers, "good", "bad")
    good, bad = site.token("good", ROOT_USER), site.token("bad")
    with site.connect(good) as admin:
        admin.admin.create_topic(topic)
        with (
            closing(DanubeCalls(site.broker.grpc_address)) as calls,
            closing(DanubeCalls(site.broker.grpc_address)) as others,
            admin.consumer(topic, "others") as other,
            admin.producer(topic) as publisher,
        ):
            calls.fields = [("authorization", f"Bearer {bad}")]
            others.fields = [("authorization", f"Bearer {good}")]
            client = site.connect(bad, reconnect_timeout=30).open()
            producer, consumer = client.producer(topic).open(), client.consumer(topic, "native").open()
            sender = calls.create(topic)
            stream = calls.receive(calls.subscribe(topic, "grpc"))
            kept = others.receive(others.subscribe(topic, "grpc-others"))
            producer.send(b"before")
            calls.send(topic, sender, b"before")
            for one in (consumer, other):
                assert [one.receive(timeout=GENEROUS_S).payload for _ in range(2)] == [b"before"] * 2
            for each in (stream, kept):
                assert [each.next(GENEROUS_S).payload for _ in range(2)] == [b"before"] * 2
            began = time.monotonic()
            take(site)
            wait_until(lambda: ended(lambda: producer.send(b"soon refused")), GENEROUS_S, "publishing ends")
            wait_until(lambda: ended(lambda: consumer.receive(timeout=0.2)), GENEROUS_S, "consuming ends")
            assert stream.wait_ended(GENEROUS_S).code != OK
            wait_until(lambda: ended(lambda: calls.send(topic, sender, b"soon")), GENEROUS_S, "calls end")
            print(f"all ended {time.monotonic() - began:.1f} s after {take.__name__}")
            delivered = len(stream.messages)
            publisher.send(b"after")
            while (record := other.receive(timeout=GENEROUS_S)).payload != b"after":
                record.ack()
            while (message := kept.next(GENEROUS_S)).payload != b"after":
                others.ack(message, "grpc-others")
            assert len(stream.messages) == delivered, "a record was delivered afterwards"
            assert all(site.refuses(bad) for _ in range(4)), "by every worker"
            with suppress(DanubeError):
                client.close()


def ended(attempt: Callable[[], object]) -> bool:
    try:
        attempt()
    except (NotAllowed, NotAuthenticated):
        return True
    except GrpcError as error:
        assert error.code != OK
        return True
    except DanubeError:
        return False
    return False


# -- what is wrong ----------------------------------------------------------------------------------


def test_a_set_that_does_not_load_keeps_the_old_one_and_is_told(made: Callable[..., Site]) -> None:
    site = made(1, "old")
    site.make("new")
    site.write("new", "old")
    (site.place / "new.key").rename(site.place / "away")
    site.reload()
    failed = "danube_auth_keys_reload_failed"
    wait_until(lambda: site.metric(failed) == 1, GENEROUS_S, "the metric tells it")
    said = site.broker.output_tail(20_000)
    assert "the former list of keys stays" in said and f"{site.place}/new.key cannot be read" in said
    assert not site.refuses(site.token("old")) and site.refuses(site.token("new"))
    (site.place / "away").rename(site.place / "new.key")
    site.reload()
    wait_until(lambda: site.metric(failed) == 0, GENEROUS_S, "and that it is over")
    assert not site.refuses(site.token("old")) and not site.refuses(site.token("new"))


def test_a_worker_that_is_replaced_begins_with_the_present_keys(made: Callable[..., Site]) -> None:
    site = made(1, "old")
    site.make("new")
    site.write("new")
    site.reload()
    wait_until(lambda: site.refuses(site.token("old")), GENEROUS_S, "the new key alone")
    site.broker.wait_worker_replaced(site.broker.kill_worker(), GENEROUS_S)
    wait_until(lambda: answers(site, site.token("new")), GENEROUS_S, "the new worker knows the new key")
    assert site.refuses(site.token("old"))


def answers(site: Site, token: str) -> bool:
    with suppress(DanubeError), site.connect(token) as client:
        return bool(client.connected)
    return False
