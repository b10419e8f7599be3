"""The section ``auth``: what is taken, and what is refused with a reason."""

from __future__ import annotations

from pathlib import Path

import pytest

from danube.config.auth import KeyFile, credentials_of, key_files, keys_of
from danube.config.loading import BrokerConfig, load, values
from danube.core.security.principals import Principal
from danube.errors import ConfigInvalid

SECRET = "a secret of thirty-two bytes, or more"


def config(folder: Path, text: str, **environ: str) -> BrokerConfig:
    path = folder / "danube.yml"
    path.write_text(f"data_dir: {folder}\n{text}")
    return load(path, environ).config


def problems(folder: Path, text: str) -> str:
    with pytest.raises(ConfigInvalid) as caught:
        config(folder, text)
    return "\n".join(f"{one.what} ({one.hint})" for one in caught.value.facts["problems"])


def test_nobody_is_asked_unless_told(tmp_path: Path) -> None:
    auth = config(tmp_path, "").auth
    assert (auth.mode, auth.asks, auth.failures_per_minute, auth.jwt_leeway_ms) == ("none", False, 10, 60_000)


def test_keys_are_a_list_of_mappings(tmp_path: Path) -> None:
    auth = config(
        tmp_path,
        "auth:\n  mode: token\n  super_admins: [user:ada, ops]\n  jwt:\n    issuer: me\n    keys:\n"
        "      - {kid: new, alg: ES256, file: /keys/new.pem, use: sign}\n"
        "      - {kid: old, alg: HS256, file: /keys/old}\n",
    ).auth
    assert auth.super_admin_names == ["user:ada", "ops"] and auth.jwt_issuer == "me"
    assert list(key_files(auth.jwt_keys)) == [
        KeyFile("new", "ES256", "/keys/new.pem", True), KeyFile("old", "HS256", "/keys/old", False)
    ]  # fmt: skip


def test_what_is_shown_can_be_read_again_and_hides_the_secret(tmp_path: Path) -> None:
    keys = "kid=a alg=EdDSA file=/a use=sign,kid=b alg=RS256 file=/b"
    found = config(tmp_path, f"auth: {{mode: token, jwt: {{keys: '{keys}', secret_key: '{SECRET}'}}}}")
    shown = values(found)
    assert shown["auth.jwt.keys"] == keys and shown["auth.jwt.secret_key"] == "(hidden)"
    assert SECRET not in repr(found)


def test_the_environment_names_nested_keys(tmp_path: Path) -> None:
    found = config(tmp_path, "", DANUBE_AUTH__MODE="token", DANUBE_AUTH__JWT__SECRET_KEY=SECRET)
    assert found.auth.jwt_secret_key.reveal() == SECRET


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("auth: {mode: some}", "not one of none, token, tls"),
        ("auth: {mode: token}", "no key that checks tokens (set auth.jwt.keys"),
        ("auth: {mode: tls}", "auth.mode is tls without a certificate"),
        ("auth: {mode: tls}\ntls: {cert_file: a, key_file: b}", "no key that checks tokens"),
        ("auth: {mode: token}\ncluster: {join: 'localhost:1'}", "in a cluster without tls.cert_file"),
        ("auth: {mode: token, jwt: {secret_key: a, secret_key_file: b}}", "both given"),
        ("server: {host: 0.0.0.0}\nauth: {mode: token, jwt: {secret_key: short}}", "less than 32 bytes"),
        ("auth: {jwt: {keys: 'kid=a alg=HS256'}}", "not kid, alg, file and use"),
        ("auth: {jwt: {keys: 'kid=a alg=HS256 file=/a colour=red'}}", "not kid, alg, file and use"),
        ("auth: {jwt: {keys: 'kid=a/b alg=HS256 file=/a'}}", "has the kid 'a/b'"),
        ("auth: {jwt: {keys: 'kid=a alg=none file=/a'}}", "has the alg 'none'"),
        ("auth: {jwt: {keys: 'kid=a alg=HS256 file=/a use=both'}}", "has the use 'both'"),
        ("auth: {jwt: {keys: 'kid=a alg=HS256 file=/a, kid=a alg=HS256 file=/b'}}", "names a kid twice"),
        (
            "auth: {jwt: {keys: 'kid=a alg=HS256 file=/a use=sign, kid=b alg=HS256 file=/b use=sign'}}",
            "two keys",
        ),
        ("auth: {jwt: {keys: [{kid: [a]}]}}", "takes one value, not a list"),
        ("auth: {mode: token, oidc: {issuer: 'https://id.example'}}", "without auth.oidc.audience"),
        ("auth: {mode: token, oidc: {audience: d}, jwt: {secret_key: a}}", "audience is given without"),
        ("auth: {mode: token, oidc: {jwks_uri: 'https://a'}, jwt: {secret_key: a}}", "jwks_uri is given"),
        ("auth: {mode: token, oidc: {ca_file: a}, jwt: {secret_key: a}}", "ca_file is given without"),
        (
            "auth: {mode: token, oidc: {issuer: 'https://a', audience: d}, jwt: {issuer: 'https://a'}}",
            "auth.jwt.issuer as well",
        ),
        ("auth: {oidc: {issuer: 'http://id.example'}}", "is not https"),
        ("auth: {oidc: {jwks_uri: 'file:///keys'}}", "is not https"),
        ("auth: {oidc: {principal_type: broker_internal}}", "not one of user, service_account"),
        ("auth: {jwt: {secret: x}}", "unknown key 'auth.jwt.secret'"),
        ("auth: {failures_per_minute: 0}", "below the least allowed"),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, says: str) -> None:
    assert says in problems(tmp_path, text)


