"""Predicted memory beside XLA:CPU's for random steps, random layouts and memory limits.

Each seed draws a step (`random_steps`, or one of the small models of `collectives`), the bandwidth of the links, and a
kind of plan:

- forced: an expert's strategy on a mesh of one to three axes;
- layouts: layouts of some arguments, drawn by `fuzz_collectives`; the search plans the rest;
- search, and limit: the search, without and with a limit of 50 to 80 % of the unlimited plan's memory with its margin;
- remat and parts: everything rematerialized, or two micro-batches.

XLA:CPU assigns buffers for the plan's program; code generation is skipped. A plan is over if the assigned bytes exceed
its predicted bytes with the margin (`cost.bytes_with_margin`). A seed reproduces its case. Exit code 1 if a plan is
over or was not judged.

    python -m oracles.fuzz_memory [--models random,mlp] [--cluster 8] [--seeds 0:40] [--plans forced,limit]
        [--keep DIR]: the cases that are over or far off, as HLO, plan and StableHLO
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.planner.partition import PartitionError, partition
from oracles.collectives import SMALL
from oracles.fuzz_collectives import LINK_POWERS, draw_layout_options, list_mesh_shapes
from shardwright.clusters.cluster import Cluster
from shardwright.clusters.links import Link
from shardwright.cost import bytes_with_margin, hardware_profile
from shardwright.errors import PlanError, ShardwrightError
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.options.user_options import DEFAULT_AXES
from shardwright.planner import plan
from shardwright.plans.plan import Plan
from shardwright.plans.plan_text import plan_to_json
from shardwright.xla import emit_stablehlo
from workloads.random_steps import random_step

RANDOM = "random"
PLANS = ("forced", "layouts", "search", "limit", "remat", "parts")
ONE_AXIS = ("data", "fsdp", "tensor")
FORCED = (*ONE_AXIS, "mixed")

#: Range of a limit, as a part of the unlimited plan's memory with its margin.
LIMITS = (0.5, 0.8)

#: Error of a peak from which on a case is saved: the bar of the worst.
FAR_OFF = 0.25


@dataclass(frozen=True, kw_only=True)
class PeakComparison:
    """Bytes of a device under one plan: predicted, predicted with the margin, and assigned by XLA:CPU.

    temporaries: (predicted, assigned) bytes.
    """

    predicted_bytes: int
    required_bytes: int
    assigned_bytes: int
    temporaries: tuple[int, int]

    @property
    def ratio(self) -> float:
        return self.predicted_bytes / self.assigned_bytes

    @property
    def is_over(self) -> bool:
        return self.assigned_bytes > self.required_bytes

    def __str__(self) -> str:
        predicted_bytes, assigned_bytes = self.temporaries
        ratio = predicted_bytes / max(assigned_bytes, 1)
        text = f"peak {self.ratio:.3f}, temporaries {ratio:.3f} of {assigned_bytes / 2**20:.2f} MiB"
        return f"{text}: OVER by {self.assigned_bytes / self.required_bytes - 1:.1%}" if self.is_over else text


def draw_options(rng: random.Random, kind: str, text: str, devices: int) -> PlanOptions:
    """Draw the options of one kind of plan; those of `limit` lack the limit itself."""
    if kind == "layouts":
        shapes = [leaf.dimensions for parameter in parse(text).entry.parameters for leaf in parameter.shape.leaves]
        return draw_layout_options(rng, shapes, devices)
    mesh = dict(zip(DEFAULT_AXES, rng.choice(list(list_mesh_shapes(devices))), strict=False))
    force = rng.choice(FORCED if len(mesh) > 1 else ONE_AXIS)
    if kind == "forced":
        return PlanOptions(mesh=mesh, force=force, stages=1)
    if kind == "remat":
        return PlanOptions(mesh=mesh, force=force, remat="full", stages=1)
    if kind == "parts":
        return PlanOptions(mesh=mesh, force=force, micro_batches=2, stages=1)
    return PlanOptions(mesh=rng.choice((mesh, None)), stages=1)


def plan_case(rng: random.Random, kind: str, text: str, cluster: Cluster) -> Plan:
    """Plan one case. Raises ShardwrightError if there is no plan."""
    linked = replace(cluster, intra_node=Link(bandwidth_bytes_per_s=10 ** rng.uniform(*LINK_POWERS)))
    options = draw_options(rng, kind, text, cluster.device_count)
    step_plan = plan(text, linked, options)
    if kind != "limit":
        return step_plan
    budget = int(rng.uniform(*LIMITS) * bytes_with_margin(step_plan.memory, hardware_profile(linked.hardware)))
    return plan(text, linked, replace(options, memory_budget=budget))


def compare_with_xla(step_plan: Plan, cluster: Cluster, *, limit_s: float = 300.0) -> PeakComparison:
    """Compare a plan with XLA:CPU's buffer assignment. Raises PartitionError, also after `limit_s`."""
    with tempfile.TemporaryDirectory(prefix="fuzz-memory-") as folder:
        program = Path(folder) / "program.mlir"
        program.write_text(emit_stablehlo(step_plan.require_hlo(), step_plan))
        job = {"stablehlo": str(program), "devices": cluster.device_count}
        result = partition(job, cluster.device_count, limit_s=limit_s)
    if result.memory_bytes is None or result.temporaries_bytes is None:
        raise PartitionError("no buffers were assigned")
    return PeakComparison(
        predicted_bytes=step_plan.memory.peak_bytes,
        required_bytes=bytes_with_margin(step_plan.memory, hardware_profile(cluster.hardware)),
        assigned_bytes=result.memory_bytes,
        temporaries=(step_plan.memory.temporaries_bytes, result.temporaries_bytes),
    )


