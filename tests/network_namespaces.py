"""Hosts on one machine: network namespaces on a bridge; needs root, ``ip`` and ``nsenter``.

A *cable* joins a host to the bridge: cut, nothing passes to or from it.  A *way* leads from one host to
another: blocked, that host's packets to the other go to a hardware address that nobody has, so they are
lost without a word while those of the other direction arrive.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess

from tests.rough_cables import Conditions, RoughCables

_NOBODY = "02:00:00:00:00:01"  # made up locally, so no cable has it


def available() -> bool:
    """Whether namespaces can be made here."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("nsenter") is None:
        return False
    name = f"dn{secrets.token_hex(3)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode == 0
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return made


class Hosts:
    """``count`` namespaces with addresses ``host(n)``; close() leaves nothing behind.

    With ``reached`` this process reaches them too, over the bridge.  With ``rough`` cables the network can be
    made bad, see ``roughen``; they are slower.
    """

    def __init__(self, count: int, *, reached: bool = False, rough: bool = False) -> None:
        self._name = f"dn{secrets.token_hex(3)}"
        self._network = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250)}"
        self.count = count
        self._blocked: set[tuple[int, int]] = set()
        self._rough: RoughCables | None = None
        try:
            _ip("link", "add", self._name, "type", "bridge")
            if reached:
                _ip("address", "add", f"{self.bridge}/24", "dev", self._name)
            _ip("link", "set", self._name, "up")
            for place in range(count):
                _ip("netns", "add", self.namespace(place))
            self._lay_cables(rough)
            for place in range(count):
                self._set_up(place)
        except BaseException:
            self.close()
            raise

    def _lay_cables(self, rough: bool) -> None:
        cables = {self._cable(place): self.namespace(place) for place in range(self.count)}
        if rough:
            self._rough = RoughCables(self._name, cables)
            return
        for cable, namespace in cables.items():
            _ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
            _ip("link", "set", cable, "master", self._name, "up")

    def _set_up(self, place: int) -> None:
        namespace = self.namespace(place)
        _ip("-n", namespace, "address", "add", f"{self.host(place)}/24", "dev", "eth0")
        _ip("-n", namespace, "link", "set", "eth0", "up")
        _ip("-n", namespace, "link", "set", "lo", "up")

    def namespace(self, place: int) -> str:
        return f"{self._name}-{place}"

    def host(self, place: int) -> str:
        return f"{self._network}.{place + 1}"

    @property
    def bridge(self) -> str:
        """The address of this process on the bridge, where it is ``reached``."""
        return f"{self._network}.254"

    def prefix(self, place: int) -> list[str]:
        """What runs a command on this host; `ip netns exec` would mount its disk anew, as a cut does."""
        return ["nsenter", f"--net=/run/netns/{self.namespace(place)}"]

    def cut(self, place: int) -> None:
        """Nothing passes to or from this host any more; nobody is told."""
        _ip("link", "set", self._cable(place), "down")

    def mend(self, place: int) -> None:
        _ip("link", "set", self._cable(place), "up")

    def block(self, source: int, target: int) -> None:
        """Nothing that one host sends arrives at the other any more; the way back stays."""
        self._neighbour(source, "replace", target, "lladdr", _NOBODY, "nud", "permanent")
        self._blocked.add((source, target))

    def open(self, source: int, target: int) -> None:
        """End a block; without one nothing is to do."""
        if (source, target) in self._blocked:
            self._neighbour(source, "del", target)
            self._blocked.discard((source, target))

    def separate(self, one: int, other: int) -> None:
        """The link between two hosts is gone, in both directions; others reach both."""
        self.block(one, other)
        self.block(other, one)

    def join(self, one: int, other: int) -> None:
        self.open(one, other)
        self.open(other, one)

    def roughen(self, conditions: Conditions) -> None:
        """What hosts send meets these conditions from now on; needs rough cables."""
        assert self._rough is not None, "the cables of these hosts are good ones"
        self._rough.set(conditions)

    def mend_all(self) -> None:
        """All cables and ways are as at the beginning."""
        if self._rough is not None:
            self._rough.set(Conditions())
        for source, target in sorted(self._blocked):
            self.open(source, target)
        for place in range(self.count):
            self.mend(place)

    def _neighbour(self, source: int, verb: str, target: int, *more: str) -> None:
        _ip("-n", self.namespace(source), "neigh", verb, self.host(target), *more, "dev", "eth0")

    def close(self) -> None:
        if self._rough is not None:
            self._rough.close()
        for place in range(self.count):
            # A namespace lives on while a socket of it does, and would keep its cable.
            subprocess.run(["ip", "link", "del", self._cable(place)], capture_output=True)
            subprocess.run(["ip", "netns", "del", self.namespace(place)], capture_output=True)
        subprocess.run(["ip", "link", "del", self._name], capture_output=True)

    def _cable(self, place: int) -> str:
        return f"{self._name}c{place}"


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)
