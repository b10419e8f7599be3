"""Random lives of a group: ``python -m tests.model.raft_simulation --seeds N --from S [--nodes 3]``.

A seed is one life.  Even seeds *walk*: any message, timer, crash or call may be next, clocks go as they
like.  Odd seeds *run*: one clock, a network with delays, losses, duplicates and partitions.  At the end of
both everything heals, and the group must take a write and agree within a few simulated seconds.
"""

from __future__ import annotations

import argparse
import errno
import random
import sys
import time
from collections import Counter

from danube.cluster.raft.engine import Members
from tests.model.raft_world import Killed, Node, Violation, World

STEPS = 500
HEAL_S = 30.0


class Life:
    """One seed's faults and calls."""

    def __init__(self, seed: int, size: int = 3) -> None:
        self.rng = random.Random(seed)
        self.changing = self.rng.random() < 0.4
        self.world = World(self.rng, size, snapshot_bytes=self.rng.choice([300, 1_500, 100_000]))
        self.joined = size
        self.timed = seed % 2 == 1
        self.loss = self.rng.choice([0.0, 0.05, 0.2])
        self.world.aside_s = self._aside_s
        if self.timed:
            self.world.delay = self._delays

    def _delays(self) -> list[float]:
        rng = self.rng
        if rng.random() < self.loss:
            return []
        slow = 20 if rng.random() < 0.03 else 1
        return [rng.uniform(0.001, 0.02) * slow for _ in range(2 if rng.random() < 0.05 else 1)]

    def _aside_s(self) -> float:
        return 0.0 if self.rng.random() < 0.5 else self.rng.uniform(0.001, 0.5)

    def live(self, steps: int = STEPS) -> World:
        for _ in range(steps):
            (self._run if self.timed else self._walk)()
        self.heal()
        return self.world

    # Walk

    def _walk(self) -> None:
        world, rng = self.world, self.rng
        chance = rng.random()
        if chance < 0.62 and world.network:
            self._walk_message()
        elif chance < 0.66 and world.network:
            world.network.pop(rng.randrange(len(world.network)))
        elif chance < 0.80:
            self._walk_timer()
        else:
            self._trouble_or_call()
        if len(world.network) > 100:
            del world.network[: len(world.network) - 100]

    def _walk_message(self) -> None:
        world, rng = self.world, self.rng
        place = rng.randrange(len(world.network)) if rng.random() < 0.3 else 0
        world.deliver(place, keep=rng.random() < 0.06)

    def _walk_timer(self) -> None:
        """Mostly a leader's; a follower's means an election, if others have heard nothing, too."""
        rng = self.rng
        alive = [node for node in self.world.nodes.values() if node.alive]
        leading = [node for node in alive if node.leads]
        if leading and rng.random() < 0.75:
            self.world.fire(rng.choice(leading))
        elif alive:
            node = rng.choice(alive)
            if rng.random() < 0.7:
                for other in alive:
                    other.loop.now += 0.5
            self.world.fire(node)

    # Run

    def _run(self) -> None:
        if self.rng.random() < 0.12:
            self._trouble_or_call()
        else:
            self.advance()

    def advance(self) -> None:
        """Let what is next on the clock happen."""
        world = self.world
        times = [
            (when, node) for node in world.nodes.values() if (when := node.loop.next_timer()) is not None
        ]
        timer = min(times, key=lambda one: one[0], default=None)
        place = min(range(len(world.network)), key=lambda one: world.network[one][0], default=None)
        if place is not None and (timer is None or world.network[place][0] <= timer[0]):
            self._clock(world.network[place][0])
            world.deliver(place)
        elif timer is not None:
            self._clock(timer[0])
            world.fire(timer[1])

    def _clock(self, now: float) -> None:
        world = self.world
        world.now = max(world.now, now)
        for node in world.nodes.values():
            node.loop.now = world.now

    # Trouble

    def _trouble_or_call(self) -> None:
        world, rng = self.world, self.rng
        chance = rng.random()
        if chance < 0.62:
            self._call()
        elif chance < 0.70:
            self._crash(rng.choice(list(world.nodes.values())))
        elif chance < 0.85:
            down = [node for node in world.nodes.values() if not node.alive]
            if down:
                rng.choice(down).boot()
        elif chance < 0.93:
            self._partition()
        elif self.changing:
            self._change()

    def _call(self) -> None:
        rng = self.rng
        leading = [node for node in self.world.nodes.values() if node.leads]
        if leading:
            node = rng.choice(leading)
            (self.world.write if rng.random() < 0.7 else self.world.read)(node)

    def _crash(self, node: Node) -> None:
        """Now, or at one of its next calls to the disk; a device that fails ends a member, too."""
        rng = self.rng
        if not node.alive:
            return
        if rng.random() < 0.5:
            node.crash(power=rng.random() < 0.5)
            self.world.crash_count += 1
            return
        node.disk.countdown = rng.randrange(6)
        node.disk.fault = Killed() if rng.random() < 0.8 else OSError(errno.EIO, "input/output error")

    def _partition(self) -> None:
        world, rng = self.world, self.rng
        names = list(world.nodes)
        rng.shuffle(names)
        kind = rng.random()
        if world.blocked and kind < 0.6:
            world.blocked = set()
        elif kind < 0.8:
            apart = set(names[: rng.randint(0, len(names) // 2)])
            world.blocked = {(a, b) for a in names for b in names if (a in apart) != (b in apart)}
        elif kind < 0.9 and len(names) > 1:
            world.blocked = {(names[0], names[1]), (names[1], names[0])}
        else:
            world.blocked = {(names[0], other) for other in names[1:]}  # heard by nobody, hears everybody

    def _change(self) -> None:
        world, rng = self.world, self.rng
        leading = [node for node in world.nodes.values() if node.leads]
        if not leading:
            return
        node = rng.choice(leading)
        log = node.log
        assert log is not None
        voters, learners = dict(log.members.voters), dict(log.members.learners)
        chance = rng.random()
        if chance < 0.3 and len(voters) > 1:
            voters.pop(rng.choice(list(voters)))
        elif chance < 0.7 and learners:
            one = rng.choice(list(learners))
            voters[one] = learners.pop(one)
        elif len(voters) + len(learners) < 6:
            self.joined += 1
            name = f"n{self.joined}"
            learners[name] = f"{name}:1"
            world.join(name)
        world.change(node, Members(voters, learners))

    # Healing

    def heal(self) -> None:
        """No fault any more: a write is taken, and everybody who takes part comes to agree."""
        world = self.world
        world.blocked, self.loss, self.timed = set(), 0.0, True
        world.now = max([world.now, *(node.loop.now for node in world.nodes.values())])
        world.network = [(world.now, *one[1:]) for one in world.network]
        world.delay = self._delays
        for node in world.nodes.values():
            node.disk.countdown = -1
            if not node.alive:
                node.boot()
        self._clock(world.now)
        deadline = world.now + HEAL_S
        call = None
        while world.now < deadline:
            self.advance()
            leading = [node for node in world.nodes.values() if node.leads]
            if leading and (call is None or call.outcome not in ("", "ok")):
                call = world.write(max(leading, key=lambda node: node.term))
            if call is not None and call.outcome == "ok" and self._agreed():
                return
        raise Violation(f"the group did not agree within {HEAL_S} s without faults: {self.standing()}")

    def _agreed(self) -> bool:
        leading = max(
            (node for node in self.world.nodes.values() if node.leads), key=lambda one: one.term, default=None
        )
        if leading is None or leading.log is None:
            return False
        members = leading.log.members
        return all(
            self.world.nodes[one].machine.state[2] == leading.machine.state[2]
            for one in (*members.voters, *members.learners)
        )

    def standing(self) -> list[object]:
        return [node.engine.status if node.engine else node.node_id for node in self.world.nodes.values()]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/simulate", description="Simulate a group that keeps a replicated log."
    )
    parser.add_argument("--seeds", type=int, default=1_000, help="how many lives")
    parser.add_argument("--from", dest="start", type=int, default=0, help="the first seed")
    parser.add_argument("--nodes", type=int, default=3, choices=range(1, 8), help="members at the beginning")
    parser.add_argument("--steps", type=int, default=STEPS, help="of each life, before it heals")
    chosen = parser.parse_args(arguments)
    began, counts = time.monotonic(), Counter[str]()
    for seed in range(chosen.start, chosen.start + chosen.seeds):
        life = Life(seed, chosen.nodes)
        try:
            world = life.live(chosen.steps)
        except Exception as error:
            what = f"seed {seed} with {chosen.nodes} nodes, {chosen.steps} steps"
            print(f"{what}: {type(error).__name__}: {error}")
            return 1
        counts.update(
            steps=world.step_count,
            terms_with_leader=len(world.leaders),
            commits=world.committed_end,
            writes=world.write_count,
            acknowledged=world.ok_count,
            reads=world.read_count,
            crashes=world.crash_count,
            members_joined=life.joined - chosen.nodes,
        )
    said = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in counts.items())
    what = f"seeds {chosen.start}..{chosen.start + chosen.seeds - 1}, {chosen.nodes} nodes"
    print(f"{what}: {said}; no violation; {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
