"""Tokens that are made and checked without a broker."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner, Result

from danube.cli.upstream.admin import root
from danube.cli.upstream.root import Outside
from danube.cli.upstream.security import read_ttl_s
from danube.core.security.principals import Principal
from danube.host import clock
from danube.host.credentials import Credentials, secret_key

CLAIMS = {
    "iss": "danube-auth",
    "sub": "app",
    "principal_type": "service_account",
    "principal_name": "app",
}


def run(*words: str, exit_code: int = 0, environ: dict[str, str] | None = None) -> Result:
    runner = CliRunner(env={"DANUBE_JWT_SECRET_KEY": None, "DANUBE_ADMIN_ENDPOINT": None})
    line = ["security", "tokens", *words]
    result = runner.invoke(root, line, obj=Outside(), prog_name="danube-admin", env=environ)
    assert result.exit_code == exit_code, result.output
    return result


def verify(token: str, secret: str, now_s: int) -> dict[str, Any]:
    return Credentials([secret_key("", secret.encode(), short_allowed=True)]).examine(
        token, now_s * 1_000_000
    )


def sign(secret: str) -> str:
    known = Credentials([secret_key("", secret.encode(), short_allowed=True)])
    return known.sign(Principal("service_account", "app"), 100, clock.wall_us())


@pytest.mark.parametrize(
    ("text", "seconds"), [("8760h", 31_536_000), ("30d", 2_592_000), ("90", 90), ("1h", 3_600)]
)
def test_lifetimes(text: str, seconds: int) -> None:
    assert read_ttl_s(text) == seconds


@pytest.mark.parametrize("text", ["", "0", "0h", "-1", "1w", "h", "1.5h", "1 h"])
def test_lifetimes_that_are_none(text: str) -> None:
    assert "8760h" in run("create", "--subject", "a", "--secret-key", "k", "--ttl", text, exit_code=1).stderr


def test_create_prints_the_token_and_nothing_else() -> None:
    before_s = clock.wall_us() // 1_000_000
    token = run("create", "--subject", "app", environ={"DANUBE_JWT_SECRET_KEY": "secret"}).stdout.strip()
    claims = verify(token, "secret", before_s)
    assert {name: claims[name] for name in CLAIMS} == CLAIMS
    assert 0 <= claims["iat"] - before_s <= 60
    assert 0 <= claims["exp"] - before_s - 31_536_000 <= 60
    other = run(
        *("create", "--subject", "a", "--secret-key", "k", "--ttl", "1d", "--type", "user", "--issuer", "me")
    )
    found = verify(other.stdout.strip(), "k", before_s)
    assert (found["principal_type"], found["iss"]) == ("user", "me")


def test_validate_tells_what_is_in_it() -> None:
    token = run("create", "--subject", "app", "--secret-key", "secret").stdout.strip()
    text = run("validate", "--token", token, "--secret-key", "secret").stdout
    assert text.startswith("Token is valid.\n")
    for word in ("Subject: app", "Principal type: service_account", "Issuer: danube-auth", "Expires: 20"):
        assert word in text


def test_validate_refuses_and_leaves_with_1() -> None:
    result = run("validate", "--token", sign("other"), "--secret-key", "secret", exit_code=1)
    assert result.stdout == ""
    assert "Invalid token" in result.stderr and "ignature" in result.stderr


def test_a_lifetime_has_an_end() -> None:
    result = run("create", "--subject", "a", "--secret-key", "k", "--ttl", "999999999999", exit_code=1)
    assert "lifetime" in result.stderr


def test_nobody_becomes_a_broker() -> None:
    run("create", "--subject", "a", "--secret-key", "k", "--type", "broker_internal", exit_code=2)


def test_a_secret_is_needed() -> None:
    run("create", "--subject", "a", exit_code=2)
    run("validate", "--token", "x", exit_code=2)
