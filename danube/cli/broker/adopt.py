"""``danube cluster adopt``: a broker that was alone becomes the first member of a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from danube.cli.broker.config import config_file_option
from danube.cli.terminal.output import note, output_option, show
from danube.cli.terminal.services import Services


@click.command(short_help="Make a broker of one host the first member.")
@click.option("--data-dir", type=click.Path(path_type=Path), help="Data directory of a stopped broker.")
@click.option(
    "--raft-addr", metavar="HOST:PORT", help="Address of this node for other members.  [127.0.0.1:7650]"
)
@config_file_option
@output_option()
@click.pass_obj
def adopt(
    services: Services, /, data_dir: Path | None, raft_addr: str | None, file: Path | None, output: str
) -> None:
    """Turn the data directory of a broker of one host into that of a cluster's first member.

    \b
    danube stop --data-dir DIR
    danube cluster adopt --data-dir DIR --raft-addr HOST:7650
    danube start --data-dir DIR --raft-addr HOST:7650 --seed-nodes HOST:7650

    Topics, schemas, records, offsets and subscriptions stay.  There is no way back, so copy the directory
    before.  After an interruption repeat the command; until it has ended no broker starts there.
    """
    from danube.broker.clustered.adopting import adopt_directory
    from danube.config.loading import load

    config = load(file, services.environ, {"data_dir": data_dir, "cluster.raft_addr": raft_addr}).config
    found = adopt_directory(config.data_dir, config.cluster.raft_addr)
    plan = found.plan
    show(
        {"node_id": plan.node_id, "cluster_id": plan.cluster_id, "kept": str(config.data_dir / plan.kept)}
        | found.told,
        output,
    )
    note("start it with --seed-nodes and --raft-addr, other brokers with --join; docs/cluster.md")
