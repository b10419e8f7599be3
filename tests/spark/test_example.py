"""The example in the documents, block after block, as a reader would type it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danube import sync
from tests.broker_process import ROOT, BrokerProcess

pytestmark = pytest.mark.e2e
pytest.importorskip("pyspark")

EXAMPLE = ROOT / "docs" / "spark-example.md"
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def test_every_block_of_the_example_runs(
    spark: Any, broker: Callable[..., BrokerProcess], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    process = broker()
    lake = tmp_path / "lake"
    lake.mkdir()
    names: dict[str, Any] = {"address": process.address, "storage": str(process.data_dir), "lake": str(lake)}
    text = EXAMPLE.read_text()
    blocks = list(BLOCK.finditer(text))
    assert len(blocks) >= 8
    for block in blocks:
        line = text.count("\n", 0, block.start(1))
        code = compile("\n" * line + block[1], str(EXAMPLE), "exec")
        exec(code, names)
        if "jobId" in block[1]:
            exec(code, names)  # its text says that rows are there once
    with sync.connect(process.address) as client:
        (totals,) = client.admin.describe_topic("/default/totals").partitions
    assert totals["high_watermark"] == 40
    assert "append_time" in capsys.readouterr().out
