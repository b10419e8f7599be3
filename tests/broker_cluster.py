"""Several real brokers on loopback that agree, and own partitions between them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from danube.cluster.control.cluster_log import ClusterLog
from danube.core.cluster.commands import AssignPartitions, Ownership, UnloadPartitions
from danube.core.metadata.commands import Command
from danube.errors import DanubeError, TopicNotFound
from tests.broker_process import BrokerProcess, free_port, wait_until


class Starting(threading.Thread):
    """Starts a broker, as none is ready before all are; it lives as long as its thread does."""

    def __init__(self, broker: BrokerProcess, over: threading.Event) -> None:
        super().__init__(daemon=True)
        self._broker = broker
        self._over = over
        self.done = threading.Event()
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self._broker.start()
        except BaseException as error:
            self.error = error
        self.done.set()
        self._over.wait()


class BrokerCluster:
    """``with BrokerCluster(directory) as cluster``: all are killed at the end."""

    def __init__(
        self,
        directory: Path,
        size: int = 2,
        *,
        workers: int = 1,
        arguments: Sequence[str] = (),
        metadata: str = "",
    ) -> None:
        """With ``metadata``, the URL of an etcd, the brokers meet there."""
        ports = [free_port() for _ in range(size)]
        seeds = ",".join(f"127.0.0.1:{port}" for port in ports)
        others = ["--metadata", metadata] if metadata else ["--seed-nodes", seeds]
        self.brokers = [
            BrokerProcess(
                directory / f"b{place}",
                workers=workers,
                arguments=["--raft-addr", f"127.0.0.1:{port}", *others, *arguments],
            )
            for place, port in enumerate(ports)
        ]
        self._over = threading.Event()
        self._log: ClusterLog | None = None
        self._asked: BrokerProcess | None = None

    def __enter__(self) -> BrokerCluster:
        try:
            self.start(self.brokers)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, brokers: Sequence[BrokerProcess]) -> None:
        """Start brokers together, as none is ready before most are; until each is registered anew.

        Before that the others still know the former process of a broker by its address, and by what it owned.
        """
        before = self.leases()
        threads = [Starting(broker, self._over) for broker in brokers]
        for thread in threads:
            assert thread.done.wait(90)
            assert thread.error is None, thread.error
        self.wait_registered(brokers, before)

    def wait_registered(self, brokers: Sequence[BrokerProcess], before: dict[int, int]) -> None:
        """Until each has another lease than ``before``."""

        def registered() -> bool:
            now = self.leases()
            ids = [self.id_of(broker) for broker in brokers]
            return all(now.get(one, 0) not in (0, before.get(one, 0)) for one in ids)

        wait_until(registered, 20, "all brokers are registered")

    def close(self) -> None:
        if self._log is not None:
            self._log.close()
        self._over.set()
        for broker in self.brokers:
            broker.kill()

    # -- metadata ---------------------------------------------------------------------------------

    @property
    def log(self) -> ClusterLog:
        """The metadata as a worker of one broker sees it: of the first that runs, or see :meth:`ask`."""
        if self._log is None:
            broker = self._asked or next(broker for broker in self.brokers if broker.running)
            state = json.loads((broker.data_dir / "danube.json").read_text())
            self._log = ClusterLog(broker.data_dir / "metadata", "\0" + state["controller"])
        self._log.refresh()
        return self._log

    def ask(self, broker: BrokerProcess | None) -> None:
        """Look at the metadata of this one from now on; None: of the first that runs."""
        self._asked = broker
        if self._log is not None:
            self._log.close()
            self._log = None

    def propose(self, command: Command) -> Any:
        outcome = self.log.propose_many([command])[0]
        if isinstance(outcome, DanubeError):
            raise outcome
        return outcome

    def leases(self) -> dict[int, int]:
        """Of all known brokers by id, as far as a broker that runs tells; 0 of one that is not there."""
        with suppress(OSError, DanubeError, KeyError, ValueError, StopIteration):
            return {one.broker_id: one.lease_id for one in self.log.state.cluster.brokers.records()}
        return {}

    def alive(self) -> list[int]:
        """Ids of the brokers that are registered."""
        return [broker_id for broker_id, lease_id in self.leases().items() if lease_id]

    def id_of(self, broker: BrokerProcess) -> int:
        return int((broker.data_dir / "node_id").read_text().split()[0])

    def broker(self, broker_id: int) -> BrokerProcess:
        return next(one for one in self.brokers if self.id_of(one) == broker_id)

    def ownership(self, topic: str, partition: int = 0) -> Ownership:
        state = self.log.state
        return state.cluster.owners.of(state.topic(topic).topic_id, partition)

    def owner(self, topic: str, partition: int = 0) -> BrokerProcess:
        """Who serves a partition, once somebody does."""
        seen: list[int] = []  # it may have none again a moment later

        def owned() -> bool:
            seen.append(self.ownership(topic, partition).broker_id)
            return seen[-1] != 0

        wait_until(owned, 10, f"owner of {topic}")
        return self.broker(seen[-1])

    def wait_heard(self, topics: Iterable[str]) -> None:
        """Until each broker knows an owner of every topic; a follower hears of them later than the leader."""
        asked = self._asked
        for broker in self.brokers:
            self.ask(broker)

            def heard() -> bool:
                with suppress(TopicNotFound):
                    return all(self.ownership(topic).broker_id for topic in topics)
                return False

            wait_until(heard, 30, "every broker knows the owners")
        self.ask(asked)

    def others(self, broker: BrokerProcess) -> list[BrokerProcess]:
        return [one for one in self.brokers if one is not broker]

    def place(self, topic: str, broker: BrokerProcess, partition: int = 0, timeout_s: float = 30.0) -> None:
        """Move a partition and wait until it is there."""
        broker_id = self.id_of(broker)
        record = self.ownership(topic, partition)
        if record.broker_id == broker_id:
            return
        place = (record.topic_id, partition, record.epoch)
        if record.broker_id:
            self.propose(UnloadPartitions(partitions=(place,), reason="rebalance", to_broker_id=broker_id))
        else:
            self.propose(AssignPartitions(broker_id=broker_id, partitions=(place,)))
        wait_until(
            lambda: (
                self.ownership(topic, partition).broker_id == broker_id
                and not self.ownership(topic, partition).reason
            ),
            timeout_s,
            f"{topic} is moved: {self.ownership(topic, partition)}\n"
            + "\n".join(one.output_tail() for one in self.brokers),
        )
