"""What a broker is told to load again: one process reads the list of keys, and all of them learn of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from danube import app
from danube.broker.processes.reloads import KEYS_BYTES_MAX, Reloads
from danube.config.auth import with_keys
from danube.config.loading import load
from danube.errors import ConfigInvalid


def test_other_processes_see_what_the_supervisor_has_read() -> None:
    found = [b"first", b"a longer second"]
    reloads = Reloads(lambda: found.pop(0))
    assert reloads.keys == b"" and reloads.count == 0
    to_child, to_parent = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:  # its memory is a copy, except for what is shared
        try:
            os.write(to_parent[1], reloads.keys + b"|")
            os.read(to_child[0], 1)
            os.write(to_parent[1], reloads.keys + b"|%d" % reloads.count)
        finally:
            os._exit(0)
    os.close(to_parent[1])  # so that a child that dies ends what is read below
    told = os.read(to_parent[0], 100)
    reloads.request()
    reloads.request()
    os.write(to_child[1], b"x")
    os.waitpid(child, 0)
    assert (told, os.read(to_parent[0], 100)) == (b"|", b"a longer second|2")
    for descriptor in (*to_child, to_parent[0]):
        os.close(descriptor)


def test_a_list_that_is_being_written_is_not_taken() -> None:
    found = [b"first", b"second"]
    reloads = Reloads(lambda: found.pop(0))
    reloads.request()
    assert reloads.keys == b"first"
    reloads._memory[64:67] = b"sec"  # as the supervisor begins
    assert reloads.keys == b"first"
    reloads.request()
    assert reloads.keys == b"second"


def test_what_cannot_be_used_keeps_the_former_list(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[Callable[[], bytes]] = [lambda: b"good", _refuse, lambda: b"x" * (KEYS_BYTES_MAX + 1)]
    reloads = Reloads(lambda: answers.pop(0)())
    reloads.request()
    for count, said in ((2, "it is not good"), (3, "too long")):
        reloads.request()
        assert (reloads.keys, reloads.count, reloads.refused) == (b"good", count, True)
        assert "the former list of keys stays" in told(caplog) and said in told(caplog)
    answers.append(lambda: b"x" * KEYS_BYTES_MAX)
    reloads.request()
    assert not reloads.refused and len(reloads.keys) == KEYS_BYTES_MAX


def told(caplog: pytest.LogCaptureFixture) -> str:
    """All log lines with their facts."""
    return "\n".join(f"{one.getMessage()} {getattr(one, 'danube_facts', {})}" for one in caplog.records)


def _refuse() -> bytes:
    raise ConfigInvalid("it is not good")


def test_a_broker_with_certificates_alone_has_no_list() -> None:
    reloads = Reloads()
    reloads.request()
    assert (reloads.keys, reloads.count, reloads.refused) == (b"", 1, False)


# -- the configuration, read again ------------------------------------------------------------------


class Site:
    """A configuration file with keys, and what a broker that was started with it makes of a reload."""

    def __init__(self, place: Path) -> None:
        self.place, self.file = place, place / "danube.yml"
        for name in "ab":
            key = place / name
            key.write_text(name * 40)
            key.chmod(0o600)
        self.write("a")
        loaded = load(self.file, {}, {"data_dir": str(place)})
        self.config = loaded.config
        reloads = app._reloads(loaded.config, loaded.again)
        assert reloads is not None
        self.reloads = reloads

    def write(self, *names: str, mode: str = "token", more: str = "") -> None:
        keys = ", ".join(f"{{kid: {name}, alg: HS256, file: {self.place}/{name}}}" for name in names)
        self.file.write_text(f"auth: {{mode: {mode}, jwt: {{keys: [{keys}]}}}}\n{more}")

    @property
    def keys(self) -> list[str]:
        auth = app._with_present_keys(self.config, self.reloads).auth
        return [path.rpartition("/")[2] for path in auth.key_paths if path]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def test_the_list_of_keys_is_read_again(site: Site) -> None:
    assert site.keys == ["a"]
    site.write("a", "b")
    assert site.keys == ["a"]
    site.reloads.request()
    assert site.keys == ["a", "b"] and not site.reloads.refused


@pytest.mark.parametrize(
    ("names", "how", "said"),
    [
        ("c", {}, "cannot be read"),
        ("aa", {}, "names a kid twice"),
        ("", {}, "no key that checks tokens"),
        ("", {"mode": "none"}, "has no key that checks tokens any more"),
        ("ab", {"more": "nonsense: 1\n"}, "unknown key 'nonsense'"),
    ],
)
def test_a_list_that_does_not_load_is_told_and_not_taken(
    site: Site, caplog: pytest.LogCaptureFixture, names: str, how: dict[str, str], said: str
) -> None:
    site.write(*names, **how)
    site.reloads.request()
    assert site.keys == ["a"] and site.reloads.refused and site.reloads.count == 1
    assert said in told(caplog)
    site.write("b")
    site.reloads.request()
    assert site.keys == ["b"] and not site.reloads.refused


def test_a_file_that_is_gone_is_told(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.file.unlink()
    os.mkfifo(site.file)  # to read it would wait for ever
    site.reloads.request()
    assert site.keys == ["a"] and site.reloads.refused
    assert f"{site.file} cannot be read again" in told(caplog)


def test_other_settings_wait_for_the_next_start(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    site.write("b", more="limits: {connections_max: 77}\n")
    site.reloads.request()
    present = app._with_present_keys(site.config, site.reloads)
    assert site.keys == ["b"] and present.limits == site.config.limits
    assert "hold from the next start" in told(caplog) and "limits.connections_max" in told(caplog)
    assert "auth.jwt.keys" not in told(caplog)


def test_a_secret_is_read_again_and_not_told(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    secret = "s" * 40
    site.file.write_text(f"auth: {{mode: token, jwt: {{secret_key: {secret}}}}}\n")
    site.reloads.request()
    auth = with_keys(site.config.auth, site.reloads.keys)
    assert auth.jwt_secret_key.reveal() == secret and not auth.jwt_keys
    assert secret not in told(caplog) and secret not in repr(auth)


def test_who_asks_nobody_and_has_no_certificates_has_nothing_to_reload(tmp_path: Path) -> None:
    loaded = load(None, {}, {"data_dir": str(tmp_path)})
    assert app._reloads(loaded.config, loaded.again) is None
    assert app._with_present_keys(loaded.config, None) is loaded.config
