"""Handle numbers of a session's connection, and whose they are."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from danube.client.machine.opened import Opened


class Handles:
    """Each number is given once, so that late frames cannot be mistaken; no call looks at those of others."""

    __slots__ = ("_numbers", "_of", "_owners", "owner")

    def __init__(self) -> None:
        self._numbers = itertools.count(1)
        self._owners: dict[int, Opened] = {}
        self._of: dict[Opened, list[int]] = {}  # without those that have none
        self.owner = self._owners.get  # for every frame with batches

    def give(self, opened: Opened) -> int:
        """A number that was not used lately on this connection, and is nobody's."""
        number = next(self._numbers) & 0xFFFFFFFF
        while not number or number in self._owners:  # 32 bits begin again after some time
            number = next(self._numbers) & 0xFFFFFFFF
        self._owners[number] = opened
        self._of.setdefault(opened, []).append(number)
        return number

    def drop(self, number: int) -> Opened | None:
        """Forget one; whose it was."""
        opened = self._owners.pop(number, None)
        if opened is not None:
            numbers = self._of[opened]
            numbers.remove(number)
            if not numbers:
                del self._of[opened]
        return opened

    def drop_all(self, opened: Opened) -> None:
        """Forget those of ``opened``."""
        for number in self._of.pop(opened, ()):
            del self._owners[number]

    def clear(self) -> None:
        """The connection is gone, and with it what the numbers meant."""
        self._owners.clear()
        self._of.clear()
