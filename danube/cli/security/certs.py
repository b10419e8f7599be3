"""``danube certs``: certificates for tests and laptops, and what is wrong with certificates of any origin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from danube.cli.terminal.certificate_folder import LEAF_DAYS, CertificateFolder, own_hosts
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import line, note, output_option, show
from danube.errors import InvalidArgument

if TYPE_CHECKING:
    from datetime import datetime

    from danube.host.certificates import Facts

EXIT_FINDINGS: Final = 10


@click.group(cls=LazyGroup)
def certs() -> None:
    """Make certificates for this host, show what a certificate is, and check what a broker would refuse.

    \b
    danube certs dev --client alice
    danube certs show certs/broker.pem
    danube certs check certs/broker.pem --key certs/broker.key --ca certs/authority.pem
    """


@certs.command("dev", short_help="Make an authority, and certificates of broker, clients and nodes.")
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), default=Path("certs"), show_default=True,
    help="Folder of the files; made with mode 0700.",
)  # fmt: skip
@click.option(
    "--host", "hosts", multiple=True, help="Name or address of the broker, besides this host's own."
)
@click.option("--client", "clients", multiple=True, metavar="NAME", help="A client: a service account.")
@click.option("--node", "nodes", multiple=True, metavar="ID", help="A member of a cluster, by its node id.")
@click.option("--days", type=click.IntRange(1, 3_650), default=LEAF_DAYS, show_default=True)
@click.option("--replace", is_flag=True, help="Make certificates anew; the authority stays.")
@output_option()
def dev(
    directory: Path, hosts: tuple[str, ...], clients: tuple[str, ...], nodes: tuple[str, ...], days: int,
    replace: bool, output: str,
) -> None:  # fmt: skip
    """Make an authority of this host's own and what it signs; existing files are kept.

    \b
    authority.pem, broker.pem, NAME.pem    certificates, for all to read (0644)
    authority.key, broker.key, NAME.key    their keys (0600)

    Nodes get an authority of their own, cluster-authority: whoever holds one of its certificates is a
    member.  Move the keys of both authorities to a safe place; only this command needs them.
    """
    from danube.host import certificates
    from danube.host.certificates import CLIENT, SERVER, Wanted

    names = [*clients, *(f"node-{node}" for node in nodes)]
    _check_names(names)
    own = own_hosts(hosts)
    made = CertificateFolder(directory, days, replace)
    made.signed("authority", [Wanted("broker", (SERVER,), hosts=own)])
    made.signed(
        "authority", [Wanted(name, (CLIENT,), uris=[f"danube:service_account:{name}"]) for name in clients]
    )
    if nodes:
        members = [
            Wanted(f"node-{node}", (SERVER, CLIENT), hosts=own, uris=[f"danube:node:{node}"])
            for node in nodes
        ]
        made.signed("cluster-authority", members)
    rows = [row | _told(certificates.describe(row["file"].read_bytes())[0]) for row in made.rows]
    show([row | {"file": str(row["file"])} for row in rows], output, ("file", "done", "names", "not_after"))


def _check_names(names: Sequence[str]) -> None:
    """A name becomes a file's name and part of a URI, so it holds neither slashes nor blanks."""
    taken = {"authority", "cluster-authority", "broker"}
    for name in names:
        if not name.replace("-", "").replace("_", "").replace(".", "").isalnum() or name.startswith("."):
            raise InvalidArgument(
                f"{name[:80]!r} cannot be the name of a certificate",
                hint="letters, digits and - _ . are taken",
            )
        if name in taken:
            raise InvalidArgument(f"{name} is used twice", hint="choose another name")
        taken.add(name)


@certs.command("show", short_help="Show what a certificate is.")
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path(path_type=Path))
@output_option()
def show_certificates(files: tuple[Path, ...], output: str) -> None:
    """Print subject, issuer, dates, names and uses of every certificate of the files (PEM)."""
    from danube.cli.terminal.private_file import read_file
    from danube.host import certificates

    rows = [
        {"file": str(path)} | _told(facts)
        for path in files
        for facts in certificates.describe(read_file(path))
    ]
    if output == "json":
        show(rows, output)
        return
    for row in rows:
        show(row, output)


def _told(facts: Facts) -> dict[str, Any]:
    told = {one.name: getattr(facts, one.name) for one in fields(facts)}
    days = {name: told[name].strftime("%Y-%m-%dT%H:%M:%SZ") for name in ("not_before", "not_after")}
    return {**told, **days, "names": list(facts.names), "uses": list(facts.uses)}


@certs.command("check", short_help="Say what a broker would refuse, and why.")
@click.argument("certificate", metavar="FILE", type=click.Path(path_type=Path))
@click.option("--key", type=click.Path(path_type=Path), help="Its key.")
@click.option("--ca", "authority", type=click.Path(path_type=Path), help="The authority that is trusted.")
@click.option(
    "--as", "role", type=click.Choice(["broker", "client", "node"]), default="broker", show_default=True,
    help="Whose it is.",
)  # fmt: skip
@click.option("--host", default="", metavar="NAME", help="Name or address by which it will be dialled.")
@click.option(
    "--days", type=click.IntRange(0), default=14, show_default=True, help="Warn this long before its end."
)
@output_option()
def check(
    certificate: Path, key: Path | None, authority: Path | None, role: str, host: str, days: int, output: str
) -> int:
    """Say what would be refused and why; exit code 10 if anything would.

    Dates, key, authority, names and uses are looked at.  With --key and --ca a handshake is played in
    memory, so that OpenSSL's own opinion is known as well.
    """
    from danube.cli.security.checking import Files, problems
    from danube.host import certificates
    from danube.host.clock import wall_us

    now = certificates.now_utc(wall_us())
    found = problems(Files(certificate, key, authority), role, host, now)
    if output == "json":
        show({"file": str(certificate), "as": role, "refused": found}, output)
    else:
        reasons = [f"refused: {reason}" for reason in found]
        line("\n".join(reasons) or f"{certificate} would be accepted as a {role}")
    if found:
        return EXIT_FINDINGS
    for warning in _soon(certificates.describe(certificate.read_bytes()), now, days):
        note(warning)
    return 0


def _soon(found: Sequence[Facts], now: datetime, days: int) -> Iterator[str]:
    for facts in found:
        left = (facts.not_after - now).days
        if left < days:
            yield f"{facts.subject} expires in {left} days"
