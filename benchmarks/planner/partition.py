"""Compiles a program in a child process up to XLA's buffer assignment.

XLA dumps the optimized module of one device, combiners and fusion on, and then the buffer assignment. The child is
killed there: code generation, by far the longest part of a compilation, is skipped.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_targets

_ROOT = Path(__file__).resolve().parents[2]
_PARTITIONED = "*after_spmd-partitioning*.txt"
_FOR_GPUS = "*.sm_*_gpu_after_optimizations.txt"
_OPTIMIZED = "{module}.*_after_optimizations.txt"
_MEMORY = "{module}.*memory-usage-report.txt"
_ASSIGNED = "{module}.*buffer-assignment.txt"
_TOTAL = re.compile(r"Total bytes: (\d+)")
_TEMPORARIES = re.compile(r"^allocation \d+: size (\d+), preallocated-temp", re.MULTILINE)
_POLL_S = 0.05


#: Prefix of the child's message about an expert's layout that does not fit the model.
DOES_NOT_APPLY = "does not apply: "


class PartitionError(Exception):
    """XLA refused the program, or took too long."""


@dataclass(frozen=True, kw_only=True)
class PartitionedProgram:
    """One device's program.

    memory_bytes: assigned bytes of arguments, results, temporaries and constants; None after a timeout.
    temporaries_bytes: of these, the allocation shared by all intermediate values.
    """

    hlo_text: str
    memory_bytes: int | None
    temporaries_bytes: int | None
    seconds: float


def partition(job: dict[str, Any], devices: int, *, limit_s: float = 300.0) -> PartitionedProgram:
    """Run a job of `partition_child` on `devices` host devices. Raises PartitionError."""
    flags = (
        f"--xla_force_host_platform_device_count={devices}",
        "--xla_dump_hlo_pass_re=spmd-partitioning",
        # Barriers stay, for the experts' jax.checkpoint as for ours: otherwise XLA:CPU merges what is computed twice.
        "--xla_disable_hlo_passes=cse_barrier_expander",
    )
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    return _run_child(job, environment, _PARTITIONED, limit_s)


def compile_for_gpus(
    job: dict[str, Any], target: str, *, options: Sequence[str] = (), limit_s: float = 300.0
) -> PartitionedProgram:
    """Run a job of `partition_child` for GPUs of a target, with the compiler in `gpu_targets.packages_folder`.

    options: further options of the compiler, such as `xla_gpu_some_option=value`.

    Raises PartitionError.
    """
    folder = gpu_targets.packages_folder()
    environment = gpu_targets.compiler_environment(folder)
    environment["XLA_FLAGS"] = " ".join([environment["XLA_FLAGS"], *(f"--{option}" for option in options)])
    return _run_child({**job, "target": target, "packages": folder}, environment, _FOR_GPUS, limit_s)


def compile_for(job: dict[str, Any], machine: str, *, limit_s: float = 300.0) -> PartitionedProgram:
    """Run a job with the compiler of a machine of the judge. Raises PartitionError."""
    if machine in gpu_targets.TARGETS:
        return compile_for_gpus(job, machine, limit_s=limit_s)
    return partition(job, job["devices"], limit_s=limit_s)


def _run_child(job: dict[str, Any], environment: dict[str, str], pattern: str, limit_s: float) -> PartitionedProgram:
    """Run a job until XLA has dumped text and memory of the module named by a dump of `pattern`."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bench-planner-") as folder:
        dumps = Path(folder) / "dumps"
        flags = f"{environment['XLA_FLAGS']} --xla_dump_to={dumps}"
        with open(Path(folder) / "stderr", "w+b") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "benchmarks.planner.partition_child"], cwd=_ROOT, stdin=subprocess.PIPE,
                env={**os.environ, **environment, "XLA_FLAGS": flags},
                stdout=errors, stderr=errors, start_new_session=True,
            )  # fmt: skip
            try:
                assert child.stdin is not None
                child.stdin.write(json.dumps(job).encode())
                child.stdin.close()
                text, memory, temporaries = _await_dumps(child, dumps, pattern, started + limit_s)
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            if text is None:
                errors.seek(0)
                raise PartitionError(_find_reason(errors.read().decode(errors="replace"), child.returncode))
    return PartitionedProgram(
        hlo_text=text,
        memory_bytes=memory,
        temporaries_bytes=temporaries,
        seconds=time.perf_counter() - started,
    )


def _await_dumps(
    child: subprocess.Popen[bytes], dumps: Path, pattern: str, deadline: float
) -> tuple[str | None, int | None, int | None]:
    while True:
        has_ended = child.poll() is not None
        dump = _find_newest(dumps, pattern)
        module = ".".join(dump.name.split(".")[:2]) if dump else "none"
        memory, temporaries = _read_memory(dumps, module)
        if memory is not None or has_ended or time.perf_counter() > deadline:
            optimized = _find_newest(dumps, _OPTIMIZED.format(module=module))
            return optimized.read_text() if optimized else None, memory, temporaries
        time.sleep(_POLL_S)


def _read_memory(dumps: Path, module: str) -> tuple[int | None, int | None]:
    """(total, temporaries) bytes of a module; None until both are written."""
    report = _find_newest(dumps, _MEMORY.format(module=module))
    total = _TOTAL.search(report.read_text()) if report else None
    if total is None:  # it is written after the assignment
        return None, None
    assigned = _find_newest(dumps, _ASSIGNED.format(module=module))
    matches = _TEMPORARIES.findall(assigned.read_text()) if assigned else []
    return int(total[1]), sum(map(int, matches))


def _find_newest(dumps: Path, pattern: str) -> Path | None:
    return max(dumps.glob(pattern), default=None)


def _find_reason(output: str, returncode: int) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1][:400] if lines else f"the child ended with {returncode} and said nothing"
