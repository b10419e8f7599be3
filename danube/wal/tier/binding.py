"""Binding of a store to a data directory.

Both hold the same id: the store in ``store.json``, the data directory in the file ``store``. A broker with an
empty disk numbers its topics from 1 again and would use another broker's objects as its own.  So a store with
data is used only by a data directory that is bound to it, by its first start or by a restore.

Copies of a data directory have the same id and would use the same epochs; so would a directory that a restore
replaced.  So each mover that starts writes a new *holder* into ``store.json`` and remembers the holders that
it has written.  A mover that finds a holder which it never wrote stops, because another host has taken over.

The store of a cluster has the cluster's id.  A cluster that was recovered after the loss of most journals has
a new id and gives it to the store; brokers that know only the former id are then refused.  The same happens
if a broker of one host begins a cluster and no other host has taken its store over meanwhile.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from danube.errors import ObjectMissing, StorageFailed, StorageIncompatible, StoreDamaged, WrongState
from danube.host import files
from danube.host.clock import wall_us
from danube.host.disk_reserve import reserve
from danube.wal.stores.objects import ObjectStore
from danube.wal.tier.keys import METADATA_PREFIX, PARTITIONS_PREFIX, STORE_KEY, parse_key

FORMAT: Final = 1
FILE_NAME: Final = "store"
_FILE_BYTES_MAX: Final = 4_096
HOLDERS_REMEMBERED_MAX: Final = 16  # a put of a killed process may arrive late


class StoreIdentity(msgspec.Struct, frozen=True):
    """The content of ``store.json`` and of the file in the data directory."""

    format: int
    store_id: str
    created_us: int
    holder: str = ""


_Identity = TypeVar("_Identity", bound=StoreIdentity)


class _Binding(StoreIdentity, frozen=True):
    """The file in the data directory: ``held`` are the holders that it has written, the newest last."""

    held: tuple[str, ...] = ()


class _Moved(_Binding, frozen=True):
    """Binding of a member of a new cluster: the store may still have one of the ids ``former``."""

    former: tuple[str, ...] = ()


def bound_store(data_dir: Path) -> StoreIdentity | None:
    """The store that the data directory belongs to; None when it never had one."""
    path = data_dir / FILE_NAME
    try:
        return _decode(files.read_bounded(path, _FILE_BYTES_MAX), path, StoreIdentity)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageFailed(f"{path} cannot be read", why=str(error)) from None


def bind(data_dir: Path, identity: StoreIdentity) -> None:
    """From now on the data directory belongs to that store."""
    try:
        reserve.replace_durably(data_dir / FILE_NAME, msgspec.json.encode(identity) + b"\n")
    except OSError as error:
        raise StorageFailed(f"{data_dir / FILE_NAME} cannot be written", why=str(error)) from None


def stored_identity(store: ObjectStore) -> StoreIdentity | None:
    """Return the identity that the store states; None if it was never used."""
    try:
        return _decode(store.get(STORE_KEY), f"{store.name}/{STORE_KEY}", StoreIdentity)
    except ObjectMissing:
        return None


def ensure_bound(store: ObjectStore, data_dir: Path) -> StoreIdentity:
    """Bind a new store or a new data directory; WrongState when one of them belongs to another."""
    here, there = bound_store(data_dir), stored_identity(store)
    if here is not None and there is not None and here.store_id == there.store_id:
        return there
    used = there is not None and _holds_data(store)
    if here is not None or used:
        raise WrongState(
            f"{store.name} is not the store of {data_dir}",
            why="the store holds another broker's data" if used else "this broker's objects are elsewhere",
            hint="use `danube storage restore` for an empty data directory, or another bucket or prefix",
        )
    if there is None:
        there = StoreIdentity(FORMAT, str(uuid.uuid4()), wall_us())
        store.put(STORE_KEY, msgspec.json.encode(there) + b"\n")
        there = stored_identity(store) or there  # another process may have been first
    bind(data_dir, there)
    return there


def take_over(store: ObjectStore, data_dir: Path, holder: str) -> None:
    """Bind, and become the user of the store; ``holder`` is a new name for each process.

    Raises the errors of ensure_bound, and WrongState if another host has become the user since.
    """
    there = ensure_bound(store, data_dir)
    here = _binding(data_dir)
    _refuse_taken_over(store, data_dir, there, here)
    if there.holder == holder:
        return
    held = (*(here.held if here is not None else ()), holder)[-HOLDERS_REMEMBERED_MAX:]
    # Remembered before it is written: a crash in between must not make this host a stranger.
    bind(data_dir, _Binding(there.format, there.store_id, there.created_us, there.holder, held))
    taken = StoreIdentity(there.format, there.store_id, there.created_us, holder)
    store.put(STORE_KEY, msgspec.json.encode(taken) + b"\n")


def _refuse_taken_over(
    store: ObjectStore, data_dir: Path, there: StoreIdentity, here: _Binding | None
) -> None:
    if there.holder and here is not None and there.holder not in (here.holder, *here.held):
        raise WrongState(
            f"another host has taken over {store.name}",
            why=f"it was restored there, or started from a copy of {data_dir}",
            hint="stop one of the two; `danube verify` tells what only this one has",
        )


def share(store: ObjectStore, data_dir: Path, cluster_id: str) -> None:
    """Bind to the store that the brokers of a cluster share: its id is theirs, and none holds it alone.

    Raises WrongState if store or data directory belong to another.
    """
    here, there = bound_store(data_dir), stored_identity(store)
    member = here is not None and here.store_id == cluster_id
    former = _former_ids(data_dir) if member else ()
    unused = there is None and (here is None or bool(former))  # else the objects are in another one
    if unused or (there is not None and there.store_id in former):
        if there is not None:
            _refuse_taken_over(store, data_dir, there, _binding(data_dir))
        store.put(STORE_KEY, msgspec.json.encode(StoreIdentity(FORMAT, cluster_id, wall_us())) + b"\n")
        there = stored_identity(store)
    if there is None or there.store_id != cluster_id or not (here is None or member):
        raise WrongState(
            f"{store.name} is not the store of this cluster",
            why="it, or this data directory, belongs to another",
            hint="use another bucket or prefix; its data is not touched",
        )
    if here != there:  # or another member put its word at the same time: the ids are the same then
        bind(data_dir, there)


def rebind(data_dir: Path, cluster_id: str, former_id: str) -> None:
    """The cluster ``former_id`` goes on under another id, and its store is to follow; may be called again.

    An empty ``former_id``: a broker that was alone, which may have no store.
    """
    here = _binding(data_dir) if bound_store(data_dir) is not None else None
    if (here is not None and here.store_id == cluster_id) or (here is None and not former_id):
        return
    former = (former_id,) if here is None else (*_former_ids(data_dir), here.store_id)
    former = former[-HOLDERS_REMEMBERED_MAX:]  # more would make the file larger than is read
    created_us, holder, held = (here.created_us, here.holder, here.held) if here is not None else (0, "", ())
    bind(data_dir, _Moved(FORMAT, cluster_id, created_us, holder, held=held, former=former))


def _former_ids(data_dir: Path) -> tuple[str, ...]:
    path = data_dir / FILE_NAME
    return _decode(files.read_bounded(path, _FILE_BYTES_MAX), path, _Moved).former


def _binding(data_dir: Path) -> _Binding | None:
    try:
        return _decode(files.read_bounded(data_dir / FILE_NAME, _FILE_BYTES_MAX), data_dir, _Binding)
    except OSError:
        return None  # ensure_bound has read it a moment ago


def _holds_data(store: ObjectStore) -> bool:
    """Return whether the store holds Danube's objects; a console's folder, for example, is none."""
    prefixes = (PARTITIONS_PREFIX, METADATA_PREFIX)
    return any(parse_key(found.key) is not None for prefix in prefixes for found in store.list(prefix))


def _decode(data: bytes, where: str | Path, kind: type[_Identity]) -> _Identity:
    try:
        identity = msgspec.json.decode(data, type=kind)
    except msgspec.DecodeError as error:
        raise StoreDamaged(
            f"{where} cannot be read", why=str(error), hint="restore it from a backup"
        ) from None
    if identity.format > FORMAT:
        raise StorageIncompatible(
            f"{where} has format {identity.format}",
            why=f"this version of Danube knows formats up to {FORMAT}",
            hint="start the newer Danube; nothing was changed",
        )
    return identity
