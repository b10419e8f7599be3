"""Upstream's story for the tests of official clients: a broker with TLS, roles, bindings, and three tokens.

All of it is done with ``danube-admin``, as its users do.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.broker_process import ROOT, BrokerProcess
from tests.certificates import Authority

SECRET = "a secret of thirty-two bytes, or more"
ADMIN = "import danube.cli.upstream.admin as command; command.main()"
CERTIFICATES = "SCENARIO_CERTIFICATES"  # names the file of the authorities that a scenario trusts
WRITES, READS = "story-writes", "story-reads"  # the roles, and the service accounts that have them


def admin_command(*words: str, **environment: str) -> str:
    """Standard output of ``danube-admin``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("DANUBE_")}
    kept |= {"PYTHONPATH": str(ROOT), "DANUBE_JWT_SECRET_KEY": SECRET, **environment}
    done = subprocess.run(
        [sys.executable, "-c", ADMIN, *words], env=kept, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def token_of(name: str, kind: str = "service_account") -> str:
    return admin_command("security", "tokens", "create", "--subject", name, "--type", kind, "--ttl", "1h")


class Secured(NamedTuple):
    """The broker, the authority to trust, and the environment of its administrator."""

    process: BrokerProcess
    authority: Path
    admin: dict[str, str]

    def give(self, topic: str) -> None:
        """Make the topic; one role may publish to it, another may consume."""
        admin_command("topics", "create", topic, "--dispatch-strategy", "reliable", **self.admin)
        name = topic.rpartition("/")[2]
        for role, permissions in ((WRITES, "Lookup,Produce"), (READS, "Lookup,Consume")):
            admin_command("security", "roles", "create", role, "--permissions", permissions, **self.admin)
            place = ("--scope", "topic", "--resource", topic, "--roles", role)
            who = ("--principal-type", "service_account", "--principal-name", role)
            admin_command("security", "bindings", "create", f"{role}-{name}", *who, *place, **self.admin)

    def credentials(self) -> dict[str, str]:
        """The environment of a scenario: a token of each role, and where their certificates and keys lie."""
        return {
            "SCENARIO_PRODUCER": token_of(WRITES), "SCENARIO_CONSUMER": token_of(READS),
            "SCENARIO_HOLDERS": str(self.authority.parent),
        }  # fmt: skip


@contextmanager
def secured(folder: Path) -> Iterator[Secured]:
    """A broker with TLS that asks for tokens or certificates of clients."""
    authority = Authority(folder / "authority")  # rustls takes no broker that signed itself
    files = authority.sign("broker", "IP:127.0.0.1,DNS:localhost")
    for name in (WRITES, READS):
        authority.sign(name, f"URI:danube:service_account:{name}", "extendedKeyUsage=clientAuth")
    environment = {
        "DANUBE_TLS__CERT_FILE": files.cert_file, "DANUBE_TLS__KEY_FILE": files.key_file,
        "DANUBE_TLS__CLIENT_CERTIFICATES": "optional", "DANUBE_TLS__CA_FILE": files.ca_file,
        "DANUBE_AUTH__MODE": "tls", "DANUBE_AUTH__JWT__SECRET_KEY": SECRET,
        "DANUBE_AUTH__SUPER_ADMINS": "user:admin",
    }  # fmt: skip
    # A right that was given is known at once to one worker.
    with BrokerProcess(folder / "data", workers=1, environment=environment) as process:
        admin = {
            "DANUBE_ADMIN_ENDPOINT": f"https://{process.admin_address}", "DANUBE_ADMIN_TLS": "true",
            "DANUBE_ADMIN_CA": files.ca_file, "DANUBE_ADMIN_TOKEN": token_of("admin", "user"),
        }  # fmt: skip
        yield Secured(process, authority.cert, admin)
