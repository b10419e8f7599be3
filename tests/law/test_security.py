"""Rules of security about the product's source and the repository: rows S17, S20, S27, S28 and S56."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.law.source import dotted, name_of, nodes, product_files, repository_files, tree

# Where numbers that anybody may guess are made, and why nothing is lost by that.
GUESSABLE = {
    "danube/broker/mover/mover.py": "pauses between attempts",
    "danube/cli/upstream/routes.py": "pauses between attempts",
    "danube/wal/stores/retries.py": "pauses between attempts",
    "danube/wal/cold/cache.py": "pauses between attempts",
    "danube/client/machine/session.py": "pauses between attempts",
    "danube/cluster/control/formation.py": "pauses between attempts",
    "danube/cluster/etcd/engine.py": "pauses between attempts",
    "danube/cluster/links/lane.py": "pauses between attempts",
    "danube/cluster/raft/raftos_engine.py": "time-outs of elections",
    "danube/host/local_socket.py": "the order of workers that are tried",
    "danube/load/producing.py": "sizes and pauses of a load test",
    "danube/load/stamp.py": "filling of a load test's records",
}
# Where names in certificates are not compared by OpenSSL, and by what instead.
NAMES_UNCHECKED = {
    "danube/host/tls.py": "a broker of the cluster: the authority is the cluster's own, the node is compared",
    "danube/cluster/links/tls.py": "a member of the cluster: identity_problem() compares the node",
    "danube/cli/security/checking.py": "`danube certs check` tries a certificate for a role without a host",
}
# Words that libraries take instead: urllib3's (below minio), obstore's, grpc's and aiohttp's.
UNVERIFIED = {"CERT_NONE", "allow_invalid_certificates", "danger_accept_invalid_certs", "ssl_verify"}
# Comparisons that no peer can time, and why.
COMPARED = {
    "danube/cli/security/access.py": "the name of a field",
    "danube/client/machine/session.py": "a client with what it sent itself",
}
# Secrets are compared in constant time, and never by these.
SECRET = re.compile(r"(\A|_)(secret|hmac|mac|signature|password|passphrase|secret_hash|api_key|token)\Z")
BANNED_MODULES = {
    "cProfile": "a profiler", "profile": "a profiler", "yappi": "a profiler", "tracemalloc": "a profiler",
    "pdb": "a debugger", "bdb": "a debugger", "code": "a debugger", "debugpy": "a debugger",
    "aiomonitor": "a debugger", "manhole": "a debugger", "rpyc": "calls of objects",
    "xmlrpc": "calls of objects",
    "jsonpickle": "builds arbitrary objects", "joblib": "builds arbitrary objects",
    "multiprocessing.connection": "a socket of pickles", "multiprocessing.managers": "a socket of pickles",
    "logging.config": "may listen for programs",
}  # fmt: skip
BANNED_ENDINGS = {
    "extractall": "writes wherever an archive says", "unpack_archive": "writes wherever an archive says",
    "unsafe_load": "builds arbitrary objects", "full_load": "builds arbitrary objects",
    "disable_warnings": "hides that a name is not checked", "_create_unverified_context": "checks no name",
}  # fmt: skip
BANNED_KEYWORDS = {("allow_pickle", True), ("verify", False), ("cert_check", False), ("verify_ssl", False)}
LITERALS = re.compile(
    rb"-----BEGIN [A-Z ]*PRIVATE KEY-----\s*\n[A-Za-z0-9+/=]{16}|\bAKIA[0-9A-Z]{16}\b|\bASIA[0-9A-Z]{16}\b"
    rb"|\beyJ[\w-]{10,}\.eyJ[\w-]{10,}\.[\w-]{10,}|\bdnb_[A-Za-z0-9]+_[A-Za-z0-9]{32,}|\bgh[pousr]_\w{30,}"
)


def offences(found: Iterator[str]) -> None:
    listed = sorted(found)
    assert not listed, "\n".join(listed)


def imported() -> Iterator[tuple[str, int, str]]:
    for path, node in nodes():
        if isinstance(node, ast.Import):
            yield from ((name_of(path), node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield name_of(path), node.lineno, node.module or ""
            yield from ((name_of(path), node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def test_numbers_that_guard_something_come_from_the_system() -> None:
    found = {name for name, _, module in imported() if module == "random"}
    assert found == set(GUESSABLE), "use `secrets`, or say here why anybody may guess the numbers"


def test_secrets_are_compared_in_constant_time() -> None:
    found = list(_compared())
    offences(one for one in found if one.partition(":")[0] not in COMPARED)
    assert {one.partition(":")[0] for one in found} == set(COMPARED)


def _compared() -> Iterator[str]:
    for path, node in nodes():
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq | ast.NotEq):
            sides = [node.left, *node.comparators]
            plain = any(isinstance(side, ast.Constant) for side in sides)  # whether there is any
            secret = [dotted(side) for side in sides if SECRET.search(dotted(side).rpartition(".")[2])]
            if secret and not plain:
                yield f"{name_of(path)}:{node.lineno}: {secret[0]} is compared; use hmac.compare_digest"


def test_nothing_debugs_profiles_or_makes_objects_of_what_a_peer_sent() -> None:
    offences(
        f"{name}:{line}: {module}: {BANNED_MODULES[module]}"
        for name, line, module in imported()
        if module in BANNED_MODULES
    )


def test_no_call_trusts_an_archive_a_document_or_a_server() -> None:
    offences(_trusting())


def _trusting() -> Iterator[str]:
    for path, node in nodes():
        if not isinstance(node, ast.Call):
            continue
        last = dotted(node.func).rpartition(".")[2]
        if last in BANNED_ENDINGS:
            yield f"{name_of(path)}:{node.lineno}: {last}: {BANNED_ENDINGS[last]}"
        for keyword in node.keywords:
            value = keyword.value.value if isinstance(keyword.value, ast.Constant) else None
            if (keyword.arg, value) in BANNED_KEYWORDS:
                yield f"{name_of(path)}:{node.lineno}: {keyword.arg}={value}"


def test_every_certificate_is_checked_and_every_name() -> None:
    unverified, unnamed = set(), set()
    for path in product_files():
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Attribute) and node.attr == "CERT_NONE":
                unverified.add(f"{name_of(path)}:{node.lineno}")
            if isinstance(node, ast.Constant) and node.value in UNVERIFIED:
                unverified.add(f"{name_of(path)}:{node.lineno}")
            if isinstance(node, ast.Assign) and any(
                isinstance(target, ast.Attribute) and target.attr == "check_hostname"
                for target in node.targets
            ):
                unnamed.add(name_of(path))
    assert not unverified, "a peer whose certificate is not checked may be anybody"
    assert unnamed == set(NAMES_UNCHECKED), "say here what compares the name instead"


def test_the_repository_holds_no_secret() -> None:
    """Neither a key, nor a token that anybody might accept."""
    offences(
        f"{name_of(path)}: {found.group()[:24]!r}"
        for path in repository_files()
        if (found := LITERALS.search(path.read_bytes())) is not None
    )


def test_the_laws_see_what_they_forbid() -> None:
    """Each literal is put together here, so that this file holds none."""
    for kind in (b"-----BEGIN EC PRIVATE KEY-----\n" + b"M" * 20, b"AKIA" + b"A" * 16, b"dnb_a_" + b"x" * 40,
                 b"eyJ" + b"a" * 12 + b".eyJ" + b"b" * 12 + b"." + b"c" * 12):  # fmt: skip
        assert LITERALS.search(b" " + kind), kind
    assert SECRET.search("key_hash") is None and SECRET.search("secret_hash") and SECRET.search("token")
