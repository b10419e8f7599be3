"""Warnings about the host a broker is started on: they lose data or refuse clients later on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from danube.config.exposure import open_doors

if TYPE_CHECKING:
    from danube.config.loading import BrokerConfig

DESCRIPTORS_RESERVED = 1_024  # segment files, shared memory and doorbells of one worker
FREE_BYTES_LOW = 1 << 30
_VOLATILE = frozenset({"tmpfs", "ramfs"})
_REMOTE = frozenset({"nfs", "nfs4", "cifs", "smb3", "fuse.sshfs", "9p"})


def warnings_about(config: BrokerConfig) -> list[str]:
    """Sentences for the banner; empty when nothing is in the way."""
    found = [
        _file_system(config.data_dir),
        _free_space(config.data_dir),
        _descriptors(config),
    ]
    return [sentence for sentence in [*found, *(sentence for _, sentence in open_doors(config))] if sentence]


def _file_system(data_dir: Path) -> str:
    kind = file_system_of(data_dir)
    if kind in _VOLATILE:
        return f"the data directory is on {kind}: a reboot loses everything, whatever the durability level"
    if kind in _REMOTE:
        return f"the data directory is on {kind}: syncs are slow and locks may not hold; use a local disk"
    return ""


def file_system_of(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str:
    """Type of the file system that holds ``path``, which need not exist; empty if it is not known."""
    place = _existing(path).resolve()
    best, kind = -1, ""
    try:
        text = mounts.read_text("utf-8", "surrogateescape")
    except OSError:
        return ""
    for entry in text.splitlines():
        words = entry.split(" ")
        if len(words) > 2:
            point = words[1].replace("\\040", " ")
            inside = point == "/" or place == Path(point) or Path(point) in place.parents
            if inside and len(point) >= best:  # a later mount on the same point hides the earlier one
                best, kind = len(point), words[2]
    return kind


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


def _free_space(data_dir: Path) -> str:
    import shutil

    try:
        free = shutil.disk_usage(_existing(data_dir)).free
    except OSError:
        return ""
    if free >= FREE_BYTES_LOW:
        return ""
    return f"the data directory's file system has only {free >> 20} MiB free"


def _descriptors(config: BrokerConfig) -> str:
    try:
        import resource
    except ImportError:
        return ""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    per_worker = -(-config.limits.connections_max // config.worker_count) + DESCRIPTORS_RESERVED
    if limit == resource.RLIM_INFINITY or limit >= per_worker:
        return ""
    return (
        f"a process may open {limit} files here, {per_worker} are wanted for "
        f"{config.limits.connections_max} connections: raise `ulimit -Hn` or lower limits.connections_max"
    )
