"""Changes of the members are written down by the controller before they are asked of the leader."""

from __future__ import annotations

import asyncio
import errno
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from danube.broker.audit.audit import MEMBERS_CHAIN
from danube.broker.audit.trail import list_files, trail, verify
from danube.broker.clustered.controller import Controller
from danube.broker.processes.contexts import ControllerContext, DrainSignal, Pulse, SupervisorSettings
from danube.cluster.control.calls import Change, Status, encode
from danube.cluster.control.node import Node, NodeSettings
from danube.config.loading import BrokerConfig, load
from danube.host import files


def config_at(directory: Path, mode: str) -> BrokerConfig:
    return load(None, {}, {"data_dir": str(directory), "audit.mode": mode}).config


def controller_at(directory: Path, mode: str) -> Controller:
    context = ControllerContext(
        listener=cast(socket.socket, None), door=cast(socket.socket, None), drain=DrainSignal(),
        settings=SupervisorSettings(data_dir=directory), pulse=Pulse(),
    )  # fmt: skip
    made = Controller(context, cast(Any, SimpleNamespace(tls=None)), None, config_at(directory, mode))
    made._loop = asyncio.get_running_loop()
    return made


def node_at(directory: Path) -> Node:
    return Node(
        NodeSettings(data_dir=directory, cluster="test", raft_addr="127.0.0.1:7000"), cast(Any, None), print
    )


def test_a_change_is_told_and_a_question_is_not(tmp_path: Path) -> None:
    async def scenario() -> None:
        controller, node = controller_at(tmp_path, "on"), node_at(tmp_path)
        assert controller._open_audit()
        node.before_change = controller._tell_change
        await node.asked(encode(Change("add", "17", "10.0.0.2:7650")))
        await node.asked(encode(Change("remove", "17")))
        await node.asked(encode(Status()))
        assert controller._audit is not None
        controller._audit.close()
        node.stop()

    asyncio.run(scenario())
    told = [line for line in trail(tmp_path / "audit") if "audit." not in line["operation"]]
    assert [(one["operation"], one["resource"], one["details"]) for one in told] == [
        ("member_add", "17", {"address": "10.0.0.2:7650"}),
        ("member_remove", "17", {}),
    ]
    assert {(one["principal"], one["how"], one["worker"]) for one in told} == {
        ("host", "socket", MEMBERS_CHAIN)
    }
    assert not verify(tmp_path / "audit").findings
    assert [one.worker for one in list_files(tmp_path / "audit")] == [MEMBERS_CHAIN]


def test_a_change_whose_line_is_required_and_cannot_be_written_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        controller, node = controller_at(tmp_path, "required"), node_at(tmp_path)
        assert controller._open_audit()
        node.before_change = controller._tell_change
        with monkeypatch.context() as patched:
            patched.setattr(files, "pwritev", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full")))
            assert b"takes no more audit lines" in await node.asked(encode(Change("remove", "17")))
        assert controller._audit is not None
        controller._audit.close()
        node.stop()

    asyncio.run(scenario())


def test_without_the_setting_nothing_is_written(tmp_path: Path) -> None:
    async def scenario() -> None:
        assert not controller_at(tmp_path, "off")._open_audit()

    asyncio.run(scenario())
    assert not (tmp_path / "audit").exists()
