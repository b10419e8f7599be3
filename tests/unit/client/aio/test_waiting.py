"""A task that waits for a reply goes on where the bytes that settled it are taken."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import Any, cast

import pytest
import uvloop

from danube.client.aio.connection import Link
from danube.client.aio.waiting import Waiting, Wakeups
from danube.client.machine.reply import Reply
from danube.client.machine.session import Session
from danube.errors import DanubeError, ProtocolError

RUNS = {"asyncio": asyncio.run, "uvloop": uvloop.run}
TASKS = {"C": asyncio.Task, "Python": asyncio.tasks._PyTask}  # type: ignore[attr-defined]


@pytest.fixture(params=RUNS)
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, None]], None]:
    runner = RUNS[request.param]

    def bounded(test: Coroutine[Any, Any, None]) -> None:
        runner(asyncio.wait_for(test, 20))

    return bounded


class Bench:
    """Tasks that wait for replies, and bytes that settle them."""

    def __init__(self, task_type: Any = asyncio.Task) -> None:
        self.loop = asyncio.get_running_loop()
        self.wakeups = Wakeups(self.loop)
        self.seen: list[Any] = []
        self._task_type = task_type

    async def waits(self, reply: Reply, name: str) -> None:
        try:
            await Waiting(reply, self.wakeups)
        except asyncio.CancelledError as error:
            self.seen.append((name, "cancelled", *error.args))
            raise
        self.seen.append((name, reply.value))

    async def started(self, *coroutines: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
        """Tasks that have run up to their first wait."""
        tasks = [self._task_type(one, loop=self.loop) for one in coroutines]
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return tasks

    def bytes_settle(self, *replies: Reply) -> None:
        """Bytes are read that answer these, with 1, 2 and so on."""
        self.wakeups.due = []
        for number, reply in enumerate(replies, 1):
            reply.resolve(number)
        self.wakeups.run()

    async def waiting(self) -> tuple[Reply, asyncio.Task[Any]]:
        """A task ``x`` that waits for the reply."""
        reply = Reply()
        (task,) = await self.started(self.waits(reply, "x"))
        return reply, task

    async def outside_of_tasks(self, callback: Callable[[], None]) -> None:
        """Call it as a transport would; raises what it raises."""
        done = self.loop.create_future()

        def call() -> None:
            try:
                callback()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)

        self.loop.call_soon(call)
        await done


@pytest.mark.parametrize("task_type", TASKS)
def test_who_waited_goes_on_when_all_bytes_are_taken_and_not_before(run: Any, task_type: str) -> None:
    async def test() -> None:
        bench = Bench(TASKS[task_type])
        first, second = Reply(), Reply()
        tasks = await bench.started(bench.waits(first, "first"), bench.waits(second, "second"))

        def bytes_come() -> None:
            bench.wakeups.due = []
            second.resolve(2)
            first.resolve(1)
            assert bench.seen == []
            bench.wakeups.run()
            assert bench.seen == [("second", 2), ("first", 1)], "in the order of their answers, at once"

        await bench.outside_of_tasks(bytes_come)
        await asyncio.gather(*tasks)
        assert bench.seen == [("second", 2), ("first", 1)]

    run(test())


def test_a_reply_that_no_bytes_settle_wakes_in_the_next_iteration(run: Any) -> None:
    async def test() -> None:
        bench = Bench()
        reply, task = await bench.waiting()

        def time_is_over() -> None:
            reply.fail(TimeoutError())
            assert bench.seen == []

        await bench.outside_of_tasks(time_is_over)
        await task
        assert bench.seen == [("x", None)]

    run(test())


def test_a_reply_that_is_settled_before_the_wait_began_ends_it(run: Any) -> None:
    async def test() -> None:
        bench = Bench()
        reply = Reply()
        reply.resolve(3)
        await bench.waits(reply, "x")
        assert bench.seen == [("x", 3)]

    run(test())


def test_bytes_that_a_task_takes_wake_others_when_it_waits(run: Any) -> None:
    async def test() -> None:
        bench = Bench()
        reply, task = await bench.waiting()
        bench.bytes_settle(reply)
        assert bench.seen == [], "a task cannot run inside of another"
        await task
        assert bench.seen == [("x", 1)]

    run(test())


@pytest.mark.parametrize("task_type", TASKS)
def test_cancelled_while_it_waits(run: Any, task_type: str) -> None:
    async def test() -> None:
        bench = Bench(TASKS[task_type])
        reply, task = await bench.waiting()
        assert task.cancel("enough")
        assert task.cancel("again"), "the task still has to hear of it"
        with pytest.raises(asyncio.CancelledError):
            await task
        assert bench.seen[0][:2] == ("x", "cancelled") and len(bench.seen) == 1
        reply.resolve(1)
        await asyncio.sleep(0)
        assert not reply._callbacks, "nobody is told any more"

    run(test())


@pytest.mark.parametrize("task_type", TASKS)
def test_cancelled_by_one_who_goes_on_first(run: Any, task_type: str) -> None:
    async def test() -> None:
        bench = Bench(TASKS[task_type])
        first, second = Reply(), Reply()
        others: list[asyncio.Task[Any]] = []

        async def cancels() -> None:
            await Waiting(first, bench.wakeups)
            others[0].cancel()

        tasks = await bench.started(cancels(), bench.waits(second, "second"))
        others.append(tasks[1])

        def bytes_come() -> None:
            bench.bytes_settle(first, second)

        await bench.outside_of_tasks(bytes_come)
        await asyncio.wait(tasks)
        assert bench.seen == [("second", "cancelled")] and tasks[1].cancelled()

    run(test())


@pytest.mark.parametrize("ending", [SystemExit, KeyboardInterrupt])
def test_one_who_ends_the_program_holds_up_no_other(run: Any, ending: type[BaseException]) -> None:
    seen: list[Any] = []

    async def test() -> None:
        bench = Bench()
        first, second = Reply(), Reply()

        async def ends() -> None:
            await Waiting(first, bench.wakeups)
            raise ending

        tasks = await bench.started(ends(), bench.waits(second, "second"))

        def bytes_come() -> None:
            bench.bytes_settle(first, second)
            seen.extend(bench.seen)
            assert type(tasks[0].exception()) is ending

        bench.loop.call_soon(bytes_come)
        await asyncio.sleep(10)

    with pytest.raises(ending):
        run(test())
    assert seen == [("second", 2)]


def test_a_task_keeps_its_context_and_its_deadline(run: Any) -> None:
    async def test() -> None:
        bench = Bench()
        variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="others'")
        reply = Reply()

        async def in_context() -> None:
            variable.set("its own")
            await Waiting(reply, bench.wakeups)
            bench.seen.append((variable.get(), asyncio.current_task() is tasks[0]))

        tasks = await bench.started(in_context())

        def bytes_come() -> None:
            bench.bytes_settle(reply)
            bench.seen.append(variable.get())

        await bench.outside_of_tasks(bytes_come)
        assert bench.seen == [("its own", True), "others'"]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await Waiting(Reply(), bench.wakeups)

    run(test())


class Received:
    """A session that settles what the test wants, and may then find the rest damaged."""

    def __init__(self, reply: Reply, error: DanubeError | None) -> None:
        self.reply, self.error = reply, error
        self.wanted = 16

    def received(self, view: memoryview, start: int, end: int) -> int:
        self.reply.resolve(bytes(view[start:end]))
        if self.error is not None:
            raise self.error
        return end


@pytest.mark.parametrize("error", [None, ProtocolError("damaged")])
def test_a_link_wakes_whose_answers_it_read_also_where_damage_follows(
    run: Any, error: DanubeError | None
) -> None:
    async def test() -> None:
        bench = Bench()
        reply = Reply()
        link = Link(cast(Session, Received(reply, error)), bench.wakeups)
        await bench.started(bench.waits(reply, "x"))

        def bytes_come() -> None:
            link.get_buffer(-1)[:5] = b"bytes"
            link.buffer_updated(5)
            assert bench.seen == [("x", b"bytes")]

        await bench.outside_of_tasks(bytes_come)
        assert link.reason is error

    run(test())
