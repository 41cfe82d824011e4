"""Compile a program in a child process, and end the child once XLA has written what the counters read.

XLA dumps the optimized module of one device, combiners and fusion on, and right behind it the buffer assignment: code
generation, by far the longest part of a compilation, is never waited for.
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


#: What the child says, ahead of the reason, where an expert's layout does not fit the model.
DOES_NOT_APPLY = "does not apply: "


class PartitionError(Exception):
    """XLA refused the program, or took too long."""


@dataclass(frozen=True, kw_only=True)
class Partitioned:
    """One device's program: its HLO text, and the bytes that XLA assigns for it (arguments, results and temporaries,
    constants among them; None where that was not reached in time).

    temporaries_bytes: of the allocation that all intermediate values share, among them.
    """

    hlo_text: str
    memory_bytes: int | None
    temporaries_bytes: int | None
    seconds: float


def partition(job: dict[str, Any], devices: int, *, limit_s: float = 300.0) -> Partitioned:
    """Run a job of `partition_child` on `devices` host devices. Raises PartitionError."""
    flags = (
        f"--xla_force_host_platform_device_count={devices}",
        "--xla_dump_hlo_pass_re=spmd-partitioning",
        # Barriers stay, for the experts' jax.checkpoint as for ours: otherwise XLA:CPU merges what is computed twice.
        "--xla_disable_hlo_passes=cse_barrier_expander",
    )
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    return _in_child(job, environment, _PARTITIONED, limit_s)


def compile_for_gpus(
    job: dict[str, Any], target: str, *, options: Sequence[str] = (), limit_s: float = 300.0
) -> Partitioned:
    """Run a job of `partition_child` for GPUs of a target, with the compiler in `gpu_targets.packages`.

    options: more of the compiler's, as `xla_gpu_some_option=value`.

    Raises PartitionError.
    """
    folder = gpu_targets.packages()
    environment = gpu_targets.environment(folder)
    environment["XLA_FLAGS"] = " ".join([environment["XLA_FLAGS"], *(f"--{option}" for option in options)])
    return _in_child({**job, "target": target, "packages": folder}, environment, _FOR_GPUS, limit_s)


def compile_for(job: dict[str, Any], machine: str, *, limit_s: float = 300.0) -> Partitioned:
    """Run a job with the compiler of a machine of the judge. Raises PartitionError."""
    if machine in gpu_targets.TARGETS:
        return compile_for_gpus(job, machine, limit_s=limit_s)
    return partition(job, job["devices"], limit_s=limit_s)


def _in_child(job: dict[str, Any], environment: dict[str, str], pattern: str, limit_s: float) -> Partitioned:
    """Run a job until XLA's text and memory of the module are there that a dump of `pattern` tells from others."""
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
                text, memory, temporaries = _await(child, dumps, pattern, started + limit_s)
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            if text is None:
                errors.seek(0)
                raise PartitionError(_reason(errors.read().decode(errors="replace"), child.returncode))
    return Partitioned(
        hlo_text=text,
        memory_bytes=memory,
        temporaries_bytes=temporaries,
        seconds=time.perf_counter() - started,
    )


def _await(
    child: subprocess.Popen[bytes], dumps: Path, pattern: str, deadline: float
) -> tuple[str | None, int | None, int | None]:
    while True:
        ended = child.poll() is not None
        told = _newest(dumps, pattern)
        module = ".".join(told.name.split(".")[:2]) if told else "none"
        memory, temporaries = _memory(dumps, module)
        if memory is not None or ended or time.perf_counter() > deadline:
            optimized = _newest(dumps, _OPTIMIZED.format(module=module))
            return optimized.read_text() if optimized else None, memory, temporaries
        time.sleep(_POLL_S)


def _memory(dumps: Path, module: str) -> tuple[int | None, int | None]:
    """XLA's total for a module, and its temporaries, once both are written."""
    report = _newest(dumps, _MEMORY.format(module=module))
    total = _TOTAL.search(report.read_text()) if report else None
    if total is None:  # it is written after the assignment
        return None, None
    assigned = _newest(dumps, _ASSIGNED.format(module=module))
    matches = _TEMPORARIES.findall(assigned.read_text()) if assigned else []
    return int(total[1]), sum(map(int, matches))


def _newest(dumps: Path, pattern: str) -> Path | None:
    return max(dumps.glob(pattern), default=None)


def _reason(output: str, returncode: int) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1][:400] if lines else f"the child ended with {returncode} and said nothing"
