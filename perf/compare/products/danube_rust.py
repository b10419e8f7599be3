"""The Danube broker in Rust, where somebody has built one: standalone, through the official Python client."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from perf.compare import places
from perf.compare.levels import Level
from perf.compare.processes import listens, started
from perf.compare.product import Client, Running, Setting, Work
from perf.compare.scripted import Scripted
from tests.broker_process import free_port
from tests.child_process import Child

SERVER = "DANUBE_COMPARE_DANUBE_RUST"


class Official(Scripted):
    """danube-client; it makes topics by using them and cannot delete one."""

    def missing(self, setting: Setting, workload: str) -> str:
        if workload == "replay":
            return "its API has no way to begin a subscription with the first record"
        return super().missing(setting, workload)

    def create(self, running: Running, work: Work, stack: ExitStack) -> None:
        self.run("create", running, work)

    def child(self, role: str, running: Running, work: Work, **more: Any) -> Child:
        return super().child(role, running, replace(work, topic=f"/default/{work.topic}"), **more)


class DanubeRust:
    """One broker in standalone mode."""

    name = "danube-rust"
    ours = False
    stored_max = 200_000
    settings: tuple[Setting, ...] = (
        Setting(
            name="danube-rust non-reliable",
            level=Level.TAKEN,
            promise="non-reliable topic: handed to whoever listens, dropped for who is full",
        ),
        Setting(
            name="danube-rust reliable",
            level=Level.WRITTEN_LATER,
            promise="in the log's buffer: written within 5 s or 10 MiB of the ack, never synced",
        ),
    )

    def clients(self, setting: Setting) -> tuple[Client, ...]:
        return (Official("danube-client, gRPC", "danube_grpc.py", "danube"),)

    def missing(self, setting: Setting) -> str:
        return "" if places.program("danube-broker", SERVER) else places.no_program("danube-broker", SERVER)

    def version(self) -> str:
        return "of unknown version"  # its command line has no flag that tells

    def start(self, setting: Setting, directory: Path) -> Running:
        port, admin = free_port(), free_port()
        command = [
            *(places.program("danube-broker", SERVER), "--mode", "standalone"),
            *("--broker-addr", f"127.0.0.1:{port}", "--admin-addr", f"127.0.0.1:{admin}"),
            *("--raft-addr", f"127.0.0.1:{free_port()}", "--data-dir", str(directory / "data")),
        ]
        server = started(command, directory, lambda: listens(port))
        address: dict[str, object] = {"url": f"http://127.0.0.1:{port}"}
        return Running(setting=setting, directory=directory, server=server, address=address)
