"""Planner children: planning beside the event loop."""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import BinaryIO, cast

from shardwright.clusters.cluster import Cluster
from shardwright.errors import InternalError, PlanError
from shardwright.processes import describe_exit
from shardwright.proto.v1 import common_pb2, master_pb2
from shardwright.protocol import wire
from shardwright.xla.messages import read_message, write_message

_log = logging.getLogger("shardwright.server")

ProgressListener = Callable[[master_pb2.PlanProgress], None]


class PlannerKilledError(PlanError):
    """Somebody killed the planner's process: the program need not be at fault."""


class PlannerChild:
    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shardwright.server.master.planner_child", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},  # the devices belong to the executors
            start_new_session=True,
        )

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def plan(self, blobs: list[bytes], listener: ProgressListener) -> bytes:
        """Blocking. JSON of the plan; raises the planner's errors, InternalError if it died."""
        stdin, stdout = cast(BinaryIO, self._process.stdin), cast(BinaryIO, self._process.stdout)
        try:
            write_message(stdin, {}, blobs)
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
            f"the planner ended with {describe_exit(code)}", remedy="please report this with the server's log"
        )

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


class PlannerPool:
    """Keeps one planner warm; more run while several clients plan at once.

    Use it from the event loop's thread: a child dies with the thread that started it.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = pickle.dumps(cluster)
        self._idle: PlannerChild | None = None
        self._busy: set[PlannerChild] = set()

    def warm(self) -> None:
        """Start a planner ahead of the first request."""
        if self._idle is None:
            self._idle = PlannerChild()

    async def plan(self, request: master_pb2.PlanProgramRequest, hlo_text: str, listener: ProgressListener) -> bytes:
        """JSON of the plan. `listener` is called on the event loop. Cancelling ends the planner.

        A planner that was killed is asked once more, in a new process.
        """
        try:
            return await self._request_plan(request, hlo_text, listener)
        except PlannerKilledError as error:
            _log.warning("%s; planning begins anew", error.message)
        return await self._request_plan(request, hlo_text, listener)

    async def _request_plan(
        self, request: master_pb2.PlanProgramRequest, hlo_text: str, listener: ProgressListener
    ) -> bytes:
        loop = asyncio.get_running_loop()
        child = self._take_child()
        blobs = [self._cluster, request.SerializeToString(), hlo_text.encode()]
        is_finished = False

        def on_loop(progress: master_pb2.PlanProgress) -> None:
            loop.call_soon_threadsafe(listener, progress)

        try:
            plan = await asyncio.to_thread(child.plan, blobs, on_loop)
            is_finished = True
            return plan
        finally:
            self._busy.discard(child)
            if is_finished and self._idle is None and child.is_alive:
                self._idle = child
            else:
                child.kill()

    def _take_child(self) -> PlannerChild:
        child, self._idle = self._idle, None
        if child is None or not child.is_alive:
            child = PlannerChild()
        self._busy.add(child)
        return child

    def close(self) -> None:
        for child in [*self._busy, *([self._idle] if self._idle else [])]:
            child.kill()
        self._idle = None
