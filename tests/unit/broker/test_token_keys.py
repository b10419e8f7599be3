"""Keys of tokens are exchanged while sessions are open: which tokens are good, and which no longer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from danube.broker.admission import Admission, admission_of
from danube.broker.processes.reloads import Reloads
from danube.config.auth import packed_keys
from danube.config.loading import BrokerConfig, load
from danube.core.metadata.machine import Metadata
from danube.core.security.principals import Identity, Principal
from danube.errors import NotAuthenticated
from danube.host import clock

APP = Principal("service_account", "app")


class Site:
    """The admission of a worker, its key files, and the operator who exchanges them."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.put("a", "a")
        self.put("b", "b")
        self.config = self.listed("a=sign")
        self.reloads = Reloads(lambda: packed_keys(self.config.auth))
        machine = Metadata()
        admission = admission_of(self.config, lambda: machine.access)
        assert admission is not None
        self.admission: Admission = admission

    def put(self, name: str, letter: str, mode: int = 0o600) -> None:
        new = self.place / "new"
        new.write_text(letter * 40)
        new.chmod(mode)
        os.replace(new, self.place / name)

    def listed(self, *uses: str) -> BrokerConfig:
        entries = []
        for name, _, use in (one.partition("=") for one in uses):
            entries.append(f"kid={name} alg=HS256 file={self.place}/{name} use={use or 'check'}")
        flags = {"data_dir": str(self.place), "auth.mode": "token", "auth.jwt.keys": ",".join(entries)}
        return load(None, {}, flags).config

    def exchange(self, *uses: str) -> bool:
        self.config = self.listed(*uses)
        return self.reload()

    def reload(self) -> bool:
        self.reloads.request()
        return self.admission.look_at_keys(self.reloads)

    def token(self) -> str:
        return self.admission.credentials.sign(APP, 60, clock.wall_us())

    def admit(self, token: str) -> Identity:
        return self.admission.admit(token, "here")


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_a_key_is_exchanged_in_three_steps_and_no_token_fails(site: Site) -> None:
    old = site.token()
    assert not site.exchange("a=sign", "b") and site.admit(old)
    assert not site.exchange("a", "b=sign") and site.admit(old)
    new = site.token()
    identity, former = site.admit(new), site.admit(old)
    assert (identity.key_id, former.key_id) == ("b", "a")
    assert site.exchange("b=sign"), "one is gone: sessions are to be judged again"
    assert not site.admission.revoked(identity) and site.admission.revoked(former)
    assert site.admit(new).key_id == "b"
    with pytest.raises(NotAuthenticated, match="is not accepted"):
        site.admit(old)  # it was remembered as good


def test_another_key_of_the_same_name_ends_what_the_former_signed(site: Site) -> None:
    old = site.token()
    former = site.admit(old)
    site.put("a", "x")
    assert site.reload() and site.admission.revoked(former)
    with pytest.raises(NotAuthenticated):
        site.admit(old)
    assert not site.admission.revoked(site.admit(site.token()))


def test_a_file_is_followed_without_a_reload(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.put("a", "x")
    assert not site.admission.look_at_keys(site.reloads), "it looks every five seconds"
    now_ns = clock.monotonic_ns()
    monkeypatch.setattr(clock, "monotonic_ns", lambda: now_ns + 5_000_000_000)
    assert site.admission.look_at_keys(site.reloads)


def test_the_same_key_in_a_new_file_ends_nothing(site: Site) -> None:
    identity = site.admit(site.token())
    site.put("a", "a")
    assert not site.reload() and not site.admission.revoked(identity)
    assert site.admission.keys is not None and site.admission.keys.renewed_count == 1


@pytest.mark.parametrize("mode", [0o600, 0o644])
def test_keys_that_cannot_be_used_leave_the_former_ones(
    site: Site, mode: int, caplog: pytest.LogCaptureFixture
) -> None:
    token, keys = site.token(), site.admission.keys
    assert keys is not None
    site.put("a", "a" if mode == 0o644 else "", mode)
    assert not site.reload() and keys.failed
    assert "the former keys of tokens stay" in caplog.text and str(site.place / "a") not in token
    assert site.admit(token).key_id == "a" and site.admit(site.token())
    site.put("a", "x")
    assert site.reload() and not keys.failed


def test_a_list_with_a_file_that_is_missing_leaves_the_former_one(site: Site) -> None:
    token = site.token()
    (site.place / "b").unlink()
    assert not site.exchange("b=sign")
    assert site.admission.keys is not None and site.admission.keys.failed and site.admit(token)
    site.put("b", "b")
    assert site.reload(), "the file came"
    with pytest.raises(NotAuthenticated):
        site.admit(token)


def test_where_keys_are_not_followed_nothing_is_looked_at(site: Site) -> None:
    machine = Metadata()
    admission = Admission(site.admission.credentials, lambda: machine.access, failures_per_minute=1)
    site.reloads.request()
    assert not admission.look_at_keys(site.reloads)
