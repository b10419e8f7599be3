"""Runs the stories in this folder: text files that say what happens and what must follow.

A story is blocks of commands, a line of dashes, and the lines expected until the next empty line.
After a block's commands the subscription hands out whatever it may, one line for each grant;
ranges are half-open.  Commands:

    subscription NAME type=MODE records=0..10 | keys=a,b,a
                 [unacked=N] [redeliveries=N] [poison=P] [timeout=SECONDS] [base=SECONDS]
    publish 10..20 | publish keys=a,b       join NAME [credit=N] [filters=a*,b?]      leave NAME
    credit NAME +N      pause NAME      resume NAME      ack NAME 0..3 [5..6]     nack NAME 0..1 [delay=N]
    hand_back NAME 0..1
    pass SECONDS        unblock         restart          seek OFFSET              expire OFFSET
    cursor              explain         dead_letters     stored OFFSET            not_stored OFFSET
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from danube.core.batch.selection import ring_hash
from danube.core.dispatch.cursor import CursorState
from danube.core.dispatch.subscription import Mode, Subscription
from danube.core.dispatch.window import IN_FLIGHT
from danube.core.partition.policy import FailurePolicy
from danube.errors import SubscriptionBusy

SECOND = 1_000_000_000
STORIES = sorted(Path(__file__).parent.glob("*.txt"))


def show(offsets: list[int]) -> str:
    """Ascending offsets as half-open ranges; a single offset as itself."""
    parts: list[list[int]] = []
    for offset in offsets:
        if parts and parts[-1][1] == offset:
            parts[-1][1] += 1
        else:
            parts.append([offset, offset + 1])
    return " ".join(str(start) if end == start + 1 else f"{start}..{end}" for start, end in parts)


def bounds(texts: list[str]) -> np.ndarray:
    pairs = [text.split("..") if ".." in text else [text, str(int(text) + 1)] for text in texts]
    return np.array(pairs).astype(np.int64)


class Teller:
    """One story's subscription and its readers."""

    def __init__(self) -> None:
        self.now = 0
        self.keys: list[bytes] = []
        self.id_by_name: dict[str, int] = {}
        self.held: dict[int, int] = {}  # offset -> consumer, of what is in flight
        self.next_id = 1
        self.lines: list[str] = []

    def name_of(self, consumer_id: int) -> str:
        return next(name for name, number in self.id_by_name.items() if number == consumer_id)

    def tell(self, line: str) -> None:
        command, *words = line.split()
        options = dict(word.split("=", 1) for word in words if "=" in word)
        getattr(self, f"on_{command}")([word for word in words if "=" not in word], options)

    def on_subscription(self, words: list[str], options: dict[str, str]) -> None:
        self.mode = Mode.parse(options["type"])
        self.max_unacked = int(options.get("unacked", 1000))
        self.policy = FailurePolicy(
            max_redelivery_count=int(options.get("redeliveries", 5)),
            ack_timeout_ms=int(options.get("timeout", 30)) * 1000,
            base_redelivery_delay_ms=int(options.get("base", 1)) * 1000,
            poison=options.get("poison", "block"),
            dead_letter_topic="/default/dead",
        )
        self.subscription = self.make(CursorState.at(self.mode, 0))
        self.on_publish([options["records"]] if "records" in options else [], options)

    def make(self, state: CursorState) -> Subscription:
        return Subscription("s", self.mode, state, max_unacked=self.max_unacked, failure=self.policy)

    def on_publish(self, words: list[str], options: dict[str, str]) -> None:
        if words:
            start, end = bounds(words)[0].tolist()
            assert start == len(self.keys)
            self.keys += [b""] * (end - start)
        else:
            self.keys += [key.encode() for key in options["keys"].split(",")]

    def on_join(self, words: list[str], options: dict[str, str]) -> None:
        filters = options["filters"].split(",") if "filters" in options else []
        try:
            result = self.subscription.join(self.next_id, words[0], filters=filters, now_ns=self.now)
        except SubscriptionBusy:
            self.lines.append(f"busy {words[0]}")
            return
        if result.displaced is not None:
            self.gone(words[0], result.displaced)
        if not result.active:
            self.lines.append(f"standby {words[0]}")
        self.id_by_name[words[0]] = self.next_id
        self.next_id += 1
        self.on_credit([words[0], options.get("credit", "0")], {})

    def gone(self, name: str, consumer_id: int) -> None:
        returned = sorted(offset for offset, owner in self.held.items() if owner == consumer_id)
        if returned:
            self.lines.append(f"return {show(returned)}")
        for offset in returned:
            del self.held[offset]
        del self.id_by_name[name]

    def on_leave(self, words: list[str], options: dict[str, str]) -> None:
        consumer_id = self.id_by_name[words[0]]
        self.subscription.leave(consumer_id, self.now)
        self.gone(words[0], consumer_id)

    def on_credit(self, words: list[str], options: dict[str, str]) -> None:
        self.subscription.credit(self.id_by_name[words[0]], int(words[1]))

    def on_pause(self, words: list[str], options: dict[str, str]) -> None:
        self.subscription.set_ready(self.id_by_name[words[0]], False)

    def on_resume(self, words: list[str], options: dict[str, str]) -> None:
        self.subscription.set_ready(self.id_by_name[words[0]], True)

    def on_ack(self, words: list[str], options: dict[str, str]) -> None:
        result = self.subscription.ack(self.id_by_name[words[0]], bounds(words[1:]), self.now)
        if result.ignored or result.refused:
            self.lines.append(f"acked {result.acked} ignored {result.ignored} refused {result.refused}")
        for offset in list(self.held):
            if self.held[offset] == self.id_by_name[words[0]] and any(
                start <= offset < end for start, end in bounds(words[1:]).tolist()
            ):
                del self.held[offset]

    def on_nack(self, words: list[str], options: dict[str, str]) -> None:
        delay_ms = int(options.get("delay", 0)) * 1000
        ranges = bounds(words[1:])
        self.subscription.nack(self.id_by_name[words[0]], ranges, delay_ms, "nacked", self.now)
        for start, end in ranges.tolist():
            for offset in range(start, end):
                self.held.pop(offset, None)

    def on_hand_back(self, words: list[str], options: dict[str, str]) -> None:
        ranges = bounds(words[1:])
        self.subscription.hand_back(self.id_by_name[words[0]], ranges)
        for start, end in ranges.tolist():
            for offset in range(start, end):
                if self.held.get(offset) == self.id_by_name[words[0]]:
                    del self.held[offset]

    def on_pass(self, words: list[str], options: dict[str, str]) -> None:
        self.now += int(words[0]) * SECOND
        self.subscription.tick(self.now)
        window = self.subscription._window
        self.held = {o: owner for o, owner in self.held.items() if window.state[o & window.mask] == IN_FLIGHT}

    def on_unblock(self, words: list[str], options: dict[str, str]) -> None:
        self.subscription.unblock(self.now)

    def on_restart(self, words: list[str], options: dict[str, str]) -> None:
        self.subscription = self.make(CursorState.decode(self.subscription.cursor_state().encode()))
        self.id_by_name.clear()
        self.held.clear()

    def on_seek(self, words: list[str], options: dict[str, str]) -> None:
        self.subscription.seek(int(words[0]), len(self.keys), self.now)
        self.held.clear()

    def on_expire(self, words: list[str], options: dict[str, str]) -> None:
        self.lines.append(f"expired {self.subscription.skip_to(int(words[0]))}")

    def on_cursor(self, words: list[str], options: dict[str, str]) -> None:
        self.lines.append(f"floor {self.subscription.ack_floor} next {self.subscription.next}")

    def on_explain(self, words: list[str], options: dict[str, str]) -> None:
        self.lines.append(self.subscription.explain(self.now))

    def on_dead_letters(self, words: list[str], options: dict[str, str]) -> None:
        for letter in self.subscription.take_dead_letters(100):
            self.lines.append(f"dead {letter.offset} deliveries={letter.deliveries} reason={letter.reason}")

    def on_stored(self, words: list[str], options: dict[str, str]) -> None:
        self.subscription.dead_lettered(int(words[0]))

    def on_not_stored(self, words: list[str], options: dict[str, str]) -> None:
        self.subscription.dead_letter_failed(int(words[0]), self.now)

    def hand_out(self) -> None:
        """Grants until there are none; lines go by the first offset."""
        hashes = np.array([ring_hash(key) for key in self.keys], np.uint64)
        grants = self.subscription.due(self.now, 1000)
        grants += self.subscription.grant(len(self.keys), self.now, hashes, 0, self.keys.__getitem__)
        for grant in sorted(grants, key=lambda grant: grant.start):
            offsets = list(range(grant.start, grant.end)) if grant.offsets is None else grant.offsets.tolist()
            for offset in offsets:
                assert offset not in self.held, "in flight twice"
                self.held[offset] = grant.consumer_id
            again = f" redelivery={grant.redelivery_count}" if grant.redelivery_count else ""
            self.lines.append(f"grant {self.name_of(grant.consumer_id)} {show(offsets)}{again}")
        self.subscription.check()


def blocks(text: str) -> list[tuple[list[str], list[str]]]:
    found = []
    for block in text.split("\n\n"):
        lines = [line for line in block.splitlines() if line.strip() and not line.startswith("#")]
        if lines:
            line = lines.index("----")
            found.append((lines[:line], lines[line + 1 :]))
    return found


@pytest.mark.parametrize("path", STORIES, ids=lambda path: path.stem)
def test_story(path: Path) -> None:
    teller = Teller()
    for commands, expected in blocks(path.read_text()):
        teller.lines = []
        for command in commands:
            teller.tell(command)
        teller.hand_out()
        assert teller.lines == expected, "; ".join(commands)


def test_there_are_stories() -> None:
    assert len(STORIES) >= 9
