"""Planners of many clients: no more than there is room for, and nobody's many requests before another's first."""

from __future__ import annotations

import asyncio

from shardwright.server.master.planning import FairQueue


def test_sessions_take_turns_and_hear_their_position() -> None:
    started: list[str] = []
    heard: dict[str, list[int]] = {}
    running = most = 0

    async def work(queue: FairQueue, session: str, name: str) -> None:
        nonlocal running, most
        async with queue.place(session, heard.setdefault(name, []).append):
            running += 1
            most = max(most, running)
            started.append(name)
            await asyncio.sleep(0.01)
            running -= 1

    async def main() -> None:
        queue = FairQueue(2)
        requests = [("a", f"a{number}") for number in range(4)] + [("b", "b0"), ("c", "c0")]
        await asyncio.gather(*(work(queue, session, name) for session, name in requests))

    asyncio.run(main())
    assert most == 2
    assert started[:2] == ["a0", "a1"]
    assert started[2] == "b0", "before a's third: a still has a place"
    assert "c0" in started[:5]
    assert started[5] == "a3"
    assert heard["a0"] == []
    assert heard["c0"][-1] <= 2
    assert heard["a3"][0] == 2


def test_whoever_gives_up_leaves_room() -> None:
    async def main() -> None:
        queue = FairQueue(1)

        async def hold() -> None:
            async with queue.place("a", lambda position: None):
                await asyncio.sleep(3600)

        first, second = asyncio.ensure_future(hold()), asyncio.ensure_future(hold())
        await asyncio.sleep(0)
        second.cancel()
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        async with asyncio.timeout(5), queue.place("b", lambda position: None):
            pass

    asyncio.run(main())
