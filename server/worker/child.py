"""Starts an executor child and keeps the last lines of its stderr."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable

from shardwright.clusters.cluster import Cluster, ClusterNode
from shardwright.processes import REPORT_MARK
from shardwright.server.worker.state import ChildExited, StartRequested

_LAST_LINES = 30

#: What is kept of a line: XLA prints whole modules in one.
_LINE_BYTES = 4000

_log = logging.getLogger("shardwright.server")


#: JAX's settings for whoever sits at a program; a server that inherits a client's environment goes without.
_OTHERS_SETTINGS = (
    "JAX_DEBUG_INFS",
    "JAX_DEBUG_KEY_REUSE",
    "JAX_DEBUG_NANS",
    "JAX_DISABLE_JIT",
    "JAX_ENABLE_CHECKS",
    "JAX_NUMPY_DTYPE_PROMOTION",
    "JAX_NUMPY_RANK_PROMOTION",
    "JAX_TRANSFER_GUARD",
)


#: Part of a GPU's memory that an executor reserves: all that a profile counts (80 GB of the 85.5 of an H100), and no
#: more. The rest is for CUDA's and NCCL's own, and for the process that compiles on the same GPU.
_GPU_MEMORY_FRACTION = "0.94"


def executor_environment(cluster: Cluster, node: ClusterNode) -> dict[str, str]:
    """This process' environment, with what decides the executor's devices before jax starts."""
    environment = {name: value for name, value in os.environ.items() if name not in _OTHERS_SETTINGS}
    environment["JAX_PLATFORMS"] = cluster.platform
    if cluster.platform == "cpu":
        flags = [flag for flag in environment.get("XLA_FLAGS", "").split() if "host_platform_device_count" not in flag]
        flags.append(f"--xla_force_host_platform_device_count={node.device_count}")
        environment["XLA_FLAGS"] = " ".join(flags)
    elif cluster.platform == "cuda":
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, node.gpu_ids))
        environment.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", _GPU_MEMORY_FRACTION)
    return environment


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of a stream to its end, each cut to its beginning; `readline` would fail at long ones."""
    line = b""
    while chunk := await stream.read(1 << 16):
        *ended, rest = chunk.split(b"\n")
        for part in ended:
            yield (line + part)[:_LINE_BYTES].decode(errors="replace").rstrip()
            line = b""
        line = (line + rest)[:_LINE_BYTES]
    if line:
        yield line.decode(errors="replace").rstrip()


class ExecutorChild:
    """One executor process; `exited` is called once, on the event loop."""

    def __init__(self, start: StartRequested, exited: Callable[[ChildExited], None]) -> None:
        self._start = start
        self._exited = exited
        self._process: asyncio.subprocess.Process | None = None
        self._is_killed = False

    async def run(self, environment: dict[str, str], config: dict[str, object]) -> None:
        """Start it, hand over `config` on stdin (which stays open: its end means die), wait for its end."""
        lines: deque[str] = deque(maxlen=_LAST_LINES)
        code = 1
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "shardwright.server.worker.executor", str(os.getpid()),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
                env=environment, start_new_session=True,  # Ctrl-C in a terminal reaches the daemon only
            )  # fmt: skip
            self._process = process
            if self._is_killed:
                process.kill()
            assert process.stdin is not None
            assert process.stderr is not None
            process.stdin.write(json.dumps(config).encode() + b"\n")
            async for line in _lines(process.stderr):
                lines.append(line)
                level = logging.WARNING if line.startswith(REPORT_MARK) else logging.DEBUG
                _log.log(level, "executor: %s", line.removeprefix(REPORT_MARK))
            code = await process.wait()
        except OSError as error:
            lines.append(f"the executor cannot be started: {error}")
        self._exited(
            ChildExited(generation=self._start.generation, exit_code=code, last_lines="\n".join(lines)[-8000:])
        )

    def kill(self) -> None:
        """End it at once: it has nothing to save. May come before it started, or twice."""
        self._is_killed = True
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
