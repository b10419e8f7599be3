"""Workflows, templates and release notes: what the forge reads."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.broker_process import ROOT

FORGE = ROOT / ".github"
WORKFLOWS = sorted((FORGE / "workflows").glob("*.yml"))
# By its publisher's branch: the commit of its newest tag could not be read where the others were.
BY_NAME = {"pypa/gh-action-pypi-publish@release/v1"}
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


def test_actions_are_commits_and_their_tag_is_beside() -> None:
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    lines = [line for line in text.splitlines() if line.lstrip(" -").startswith("uses:")]
    pinned = [line for line in lines if re.search(r"uses: [\w/.-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+$", line)]
    assert pinned
    assert {line.split("uses: ")[1] for line in lines if line not in pinned} == BY_NAME


def test_an_action_has_one_commit() -> None:
    text = "\n".join(path.read_text() for path in WORKFLOWS)
    commits = set(re.findall(r"uses: ([\w/.-]+)@([0-9a-f]{40} # \S+)", text))
    assert len(commits) == len({name for name, _ in commits})


def test_pins_and_dependencies_move_each_week() -> None:
    path = FORGE / "dependabot.yml"
    done = checked("vendor.dependabot", path)
    assert done.returncode == 0, done.stdout
    updates = yaml.safe_load(path.read_text())["updates"]
    assert {one["package-ecosystem"] for one in updates} == {"pip", "github-actions"}
    assert {one["schedule"]["interval"] for one in updates} == {"weekly"}


def test_each_job_tests_the_pythons_that_are_promised() -> None:
    jobs = yaml.safe_load((FORGE / "workflows" / "ci.yml").read_text())["jobs"]
    promised = re.findall(r"Python :: (3\.\d+)", (ROOT / "pyproject.toml").read_text())
    assert set(promised) <= set(jobs["test"]["strategy"]["matrix"]["python"])


def test_a_weakness_is_reported_in_private_and_the_page_is_dated() -> None:
    text = (ROOT / "SECURITY.md").read_text()
    assert "](../../security/advisories/new)" in text
    assert (FORGE / "advisory.md").is_file() and "](.github/advisory.md)" in text
    (reviewed,) = re.findall(r"Last reviewed on (\d{4}-\d{2}-\d{2})", text)
    assert datetime.date.fromisoformat(reviewed) >= datetime.date(2026, 11, 28)
    assert "## What is not promised" in text and "within seven days" in text


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
