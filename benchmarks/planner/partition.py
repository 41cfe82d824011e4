"""Compile a program in a child process, and end the child once XLA has written what the counters read.

`partition` takes XLA:CPU's module behind its partitioner, `compile_for_gpus` the one that XLA:GPU has optimized and
scheduled. The buffer assignment is written right behind both: code generation, by far the longest part of a
compilation, is never waited for.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu_targets

_ROOT = Path(__file__).resolve().parents[2]
_PARTITIONED = "*after_spmd-partitioning*.txt"
_OPTIMIZED = "*.sm_*_gpu_after_optimizations.txt"
_MEMORY = "{module}.*memory-usage-report.txt"
_ASSIGNED = "{module}.*buffer-assignment.txt"
_TOTAL = re.compile(r"Total bytes: (\d+)")
_TEMPORARIES = re.compile(r"^allocation \d+: size (\d+), preallocated-temp", re.MULTILINE)
_POLL_S = 0.05


#: All-reduces stay apart for the counter of bytes; a server's programs have them merged.
COMBINER = "cpu-all-reduce-combiner"

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


def partition(job: dict[str, Any], devices: int, *, limit_s: float = 300.0, without: str = COMBINER) -> Partitioned:
    """Run a job of `partition_child` on `devices` host devices. without: passes to leave out, beside those that every
    plan leaves out. Raises PartitionError."""
    flags = (
        f"--xla_force_host_platform_device_count={devices}",
        "--xla_dump_hlo_pass_re=spmd-partitioning",
        # Barriers stay, for the experts' jax.checkpoint as for ours: otherwise XLA:CPU merges what is computed twice.
        f"--xla_disable_hlo_passes={','.join(filter(None, (without, 'cse_barrier_expander')))}",
    )
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": " ".join(flags)}
    return _in_child({**job, "without": without}, environment, _PARTITIONED, limit_s)


def compile_for_gpus(job: dict[str, Any], target: str, *, packages: str, limit_s: float = 300.0) -> Partitioned:
    """Run a job of `partition_child` for GPUs of a target, its module as XLA:GPU will execute it. Raises PartitionError.

    packages: the folder that `gpu_targets` describes.
    """
    return _in_child({**job, "target": target, "packages": packages}, gpu_targets.environment(packages), _OPTIMIZED, limit_s)


def _in_child(job: dict[str, Any], environment: dict[str, str], pattern: str, limit_s: float) -> Partitioned:
    """Run a job until XLA's dump of `pattern` and the memory of its module are there."""
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
        partitioned = _newest(dumps, pattern)
        memory, temporaries = _memory(dumps, partitioned)
        if memory is not None or ended or time.perf_counter() > deadline:
            return partitioned.read_text() if partitioned else None, memory, temporaries
        time.sleep(_POLL_S)


def _memory(dumps: Path, partitioned: Path | None) -> tuple[int | None, int | None]:
    """XLA's total for the module that was partitioned, and its temporaries, once both are written."""
    if partitioned is None:
        return None, None
    module = ".".join(partitioned.name.split(".")[:2])
    report = _newest(dumps, _MEMORY.format(module=module))
    total = _TOTAL.search(report.read_text()) if report else None
    if total is None:  # it is written after the assignment
        return None, None
    assigned = _newest(dumps, _ASSIGNED.format(module=module))
    found = _TEMPORARIES.findall(assigned.read_text()) if assigned else []
    return int(total[1]), sum(map(int, found))


def _newest(dumps: Path, pattern: str) -> Path | None:
    return max(dumps.glob(pattern), default=None)


def _reason(output: str, returncode: int) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1][:400] if lines else f"the child ended with {returncode} and said nothing"