def draw_cases(models: list[str], plans: list[str], seeds: range) -> Iterator[tuple[str, str, str, str, random.Random]]:
    """(model, plan, description, HLO text, generator) of each case; small models have every plan per seed."""
    for model in models:
        text = "" if model == RANDOM else SMALL[model]()
        for seed in seeds:
            for kind in [plans[seed % len(plans)]] if model == RANDOM else plans:
                rng = random.Random(f"{model} {seed} {kind}")
                description, step = random_step(rng) if model == RANDOM else ("", text)
                yield f"{model}-{seed}", kind, description, step, rng


def save_case(folder: Path, name: str, step_plan: Plan) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.hlo").write_text(step_plan.require_hlo())
    (folder / f"{name}.json").write_text(plan_to_json(step_plan))
    (folder / f"{name}.mlir").write_text(emit_stablehlo(step_plan.require_hlo(), step_plan))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=RANDOM, help=f"{RANDOM}, or names of collectives (default: %(default)s)")
    parser.add_argument("--cluster", type=int, default=8, help="devices (default: %(default)s)")
    parser.add_argument("--seeds", default="0:60", help="first:last (default: %(default)s)")
    parser.add_argument("--plans", default=",".join(PLANS), help="(default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="folder for cases that are over or far off")
    options = parser.parse_args()
    cluster = Cluster.local(options.cluster)
    seeds = range(*map(int, options.seeds.split(":")))
    results: list[PeakComparison] = []
    failed = 0
    for name, kind, description, text, rng in draw_cases(options.models.split(","), options.plans.split(","), seeds):
        label = f"{name} {kind}{': ' + description if description else ''}"
        try:
            step_plan = plan_case(rng, kind, text, cluster)
            results.append(compare_with_xla(step_plan, cluster))
        except PlanError as error:  # no such plan: nothing fits, or an axis does not divide the batch
            print(f"{label}: refused: {error.message.splitlines()[0]}", flush=True)
            continue
        except (ShardwrightError, PartitionError) as error:
            failed += 1
            print(f"{label}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        print(f"{label}: {step_plan.mesh}: {results[-1]}", flush=True)
        if options.keep and (results[-1].is_over or abs(results[-1].ratio - 1) > FAR_OFF):
            save_case(options.keep, f"{name}-{kind}", step_plan)
    return print_summary(results, failed)


def print_summary(results: list[PeakComparison], failed: int) -> int:
    """Print the errors of the peaks; returns the exit code."""
    over = sum(result.is_over for result in results)
    if results:
        errors = [abs(result.ratio - 1) for result in results]
        print(
            f"{len(results)} plans: error of the peak {statistics.median(errors):.1%} median, {max(errors):.1%} worst"
        )
    print(f"{over} over, {failed} not judged")
    return int(over + failed > 0)


if __name__ == "__main__":
    sys.exit(main())
