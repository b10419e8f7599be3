"""Build a client's scenarios with its own toolchain and run them against a broker.

The programs in ``rust``, ``go`` and ``java`` print ``ok NAME`` or ``FAIL NAME: why``, and ``# `` before what
they measured; for ``@restart`` (``@kill``: by SIGKILL) the broker is stopped and started again and a line
answers.  What cannot be built because a toolchain or the client itself is missing is ``skipped``.
``--prepare LANGUAGE`` builds alone, and notes for tests what is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.broker_process import ROOT, BrokerFailed, BrokerProcess, die_with_parent

HERE = Path(__file__).parent
BUILD = ROOT / "build" / "compat"
BUILD_TIMEOUT_S = 1_800
RUN_TIMEOUT_S = 900
JAVA_MIN = 21
GO_MODULE = "github.com/danube-messaging/danube-go"
UNREACHABLE = (
    "403 Forbidden", "404 Not Found", "410 Gone", "Could not find artifact", "Could not resolve",
    "Could not transfer", "no matching package", "failed to download", "dial tcp", "no such host",
    "spurious network error", "failed to get `", "i/o timeout", "Unknown host", "is not available",
    "npm error network", "ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED", "ETIMEDOUT",
)  # fmt: skip


class Skipped(Exception):
    """There is nothing to run: a toolchain or the client is missing."""


class BuildFailed(Exception):
    """The client is there and its scenarios do not build."""


def need(program: str) -> str:
    found = shutil.which(program)
    if found is None:
        raise Skipped(f"{program} is not installed")
    return found


def build(command: Sequence[str], folder: Path, environment: dict[str, str] | None = None) -> None:
    """Run a build step; Skipped when a registry does not give what it needs."""
    try:
        result = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=BUILD_TIMEOUT_S,
            preexec_fn=die_with_parent,
        )
    except subprocess.TimeoutExpired:
        raise Skipped(f"{command[0]} took longer than {BUILD_TIMEOUT_S} s") from None
    if result.returncode == 0:
        return
    said = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout.decode(errors="replace"))
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    for line in lines:
        if any(sign in line for sign in UNREACHABLE):
            raise Skipped(f"its registry does not give the client: {line[:300]}")
    raise BuildFailed("\n".join(lines[-30:]))


# -- one client each ----------------------------------------------------------------------------


def rust(binary: str = "danube-compat", *options: str) -> list[str]:
    """danube-client of crates.io; it compiles .proto files, so protoc is given to it."""
    cargo = need("cargo")
    BUILD.mkdir(parents=True, exist_ok=True)
    protoc = BUILD / "protoc"
    protoc.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m grpc_tools.protoc "$@"\n')
    protoc.chmod(0o755)
    environment = {"PROTOC": str(protoc), "CARGO_TARGET_DIR": str(BUILD / "rust"), "CARGO_NET_RETRY": "1"}
    build([cargo, "build", "--locked", "--quiet", "--bin", binary, *options], HERE / "rust", environment)
    return [str(BUILD / "rust" / ("release" if "--release" in options else "debug") / binary)]


def go() -> list[str]:
    """The module danube-go."""
    program = need("go")
    folder = BUILD / "go"
    shutil.copytree(HERE / "go", folder, dirs_exist_ok=True)
    environment = {"GOFLAGS": "-mod=mod -buildvcs=false"}
    build([program, "get", f"{GO_MODULE}@latest"], folder, environment)
    build([program, "build", "-o", "danube-compat", "."], folder, environment)
    return [str(folder / "danube-compat")]


def java() -> list[str]:
    """The artefact com.danube-messaging:danube-client, which wants Java 21."""
    maven, runtime = need("mvn"), need("java")
    folder = BUILD / "java"
    shutil.copytree(HERE / "java", folder, dirs_exist_ok=True)
    local = f"-Dmaven.repo.local={BUILD / 'maven'}"
    build([maven, "-q", "-B", "-U", local, "dependency:copy-dependencies"], folder)
    version = java_version(runtime)
    if version < JAVA_MIN:
        raise Skipped(f"the client wants Java {JAVA_MIN}, and this is {version or 'none'}")
    source = folder / "src" / "main" / "java" / "Compat.java"
    imports = "".join(f"import {one}.*; " for one in packages(folder / "target" / "libraries"))
    source.write_text(source.read_text().replace("// @IMPORTS@", f"{imports}//", 1))
    build([maven, "-q", "-B", local, "compile"], folder)
    return [runtime, "-cp", f"{folder / 'target' / 'classes'}:{folder / 'target' / 'libraries'}/*", "Compat"]


def packages(libraries: Path) -> list[str]:
    """The packages of the client's jar that an application may use."""
    for jar in sorted(libraries.glob("danube-client-*.jar")):
        names = zipfile.ZipFile(jar).namelist()
        folders = {name.rpartition("/")[0] for name in names if name.endswith(".class")}
        if any(name.endswith("/DanubeClient.class") for name in names):
            return sorted(one.replace("/", ".") for one in folders if "internal" not in one.split("/"))
    raise BuildFailed(f"there is no DanubeClient in {libraries}")


