"""Tokens of a certified issuer: oidc-provider of npm, over TLS, which ``tests/compat/issuer`` runs.

It is installed anew by each run of these tests.
"""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import shutil
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from urllib.parse import quote, urlencode

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec

from danube import sync
from danube.errors import DanubeError, NotAllowed, NotAuthenticated, TokenExpired
from danube.host.issuer import IssuerKeys
from tests.broker_process import BrokerProcess, die_with_parent, free_port, wait_until
from tests.certificates import Authority
from tests.compat import run
from tests.e2e.authority_site import ENVIRONMENT, comes_in, root
from tests.e2e.grpc_parts import DENIED, UNAUTHENTICATED, DanubeCalls
from tests.grpc_client import GrpcError

NODE_MIN = 20
TOPIC = "/default/orders"
AUDIENCE = "danube"
ALGORITHMS = ("RS256", "ES256", "EdDSA")
ACCOUNTS = {"writer": ["writers", "staff"], "reader": ["readers"], "nobody": []}
READY_S = 120.0  # of a slow and loaded machine
WITHIN_S = 50.0  # less than the minute after which keys are read for the next token
READ = "the keys of an issuer were read"
INSTALL = (
    "ci", "--no-audit", "--no-fund", "--ignore-scripts", "--prefer-offline", "--fetch-retries=1",
    "--fetch-timeout=30000",
)  # fmt: skip
pytestmark = pytest.mark.timeout(600)


