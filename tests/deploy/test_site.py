"""The documentation site: built as a release builds it, with no broken link."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.broker_process import ROOT

pytest.importorskip("material", reason="needs pip install 'danube-broker[test-deploy]'")


def build(site: Path, *, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    environ = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(
        [*command, "--site-dir", str(site)], capture_output=True, text=True, env=environ, check=False
    )


@pytest.mark.slow
def test_the_site_is_built_and_can_be_searched(tmp_path: Path) -> None:
    done = build(tmp_path / "site")
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "site" / "search" / "search_index.json").read_text())
    assert {"client/", "formats/batch/", "guarantees/"} <= {
        page["location"].partition("#")[0] for page in index["docs"]
    }


def test_a_broken_link_fails_the_build(tmp_path: Path) -> None:
    pages = tmp_path / "docs"
    pages.mkdir()
    (pages / "README.md").write_text("# Title\n\nSee [there](nowhere.md).\n")
    config = tmp_path / "mkdocs.yml"
    text = (ROOT / "mkdocs.yml").read_text()
    config.write_text(text.partition("\nnav:")[0] + "\n")
    done = build(tmp_path / "site", config=config)
    assert done.returncode == 1
    assert "nowhere.md" in done.stderr
