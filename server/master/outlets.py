"""What the master's gRPC handlers hold: messages on their way to one peer, and calls that wait for an answer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from shardwright.errors import ShardwrightError
from shardwright.server.master import commands as do


class OutgoingStream:
    """Messages on their way to one peer, written in order by its gRPC handler."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, message: Any) -> None:
        self._queue.put_nowait(message)

    def end(self, error: ShardwrightError | None = None) -> None:
        """No more messages; the handler ends the stream with `error`, where given."""
        self._queue.put_nowait(_EndOfStream(error))

    async def get(self) -> Any:
        """The next message, or None at the end; raises the error the stream is to end with."""
        message = await self._queue.get()
        if isinstance(message, _EndOfStream):
            if message.error is not None:
                raise message.error
            return None
        return message


@dataclass(frozen=True, slots=True)
class _EndOfStream:
    error: ShardwrightError | None


class Call:
    """A call that waits for the state machine: phases, then a value or an error."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._queue: asyncio.Queue[do.Progress | do.Answer | do.Fail] = asyncio.Queue()

    def put(self, command: do.Progress | do.Answer | do.Fail) -> None:
        self._queue.put_nowait(command)

    async def next(self) -> do.Progress | do.Answer:
        """The next phase, or the answer; raises the error the call failed with."""
        command = await self._queue.get()
        if isinstance(command, do.Fail):
            raise command.error
        return command

    async def answer(self) -> Any:
        while isinstance(command := await self.next(), do.Progress):
            pass
        return command.value
