"""A worker dies, or the whole broker restarts, while messages flow: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from official import Failed, connect, expect, open_inbox, outside, producing, run

from danube import SubType

COUNT = 300
DISTURB_AT = 80
APPLICATION_RETRIES = 40


@dataclass
class Errors:
    """What an application saw: of sending, and of acknowledging."""

    send: list[str] = field(default_factory=list)
    ack: list[str] = field(default_factory=list)


async def _flow(url: str, topic: str, disturbance: str, partitions: int = 0) -> Errors:
    """Produce and consume COUNT messages while the broker is disturbed; the errors an application saw."""
    client = await connect(url)
    acknowledged: list[int] = []
    received: dict[int, int] = {}
    errors = Errors()
    complete = asyncio.Event()
    async with producing(client, topic, partitions=partitions) as producer:
        inbox = await open_inbox(client, topic, "consumer", kind=SubType.SHARED)

        async def produce() -> None:
            for number in range(COUNT):
                if number == DISTURB_AT:
                    disturbing.set()
                for _ in range(APPLICATION_RETRIES):
                    try:
                        await producer.send(b"%d" % number)
                        break
                    except Exception as error:  # an application sends again
                        errors.send.append(f"{number}: {error!r}"[:300])
                        await asyncio.sleep(0.1)
                else:
                    raise Failed(f"message {number} could not be sent: {errors.send[-1]}")
                acknowledged.append(number)
                await asyncio.sleep(0.005)

        async def consume() -> None:
            while not complete.is_set():
                message = await inbox.queue.get()
                number = int(message.payload)
                received[number] = received.get(number, 0) + 1
                try:
                    await inbox.consumer.ack(message)
                except Exception as error:  # it comes again
                    errors.ack.append(f"{number}: {error!r}"[:300])
                if len(received) == COUNT:
                    complete.set()

        disturbing = asyncio.Event()
        tasks = [asyncio.create_task(produce()), asyncio.create_task(consume())]
        await disturbing.wait()
        await outside(wish=disturbance)
        try:
            await asyncio.wait_for(asyncio.gather(*tasks), 40)
        except TimeoutError:
            missing = sorted(set(acknowledged) - set(received))
            raise Failed(
                f"{len(acknowledged)} acknowledged, {len(received)} received, "
                f"missing {missing[:10]}; {errors.send[-3:]} {errors.ack[-3:]}"
            ) from None
        missing = sorted(set(acknowledged) - set(received))
        expect(not missing, "acknowledged and lost", missing)
        await inbox.consumer.close()
    for what, seen in (("send", errors.send), ("ack", errors.ack)):
        print(f"# errors an application saw of {what}: {len(seen)} {seen[:3]}", flush=True)
    return errors


def _hidden(errors: Errors) -> None:
    """A dead worker is back so soon that the client's retries hide it.

    The client sends again what it could not send, and not an acknowledgement.  This application waits for
    each, so the one that was on its way is all that may fail; its message comes again.
    """
    expect(not errors.send, "the application saw nothing of it where it sent", errors.send)
    expect(len(errors.ack) <= 1, "only the acknowledgement on its way failed", errors.ack)


async def worker_killed(url: str, topic: str) -> None:
    _hidden(await _flow(url, topic, "kill worker"))


async def worker_killed_partitions(url: str, topic: str) -> None:
    _hidden(await _flow(url, topic, "kill worker", partitions=4))


async def broker_restarted(url: str, topic: str) -> None:
    await _flow(url, topic, "restart")


async def broker_killed(url: str, topic: str) -> None:
    await _flow(url, topic, "kill broker")


async def resumed_after_restart(url: str, topic: str) -> None:
    """What was acknowledged before a restart is not delivered after it to a new client."""
    client = await connect(url)
    async with producing(client, topic) as producer:
        inbox = await open_inbox(client, topic, "consumer")
        for number in range(10):
            await producer.send(b"%d" % number)
        first = await inbox.payloads(6)
        expect(first == [b"%d" % number for number in range(6)], "six are acknowledged", first)
        await inbox.consumer.close()
    await outside(wish="restart")
    client = await connect(url)
    inbox = await open_inbox(client, topic, "consumer")
    rest = await inbox.payloads(4)
    expect(rest == [b"%d" % number for number in range(6, 10)], "the other four come", rest)
    await inbox.silent(0.3)
    await inbox.consumer.close()


if __name__ == "__main__":
    run("__main__")