def test_the_keys_check_and_the_first_that_may_signs(tmp_path: Path) -> None:
    for name in ("one", "two"):
        path = tmp_path / name
        path.write_text(f"{name} {SECRET}")
        path.chmod(0o600)
    found = config(
        tmp_path,
        f"auth: {{mode: token, jwt: {{secret_key_file: {tmp_path}/one,"
        f" keys: 'kid=k alg=HS256 file={tmp_path}/two use=sign'}}}}",
    )
    credentials = credentials_of(found.auth, keys_of(found.auth, short_allowed=False))
    signed = credentials.sign(Principal("user", "ada"), 60, 1_000_000)
    assert credentials.check(signed, 1_000_000).key_id == "k"
    old = credentials.sign(Principal("user", "ada"), 60, 1_000_000, key_id="")
    assert credentials.check(old, 1_000_000).key_id == ""


def test_an_issuer_is_a_source_of_keys(tmp_path: Path) -> None:
    issuer = "https://id.example/realms/x"
    auth = config(tmp_path, f"auth: {{mode: token, oidc: {{issuer: {issuer}, audience: danube}}}}").auth
    provider = credentials_of(auth, []).provider
    assert provider is not None and provider.keys.issuer == issuer
    assert provider[1:] == ("danube", "sub", "user", "groups")
    given = "principal_claim: azp, principal_type: service_account, groups_claim: roles"
    text = f"auth: {{mode: token, oidc: {{issuer: {issuer}, audience: danube, {given}}}}}"
    changed = credentials_of(config(tmp_path, text).auth, []).provider
    assert changed is not None and changed[1:] == ("danube", "azp", "service_account", "roles")
    missing = config(
        tmp_path, f"auth: {{mode: token, oidc: {{issuer: {issuer}, audience: d, ca_file: /no}}}}"
    )
    with pytest.raises(ConfigInvalid, match=r"auth\.oidc\.ca_file /no cannot be read"):
        credentials_of(missing.auth, [])


def test_a_key_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    auth = config(tmp_path, "auth: {mode: token, jwt: {keys: 'kid=k alg=ES256 file=/nowhere'}}").auth
    with pytest.raises(ConfigInvalid, match="/nowhere cannot be read"):
        keys_of(auth, short_allowed=True)
    short = config(tmp_path, "auth: {mode: token, jwt: {secret_key: short}}").auth
    assert keys_of(short, short_allowed=True)
    with pytest.raises(ConfigInvalid, match="5 bytes"):
        keys_of(short, short_allowed=False)
