"""Starts an executor child and keeps the last lines of its stderr."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable

from shardwright.clusters.cluster import Cluster, ClusterNode
from shardwright.log_lines import ChildOutput, LineCutter, fields
from shardwright.processes import describe_exit
from shardwright.server.black_box import BlackBox
from shardwright.server.worker.exit_codes import CANNOT_START
from shardwright.server.worker.host_memory import host_memory
from shardwright.server.worker.state import ChildExited, StartRequested

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
        environment.setdefault("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB", _host_memory_gib())
    return environment


def _host_memory_gib() -> str:
    """All of this machine's memory: snapshots and saves go through memory that XLA takes of it, 64 GiB by default."""
    total, _ = host_memory()
    return str(max(1, total >> 30))


async def _read(stream: asyncio.StreamReader, output: ChildOutput) -> None:
    """A stream to its end, line by line; `readline` would fail at long ones."""
    cutter = LineCutter()
    while chunk := await stream.read(1 << 16):
        for line in cutter.feed(chunk):
            output.take(line)
    for line in cutter.rest():
        output.take(line)


class ExecutorChild:
    """One executor process; `exited` is called once, on the event loop."""

    def __init__(self, start: StartRequested, exited: Callable[[ChildExited], None]) -> None:
        self._start = start
        self._exited = exited
        self._process: asyncio.subprocess.Process | None = None
        self._is_killed = False

    async def run(self, environment: dict[str, str], config: dict[str, object]) -> None:
        """Start it, hand over `config` on stdin (which stays open: its end means die), wait for its end."""
        output = ChildOutput(_log, "executor")
        code, failure, box = 1, "", BlackBox.make()
        config = {**config, "black_box": box.descriptor}
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "shardwright.server.worker.executor", str(os.getpid()),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
                env=environment, start_new_session=True,  # Ctrl-C in a terminal reaches the daemon only
                pass_fds=(box.descriptor,),
            )  # fmt: skip
            self._process = process
            if self._is_killed:
                process.kill()
            assert process.stdin is not None
            assert process.stderr is not None
            process.stdin.write(json.dumps(config).encode() + b"\n")
            await _read(process.stderr, output)
            code = await process.wait()
            self._log_end(code, output)
        except OSError as error:
            failure = f"the executor cannot be started: {error}"
        last_lines, works = failure or "\n".join(output.last_lines)[-8000:], tuple(box.read())
        box.close()
        self._exited(
            ChildExited(
                generation=self._start.generation, exit_code=code, last_lines=last_lines, works=works,
                was_killed=self._is_killed,
            )
        )  # fmt: skip

    def _log_end(self, code: int, output: ChildOutput) -> None:
        """With its last words, unless they are in the log already: of its own exit codes it has said why."""
        was_asked = code in (0, 1, CANNOT_START) or (self._is_killed and code == -signal.SIGKILL)
        last_lines = "" if was_asked else "\n".join(output.last_lines)
        how = "was ended" if self._is_killed else f"ended with {describe_exit(code)}"
        about_it = fields(process="daemon", output=last_lines)
        level = logging.INFO if was_asked else logging.ERROR
        _log.log(level, "the executor of generation %d %s", self._start.generation, how, extra=about_it)

    def kill(self) -> None:
        """End it at once: it has nothing to save. May come before it started, or twice."""
        self._is_killed = True
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(signal.SIGKILL)
