"""``danube cluster adopt``: a broker that was alone becomes the first member of a cluster."""

from __future__ import annotations

import click

from danube.cli.broker.here import Here, config_file_option, data_dir_option, pass_here
from danube.cli.terminal.output import note, output_option, show


@click.command(short_help="Make a broker of one host the first member.")
@data_dir_option("Data directory of a stopped broker.")
@click.option(
    "--raft-addr", metavar="HOST:PORT", help="Address of this node for other members.  [127.0.0.1:7650]"
)
@config_file_option
@output_option()
@pass_here
def adopt(here: Here, raft_addr: str | None) -> None:
    """Turn the data directory of a broker of one host into that of a cluster's first member.

    \b
    danube stop --data-dir DIR
    danube cluster adopt --data-dir DIR --raft-addr HOST:7650
    danube start --data-dir DIR --raft-addr HOST:7650 --seed-nodes HOST:7650

    Topics, schemas, records, offsets and subscriptions stay.  There is no way back, so copy the directory
    before.  After an interruption repeat the command; until it has ended no broker starts there.
    """
    from danube.broker.clustered.adopting import adopt_directory

    config = here.load({"cluster.raft_addr": raft_addr})
    found = adopt_directory(config.data_dir, config.cluster.raft_addr)
    plan = found.plan
    kept = str(config.data_dir / plan.kept)
    show({"node_id": plan.node_id, "cluster_id": plan.cluster_id, "kept": kept} | found.told, here.output)
    note("start it with --seed-nodes and --raft-addr, other brokers with --join; docs/cluster.md")