def java_version(runtime: str) -> int:
    """The feature number of a Java runtime, 0 when it does not say."""
    said = subprocess.run([runtime, "-version"], capture_output=True, text=True, timeout=60).stderr
    words = said.split('"')
    number = words[1].split(".")[0] if len(words) > 1 else ""
    return int(number) if number.isdigit() else 0


BUILDS: dict[str, Callable[[], list[str]]] = {"rust": rust, "go": go, "java": java}


def prepare(language: str) -> None:
    """Build for tests that follow; they are told what could not be had."""
    missing = BUILD / f"{language}.missing"
    missing.unlink(missing_ok=True)
    try:
        BUILDS[language]()
    except Skipped as reason:
        BUILD.mkdir(parents=True, exist_ok=True)
        missing.write_text(str(reason), encoding="utf-8")
        say("skipped", f"{language}:", str(reason))


def prepared(language: str) -> list[str]:
    """Return the program's command, built unless it is; Skipped where the last attempt had to be."""
    missing = BUILD / f"{language}.missing"
    if missing.exists():
        raise Skipped(missing.read_text(encoding="utf-8"))
    return BUILDS[language]()


# -- running ------------------------------------------------------------------------------------


@contextmanager
def running_broker() -> Iterator[BrokerProcess]:
    """A broker with two workers on free ports and a data directory that goes with it."""
    with tempfile.TemporaryDirectory(prefix="danube-compat-") as folder:
        process = BrokerProcess(Path(folder) / "data", workers=2)
        try:
            yield process.start()
        finally:
            process.kill()


def run(
    language: str,
    command: list[str],
    broker: BrokerProcess,
    wanted: Sequence[str] = (),
    trusting: Mapping[str, str] | None = None,
) -> bool:
    """Print what each scenario came to; False when one failed or the program broke off.

    ``trusting``: over TLS, and what the environment says of certificates and tokens.
    """
    failed, seen = False, 0
    scheme = "http" if trusting is None else "https"
    with subprocess.Popen(
        [*command, f"{scheme}://{broker.grpc_address}", *wanted],
        env={**os.environ, **(trusting or {})},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=die_with_parent,
    ) as program:
        alarm = threading.Timer(RUN_TIMEOUT_S, program.kill)
        alarm.start()
        try:
            for line in program.stdout or ():
                if line.startswith(("@restart", "@kill")):
                    broker.kill() if line.startswith("@kill") else broker.stop()
                    broker.start()
                    _answer(program)
                elif line.startswith(("ok ", "FAIL ", "skipped ")):
                    outcome, _, what = line.rstrip().partition(" ")
                    failed = failed or outcome == "FAIL"
                    seen += 1
                    say(outcome, language, what)
                elif line.startswith("# "):
                    say("#", language, line[2:].rstrip())
            code = program.wait()
        finally:
            alarm.cancel()
            program.kill()
    if not failed and (code != 0 or not seen):
        say("FAIL", language, f"the program ended with {code} after {seen} scenarios")
        failed = True
    return not failed


def _answer(program: subprocess.Popen[str]) -> None:
    if program.stdin is not None:
        with suppress(BrokenPipeError):
            program.stdin.write("done\n")
            program.stdin.flush()


def say(outcome: str, language: str, what: str) -> None:
    print(f"{outcome} {language} {what}", flush=True)


def main(words: Sequence[str]) -> int:
    only_build = tuple(words[:1]) == ("--prepare",)
    language, *wanted = words[only_build:] or [""]
    if language not in BUILDS:
        usage = f"usage: python -m tests.compat.run [--prepare] {'|'.join(BUILDS)} [SCENARIO...]"
        print(usage, file=sys.stderr)
        return 2
    BUILD.mkdir(parents=True, exist_ok=True)
    try:
        if only_build:
            prepare(language)
            return 0
        command = BUILDS[language]()
    except Skipped as reason:
        say("skipped", f"{language}:", str(reason))
        return 0
    except BuildFailed as error:
        say("FAIL", language, f"build: {error}")
        return 1
    try:
        with running_broker() as broker:
            return 0 if run(language, command, broker, wanted) else 1
    except BrokerFailed as error:
        say("FAIL", language, f"broker: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
