"""Predicted memory beside XLA:CPU's for plans that nobody would ask for: random steps, random layouts, memory limits.

Each seed draws a step (`random_steps`, or one of the small models of `collectives`), the speed of the links, and how it
is planned:

- forced: an expert's strategy on a mesh of one to three axes;
- layouts: axes of some arguments, as `fuzz_collectives` draws them; the search plans the rest around them;
- search, and limit: what the search makes of 50 to 80 % of the memory that the unlimited plan must have;
- remat and parts: everything computed again, or the batch in two parts.

XLA:CPU assigns buffers for the plan's program; code generation is not waited for. A plan is over where a device
takes more than the least limit under which the plan is called feasible (`cost.bytes_with_margin`). The same seed draws
the same case. Exit code 1 where a plan is over, or a case was not judged.

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
from oracles.fuzz_collectives import LINK_POWERS, drawn, meshes
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

#: Of the memory that an unlimited plan must have, what a limit leaves.
LIMITS = (0.5, 0.8)

#: Peaks that are so far off are kept: the bar of the worst.
FAR_OFF = 0.25


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One plan: bytes of a device as predicted, as a limit must leave them, and as XLA:CPU assigns them."""

    predicted: int
    required: int
    taken: int
    temporaries: tuple[int, int]

    @property
    def ratio(self) -> float:
        return self.predicted / self.taken

    @property
    def is_over(self) -> bool:
        return self.taken > self.required

    def __str__(self) -> str:
        predicted, taken = self.temporaries
        said = f"peak {self.ratio:.3f}, temporaries {predicted / max(taken, 1):.3f} of {taken / 2**20:.2f} MiB"
        return f"{said}{': OVER by ' + format(self.taken / self.required - 1, '.1%') if self.is_over else ''}"


def options_drawn(rng: random.Random, kind: str, text: str, devices: int) -> PlanOptions:
    """Options of one kind of plan; those of `limit` are without the limit."""
    if kind == "layouts":
        return drawn(
            rng, [leaf.dimensions for each in parse(text).entry.parameters for leaf in each.shape.leaves], devices
        )
    mesh = dict(zip(DEFAULT_AXES, rng.choice(list(meshes(devices))), strict=False))
    force = rng.choice(FORCED if len(mesh) > 1 else ONE_AXIS)
    if kind == "forced":
        return PlanOptions(mesh=mesh, force=force, stages=1)
    if kind == "remat":
        return PlanOptions(mesh=mesh, force=force, remat="full", stages=1)
    if kind == "parts":
        return PlanOptions(mesh=mesh, force=force, micro_batches=2, stages=1)
    return PlanOptions(mesh=rng.choice((mesh, None)), stages=1)


def planned(rng: random.Random, kind: str, text: str, cluster: Cluster) -> Plan:
    """The plan of one case. Raises ShardwrightError where there is none."""
    linked = replace(cluster, intra_node=Link(bandwidth_bytes_per_s=10 ** rng.uniform(*LINK_POWERS)))
    options = options_drawn(rng, kind, text, cluster.device_count)
    step_plan = plan(text, linked, options)
    if kind != "limit":
        return step_plan
    budget = int(rng.uniform(*LIMITS) * bytes_with_margin(step_plan.memory, hardware_profile(linked.hardware)))
    return plan(text, linked, replace(options, memory_budget=budget))


def judged(made: Plan, cluster: Cluster, *, limit_s: float = 300.0) -> Judged:
    """A plan beside what XLA:CPU assigns. Raises PartitionError, where that takes longer than the limit, too."""
    with tempfile.TemporaryDirectory(prefix="fuzz-memory-") as folder:
        program = Path(folder) / "program.mlir"
        program.write_text(emit_stablehlo(made.require_hlo(), made))
        job = {"stablehlo": str(program), "devices": cluster.device_count}
        result = partition(job, cluster.device_count, limit_s=limit_s)
    if result.memory_bytes is None or result.temporaries_bytes is None:
        raise PartitionError("no buffers were assigned")
    return Judged(
        predicted=made.memory.peak_bytes,
        required=bytes_with_margin(made.memory, hardware_profile(cluster.hardware)),
        taken=result.memory_bytes,
        temporaries=(made.memory.temporaries_bytes, result.temporaries_bytes),
    )


def cases(models: list[str], plans: list[str], seeds: range) -> Iterator[tuple[str, str, str, str, random.Random]]:
    """(model, plan, what was drawn, HLO text, generator) of each case; small models have every plan per seed."""
    for model in models:
        text = "" if model == RANDOM else SMALL[model]()
        for seed in seeds:
            for kind in [plans[seed % len(plans)]] if model == RANDOM else plans:
                rng = random.Random(f"{model} {seed} {kind}")
                said, step = random_step(rng) if model == RANDOM else ("", text)
                yield f"{model}-{seed}", kind, said, step, rng


def keep(folder: Path, name: str, made: Plan) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.hlo").write_text(made.require_hlo())
    (folder / f"{name}.json").write_text(plan_to_json(made))
    (folder / f"{name}.mlir").write_text(emit_stablehlo(made.require_hlo(), made))


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
    found: list[Judged] = []
    failed = 0
    for name, kind, drawn_as, text, rng in cases(options.models.split(","), options.plans.split(","), seeds):
        said = f"{name} {kind}{': ' + drawn_as if drawn_as else ''}"
        try:
            made = planned(rng, kind, text, cluster)
            found.append(judged(made, cluster))
        except PlanError as error:  # no such plan: nothing fits, or an axis does not divide the batch
            print(f"{said}: refused: {error.message.splitlines()[0]}", flush=True)
            continue
        except (ShardwrightError, PartitionError) as error:
            failed += 1
            print(f"{said}: {type(error).__name__}: {str(error).splitlines()[0]}", flush=True)
            continue
        print(f"{said}: {made.mesh}: {found[-1]}", flush=True)
        if options.keep and (found[-1].is_over or abs(found[-1].ratio - 1) > FAR_OFF):
            keep(options.keep, f"{name}-{kind}", made)
    return summary(found, failed)


def summary(found: list[Judged], failed: int) -> int:
    """Print what came out; the exit code."""
    over = sum(each.is_over for each in found)
    if found:
        errors = [abs(each.ratio - 1) for each in found]
        print(f"{len(found)} plans: error of the peak {statistics.median(errors):.1%} median, {max(errors):.1%} worst")
    print(f"{over} over, {failed} not judged")
    return int(over + failed > 0)


if __name__ == "__main__":
    sys.exit(main())
