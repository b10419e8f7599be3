"""The runner of the official clients: what is skipped, what fails, and how a broker is restarted for them."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.compat import run


class Broker:
    """What the runner needs of a broker."""

    grpc_address = "127.0.0.1:1"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)


def program(text: str) -> list[str]:
    return [sys.executable, "-c", text]


def test_a_missing_toolchain_is_a_visible_skip(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run.shutil, "which", lambda name: None)
    for language, tool in (("rust", "cargo"), ("go", "go"), ("java", "mvn")):
        assert run.main([language]) == 0
        assert capsys.readouterr().out == f"skipped {language}: {tool} is not installed\n"


def test_tests_are_told_what_could_not_be_prepared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "BUILD", tmp_path / "build")
    monkeypatch.setattr(run.shutil, "which", lambda name: None)
    assert run.main(["--prepare", "rust"]) == 0
    assert capsys.readouterr().out == "skipped rust: cargo is not installed\n"
    monkeypatch.setitem(run.BUILDS, "rust", lambda: ["a program"])
    with pytest.raises(run.Skipped, match="cargo is not installed"):
        run.prepared("rust")
    assert run.main(["--prepare", "rust"]) == 0
    assert run.prepared("rust") == ["a program"] and capsys.readouterr().out == ""


def test_a_program_that_is_trusted_with_tokens_speaks_tls(capsys: pytest.CaptureFixture[str]) -> None:
    text = "import os, sys; print('ok', sys.argv[1], os.environ['TRUSTED'])"
    assert run.run("rust", program(text), Broker(), trusting={"TRUSTED": "x"})  # type: ignore[arg-type]
    assert capsys.readouterr().out == "ok rust https://127.0.0.1:1 x\n"


def test_a_client_that_its_registry_does_not_give_is_a_skip(tmp_path: Path) -> None:
    text = "import sys; print('\\x1b[1mdial tcp: no such host\\x1b[m'); sys.exit(1)"
    with pytest.raises(run.Skipped, match=r"client: dial tcp: no such host$"):
        run.build(program(text), tmp_path)


def test_what_does_not_compile_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "import sys; print('syntax error'); sys.exit(1)"
    monkeypatch.setitem(run.BUILDS, "go", lambda: run.build(program(text), tmp_path))
    assert run.main(["go"]) == 1
    assert capsys.readouterr().out == "FAIL go build: syntax error\n"


def test_each_scenario_is_a_line_and_one_failure_fails(capsys: pytest.CaptureFixture[str]) -> None:
    text = "import sys; print(sys.argv[1]); print('ok a'); print('skipped b: why'); print('FAIL c: no')"
    assert run.run("go", program(text), Broker()) is False  # type: ignore[arg-type]
    assert capsys.readouterr().out == "ok go a\nskipped go b: why\nFAIL go c: no\n"
    assert run.run("go", program("print('ok a')"), Broker(), ["a"]) is True  # type: ignore[arg-type]


def test_what_a_scenario_measured_is_shown_and_is_no_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.run("go", program("print('# 113:87')"), Broker()) is False  # type: ignore[arg-type]
    assert capsys.readouterr().out.splitlines()[0] == "# go 113:87"


@pytest.mark.parametrize("text", ["print('ok a'); raise SystemExit(3)", "pass"])
def test_a_program_that_breaks_off_fails(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.run("go", program(text), Broker()) is False  # type: ignore[arg-type]
    assert "the program ended with" in capsys.readouterr().out


@pytest.mark.parametrize(("word", "how"), [("@restart", "stop"), ("@kill", "kill")])
def test_the_broker_is_restarted_before_the_answer(word: str, how: str) -> None:
    broker = Broker()
    text = f"print('{word}', flush=True); assert input() == 'done'; print('ok a')"
    assert run.run("go", program(text), broker) is True  # type: ignore[arg-type]
    assert broker.calls == [how, "start"]


def test_packages_of_a_jar(tmp_path: Path) -> None:
    with pytest.raises(run.BuildFailed):
        run.packages(tmp_path)
    with zipfile.ZipFile(tmp_path / "danube-client-1.jar", "w") as jar:
        for name in ("com/x/DanubeClient.class", "com/x/model/M.class", "com/x/internal/I.class", "a.txt"):
            jar.writestr(name, b"")
    assert run.packages(tmp_path) == ["com.x", "com.x.model"]


def test_a_language_without_a_client_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["cobol"]) == run.main([]) == run.main(["--prepare"]) == 2
    assert "usage" in capsys.readouterr().err
