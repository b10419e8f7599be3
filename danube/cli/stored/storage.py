"""``danube storage``: data that is only on this host, and restoring a broker from the store."""

from __future__ import annotations

from typing import Any

import click

from danube.cli.broker.here import Here, config_file_option, data_dir_option, pass_here, store_flags
from danube.cli.terminal.addressing import topic_name
from danube.cli.terminal.asking import Broker, broker_command
from danube.cli.terminal.lazy import LazyGroup
from danube.cli.terminal.output import note, output_option, plain, show
from danube.errors import StoreDamaged

PROBLEMS_SHOWN_MAX = 5
COLUMNS = (
    "topic", "partitions", "local_bytes", "uploaded_bytes", "objects", "pending_bytes", "pending_seconds",
    "unconfirmed", "error",
)  # fmt: skip


@click.group(cls=LazyGroup)
def storage() -> None:
    """Show tiered storage, and restore a broker from its object store.

    \b
    danube storage status
    danube storage restore s3://bucket/prefix --data-dir ./data
    """


@broker_command(storage, "status", "Show data that is only on this host.")
@click.option("--topic", type=topic_name, help="Only this topic.")
def status(broker: Broker, topic: str | None) -> Any:
    """By topic: bytes here and in the object store, and the bytes and seconds that are only here.

    What the store was not asked about yet counts as only here; the column unconfirmed says of how many
    partitions that is so.  Exit code 0 also when something cannot be uploaded now: the column error and a
    note on standard error say why.
    """
    found = plain(broker.admin.storage_status(topic or ""))
    if broker.output == "json":
        return found
    show(found["topics"], broker.output, COLUMNS)
    store = found["store"]
    if store is None:
        note("storage is local: no object store is set up")
    elif not store["answers"]:
        name = f" {store['name']}" if store["name"] else ""
        why = store["error"] or "it was not heard of yet"
        note(f"the object store{name} does not answer: {why}")
        if store.get("hint"):
            note(f"  try: {store['hint']}")
    return None


@storage.command("restore", short_help="Fill an empty data directory from an object store.")
@click.argument("url", metavar="URL")
@data_dir_option("Target directory, empty or missing.")
@click.option("--s3-endpoint", metavar="URL", help="For example http://127.0.0.1:9000.")
@click.option(
    "--older-metadata", is_flag=True, help="Use an older copy of the metadata if the newest is damaged."
)
@config_file_option
@output_option()
@pass_here
def restore(here: Here, url: str, s3_endpoint: str | None, older_metadata: bool) -> None:
    """Bring back every topic, schema, cursor and uploaded record that URL holds.

    Records stay in the store and are read from there; local disk is needed for what is published from
    now on.  Start the broker afterwards with the same URL.  A directory that holds data is refused, and so
    is a store whose newest copy of the metadata is damaged.  Exit code 12: not everything came back, and
    the field problems says what did not; what did can be used.
    """
    from danube.broker.tiers.restore import restore_from
    from danube.wal.stores.opening import open_store

    config = here.load(store_flags(url, s3_endpoint))
    store = open_store(config.storage)
    restored = restore_from(store, config.data_dir, older_metadata=older_metadata, progress=note)
    show({**restored._asdict(), "data_dir": str(config.data_dir)}, here.output)
    if restored.problems:
        raise StoreDamaged(
            f"not everything came back from {url}",
            why="; ".join(restored.problems[:PROBLEMS_SHOWN_MAX]),
            hint="what came back can be used; `danube verify` looks at the store",
        )
