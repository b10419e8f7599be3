"""Another build of this program: the same files but for some, in a directory of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.broker_process import ROOT


def other_build(directory: Path, changes: Mapping[str, tuple[str, str]]) -> dict[str, str]:
    """The environment in which ``python -m danube`` runs it.

    ``changes``: by path below ``danube``, a piece of that file (there once) and what stands there instead.
    All other files are links, so that what was compiled of them is used.
    """
    changed = {Path(name): piece for name, piece in changes.items()}
    folders = {Path(), *(parent for path in changed for parent in path.parents)}
    for folder in sorted(folders):
        made = directory / "danube" / folder
        made.mkdir(parents=True)
        for entry in (ROOT / "danube" / folder).iterdir():
            below = folder / entry.name
            if below not in changed and below not in folders and entry.name != "__pycache__":
                (made / entry.name).symlink_to(entry)
    for path, (old, new) in changed.items():
        text = (ROOT / "danube" / path).read_text()
        assert text.count(old) == 1, f"{path} holds {old!r} {text.count(old)} times"
        (directory / "danube" / path).write_text(text.replace(old, new))
    return {"PYTHONPATH": str(directory), "PYTHONSAFEPATH": "1"}
