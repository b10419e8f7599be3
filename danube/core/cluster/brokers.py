"""The cluster's brokers inside the metadata machine: addresses, and whether each takes partitions.

A broker is *alive* as long as its registration's lease; registering again (after a restart) ends the
former one, so an older incarnation that still runs cannot renew and learns it.  A broker whose
registration has ended stays known with its mode until it is forgotten.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Final

import msgspec

from danube.core.cluster.commands import BrokerRecord, RegisterBroker, SetBrokerMode
from danube.core.cluster.records import Records, no_room
from danube.errors import InvalidArgument, NotFound
from danube.ids import check_label
from danube.limits import BROKERS_MAX

COMMANDS: Final = 1  # the newest commands that this version knows: 1 has policies of namespaces and tenants
COMMANDS_PREFIX: Final = "/cluster/commands/"  # what each broker knows; with its lease
MODES: Final = ("active", "draining", "drained")
BROKER_ID_MAX: Final = (1 << 64) - 1


class Brokers(Records[int, BrokerRecord]):
    """All known brokers by id, those that are not alive too."""

    key_of = attrgetter("broker_id")

    def broker(self, broker_id: int) -> BrokerRecord:
        """The broker of this id; raises NotFound."""
        found = self._by_key.get(broker_id)
        if found is None:
            known = ", ".join(str(one) for one in sorted(self._by_key)[:5])
            raise NotFound(f"broker {broker_id} is not known", hint=f"known are {known}" if known else "")
        return found

    def of_lease(self, lease_id: int) -> list[BrokerRecord]:
        """Brokers whose registration goes with a lease, by id."""
        return [record for record in self.records() if record.lease_id == lease_id]

    # Check

    def check_register(self, command: RegisterBroker) -> None:
        if not 1 <= command.broker_id <= BROKER_ID_MAX:
            raise InvalidArgument("a broker's id is 1 .. 2**64 - 1", why=f"not {command.broker_id}")
        check_label(command.native_address, "address")
        for text in (command.grpc_address, command.admin_address, command.metrics_address, command.version):
            if text:
                check_label(text, "address")
        if command.mode:
            _check_mode(command.mode)
        _check_reason(command.reason)
        if command.broker_id not in self._by_key and len(self._by_key) >= BROKERS_MAX:
            raise no_room("brokers", BROKERS_MAX)

    def check_mode(self, command: SetBrokerMode) -> bool:
        """Whether the mode is another one; raises a CallerError if it is not allowed."""
        _check_mode(command.mode)
        _check_reason(command.reason)
        record = self.broker(command.broker_id)
        return (record.mode, record.reason) != (command.mode, command.reason)

    # Change

    def register(self, command: RegisterBroker) -> BrokerRecord:
        former = self._by_key.get(command.broker_id)
        mode, reason = command.mode, command.reason
        if not mode:
            mode, reason = (former.mode, reason or former.reason) if former else ("active", reason)
        return self._put(
            BrokerRecord(
                broker_id=command.broker_id, native_address=command.native_address,
                grpc_address=command.grpc_address, admin_address=command.admin_address,
                metrics_address=command.metrics_address, version=command.version,
                mode=mode, reason=reason, lease_id=command.lease_id,
            )
        )  # fmt: skip

    def set_mode(self, command: SetBrokerMode) -> BrokerRecord:
        record = self.broker(command.broker_id)
        return self._put(msgspec.structs.replace(record, mode=command.mode, reason=command.reason))

    def end(self, broker_id: int) -> BrokerRecord:
        """The broker's registration has ended."""
        return self._put(msgspec.structs.replace(self.broker(broker_id), lease_id=0))

    def forget(self, broker_id: int) -> BrokerRecord:
        return self._by_key.pop(broker_id)


def command_level(value: bytes) -> int:
    """The level of commands that a broker has told; 0 if it cannot be read."""
    return int(value) if value.isdigit() and len(value) < 10 else 0


def _check_mode(mode: str) -> None:
    if mode not in MODES:
        raise InvalidArgument(f"broker mode {mode[:40]!r} is not known", hint=f"use {', '.join(MODES)}")


def _check_reason(reason: str) -> None:
    if reason:
        check_label(reason, "reason")
