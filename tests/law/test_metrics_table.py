"""docs/metrics.md lists what is exported, and every name follows the same rules."""

from __future__ import annotations

import re

from danube.ipc.counters import GAUGES
from danube.server.metrics.table import COUNTED, FAMILIES
from tests.law.source import ROOT

DOCUMENT = ROOT / "docs" / "metrics.md"
ROW = re.compile(r"\| `(danube_\w+)` \| (\w+) \| (.*?) ?\| (.+) \|")


def test_the_document_is_the_table() -> None:
    rows = [match.groups() for line in DOCUMENT.read_text().splitlines() if (match := ROW.fullmatch(line))]
    listed = [(name, kind, tuple(re.findall(r"`(\w+)`", labels)), says) for name, kind, labels, says in rows]
    assert listed == [family[:4] for family in FAMILIES]


def test_names_carry_the_kind_and_the_unit() -> None:
    for family in FAMILIES:
        assert re.fullmatch(r"danube(_[a-z]+)+", family.name), family
        assert family.name.endswith("_total") == (family.kind == "counter"), family
        for unit in ("seconds", "bytes"):
            assert unit not in family.name or family.name.endswith((f"_{unit}", "_total")), family
        assert family.says.endswith("."), family


def test_a_counter_that_starts_again_is_a_gauge() -> None:
    for counter, family in COUNTED.items():
        assert (counter in GAUGES) == (family.kind == "gauge"), counter


def test_every_name_in_the_document_is_exported() -> None:
    names = {family.name for family in FAMILIES}
    for name in re.findall(r"danube_[a-z_]*[a-z]", DOCUMENT.read_text()):
        assert name in names or any(one.startswith(f"{name}_") for one in names), name
