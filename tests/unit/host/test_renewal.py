"""Whatever is made from files follows them, and keeps what works."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from danube.errors import ConfigInvalid
from danube.host import clock
from danube.host.renewal import LOOK_NS, Renewal


class Texts(Renewal[tuple[str, ...], list[str]]):
    """The texts of some files; an empty one cannot be used."""

    def __init__(self, *paths: Path) -> None:
        self.told: list[str] = []
        super().__init__(tuple(map(str, paths)), self._read)

    def paths(self) -> Iterable[str]:
        return self.source

    def renewed(self) -> None:
        self.told.append("renewed")

    def kept(self, error: ConfigInvalid) -> None:
        self.told.append(str(error))

    @staticmethod
    def _read(paths: tuple[str, ...]) -> list[str]:
        found = [Path(path).read_text() if os.path.exists(path) else "" for path in paths if path]
        if not all(found):
            raise ConfigInvalid("one of them is empty")
        return found


@pytest.fixture
def one(tmp_path: Path) -> Path:
    path = tmp_path / "one"
    path.write_text("1")
    return path


def put(path: Path, text: str) -> None:
    """Replace a file at once, as an operator should."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


def test_the_first_one_must_be_good(tmp_path: Path) -> None:
    with pytest.raises(ConfigInvalid, match="empty"):
        Texts(tmp_path / "nowhere")


def test_it_looks_every_five_seconds_and_at_once_when_it_is_told_to(
    one: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts, now_ns = Texts(one), clock.monotonic_ns()
    put(one, "2")
    texts.look()
    assert texts.made == ["1"] and not texts.told
    monkeypatch.setattr(clock, "monotonic_ns", lambda: now_ns + LOOK_NS)
    texts.look()
    assert texts.made == ["2"] and texts.told == ["renewed"]
    put(one, "3")
    texts.look(at_once=True)
    assert texts.made == ["3"] and texts.renewed_count == 2
    kept = texts.made
    texts.look(at_once=True)
    assert texts.made is kept, "nothing has changed"


def test_what_cannot_be_used_is_told_once_and_tried_again(one: Path) -> None:
    texts = Texts(one)
    put(one, "")
    for _ in range(3):
        texts.look(at_once=True)
        assert texts.failed and texts.made == ["1"]
    assert texts.told == ["one of them is empty"] and texts.renewed_count == 0
    os.utime(one, ns=(1, 1))
    texts.look(at_once=True)
    assert len(texts.told) == 2, "the files have changed once more"
    put(one, "2")
    texts.look(at_once=True)
    assert not texts.failed and texts.made == ["2"] and texts.told[-1] == "renewed"


def test_another_list_of_files_is_followed_at_once(one: Path, tmp_path: Path) -> None:
    texts, two = Texts(one), tmp_path / "two"
    texts.follow((str(one), str(two), ""))
    assert texts.failed and texts.made == ["1"], "the former ones stay"
    put(two, "2")
    texts.look(at_once=True)
    assert texts.made == ["1", "2"] and not texts.failed
    texts.follow((str(two),))
    assert texts.made == ["2"]
    kept = texts.made
    texts.follow((str(two),))
    assert texts.made is kept and texts.renewed_count == 2
