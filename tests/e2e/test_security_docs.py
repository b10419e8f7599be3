"""Every block of commands in docs/security.md is run, in order, from an empty host."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.broker_process import ROOT, free_port

PAGE = ROOT / "docs" / "security.md"
PORTS = {"6660": "DANUBE_SERVER__NATIVE_PORT", "6650": "DANUBE_GRPC__PORT", "50051": "DANUBE_ADMIN__PORT"}


def blocks() -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of a user without anything; a broker that a block leaves running is stopped."""
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "danube").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m danube "$@"\n')
    (commands / "danube").chmod(0o755)
    environ = {name: text for name, text in os.environ.items() if not name.startswith(("DANUBE_", "XDG_"))}
    environ |= {
        "PATH": f"{commands}:{environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "HOME": str(tmp_path / "home"),
    }
    (tmp_path / "home").mkdir()
    yield environ
    for data in tmp_path.glob("work/*"):
        subprocess.run(["danube", "stop", "--data-dir", data], env=environ, capture_output=True, timeout=60)


@pytest.mark.slow
def test_every_block_of_the_page_runs(tmp_path: Path, host: dict[str, str]) -> None:
    ports = {number: str(free_port()) for number in PORTS}
    environ = host | {PORTS[number]: free for number, free in ports.items()}
    work = tmp_path / "work"
    work.mkdir()
    found = blocks()
    assert found
    for block in found:
        script = re.sub(r"(?<=:)(6660|6650|50051)\b", lambda match: ports[match[1]], block)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script], cwd=work, env=environ, capture_output=True, text=True,
            timeout=240, stdin=subprocess.DEVNULL,
        )  # fmt: skip
        assert done.returncode == 0, f"{block}\n{done.stdout}\n{done.stderr}"


def test_no_block_is_shown_that_is_not_run() -> None:
    assert set(re.findall(r"^```(\w*)$", PAGE.read_text(), re.MULTILINE)) <= {"sh", ""}
    assert PAGE.read_text().count("```") == 2 * len(blocks())
