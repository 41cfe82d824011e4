"""Compilation in a child process, because XLA ends its process on some inputs.

`CompileService` may live in a server: it imports neither jax nor MLIR. The child
is started when first needed, answers one request after the other, and is started
again after it died or was ended for taking too long.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from types import TracebackType
from typing import IO, Any, BinaryIO, Literal, Self, cast

from shardwright.errors import (
    ERRORS_BY_CODE,
    CompilationAbortedError,
    CompilationError,
    DeadlineError,
    PlatformError,
)
from shardwright.plans import Plan
from shardwright.xla.compiled import CompiledMemory, CompiledProgram, ObservedCollective
from shardwright.xla.messages import Header, read_message, write_message

#: What a compilation reads of the program: the finished one, or what the partitioner left.
Inspect = Literal["compiled", "partition-pass"]

_START_TIMEOUT_S = 120.0
_STDERR_BYTES = 4000
_DEVICE_COUNT_FLAG = "--xla_force_host_platform_device_count"


class CompileService:
    """Owns a compile child. Thread-safe; requests wait for each other.

    device_count: devices the child's programs are for. platform: jax's name
    (`cpu`, `cuda`); on `cpu` the child makes `device_count` devices of the host.
    """

    def __init__(self, device_count: int, platform: str = "cpu") -> None:
        self.device_count = device_count
        self.platform = platform
        self._lock = threading.Lock()
        self._child: _Child | None = None

    def compile(
        self,
        hlo_text: str,
        plan: Plan,
        *,
        want_executable: bool = True,
        inspect: Inspect = "compiled",
        deadline_s: float | None = None,
    ) -> CompiledProgram:
        """Emit `plan` onto `hlo_text`, compile it, read its collectives and memory.

        want_executable: also return XLA's serialized executable, for one process with
        all the devices. inspect="partition-pass" stops once XLA has partitioned the program
        (full compiles of deep models take minutes): no executable, no memory.

        Raises CompilationError with XLA's message, CompilationAbortedError where XLA ended
        its process, DeadlineError after `deadline_s` seconds, and what emission raises.
        """
        header = {"job": "compile", "inspect": inspect, "want_executable": want_executable}
        blobs = [hlo_text.encode(), plan.to_json().encode()]
        reply, parts = self._request(header, blobs, deadline_s, ends_child=inspect == "partition-pass")
        memory = reply["memory"]
        return CompiledProgram(
            stablehlo=parts[0].decode(),
            serialized=parts[1] if len(parts) > 1 else None,
            collectives=tuple(ObservedCollective(**fields) for fields in reply["collectives"]),
            memory=None if memory is None else CompiledMemory(**memory),
            emit_s=reply["emit_s"],
            compile_s=reply["compile_s"],
        )

    def emit(self, hlo_text: str, plan: Plan, *, deadline_s: float | None = None) -> str:
        """`emit_stablehlo` in the child, for a process that should not load MLIR."""
        _, parts = self._request({"job": "emit"}, [hlo_text.encode(), plan.to_json().encode()], deadline_s)
        return parts[0].decode()

    def compile_stablehlo(
        self, stablehlo: str, *, inspect: Inspect = "compiled", deadline_s: float | None = None
    ) -> str:
        """HLO text that each device runs, for StableHLO with Shardy marks as it stands; or what the partitioner
        left of it, which is there earlier."""
        header = {"job": "compile_stablehlo", "device_count": self.device_count, "inspect": inspect}
        _, parts = self._request(header, [stablehlo.encode()], deadline_s, ends_child=inspect == "partition-pass")
        return parts[0].decode()

    def close(self) -> None:
        """End the child; the service may be used again."""
        with self._lock:
            self._drop_child()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the child ---------------------------------------------------------
    def _request(
        self, header: Header, blobs: list[bytes], deadline_s: float | None, *, ends_child: bool = False
    ) -> tuple[Header, list[bytes]]:
        until = None if deadline_s is None else time.monotonic() + deadline_s
        with self._lock:
            if self._child is None or not self._child.is_alive:
                self._drop_child()
                self._child = _Child(self.device_count, self.platform)
            try:
                reply, parts = self._child.request(header, blobs, until)
            except BaseException:
                self._drop_child()
                raise
            if ends_child:
                self._drop_child()
        if "code" in reply:
            kind = ERRORS_BY_CODE.get(reply["code"], CompilationError)
            raise kind(reply["message"], where=reply["where"], remedy=reply["remedy"])
        return reply, parts

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None


class _Child:
    """One child process and its pipes."""

    def __init__(self, device_count: int, platform: str) -> None:
        # XLA's dumps go here, so that a child that is killed leaves none behind.
        self._folder = tempfile.mkdtemp(prefix="shardwright-xla-")
        self._stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (lives as long as the child)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shardwright.xla.compile_child", self._folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            env={**child_environment(device_count, platform), "TMPDIR": self._folder},
            start_new_session=True,  # a Ctrl-C at the terminal is for the server, which then ends the child
        )
        self._buffer = bytearray()
        try:
            self._read(time.monotonic() + _START_TIMEOUT_S)
        except BaseException as error:
            self.end()
            if not isinstance(error, CompilationAbortedError):
                raise
            raise PlatformError(
                f"the compile child does not start: {error.message}", remedy="run `shardwright doctor`"
            ) from None

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def request(self, header: Header, blobs: list[bytes], until: float | None) -> tuple[Header, list[bytes]]:
        try:
            write_message(cast(BinaryIO, self._process.stdin), header, blobs)
        except OSError:
            raise self._died() from None
        return self._read(until)

    def end(self) -> None:
        """Kill the process and wait for it; nothing in it needs saving."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout, self._stderr):
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
                left = None if until is None else until - time.monotonic()
                if left is not None and (left <= 0 or not selector.select(left)):
                    raise DeadlineError(
                        "the compilation did not finish within its deadline",
                        remedy="give it longer, or ask for inspect='partition-pass'",
                    )
                chunk = os.read(descriptor, 1 << 20)
                if not chunk:
                    break
                self._buffer += chunk
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    def _died(self) -> CompilationAbortedError:
        code = self._process.wait()
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return CompilationAbortedError(
            f"XLA ended its process ({how}) while compiling:\n{self._last_lines()}",
            remedy="report the program and its plan; the server goes on",
        )

    def _last_lines(self) -> str:
        size = self._stderr.seek(0, os.SEEK_END)
        self._stderr.seek(max(0, size - _STDERR_BYTES))
        lines = self._stderr.read().decode(errors="replace").splitlines()
        # XLA prints its reason first and a stack trace after it, in lines that begin with @ or PC.
        told = [line for line in lines if line.strip() and not line.lstrip().startswith(("@", "PC:", "***"))]
        return "\n".join(f"  {line[:400]}" for line in told[-12:])


def child_environment(device_count: int, platform: str) -> dict[str, str]:
    """This process' environment with the child's platform and, on CPU, its device count."""
    environment = dict(os.environ)
    environment["JAX_PLATFORMS"] = platform
    flags = [flag for flag in environment.get("XLA_FLAGS", "").split() if not flag.startswith(_DEVICE_COUNT_FLAG)]
    if platform == "cpu":
        flags.append(f"{_DEVICE_COUNT_FLAG}={device_count}")
    environment["XLA_FLAGS"] = " ".join(flags)
    return environment
