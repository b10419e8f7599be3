"""Where servers, tools and the Python of the peers' clients are, and the words when one is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOOLS_VARIABLE = "DANUBE_COMPARE_TOOLS"
SYSTEM_FOLDERS = "/usr/sbin:/usr/lib/rabbitmq/bin:/opt/kafka/bin"  # often not on a user's PATH


def tools_folder() -> Path:
    """What scripts/compare-setup makes: a virtual environment with the clients, and tools beside them."""
    return Path(os.environ.get(TOOLS_VARIABLE) or ROOT / ".venv-compare")


def program(name: str, variable: str = "") -> str:
    """Path of a program: named by the variable, fetched by the setup, or installed; empty for none."""
    named = os.environ.get(variable, "") if variable else ""
    if named:
        return named if os.access(named, os.X_OK) and Path(named).is_file() else ""
    search = os.pathsep.join(
        [str(tools_folder() / "bin"), os.environ.get("PATH", os.defpath), SYSTEM_FOLDERS]
    )
    return shutil.which(name, path=search) or ""


def no_program(name: str, variable: str = "", how: str = "") -> str:
    """Why :func:`program` found nothing."""
    named = os.environ.get(variable, "") if variable else ""
    if named:
        return f"{variable} names {named}, which is not a program"
    ways = " or ".join(filter(None, [how, f"name it with {variable}" if variable else ""]))
    return f"{name} is not installed" + (f" ({ways})" if ways else "")


def peers_python() -> list[str]:
    """The Python of the peers' clients, as a command; the folder of a script is not searched for modules."""
    return [str(tools_folder() / "bin" / "python"), "-P"]


def no_package(package: str) -> str:
    """Why a package of the peers' Python cannot be imported, in words; empty when it can."""
    if not (tools_folder() / "bin" / "python").exists():
        return "the Python clients are not installed (run scripts/compare-setup)"
    if not any(tools_folder().glob(f"lib/python3*/site-packages/{package}")):
        return f"the Python package {package} is not installed ({why_not('clients')})"
    return ""


def jars(name: str, variable: str) -> str:
    """A Java class path of a folder with jars, or in its ``libs``; empty when there is none."""
    folder = Path(os.environ.get(variable) or tools_folder() / "java" / name)
    for place in (folder, folder / "libs"):
        if any(place.glob("*.jar")):
            return str(place / "*")
    return ""


def no_jars(name: str, variable: str) -> str:
    """Why :func:`jars` found nothing."""
    if os.environ.get(variable):
        return f"{variable} names {os.environ[variable]}, where no jars are"
    return f"{name} is not here ({why_not(name)}; {variable} names a folder with its jars)"


def why_not(name: str) -> str:
    """What the setup noted when it could not fetch something."""
    try:
        return (tools_folder() / "missing" / name).read_text().strip()
    except OSError:
        return "run scripts/compare-setup"
