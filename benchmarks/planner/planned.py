"""The planner's side: plans a case's text in a child, compiles the emitted program, counts it."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planner.counted import ProgramCounts
from benchmarks.planner.counter import count
from benchmarks.planner.partition import PartitionedProgram, compile_for
from benchmarks.planner.suite import Entry, cluster_json

_ROOT = Path(__file__).resolve().parents[2]


class PlanningFailed(Exception):
    """The planner crashed or took too long."""


class PlanRefused(PlanningFailed):
    """The planner raised a typed error, such as MemoryBudgetError; the message is its own."""


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A case's HLO text, and JAX's seconds for it."""

    hlo_text: str
    lower_s: float
    as_text_s: float
    parameter_count: int

    @property
    def seconds(self) -> float:
        return self.lower_s + self.as_text_s


def lower(entry: Entry) -> Lowered:
    """Lower a case for one device to HLO text."""
    from workloads.every_model import EVERY_MODEL

    case = EVERY_MODEL[entry.model].build(entry.size, entry.devices, **entry.changes)
    started_at = time.perf_counter()
    lowered = case.lower()
    lowered_at = time.perf_counter()
    text = lowered.as_text("hlo", debug_info=True)
    ended_at = time.perf_counter()
    return Lowered(
        hlo_text=text,
        lower_s=lowered_at - started_at,
        as_text_s=ended_at - lowered_at,
        parameter_count=case.parameter_count,
    )


def plan(
    hlo_text: str,
    entry: Entry,
    options: dict[str, Any],
    *,
    limit_s: float,
    emitted: Path | None = None,
) -> dict[str, Any]:
    """Plan a text in a child: predicted figures of the plan, seconds and peak memory of planning.

    options: of the plan; `stages=1` is added, like the experts' (the judge reads no pipelines).
    emitted: file for the emitted StableHLO.
    Raises PlanningFailed or PlanRefused.
    """
    with tempfile.TemporaryDirectory(prefix="bench-planner-") as folder:
        source = Path(folder) / "step.hlo"
        source.write_text(hlo_text)
        job = {
            "hlo": str(source), "cluster": cluster_json(entry.devices, entry.machine),
            "options": {"stages": 1, **options},
            "stablehlo": None if emitted is None else str(emitted),
        }  # fmt: skip
        return _run_child(job, limit_s)


class ProgramJudge:
    """Compiles and counts emitted programs of one case; caches by content."""

    def __init__(self, entry: Entry, limit_s: float) -> None:
        self.entry = entry
        self._limit_s = limit_s
        self._programs: dict[str, tuple[PartitionedProgram, ProgramCounts]] = {}

    def __call__(self, emitted: Path) -> tuple[PartitionedProgram, ProgramCounts]:
        """XLA's program of a StableHLO file, and its counts. Raises PartitionError or CountingError."""
        key = hashlib.sha256(emitted.read_bytes()).hexdigest()
        if key not in self._programs:
            job = {"stablehlo": str(emitted), "devices": self.entry.devices}
            partitioned = compile_for(job, self.entry.machine, limit_s=self._limit_s)
            self._programs[key] = partitioned, count(partitioned.hlo_text, self.entry.devices)
        return self._programs[key]


def _run_child(job: dict[str, Any], limit_s: float) -> dict[str, Any]:
    try:
        child = subprocess.run(
            [sys.executable, "-m", "benchmarks.planner.plan_child"],
            cwd=_ROOT, input=json.dumps(job), capture_output=True, text=True, timeout=limit_s, check=False,
            env={**os.environ, "SHARDWRIGHT_CACHE": "off"},  # a plan from the cache would be timed as planning
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise PlanningFailed(f"no plan within {limit_s:.0f} s") from None
    lines = child.stdout.splitlines()
    if child.returncode or not lines:
        error_lines = [line for line in child.stderr.splitlines() if line.strip()]
        raise PlanningFailed(error_lines[-1][:400] if error_lines else f"the planner ended with {child.returncode}")
    answer: dict[str, Any] = json.loads(lines[-1])
    if "error" in answer:
        raise PlanRefused(answer["error"])
    return answer
