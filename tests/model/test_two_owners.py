"""Owners of one partition that crash, come back late and do not know of each other, call by call.

Each owner's mover runs in a thread that stops before every call to the store; a seeded scheduler lets one of
them go, kills one, or lets a put of a dead one arrive late.  All of them drop local files of one shared
directory as soon as they are told that these are in the store, which is the harshest case: nobody else
has a copy.  After every move the promise is checked: each segment is local or in the newest manifest,
intact, and no manifest names a missing or different object.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danube.errors import DanubeError, Fenced
from danube.wal.segments.segment import base_offset_of
from danube.wal.tier.manifest import Manifest
from danube.wal.tier.rewriting import merge_objects
from danube.wal.tier.uploader import Ownership, Uploader, adding, dropped_keys, replacing
from tests.examples import examples
from tests.unit.faulty_store import (
    TOPIC,
    Crash,
    FaultyStore,
    check_store,
    copy_segments,
    fail_after,
    fail_before,
    make_segments,
)
from tests.unit.wal_samples import IDENTITY, memory_directory

SEGMENTS = 5
SEEDS = range(examples(300))
MOVES_MAX = 2_000
WAIT_S = 20.0


class Mover:
    """One mover process of one owner, stopped before each of its calls."""

    def __init__(self, store: FaultyStore, directory: Path, work: Path, epoch: int, start_count: int) -> None:
        self.store = FaultyStore()
        self.store.memory = store.memory
        self.store.always = self._before_call
        self.epoch = epoch
        self.directory = directory
        self.ended = False
        self.failure: BaseException | None = None
        self.late: tuple[str, Any] | None = None  # a put that the killed process had begun
        self._work = work
        self._start_count = start_count
        self._decision: Callable[[], Any] | None = None
        self._call: tuple[str, tuple[Any, ...], Callable[[], Any]] | None = None
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._wait()

    # -- in the thread ----------------------------------------------------------------------------

    def _before_call(self, name: str, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        self._call = (name, arguments, call)
        self._theirs.release()
        self._mine.acquire()
        decision, self._decision = self._decision, None
        return call() if decision is None else decision()

    def _run(self) -> None:
        try:
            self._move_all()
        except (Crash, Fenced):
            pass
        except BaseException as error:
            self.failure = error
        self.ended = True
        self._theirs.release()

    def _move_all(self) -> None:
        owner = Ownership(TOPIC, IDENTITY, self.epoch, self.directory)
        uploader = Uploader(self.store, owner, start_count=self._start_count, copy_name=f"copy-{self.epoch}")
        done = False
        while not done:
            try:
                uploader.load() if not uploader.unsettled else uploader.install(lambda _: None)
                for path in self._files():
                    entry = uploader.upload(path, resumed=True)
                    if entry is not None:
                        self._evict(uploader.install(adding([entry])))
                self._evict(uploader.install(lambda _: None))
                done = True
                self._merge(uploader)
            except Fenced:
                raise
            except DanubeError:
                continue  # a fault of the scheduler: again, as the mover does

    def _merge(self, uploader: Uploader) -> None:
        before = uploader.manifest
        if len(before) < 2:
            return
        sources = [before.entry(index) for index in range(2)]
        entry = merge_objects(uploader, sources, self._work / f"{self.epoch}-{self._start_count}")
        uploader.remove(dropped_keys(before, uploader.install(replacing(entry, sources))))

    def _files(self) -> list[Path]:
        return sorted(one for one in self.directory.iterdir() if base_offset_of(one.name) is not None)

    def _evict(self, manifest: Manifest) -> None:
        """What an owner does with the mover's word: compare and drop."""
        for path in self._files():
            index = manifest.find(base_offset_of(path.name) or 0)
            if index < len(manifest) and manifest.entry(index).base_offset <= (
                base_offset_of(path.name) or 0
            ):
                path.unlink(missing_ok=True)

    # -- by the scheduler -------------------------------------------------------------------------

    def _wait(self) -> None:
        assert self._theirs.acquire(timeout=WAIT_S), "a mover hangs"
        if self.failure is not None:
            raise self.failure

    def go(self, decision: Callable[[], Any] | None = None) -> None:
        """Let the call happen (or what the decision makes of it) and run up to the next one."""
        self._decision = decision
        self._mine.release()
        self._wait()

    def kill(self, how: int) -> None:
        """End the process at its call: before it, after it, or with a put under way that arrives later."""
        assert self._call is not None
        name, arguments, call = self._call
        if how == 1:
            call()
        elif how == 2 and name in ("put", "put_file"):
            data = arguments[1] if name == "put" else _content(arguments[1])
            if data is not None:
                self.late = (arguments[0], data)

        def end() -> None:
            raise Crash

        self.go(end)
        self._thread.join(WAIT_S)

    def fault(self, after: bool) -> None:
        assert self._call is not None
        call = self._call
        self.go(lambda: (fail_after if after else fail_before)(*call))


