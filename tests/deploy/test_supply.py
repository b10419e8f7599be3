"""What a release is made of: exact versions, their licences, the list of all parts."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.broker_process import ROOT

LOCK = ROOT / "deploy" / "container" / "requirements.txt"
LICENCES = runpy.run_path(str(ROOT / "scripts" / "licences"))
families = LICENCES["families"]


def project() -> dict[str, list[str]]:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {"": found["dependencies"], **found["optional-dependencies"]}


def locked() -> list[tuple[Requirement, list[str]]]:
    """Each entry of the lock with its hashes."""
    entries = re.split(r"\n(?=\S)", LOCK.read_text().strip())
    parts = [entry.replace("\\\n", "").split(" --hash=") for entry in entries]
    return [(Requirement(first.strip()), [one.strip() for one in hashes]) for first, *hashes in parts]


def licence_rows() -> dict[str, tuple[str, str]]:
    lines = re.findall(r"^\| ([a-z0-9-]+) \| (.+?) \| (\w*) \|$", LICENCES["PAGE"].read_text(), re.MULTILINE)
    return {name: (licence, code) for name, licence, code in lines if name != "package"}


def test_each_entry_is_one_version_with_its_hashes() -> None:
    for asked, hashes in locked():
        assert re.fullmatch(r"==[\w.]+", str(asked.specifier)) and asked.url is None, asked
        assert hashes and all(re.fullmatch(r"sha256:[0-9a-f]{64}", one) for one in hashes), asked
    assert "://" not in LOCK.read_text()


def test_the_lock_holds_what_the_image_asks_for_within_its_ranges() -> None:
    versions: dict[str, list[str]] = {}
    for one, _ in locked():
        versions.setdefault(canonicalize_name(one.name), []).append(str(one.specifier)[2:])
    extras = project()
    for asked in map(
        Requirement, [*extras[""], *extras["cluster"], *extras["cloud"], *extras["compression"]]
    ):
        found = versions.get(canonicalize_name(asked.name), [])
        assert found and all(map(asked.specifier.contains, found)), (
            f"{asked}: run scripts/lock; it has {found}"
        )


def test_the_lock_holds_what_its_packages_ask_for() -> None:
    """As far as they are installed here in these versions."""
    names = {canonicalize_name(one.name) for one, _ in locked()}
    for one, _ in locked():
        try:
            found = metadata.distribution(one.name)
        except metadata.PackageNotFoundError:
            continue
        if not one.specifier.contains(found.version):
            continue
        for asked in map(Requirement, found.requires or []):
            if asked.marker is None or asked.marker.evaluate({"extra": ""}):
                assert canonicalize_name(asked.name) in names, f"{one.name} needs {asked}"


def test_the_image_installs_by_hash_and_nothing_else() -> None:
    text = (ROOT / "deploy/container/Dockerfile").read_text()
    installs = re.findall(r"pip install (.*?) \\$", text, re.MULTILINE)
    assert installs == [
        "--no-deps --require-hashes --requirement /tmp/dist/requirements.txt",
        "--no-deps /tmp/dist/danube_broker-*.whl",
    ]
    assert " pip check " in text


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("MIT", {"MIT"}),
        ("3-Clause BSD License", {"BSD"}),
        ("BSD-2-Clause AND Apache-2.0 WITH LLVM-exception", {"BSD", "Apache"}),
        ("(MIT OR 0BSD) AND Zlib", {"MIT", "BSD", "Zlib"}),
        ("Mozilla Public License 2.0 (MPL 2.0)", {"MPL"}),
    ],
)
def test_licences_have_families(licence: str, expected: set[str]) -> None:
    assert families(licence) == expected


@pytest.mark.parametrize(
    "licence",
    ["", "UNKNOWN", "GPL-3.0-only", "AGPL-3.0", "MIT AND LGPL-2.1", "GNU General Public License", "SSPL-1.0"],
)
def test_other_licences_are_refused(licence: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        families(licence)
    assert LICENCES["refused"]([("some", "1.0", licence, "")]) != []


def test_the_table_of_licences_names_all_that_is_asked_for() -> None:
    extras = project()
    asked = [one for name in ("", *LICENCES["EXTRAS"]) for one in extras[name]]
    names = {canonicalize_name(Requirement(one).name) for one in asked} - {"danube-broker"}
    names |= {canonicalize_name(one.name) for one, _ in locked()} | {"raftos"}
    assert names - set(licence_rows()) == set(), "run scripts/licences"


def test_the_table_of_licences_is_what_packages_declare() -> None:
    """By families: the words for one licence change from version to version."""
    rows = licence_rows()
    installed = {canonicalize_name(one.metadata["Name"]): one for one in metadata.distributions()}
    declared = [row for row in LICENCES["rows"](installed) if row[0] in rows]
    assert LICENCES["refused"](declared) == []
    assert len(declared) >= len(project()[""])
    for name, version, licence, code in declared:
        if name not in LICENCES["EXCEPTIONS"]:
            assert families(licence) == families(rows[name][0]), f"{name} {version}: run scripts/licences"
        assert not code or rows[name][1] == code, (
            f"{name} {version} holds compiled code: run scripts/licences"
        )


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An environment with the descriptions of the packages of the lock, as far as they are installed here."""
    made = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(made)], check=True)
    (packages,) = made.glob("lib/python3*/site-packages")
    names = {canonicalize_name(one.name) for one, _ in locked()} | {"danube-broker"}
    for found in metadata.distributions():
        if canonicalize_name(found.metadata["Name"]) in names:
            folder = packages / f"{found.metadata['Name']}-{found.version}.dist-info"
            folder.mkdir(exist_ok=True)  # a checkout tells of itself twice, by its egg-info too
            (folder / "METADATA").write_text(found.read_text("METADATA") or "")
    return made


def names_of(environment: Path) -> set[str]:
    folders = environment.glob("lib/python3*/site-packages/*.dist-info")
    return {
        canonicalize_name(folder.name.removesuffix(".dist-info").rpartition("-")[0]) for folder in folders
    }


def test_the_bill_of_materials_names_each_part(environment: Path, tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx_py", reason="needs pip install 'danube-broker[test-deploy]'")
    made = tmp_path / "sbom" / "danube.cdx.json"
    command = [str(ROOT / "scripts" / "sbom"), str(made), "--of", str(environment)]
    environ = os.environ | {"DANUBE_PYTHON": sys.executable}  # which the set-up may have from another one
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(made.read_text())
    assert found["bomFormat"] == "CycloneDX"
    parts = {canonicalize_name(one["name"]): one for one in found["components"]}
    assert set(parts) == names_of(environment)
    assert set(parts) >= {canonicalize_name(Requirement(one).name) for one in project()[""]}
    assert all(one["version"] and one["purl"] for one in parts.values())
    # Which writes its licence in words that are none of the list's.
    assert {name for name, one in parts.items() if not one.get("licenses")} <= {"protobuf"}


def test_licences_of_another_environment_are_told(environment: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "licences"), str(environment)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"^hpack \S+ MIT", done.stdout, re.MULTILINE)
    (description,) = environment.glob("lib/python3*/site-packages/hpack-*/METADATA")
    description.write_text(re.sub(r"(?m)^License.*$", "License: AGPL-3.0", description.read_text(), count=1))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "licences: hpack" in done.stderr and "AGPL-3.0" in done.stderr


def test_an_environment_without_danube_has_no_licences_to_tell(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts" / "licences"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "danube-broker is not installed there" in done.stderr
