"""A worker dies, or the whole broker restarts, while messages flow: nothing acknowledged is lost."""

from __future__ import annotations

import asyncio

from official import Failed, connect, expect, open_inbox, outside, producing, run

from danube import SubType

COUNT = 300
DISTURB_AT = 80
APPLICATION_RETRIES = 40


async def _flow(url: str, topic: str, disturbance: str, partitions: int = 0) -> list[str]:
    """Produce and consume COUNT messages while the broker is disturbed; the errors an application saw."""
    client = await connect(url)
    acknowledged: list[int] = []
    received: dict[int, int] = {}
    errors: list[str] = []
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
                        errors.append(f"{number}: {error!r}"[:300])
                        await asyncio.sleep(0.1)
                else:
                    raise Failed(f"message {number} could not be sent: {errors[-1]}")
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
                    errors.append(f"ack {number}: {error!r}"[:300])
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
                f"missing {missing[:10]}; {errors[-3:]}"
            ) from None
        missing = sorted(set(acknowledged) - set(received))
        expect(not missing, "acknowledged and lost", missing)
        await inbox.consumer.close()
    print(f"# errors an application saw: {len(errors)} {errors[:3]}", flush=True)
    return errors


async def worker_killed(url: str, topic: str) -> None:
    """A dead worker is back so soon that the client's own retries hide it."""
    errors = await _flow(url, topic, "kill worker")
    expect(not errors, "the application saw nothing of it", errors)


async def worker_killed_partitions(url: str, topic: str) -> None:
    errors = await _flow(url, topic, "kill worker", partitions=4)
    expect(not errors, "the application saw nothing of it", errors)


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