def _content(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None


class World:
    def __init__(self, seed: int, made: list[Path], root: Path) -> None:
        self.random = random.Random(seed)
        self.store = FaultyStore()
        self.directory = root / "log"
        self.work = root / "work"
        copy_segments(made, self.directory)
        self.originals = {base_offset_of(path.name) or 0: path.read_bytes() for path in made}
        self.movers: list[Mover] = []
        self.late: list[tuple[str, bytes]] = []
        self.epoch, self.starts = 0, 0
        self.new_owner()

    def new_owner(self) -> None:
        """A higher epoch; the older owner's process does not know and goes on."""
        self.epoch, self.starts = self.epoch + 1, 0
        self.start()

    def start(self) -> None:
        self.movers.append(Mover(self.store, self.directory, self.work, self.epoch, self.starts))

    def restart(self) -> None:
        """The newest owner's mover is killed and a new process takes its place; the owner is the same."""
        self.kill(self.movers[-1])
        self.starts += 1
        self.start()

    def kill(self, mover: Mover) -> None:
        if not mover.ended:
            mover.kill(self.random.randrange(3))
            if mover.late is not None:
                self.late.append(mover.late)

    def check(self) -> None:
        present = {base_offset_of(path.name) or 0 for path in self.directory.glob("*.seg")}
        check_store(self.store.memory, self.originals, present)

    def move(self) -> bool:
        """One random move; False when everything has come to rest."""
        running = [mover for mover in self.movers if not mover.ended]
        chance = self.random.random()
        if not running:
            return False
        if chance < 0.02 and self.epoch < 4:
            self.new_owner()
        elif chance < 0.05 and self.starts < 4:
            self.restart()
        elif chance < 0.08 and self.late:
            self.store.memory.put(*self.late.pop(self.random.randrange(len(self.late))))
        elif chance < 0.14:
            self.random.choice(running).fault(self.random.random() < 0.5)
        else:
            mover = self.random.choice(running)
            for _ in range(self.random.choice((1, 1, 1, 2, 5, 20))):
                if not mover.ended:
                    mover.go()
        return True

    def close(self) -> None:
        for mover in self.movers:
            if not mover.ended:
                mover.kill(0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return make_segments(tmp_path_factory.mktemp("made") / IDENTITY.directory_name, SEGMENTS, 1)


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_owners_do_no_record_is_lost(seed: int, made: list[Path], tmp_path: Path) -> None:
    with memory_directory(tmp_path) as root:
        world = World(seed, made, root)
        try:
            for _ in range(MOVES_MAX):
                if not world.move():
                    break
                world.check()
            else:
                pytest.fail("the owners never come to rest")
            for late in world.late:
                world.store.memory.put(*late)
                world.check()
            world.new_owner()  # a last one, undisturbed: everything gets into the store
            while not world.movers[-1].ended:
                world.movers[-1].go()
            check_store(world.store.memory, world.originals, set())
        finally:
            world.close()
