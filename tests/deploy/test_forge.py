"""Workflows, templates and release notes: what the forge reads."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.broker_process import ROOT

FORGE = ROOT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))
FORMS = [path for path in sorted((FORGE / "ISSUE_TEMPLATE").glob("*.yml")) if path.name != "config.yml"]


def checked(schema: str, path: Path) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("check_jsonschema", reason="needs pip install 'danube-broker[test-deploy]'")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
@pytest.mark.parametrize("schema", ["vendor.github-workflows", "custom.github-workflows-require-timeout"])
def test_workflows_are_valid_and_end(path: Path, schema: str) -> None:
    done = checked(schema, path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_valid(path: Path) -> None:
    done = checked("vendor.github-issue-forms", path)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_scripts_of_workflows_are_there(path: Path) -> None:
    for job in yaml.safe_load(path.read_text())["jobs"].values():
        for step in job["steps"]:
            for name in re.findall(r"(?:scripts|deploy)/[\w/.-]+", step.get("run", "")):
                assert (ROOT / name).is_file(), name


def test_each_job_tests_the_pythons_that_are_promised() -> None:
    jobs = yaml.safe_load((FORGE / "workflows" / "ci.yml").read_text())["jobs"]
    promised = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert set(promised) <= set(jobs["test"]["strategy"]["matrix"]["python"])


def notes(version: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/release-notes", version]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)


def test_release_notes_are_those_of_the_version() -> None:
    done = notes("Unreleased")
    assert done.returncode == 0
    assert done.stdout.startswith("### ")
    assert "\n## " not in done.stdout


def test_a_version_without_notes_is_no_release() -> None:
    done = notes("9.9.9")
    assert done.returncode == 3
    assert "no notes of 9.9.9" in done.stderr
