"""Our side: plan a case's text in a child, compile what the plan emits, count it."""

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

from benchmarks.planner.counted import Counted
from benchmarks.planner.counter import count
from benchmarks.planner.partition import Partitioned, compile_for
from benchmarks.planner.suite import Entry, cluster_json

_ROOT = Path(__file__).resolve().parents[2]


class PlanningFailed(Exception):
    """The planner crashed or took too long."""


class PlanRefused(PlanningFailed):
    """The planner raised a typed error, e.g. that no plan fits the memory; the message is its own."""


@dataclass(frozen=True, kw_only=True)
class Lowered:
    """A case as the planner gets it, and the seconds that JAX took for it."""

    hlo_text: str
    lower_s: float
    as_text_s: float
    parameter_count: int

    @property
    def seconds(self) -> float:
        return self.lower_s + self.as_text_s


def lower(entry: Entry) -> Lowered:
    """The HLO text of a case, written for one device."""
    from workloads.every_model import EVERY_MODEL

    case = EVERY_MODEL[entry.model].build(entry.size, entry.devices, **entry.changes)
    started = time.perf_counter()
    lowered = case.lower()
    middle = time.perf_counter()
    text = lowered.as_text("hlo", debug_info=True)
    ended = time.perf_counter()
    return Lowered(
        hlo_text=text, lower_s=middle - started, as_text_s=ended - middle, parameter_count=case.parameter_count
    )


def plan(
    hlo_text: str,
    entry: Entry,
    options: dict[str, Any],
    *,
    limit_s: float,
    emitted: Path | None = None,
) -> dict[str, Any]:
    """What the planner says of its plan; the program it emits goes to `emitted`.

    One program on all devices is asked for, as the experts' are: the judge reads no pipelines. Raises PlanningFailed
    or PlanRefused.
    """
    with tempfile.TemporaryDirectory(prefix="bench-planner-") as folder:
        source = Path(folder) / "step.hlo"
        source.write_text(hlo_text)
        job = {
            "hlo": str(source), "cluster": cluster_json(entry.devices, entry.machine),
            "options": {"stages": 1, **options},
            "stablehlo": None if emitted is None else str(emitted),
        }  # fmt: skip
        return _run(job, limit_s)


class Judging:
    """Compiles and counts emitted programs of one case, equal ones once."""

    def __init__(self, entry: Entry, limit_s: float) -> None:
        self.entry = entry
        self._limit_s = limit_s
        self._known: dict[str, tuple[Partitioned, Counted]] = {}

    def __call__(self, emitted: Path) -> tuple[Partitioned, Counted]:
        """XLA's program of a StableHLO file, and its count. Raises PartitionError or CountingError."""
        key = hashlib.sha256(emitted.read_bytes()).hexdigest()
        if key not in self._known:
            job = {"stablehlo": str(emitted), "devices": self.entry.devices}
            partitioned = compile_for(job, self.entry.machine, limit_s=self._limit_s)
            self._known[key] = partitioned, count(partitioned.hlo_text, self.entry.devices)
        return self._known[key]


def _run(job: dict[str, Any], limit_s: float) -> dict[str, Any]:
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
        said = [line for line in child.stderr.splitlines() if line.strip()]
        raise PlanningFailed(said[-1][:400] if said else f"the planner ended with {child.returncode}")
    answer: dict[str, Any] = json.loads(lines[-1])
    if "error" in answer:
        raise PlanRefused(answer["error"])
    return answer