class RealIssuer:
    """The program, and the tokens that its accounts ask for."""

    def __init__(self, node: str, folder: Path) -> None:
        self.authority = Authority(folder / "authority")
        files = self.authority.sign("issuer", "IP:127.0.0.1")
        self.port = free_port()
        self.name = f"https://127.0.0.1:{self.port}"
        self._tls = ssl.create_default_context(cafile=str(self.authority.cert))
        self._said: list[str] = []
        words = [node, "issuer.mjs", str(self.port), files.cert_file, files.key_file, json.dumps(ACCOUNTS)]
        self._errors = folder / "errors"
        with self._errors.open("wb") as errors:
            self._process = subprocess.Popen(
                words, cwd=folder, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True,
                bufsize=1, preexec_fn=die_with_parent,
            )  # fmt: skip
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()
        self._await("ready")

    def _listen(self) -> None:
        self._said.extend(map(str.strip, iter(self._process.stdout.readline, "")))  # type: ignore[union-attr]

    def _await(self, word: str) -> None:
        def said() -> bool:
            assert self._process.poll() is None, self._errors.read_text()
            return word in self._said

        wait_until(said, READY_S, f"the issuer says {word!r}")

    def rotate(self) -> None:
        """Have it sign with new keys; the old ones stay in its set."""
        assert self._process.stdin is not None
        self._said.clear()
        self._process.stdin.write("rotate\n")
        self._await("rotated")

    def token(
        self,
        account: str = "writer",
        audience: str = AUDIENCE,
        algorithm: str = "ES256",
        seconds: int = 3_600,
        headers: Mapping[str, str] | None = None,
    ) -> str:
        """A token that this account is given for its secret."""
        form = {"grant_type": "client_credentials", "resource": f"urn:{audience}:{algorithm}:{seconds}"}
        shown = base64.b64encode(f"{account}:{quote(f'secret of {account}')}".encode()).decode()
        given = {"Authorization": f"Basic {shown}", "Content-Type": "application/x-www-form-urlencoded"}
        link = http.client.HTTPSConnection("127.0.0.1", self.port, context=self._tls, timeout=READY_S)
        try:
            link.request("POST", "/token", urlencode(form), {**given, **(headers or {})})
            response = link.getresponse()
            answer = json.loads(response.read())
        finally:
            link.close()
        assert response.status == 200, answer
        return str(answer["access_token"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._listener.join()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def installed(folder: Path) -> str:
    """Install the program into ``folder`` and return the command node; Skipped tells why it cannot be."""
    node, npm = run.need("node"), run.need("npm")
    said = subprocess.run([node, "--version"], capture_output=True, text=True, timeout=60).stdout.strip()
    major = said.removeprefix("v").partition(".")[0]
    if not major.isdecimal() or int(major) < NODE_MIN:
        raise run.Skipped(f"it wants Node {NODE_MIN}, and this is {said or 'none'}")
    shutil.copytree(run.HERE / "issuer", folder)
    run.build([npm, *INSTALL], folder)
    return node


@pytest.fixture(scope="module")
def issuer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealIssuer]:
    folder = tmp_path_factory.mktemp("real") / "issuer"
    try:
        node = installed(folder)
    except run.Skipped as reason:
        pytest.skip(f"the issuer oidc-provider: {reason}")
    made = RealIssuer(node, folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def process(issuer: RealIssuer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """A broker that takes the issuer's tokens, where writers may publish and readers consume."""
    environment = {
        **ENVIRONMENT,
        "DANUBE_AUTH__OIDC__ISSUER": issuer.name,
        "DANUBE_AUTH__OIDC__AUDIENCE": AUDIENCE,
        "DANUBE_AUTH__OIDC__CA_FILE": str(issuer.authority.cert),
        "DANUBE_AUTH__OIDC__PRINCIPAL_TYPE": "service_account",
        "DANUBE_AUTH__JWT__LEEWAY": "1s",
    }
    place = tmp_path_factory.mktemp("taking") / "data"
    with BrokerProcess(place, workers=1, environment=environment) as made:
        with sync.connect(made.address, token=root()) as client:
            client.admin.create_topic(TOPIC)
            client.admin.put_binding("writers", "group:writers", ["producer"], "topic", TOPIC)
            client.admin.put_binding("readers", "group:readers", ["consumer"], "topic", TOPIC)
        wait_until(lambda: READ in made.output_tail(), READY_S, "the issuer's keys are read")
        yield made  # no token was shown before: keys would have been read for it


def refusal(process: BrokerProcess, token: str) -> type[DanubeError]:
    with pytest.raises(DanubeError) as caught:
        sync.connect(process.address, token=token).open()
    return type(caught.value)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_groups_have_their_roles(issuer: RealIssuer, process: BrokerProcess, algorithm: str) -> None:
    payload = algorithm.encode()
    writer, reader = (issuer.token(one, algorithm=algorithm) for one in ("writer", "reader"))
    assert jwt.get_unverified_header(writer)["alg"] == algorithm
    with sync.connect(process.address, token=writer) as client:
        told = client.admin.can("Produce", TOPIC)
        assert told["allowed"] and told["principal"] == "service_account:writer"
        assert "bound to group:writers, which it is in," in told["reason"]
        with pytest.raises(NotAllowed):
            client.consumer(TOPIC, f"s-{algorithm}").open()
        with sync.connect(process.address, token=reader) as reading:
            consumer = reading.consumer(TOPIC, f"s-{algorithm}").open()
            with pytest.raises(NotAllowed):
                reading.producer(TOPIC).open()
            with client.producer(TOPIC) as producer:
                producer.send(payload)
            assert consumer.receive(timeout=READY_S).payload == payload


def test_grpc_takes_them_as_well(issuer: RealIssuer, process: BrokerProcess) -> None:
    good, nobody = issuer.token(), issuer.token("nobody")
    with DanubeCalls(process.grpc_address) as calls:
        calls.fields = [("authorization", f"Bearer {good}")]
        calls.send(TOPIC, calls.create(TOPIC), b"grpc")
    for token, outcome in ((nobody, DENIED), (issuer.token(audience="another"), UNAUTHENTICATED)):
        with DanubeCalls(process.grpc_address) as calls:
            calls.fields = [("authorization", f"Bearer {token}")]
            with pytest.raises(GrpcError) as caught:
                calls.create(TOPIC)
            assert caught.value.code == outcome


def test_what_is_not_for_this_broker_is_refused(issuer: RealIssuer, process: BrokerProcess) -> None:
    assert refusal(process, issuer.token(audience="another")) is NotAuthenticated
    assert refusal(process, issuer.token(algorithm="PS256")) is NotAuthenticated
    assert comes_in(process, issuer.token())


def test_a_token_ends_with_all_that_it_opened(issuer: RealIssuer, process: BrokerProcess) -> None:
    token = issuer.token(seconds=4)
    end_s = jwt.decode(token, options={"verify_signature": False})["exp"] + 1  # the leeway

    def ended() -> bool:
        try:
            producer.send(b"short")
        except (TokenExpired, NotAuthenticated):
            return True
        return False

    try:
        with sync.connect(process.address, token=token) as client, client.producer(TOPIC) as producer:
            wait_until(ended, READY_S, "it publishes for ever")
    except TokenExpired:
        pass  # of a slow machine, before anything was open
    assert time.time() >= end_s
    wait_until(lambda: refusal(process, token) is TokenExpired, READY_S, "it is called expired")


def test_a_token_that_is_bound_to_a_key_is_no_bearers(issuer: RealIssuer, process: BrokerProcess) -> None:
    private = ec.generate_private_key(ec.SECP256R1())
    public = jwt.get_algorithm_by_name("ES256").to_jwk(private.public_key(), as_dict=True)
    claims = {
        "htm": "POST", "htu": f"{issuer.name}/token", "iat": int(time.time()),
        "jti": hashlib.sha256(str(public).encode()).hexdigest(),
    }  # fmt: skip
    proof = jwt.encode(claims, private, "ES256", {"typ": "dpop+jwt", "jwk": public})
    token = issuer.token(headers={"DPoP": proof})
    assert "cnf" in jwt.decode(token, options={"verify_signature": False})
    assert refusal(process, token) is NotAuthenticated


def test_a_certificate_of_another_authority_is_not_believed(issuer: RealIssuer, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    assert not IssuerKeys(issuer.name, ca_file=str(stranger.cert)).read()
    assert IssuerKeys(issuer.name, ca_file=str(issuer.authority.cert)).read()


def test_keys_are_exchanged_while_clients_publish(issuer: RealIssuer, process: BrokerProcess) -> None:
    """Last of all: keys are read for a token once a minute."""
    former = issuer.token()
    with sync.connect(process.address, token=former) as client, client.producer(TOPIC) as producer:
        producer.send(b"before")
        issuer.rotate()
        latter = issuer.token()
        names = [jwt.get_unverified_header(one)["kid"] for one in (former, latter)]
        assert names[0] != names[1]
        wait_until(lambda: comes_in(process, latter), WITHIN_S, "the new key is read")
        producer.send(b"after")
        assert comes_in(process, former), "a key that the issuer still shows is good"
    with sync.connect(process.address, token=latter) as client, client.producer(TOPIC) as producer:
        producer.send(b"new")
