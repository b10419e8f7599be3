"""Tokens: signed as RFC 7515 and RFC 7519 say, and refused where a broker would refuse them."""

from __future__ import annotations

import base64
import json
from typing import Any

import pytest
from click.testing import CliRunner, Result

from danube.cli.upstream.admin import root
from danube.cli.upstream.root import Outside
from danube.cli.upstream.security import read_ttl_s, sign, signature, verify
from danube.errors import InvalidArgument
from danube.host import clock

NOW_S = 1_700_000_000
CLAIMS = {
    "iss": "danube-auth",
    "exp": NOW_S + 100,
    "sub": "app",
    "principal_type": "service_account",
    "principal_name": "app",
}

# RFC 7515, appendix A.1: header and claims as they are encoded there, the key, and the signature.
RFC_CONTENT = (
    "eyJ0eXAiOiJKV1QiLA0KICJhbGciOiJIUzI1NiJ9"
    ".eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ"
)
RFC_KEY = "AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ-EstJQLr_T-1qS0gZH75aKtMN3Yj0iPS4hcgUuTwjAzZr1Z9CAow"
RFC_SIGNATURE = "dBjftJeZ4CVP-mB92K27uhbUJU1p1r_wW1gFWFOEjXk"


def run(*words: str, exit_code: int = 0, environ: dict[str, str] | None = None) -> Result:
    runner = CliRunner(env={"DANUBE_JWT_SECRET_KEY": None, "DANUBE_ADMIN_ENDPOINT": None})
    line = ["security", "tokens", *words]
    result = runner.invoke(root, line, obj=Outside(), prog_name="danube-admin", env=environ)
    assert result.exit_code == exit_code, result.output
    return result


def encoded(value: Any) -> str:
    return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()


def forged(header: Any, claims: Any, secret: str = "secret") -> str:
    content = f"{encoded(header)}.{encoded(claims)}"
    raw = signature(content, secret.encode())
    return f"{content}.{base64.urlsafe_b64encode(raw).rstrip(b'=').decode()}"


def test_the_vector_of_the_standard() -> None:
    key = base64.urlsafe_b64decode(RFC_KEY + "=" * (-len(RFC_KEY) % 4))
    made = base64.urlsafe_b64encode(signature(RFC_CONTENT, key)).rstrip(b"=").decode()
    assert made == RFC_SIGNATURE


def test_a_token_comes_back() -> None:
    token = sign(CLAIMS, "secret")
    assert token.count(".") == 2
    assert "=" not in token
    header, claims, _ = token.split(".")
    assert json.loads(base64.urlsafe_b64decode(header + "==")) == {"typ": "JWT", "alg": "HS256"}
    assert json.loads(base64.urlsafe_b64decode(claims + "==")) == CLAIMS
    assert verify(token, "secret", NOW_S) == CLAIMS


@pytest.mark.parametrize(("late_s", "valid"), [(0, True), (160, True), (161, False)])
def test_sixty_seconds_of_grace(late_s: int, valid: bool) -> None:
    token = sign(CLAIMS, "secret")
    if valid:
        verify(token, "secret", NOW_S + late_s)
    else:
        with pytest.raises(InvalidArgument, match="expired"):
            verify(token, "secret", NOW_S + late_s)


HEADER = {"typ": "JWT", "alg": "HS256"}


@pytest.mark.parametrize(
    ("token", "says"),
    [
        ("", "three parts"),
        ("a.b", "three parts"),
        ("a.b.c.d", "three parts"),
        ("é.é.é", "three parts"),
        ("!!!!.e30.e30", "three parts"),
        (sign(CLAIMS, "other"), "signature"),
        (sign(CLAIMS, "secret")[:-4], "signature"),
        (forged({"alg": "none"}, CLAIMS), "algorithm"),
        (forged({"alg": "HS512"}, CLAIMS), "algorithm"),
        (forged([], CLAIMS), "algorithm"),
        (forged(HEADER, []), "algorithm"),
        (forged(HEADER, {**CLAIMS, "aud": "x"}), "aud"),
        (forged(HEADER, {**CLAIMS, "exp": "tomorrow"}), "exp"),
        (forged(HEADER, {**CLAIMS, "exp": True}), "exp"),
        *((forged(HEADER, {k: v for k, v in CLAIMS.items() if k != name}), name) for name in CLAIMS),
    ],
)
def test_tokens_that_are_refused(token: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        verify(token, "secret", NOW_S)


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
    assert claims | {"exp": 0} == CLAIMS | {"exp": 0}
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
    far = sign({**CLAIMS, "exp": 10**18}, "secret")
    assert "after 1970" in run("validate", "--token", far, "--secret-key", "secret").stdout


def test_validate_refuses_and_leaves_with_1() -> None:
    result = run("validate", "--token", sign(CLAIMS, "other"), "--secret-key", "secret", exit_code=1)
    assert result.stdout == ""
    assert "Invalid token" in result.stderr


def test_a_secret_is_needed() -> None:
    run("create", "--subject", "a", exit_code=2)
    run("validate", "--token", "x", exit_code=2)
