"""One compile child: its process, its pipes, its end."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any, BinaryIO, cast

from shardwright.errors import CompilationAbortedError, DeadlineError, PlatformError
from shardwright.log_lines import ChildOutput, ChildOutputReader, current
from shardwright.processes import describe_exit
from shardwright.xla.compilers import CompilerInFolder
from shardwright.xla.messages import Header, read_message, write_message
from shardwright.xla.tuning import CHILD_START_TIMEOUT_S, LAST_WORDS_S

_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"

_log = logging.getLogger("shardwright.xla")


class ChildKilledError(CompilationAbortedError):
    """Somebody other than its owner killed the child: the program need not be at fault."""


class CompileChild:
    """A process answering one request after the other.

    device_count: number of devices on `cpu`. gpu_ids: those it may open, None: all. compiler: of devices that are not
    here; None: for this machine's.
    """

    def __init__(
        self,
        device_count: int,
        platform: str,
        gpu_ids: tuple[int, ...] | None = None,
        compiler: CompilerInFolder | None = None,
    ) -> None:
        self.device_count = device_count
        # XLA's dumps go here, so that a child that is killed leaves none behind.
        self._folder = tempfile.mkdtemp(prefix="shardwright-xla-")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shardwright.xla.compile_child", self._folder, *_compiler_arguments(compiler)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                **child_environment(device_count, platform, gpu_ids),
                **(compiler.environment if compiler else {}),
                "TMPDIR": self._folder,
            },
            start_new_session=True,  # a Ctrl-C at the terminal is for the server, which then ends the child
        )
        self._output = ChildOutput(_log, "compiler")
        self._reader = ChildOutputReader(cast(BinaryIO, self._process.stderr), self._output.take)
        self._buffer = bytearray()
        self._is_ended = False
        self._is_finishing = False
        try:
            self._read(time.monotonic() + CHILD_START_TIMEOUT_S)
        except BaseException as error:
            self.end()
            if isinstance(error, ChildKilledError) or not isinstance(error, CompilationAbortedError):
                raise
            raise PlatformError(
                f"the compile child does not start: {error.message}", remedy="run `shardwright doctor`"
            ) from None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def is_ready(self, patience_s: float) -> bool:
        """Whether it can take another request, soon: XLA may not be through with what was only to be partitioned."""
        if self._is_finishing:
            try:
                self._read(time.monotonic() + patience_s)
            except (CompilationAbortedError, DeadlineError):
                return False
            self._is_finishing = False
        return self.is_alive

    def request(self, header: Header, blobs: list[bytes], until: float | None) -> tuple[Header, list[bytes]]:
        try:
            write_message(cast(BinaryIO, self._process.stdin), {**header, "about": current()}, blobs)
        except OSError:
            raise self._died() from None
        reply = self._read(until)
        self._is_finishing = header.get("inspect") == "partition-pass"
        return reply

    def kill(self) -> None:
        """End the process while another thread waits for its answer."""
        self._is_ended = True
        self._process.kill()

    def end(self) -> None:
        """Kill the process and wait for it; nothing in it needs saving."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):  # unsent bytes of a request that the child did not live to read
                cast(Any, pipe).close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _read(self, until: float | None) -> tuple[Header, list[bytes]]:
        message = read_message(lambda size: self._read_exactly(size, until))
        if message is None:
            raise self._died()
        return message

    def _read_exactly(self, size: int, until: float | None) -> bytes:
        descriptor = cast(BinaryIO, self._process.stdout).fileno()
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while len(self._buffer) < size:
                remaining_s = None if until is None else until - time.monotonic()
                if remaining_s is not None and (remaining_s <= 0 or not selector.select(remaining_s)):
                    raise DeadlineError(
                        "the compilation did not finish within its deadline",
                        remedy="give it longer; to read the partitioned program takes less than to compile it",
                    )
                chunk = os.read(descriptor, 1 << 20)
                if not chunk:
                    break
                self._buffer += chunk
        content = bytes(self._buffer[:size])
        del self._buffer[:size]
        return content

    def _died(self) -> CompilationAbortedError:
        code = self._process.wait()
        if code == -signal.SIGKILL and not self._is_ended:
            return ChildKilledError(
                "the process that compiles was killed (SIGKILL), most likely by the kernel for want of memory",
                remedy="free memory on the machine that compiles (its kernel's log names what was killed), or give it "
                "more; programs of fewer unrolled layers take less to compile",
            )
        return CompilationAbortedError(
            f"XLA ended its process ({describe_exit(code)}) while compiling:\n{self._last_lines()}",
            remedy="report the program and its plan; the server goes on",
        )

    def _last_lines(self) -> str:
        self._reader.join(LAST_WORDS_S)
        lines = self._output.last_lines
        # XLA prints its reason first and a stack trace after it, in lines that begin with @ or PC.
        reason_lines = [line for line in lines if line.strip() and not line.lstrip().startswith(("@", "PC:", "***"))]
        return "\n".join(f"  {line[:400]}" for line in reason_lines[-12:])


def _compiler_arguments(compiler: CompilerInFolder | None) -> list[str]:
    return [json.dumps(dataclasses.asdict(compiler))] if compiler else []


def child_environment(device_count: int, platform: str, gpu_ids: tuple[int, ...] | None = None) -> dict[str, str]:
    """This process' environment with the child's platform and, on CPU, its device count.

    On GPUs the child takes memory as it needs it and gives it back: an executor has reserved the rest.
    """
    environment = dict(os.environ)
    environment["JAX_PLATFORMS"] = platform
    flags = [flag for flag in environment.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_COUNT_FLAG)]
    if platform == "cpu":
        flags.append(f"{_DEVICE_COUNT_FLAG}={device_count}")
    environment["XLA_FLAGS"] = " ".join(flags)
    if platform == "cuda":
        environment["XLA_PYTHON_CLIENT_ALLOCATOR"] = "platform"
        if gpu_ids is not None:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
    return environment
