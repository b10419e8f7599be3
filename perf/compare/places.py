"""Where servers, tools and the Python of the peers' clients are, and the words when one is not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TOOLS_VARIABLE = "DANUBE_COMPARE_TOOLS"
BOOT = (
    f"import runpy, sys; sys.path.append({str(ROOT)!r}); del sys.argv[0];"
    " runpy.run_path(sys.argv[0], run_name='__main__')"
)
RABBIT_FOLDER = "/usr/lib/rabbitmq/bin"  # what lies on PATH is a wrapper that becomes another user
SYSTEM_FOLDER = "/usr/sbin"  # often not on a user's PATH


def tools_folder() -> Path:
    """What scripts/compare-setup makes: a virtual environment with the clients, and tools beside them."""
    return Path(os.environ.get(TOOLS_VARIABLE) or ROOT / ".venv-compare")


def why_not(name: str) -> str:
    """What the setup noted when it could not fetch something."""
    try:
        return (tools_folder() / "missing" / name).read_text().strip()
    except OSError:
        return "run scripts/compare-setup"


class Program(NamedTuple):
    """A program: fetched by the setup, or installed; ``how`` one gets it where the setup does not.

    ``missing()`` says in words why it is not here, and nothing when it is.
    """

    name: str
    how: str = ""

    def path(self) -> str:
        """Its path; empty for none."""
        path = os.environ.get("PATH", os.defpath)
        folders = [str(tools_folder() / "bin"), RABBIT_FOLDER, path, SYSTEM_FOLDER]
        return shutil.which(self.name, path=os.pathsep.join(folders)) or ""

    def missing(self) -> str:
        return "" if self.path() else f"{self.name} is not installed ({self.how or why_not(self.name)})"


class Jars(NamedTuple):
    """A folder of Java archives."""

    name: str

    def path(self) -> str:
        """A class path of the folder or of its ``libs``; empty when there is none."""
        folder = tools_folder() / "java" / self.name
        return next((str(place / "*") for place in (folder, folder / "libs") if any(place.glob("*.jar"))), "")

    def missing(self) -> str:
        if not shutil.which("java"):
            return "no Java runtime"
        return "" if self.path() else f"{self.name} is not here ({why_not(self.name)})"

    def command(self, main: str, *options: str) -> list[str]:
        return ["java", *options, "-cp", self.path(), main]


Needed = Program | Jars  # something that may be on this machine


def peers_python() -> list[str]:
    """The Python of the peers' clients, as a command that a script follows.

    The repository's modules come behind those of the peers, of which one is called danube, too.
    """
    return [str(tools_folder() / "bin" / "python"), "-P", "-c", BOOT]


def no_package(package: str) -> str:
    """Why a package of the peers' Python cannot be imported, in words; empty when it can."""
    if not (tools_folder() / "bin" / "python").exists():
        return "the Python clients are not installed (run scripts/compare-setup)"
    if not any(tools_folder().glob(f"lib/python3*/site-packages/{package}")):
        return f"the Python package {package} is not installed ({why_not('clients')})"
    return ""
