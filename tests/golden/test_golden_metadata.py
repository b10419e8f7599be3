"""Metadata commands and snapshots are pinned byte for byte, and read as what they were."""

from __future__ import annotations

import json

import pytest

from danube.core.cluster.commands import AnyClusterCommand
from danube.core.metadata.commands import decode_commands
from danube.core.metadata.machine import Metadata
from tests.golden.metadata_cases import CASES, FOLDER, describe, vectors

NAMES = sorted(path.name for path in FOLDER.iterdir() if path.suffix != ".json")
MAGICS = {
    "topics": b"DNM1", "parts": b"DNM2", "cluster": b"DNM3", "reserved": b"DNM3", "credentials": b"DNM4",
    "quotas": b"DNM4",
}  # fmt: skip


def test_the_machine_writes_the_pinned_bytes() -> None:
    made = vectors()
    assert sorted(made) == NAMES
    for name, data in made.items():
        assert data.hex() == (FOLDER / name).read_bytes().hex(), name


@pytest.mark.parametrize("name", NAMES)
def test_pinned_bytes_hold_the_pinned_values(name: str) -> None:
    described = describe(name, (FOLDER / name).read_bytes())
    assert json.loads(json.dumps(described)) == json.loads(
        (FOLDER / f"{name}.json").read_text(encoding="utf-8")
    )


@pytest.mark.parametrize("case", sorted(CASES))
def test_pinned_commands_lead_to_the_pinned_snapshot(case: str) -> None:
    machine = Metadata()
    commands = decode_commands((FOLDER / f"{case}.commands").read_bytes())
    assert commands == CASES[case]
    for command in commands:
        assert machine.check(command)
        machine.apply(machine.version + 1, command)
    snapshot = (FOLDER / f"{case}.snapshot").read_bytes()
    assert snapshot[:4] == MAGICS[case]
    assert machine.snapshot() == snapshot == Metadata.restore(snapshot).snapshot()


def test_every_command_of_a_cluster_is_pinned() -> None:
    assert {type(command) for command in CASES["reserved"]} >= set(AnyClusterCommand.__args__)
