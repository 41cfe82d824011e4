"""Compilation in child processes, because XLA ends its process on some inputs.

`CompileService` may live in a server: it imports neither jax nor MLIR. Children start at first need, with the program's
device count, and are restarted after a crash or a timeout.
"""

from __future__ import annotations

import contextvars
import logging
import os
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self, TypeVar

import psutil

from shardwright.errors import ERRORS_BY_CODE, CompilationError, DeadlineError, ShardwrightError
from shardwright.plans.plan import Plan
from shardwright.plans.plan_text import plan_to_json
from shardwright.xla.canonical_module import CanonicalModule
from shardwright.xla.child import ChildKilledError, CompileChild
from shardwright.xla.compiled import CompiledMemory, CompiledProgram, ObservedCollective
from shardwright.xla.compilers import CompilerInFolder
from shardwright.xla.messages import Header
from shardwright.xla.tuning import (
    BYTES_OF_ANY,
    BYTES_OF_SQUARE_MB,
    BYTES_WORTH_A_CHILD,
    FINISHING_PATIENCE_S,
    SLOT_LOOK_S,
)

_log = logging.getLogger("shardwright.xla")

T = TypeVar("T")
R = TypeVar("R")

#: What a compilation reads of the program: the finished one, or what the partitioner left.
Inspect = Literal["compiled", "partition-pass"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileJob:
    """A program to compile. name: in errors. want_executable: see `CompileService.compile`."""

    name: str
    hlo_text: str
    plan: Plan
    want_executable: bool = True


class Cancellation:
    """Ends the compilations that it was given to, from another thread: their children are killed."""

    def __init__(self) -> None:
        self.is_cancelled = False
        self._lock = threading.Lock()
        self._children: set[CompileChild] = set()

    def cancel(self) -> None:
        with self._lock:
            self.is_cancelled = True
            for child in self._children:
                child.kill()  # whoever waits for it ends it

    def check(self) -> None:
        """Raises CompilationError once it is cancelled."""
        if self.is_cancelled:
            raise CompilationError("the compilation was cancelled")

    @contextmanager
    def watching(self, child: CompileChild) -> Iterator[None]:
        """Within, the child works for what may be cancelled."""
        with self._lock:
            self.check()
            self._children.add(child)
        try:
            yield
        finally:
            with self._lock:
                self._children.discard(child)


def _compilation_key(job: CompileJob) -> Hashable:
    """Everything except a program's text that XLA's result depends on."""
    return str(job.plan.mesh), job.want_executable, tuple(sorted(job.plan.compile_options.items()))


def _ends_child(inspect: Inspect, text: str) -> bool:
    """Whether a child takes longer to compile what it has partitioned than another one to start."""
    return inspect == "partition-pass" and len(text) > BYTES_WORTH_A_CHILD


class CompileService:
    """Owns compile children. Thread-safe; a request waits for a free child.

    device_count: upper bound of the programs' devices. platform: jax's name (`cpu`, `cuda`). gpu_ids:
    those that children may open; default: all of the machine. children: maximum of parallel compilations; default: one
    per core. compiler: of devices that are not here, for programs that are inspected and never run; default: this
    machine's, for its own.
    """

    def __init__(
        self,
        device_count: int,
        platform: str = "cpu",
        *,
        gpu_ids: tuple[int, ...] | None = None,
        children: int | None = None,
        compiler: CompilerInFolder | None = None,
    ) -> None:
        self.device_count = device_count
        self.platform = platform
        self._gpu_ids = gpu_ids
        self._compiler = compiler
        self._count = children or max(len(os.sched_getaffinity(0)), 1)
        self._slots = threading.Semaphore(self._count)
        self._lock = threading.Lock()
        self._idle: list[CompileChild] = []
        self._busy: list[CompileChild] = []

    def compile(
        self,
        hlo_text: str,
        plan: Plan,
        *,
        want_executable: bool = True,
        inspect: Inspect = "compiled",
        deadline_s: float | None = None,
        cancellation: Cancellation | None = None,
    ) -> CompiledProgram:
        """Emit `plan` onto `hlo_text`, compile it, read its collectives and memory.

        want_executable: also return XLA's serialized executable. On CPUs several processes may load it, each with some
          of the devices; elsewhere one with all of them.
        inspect="partition-pass" stops once XLA has partitioned the program (full compiles of deep models take minutes):
        no executable, no memory.

        cancellation: ends it from another thread.

        Raises CompilationError with XLA's message, CompilationAbortedError if XLA ended its process, DeadlineError
        after `deadline_s` seconds, and emission's errors.
        """
        header = {"job": "compile", "inspect": inspect, "want_executable": want_executable}
        blobs = [hlo_text.encode(), plan_to_json(plan).encode()]
        ends_child = _ends_child(inspect, hlo_text)
        devices = plan.mesh.device_count
        result = self._request(header, blobs, deadline_s, devices, cancellation, ends_child=ends_child)
        self._keep_one()
        return _program(*result)

    def compile_all(
        self, jobs: Sequence[CompileJob], cancellation: Cancellation | None = None
    ) -> list[CompiledProgram]:
        """Compile many programs, several at a time within memory; programs equal up to instruction names are compiled
        once.

        Raises the errors of `compile`, with the name of the program.
        """
        if len(jobs) == 1:
            (job,) = jobs
            with _name_job_in_errors(job):
                return [
                    self.compile(job.hlo_text, job.plan, want_executable=job.want_executable, cancellation=cancellation)
                ]
        devices = max((job.plan.mesh.device_count for job in jobs), default=1)
        at_once = self._count_at_once([len(job.hlo_text) for job in jobs])
        emitted = self._map(lambda job: self._emit_job(job, devices, cancellation), jobs, at_once)
        twins: dict[Hashable, int] = {}
        first_of = [
            twins.setdefault((text.text, _compilation_key(job)), number)
            for number, (job, text) in enumerate(zip(jobs, emitted, strict=True))
        ]
        distinct = sorted(twins.values(), key=lambda number: -len(emitted[number].original))  # the longest first
        at_once = self._count_at_once([len(emitted[number].original) for number in distinct])
        programs = self._map(
            lambda n: self._compile_job(jobs[n], emitted[n].original, devices, cancellation), distinct, at_once
        )
        self._keep_one()
        compiled = dict(zip(distinct, programs, strict=True))
        return [
            compiled[number] if number == first else emitted[number].rename_compiled(emitted[first], compiled[first])
            for number, first in enumerate(first_of)
        ]

    def emit(self, hlo_text: str, plan: Plan, *, deadline_s: float | None = None) -> str:
        """`emit_stablehlo` in a child, for a process that should not load MLIR."""
        blobs = [hlo_text.encode(), plan_to_json(plan).encode()]
        _, parts = self._request({"job": "emit"}, blobs, deadline_s, plan.mesh.device_count)
        return parts[0].decode()

    def compile_stablehlo(
        self, stablehlo: str, *, inspect: Inspect = "compiled", deadline_s: float | None = None
    ) -> str:
        """HLO text of each device, from unchanged StableHLO with Shardy marks; or the partitioner's output, available
        earlier.
        """
        header = {"job": "compile_stablehlo", "device_count": self.device_count, "inspect": inspect}
        ends_child = _ends_child(inspect, stablehlo)
        _, parts = self._request(header, [stablehlo.encode()], deadline_s, self.device_count, ends_child=ends_child)
        return parts[0].decode()

    def close(self) -> None:
        """End the children, even busy ones; the service may be used again."""
        with self._lock:
            idle, self._idle = self._idle, []
            for child in self._busy:
                child.kill()  # whoever waits for it ends it
        for child in idle:
            child.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- many programs -----------------------------------------------------
    def _emit_job(self, job: CompileJob, devices: int, cancellation: Cancellation | None) -> CanonicalModule:
        with _name_job_in_errors(job):
            blobs = [job.hlo_text.encode(), plan_to_json(job.plan).encode()]
            _, parts = self._request({"job": "emit"}, blobs, None, devices, cancellation)
            return CanonicalModule.of(parts[0].decode())

    def _compile_job(
        self, job: CompileJob, stablehlo: str, devices: int, cancellation: Cancellation | None
    ) -> CompiledProgram:
        with _name_job_in_errors(job):
            header = {"job": "compile_emitted", "want_executable": job.want_executable}
            blobs = [stablehlo.encode(), plan_to_json(job.plan).encode()]
            return _program(*self._request(header, blobs, None, devices, cancellation))

    def _count_at_once(self, sizes: Sequence[int]) -> int:
        return _count_at_once(sizes, self._count, psutil.virtual_memory().available)

    @staticmethod
    def _map(work: Callable[[T], R], items: Sequence[T], at_once: int) -> list[R]:
        """`work` on each item, a limited number at a time; after a failure no further item begins."""
        pool = ThreadPoolExecutor(max_workers=max(min(at_once, len(items)), 1), thread_name_prefix="compile")
        try:
            contexts = [contextvars.copy_context() for _ in items]  # what lines of the log are about
            return list(pool.map(lambda context, item: context.run(work, item), contexts, items))
        finally:
            pool.shutdown(cancel_futures=True)

    # ---- the children ------------------------------------------------------
    def _request(
        self,
        header: Header,
        blobs: list[bytes],
        deadline_s: float | None,
        devices: int,
        cancellation: Cancellation | None = None,
        *,
        ends_child: bool = False,
    ) -> tuple[Header, list[bytes]]:
        """The reply of a child; of another one where the first is killed."""
        until = None if deadline_s is None else time.monotonic() + deadline_s
        cancellation = cancellation or Cancellation()

        def ask() -> tuple[Header, list[bytes]]:
            with (
                self._child(min(devices, self.device_count), until, cancellation, ends_child) as child,
                cancellation.watching(child),
            ):
                return child.request(header, blobs, until)

        try:
            reply, parts = ask()
        except ChildKilledError as error:
            _log.warning("%s; it is asked again", error.message)
            reply, parts = ask()
        if "code" in reply:
            kind = ERRORS_BY_CODE.get(reply["code"], CompilationError)
            raise kind(reply["message"], where=reply["where"], remedy=reply["remedy"])
        return reply, parts

    @contextmanager
    def _child(
        self, devices: int, until: float | None, cancellation: Cancellation, ends_child: bool
    ) -> Iterator[CompileChild]:
        """A child with at least this many devices, kept for the next request unless this one fails.

        until: on the monotonic clock.
        """
        self._acquire_slot(until, cancellation)
        child = None
        is_well = False
        try:
            child = self._take_child(devices)
            yield child
            is_well = not ends_child
        finally:
            self._slots.release()
            if child is not None:
                self._put_back(child, is_well)

    def _acquire_slot(self, until: float | None, cancellation: Cancellation) -> None:
        while True:
            cancellation.check()
            left_s = SLOT_LOOK_S if until is None else max(min(until - time.monotonic(), SLOT_LOOK_S), 0.0)
            if self._slots.acquire(timeout=left_s):
                return
            if until is not None and time.monotonic() >= until:
                raise DeadlineError("other compilations did not leave a child free in time", remedy="give it longer")

    def _put_back(self, child: CompileChild, is_well: bool) -> None:
        with self._lock:
            self._busy.remove(child)
            if is_well:
                self._idle.append(child)
        if not is_well:
            child.end()

    def _take_child(self, devices: int) -> CompileChild:
        child = None
        with self._lock:
            if self._idle:
                child = self._idle.pop()
        if child is not None and not (child.device_count >= devices and child.is_ready(FINISHING_PATIENCE_S)):
            child.end()
            child = None
        child = child or CompileChild(devices, self.platform, self._gpu_ids, self._compiler)
        with self._lock:
            self._busy.append(child)
        return child

    def _keep_one(self) -> None:
        """Keep one child; the others would hold memory needed in training."""
        with self._lock:
            ended, self._idle[1:] = self._idle[1:], []
        for child in ended:
            child.end()


@contextmanager
def _name_job_in_errors(job: CompileJob) -> Iterator[None]:
    """Add the job's program to errors passing through."""
    try:
        yield
    except ShardwrightError as error:
        if not job.name:
            raise
        where = f"{job.name}: {error.where}" if error.where else job.name
        raise type(error)(error.message, where=where, remedy=error.remedy) from None


def _count_at_once(sizes: Sequence[int], most: int, available_bytes: int) -> int:
    """How many of these programs (bytes of text) to compile at a time, at least one; in half of the memory left."""
    most = min(most, sum(sizes) // BYTES_WORTH_A_CHILD)
    sizes = sorted(sizes, reverse=True)
    needs = [BYTES_OF_ANY + int((size / (1 << 20)) ** 2 * BYTES_OF_SQUARE_MB) for size in sizes[:most]]
    return max((count for count in range(1, len(needs) + 1) if 2 * sum(needs[:count]) <= available_bytes), default=1)


def _program(reply: Header, parts: list[bytes]) -> CompiledProgram:
    memory = reply["memory"]
    return CompiledProgram(
        stablehlo=parts[0].decode(),
        partitioned_gzip=parts[1],
        serialized=parts[2] if len(parts) > 2 else None,
        collectives=tuple(ObservedCollective(**fields) for fields in reply["collectives"]),
        memory=None if memory is None else CompiledMemory(**memory),
        emit_s=reply["emit_s"],
        compile_s=reply["compile_s"],
    )
