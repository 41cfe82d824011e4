"""Planner children: planning beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import BinaryIO, cast

from shardwright.clusters.cluster import Cluster
from shardwright.errors import InternalError, PlanError
from shardwright.log_lines import ChildOutput, ChildOutputReader, current
from shardwright.processes import describe_exit
from shardwright.proto.v1 import common_pb2, master_pb2
from shardwright.protocol import wire
from shardwright.server.master.programs import StoredProgram
from shardwright.server.master.statistics import Work
from shardwright.server.tuning import PLANNER_LAST_CHARACTERS, PLANNER_LAST_WORDS_S
from shardwright.xla.messages import read_message, write_message

_log = logging.getLogger("shardwright.server")

ProgressListener = Callable[[master_pb2.PlanProgress], None]


class PlannerKilledError(PlanError):
    """Somebody killed the planner's process: the program need not be at fault."""


class PlannerChild:
    """A process that plans. What it logs is in this process' log."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shardwright.server.master.planner_child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},  # the devices belong to the executors
            start_new_session=True,
        )
        self._output = ChildOutput(_log, "planner")
        self._reader = ChildOutputReader(cast(BinaryIO, self._process.stderr), self._output.take)

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def plan(self, blobs: list[bytes], listener: ProgressListener) -> bytes:
        """Blocking. JSON of the plan; raises the planner's errors, InternalError if it died."""
        stdin, stdout = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        try:
            write_message(stdin, {"about": current()}, blobs)
            while (message := read_message(stdout.read)) is not None:
                header, (blob,) = message
                if header["kind"] == "progress":
                    listener(master_pb2.PlanProgress.FromString(blob))
                elif header["kind"] == "plan":
                    return blob
                else:
                    raise wire.error_from_proto(common_pb2.Error.FromString(blob))
        except BrokenPipeError:
            pass
        code = self._process.wait()
        if code == -signal.SIGKILL:
            raise PlannerKilledError(
                "the planner was killed (SIGKILL), most likely by the kernel for want of memory",
                remedy="free memory on the master's machine (its kernel's log names what was killed), or give it more; "
                'effort="fast" or a deadline takes less',
            )
        raise InternalError(
            f"the planner ended with {describe_exit(code)}:\n{self._last_words()}",
            remedy="please report this with the program",
        )

    def _last_words(self) -> str:
        self._reader.join(PLANNER_LAST_WORDS_S)
        return "\n".join(self._output.last_lines)[-PLANNER_LAST_CHARACTERS:] or "it said nothing"

    def interrupt(self) -> None:
        """End the search under way with the best plan so far."""
        self._process.send_signal(signal.SIGINT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def core_count() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


class FairQueue:
    """At most `size` holders at a time; of those who wait, the session with the fewest holders is next, then the first.

    Use it from the event loop's thread.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._holders: Counter[str] = Counter()
        self._waiting: list[tuple[str, asyncio.Future[None], Callable[[int], None]]] = []

    @property
    def running(self) -> int:
        return self._holders.total()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @asynccontextmanager
    async def place(self, session_id: str, moved: Callable[[int], None]) -> AsyncIterator[None]:
        """Within, it is held. moved: called with the position in the queue, from 1, while that changes."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (session_id, turn, moved)
        self._waiting.append(entry)
        self._advance()
        try:
            await turn
            yield
        finally:
            if entry in self._waiting:
                self._waiting.remove(entry)
            else:
                self._holders[session_id] -= 1
            self._holders += Counter()  # forgets sessions without any
            self._advance()

    def _advance(self) -> None:
        queue = self._in_order()
        free = self._size - self._holders.total()
        for entry in queue[: max(free, 0)]:
            session_id, turn, _ = entry
            self._waiting.remove(entry)
            self._holders[session_id] += 1
            if not turn.done():
                turn.set_result(None)
        for position, (_, _, moved) in enumerate(queue[max(free, 0) :], 1):
            moved(position)

    def _in_order(self) -> list[tuple[str, asyncio.Future[None], Callable[[int], None]]]:
        """Round robin: each entry ranks by the places of its session that are before it."""
        before = Counter(self._holders)
        ranked = []
        for entry in self._waiting:
            ranked.append((before[entry[0]], entry))
            before[entry[0]] += 1
        return [entry for _, entry in sorted(ranked, key=lambda pair: pair[0])]


class PlannerPool:
    """Keeps one planner warm; as many run at once as the machine has cores, others wait in a `FairQueue`.

    Searches that nobody waits for have a queue of their own, and half as many planners, of the lowest priority.

    Use it from the event loop's thread: a child dies with the thread that started it. work: counts plans.
    """

    def __init__(self, cluster: Cluster, work: Work, size: int | None = None) -> None:
        self._work = work
        self._cluster = pickle.dumps(cluster)
        size = size or core_count()
        self._queue = FairQueue(size)
        self._background_queue = FairQueue(max(1, size // 2))
        self._idle: PlannerChild | None = None
        self._busy: set[PlannerChild] = set()
        self._waited_for: dict[PlannerChild, str] = {}  # → session
        self._interrupted: set[PlannerChild] = set()  # of those

    @property
    def running(self) -> int:
        """Plans that are being made, background searches included."""
        return self._queue.running + self._background_queue.running

    @property
    def waiting(self) -> int:
        """Requests that wait for a planner."""
        return self._queue.waiting + self._background_queue.waiting

    def change_cluster(self, cluster: Cluster) -> None:
        """Plans are for other nodes from now on; those under way for the nodes before."""
        self._cluster = pickle.dumps(cluster)

    def warm(self) -> None:
        """Start a planner ahead of the first request: of a client that comes, which lowers its program meanwhile."""
        if self._idle is None and not self._busy:
            self._idle = PlannerChild()

    def interrupt(self, session_id: str) -> int:
        """End a session's searches that somebody waits for, with the best plans so far; how many there are."""
        children = [child for child, owner in self._waited_for.items() if owner == session_id]
        for child in children:
            child.interrupt()
        self._interrupted.update(children)
        return len(children)

    async def plan(
        self, request: master_pb2.PlanProgramRequest, program: StoredProgram, listener: ProgressListener
    ) -> tuple[bytes, bool]:
        """JSON of the plan, and whether the search was interrupted. `listener` is called on the event loop.

        Cancelling ends the planner.

        A planner that was killed is asked once more, in a new process.
        """
        began_s = time.monotonic()

        def moved(position: int) -> None:
            elapsed_s = time.monotonic() - began_s
            listener(master_pb2.PlanProgress(phase="queue", detail=f"position {position}", elapsed_s=elapsed_s))

        queue = self._background_queue if request.in_background else self._queue
        async with queue.place(request.session_id, moved):
            with self._work.timed():
                return await self._plan_twice(request, program, listener)

    async def _plan_twice(
        self, request: master_pb2.PlanProgramRequest, program: StoredProgram, listener: ProgressListener
    ) -> tuple[bytes, bool]:
        """Once more, where the first planner was killed."""
        try:
            return await self._request_plan(request, program, listener)
        except PlannerKilledError as error:
            _log.warning("%s; planning begins anew", error.message)
        return await self._request_plan(request, program, listener)

    async def _request_plan(
        self, request: master_pb2.PlanProgramRequest, program: StoredProgram, listener: ProgressListener
    ) -> tuple[bytes, bool]:
        loop = asyncio.get_running_loop()
        child = self._take_child(must_start=request.in_background)
        blobs = [self._cluster, request.SerializeToString(), program.gzip]
        is_finished = False
        if not request.in_background:
            self._waited_for[child] = request.session_id

        def on_loop(progress: master_pb2.PlanProgress) -> None:
            loop.call_soon_threadsafe(listener, progress)

        try:
            plan = await asyncio.to_thread(child.plan, blobs, on_loop)
            is_finished = True
            return plan, child in self._interrupted
        finally:
            self._busy.discard(child)
            self._waited_for.pop(child, None)
            self._interrupted.discard(child)
            if is_finished and self._idle is None and child.is_alive and not request.in_background:
                self._idle = child
            else:
                child.kill()

    def _take_child(self, *, must_start: bool) -> PlannerChild:
        """A planner. must_start: one of its own, as it will never have its priority back."""
        child = None
        if not must_start:
            child, self._idle = self._idle, None
        if child is None or not child.is_alive:
            child = PlannerChild()
        self._busy.add(child)
        return child

    def close(self) -> None:
        for child in [*self._busy, *([self._idle] if self._idle else [])]:
            child.kill()
        self._idle = None
