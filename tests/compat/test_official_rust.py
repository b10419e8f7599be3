"""The official Rust client, unchanged, over TLS with tokens and certificates.

Its scenarios are in ``tests/compat/rust``.
``scripts/test`` builds them before its tests; without that, the first test here does.  The others are run by
``scripts/compat rust``.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.compat import run
from tests.compat.secured import CERTIFICATES, Secured, secured

NAMES = ("token-roles", "token-certificates", "token-refused", "token-supplied")
pytestmark = pytest.mark.timeout(run.BUILD_TIMEOUT_S)


@pytest.fixture(scope="module")
def program() -> list[str]:
    try:
        return run.prepared("rust")
    except run.Skipped as reason:
        pytest.skip(f"the official Rust client: {reason}")


@pytest.fixture(scope="module")
def story(program: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    with secured(tmp_path_factory.mktemp("rust")) as made:
        yield made


@pytest.mark.parametrize("name", NAMES)
def test_credentials_over_tls(
    program: list[str], story: Secured, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    story.give(f"/default/rust-{name}")
    environment = {CERTIFICATES: str(story.authority), **story.credentials()}
    held = run.run("rust", program, story.process, [name], environment)
    said = capsys.readouterr().out
    assert held and said == f"ok rust {name}\n", said + story.process.output_tail(2_000)
