"""Predicted collectives beside XLA's for plans that nobody would ask for: random layouts of random arguments.

A search on one machine finds few of the layouts that it knows. Here each seed draws a mesh of one to three axes, the
speed of the links, and where the axes split some of a step's arguments; the search plans the rest around them, and the
plan is proven as in `collectives`. Of the model `random` each seed draws the step, too (`random_steps`). The same seed
draws the same case. Exit code 1 where a proof does not hold.

    python -m oracles.fuzz_collectives [--models mlp,gpt2,random] [--cluster 8] [--seeds 0:20] [--uneven 0.5]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from oracles.collectives import SMALL, cluster_named
from shardwright.clusters.cluster import Cluster
from shardwright.clusters.links import Link
from shardwright.errors import AnnotationError, ShardwrightError
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.options.user_options import DEFAULT_AXES
from shardwright.planner import plan
from shardwright.planner.strategies.padding import divides, divides_or_pays
from shardwright.report.proof import Proof, prove
from shardwright.xla import CompileService
from workloads.random_steps import random_step

#: Bytes a second of the links inside a node, as powers of ten: from slow Ethernet to more than any NVLink.
LINK_POWERS = (8.0, 12.5)

#: Part of the arguments that are laid out, at most; chances that an axis splits none of an argument's dimensions, and
#: that it may split one that it does not divide.
MOST_PART = 0.5
WHOLE = 0.2
UNEVEN = 0.1

#: The model of which each seed is another step.
RANDOM = "random"

Dims = tuple[tuple[str, ...], ...]


def meshes(devices: int) -> Iterator[tuple[int, ...]]:
    """Every ordered factorization into one to three axes."""
    yield (devices,)
    for first in range(2, devices):
        if devices % first == 0:
            rest = devices // first
            yield (first, rest)
            yield from ((first, second, rest // second) for second in range(2, rest) if rest % second == 0)


def drawn(
    rng: random.Random, arguments: Sequence[tuple[int, ...]], devices: int, uneven: float = UNEVEN
) -> PlanOptions:
    """Options with a mesh, and axes of a few of `arguments`, which are given by their dimensions.

    uneven: chance that an axis may split a dimension that it does not divide.
    """
    mesh = dict(zip(DEFAULT_AXES, rng.choice(list(meshes(devices))), strict=False))
    splittable = [number for number, shape in enumerate(arguments) if shape]
    chosen = rng.sample(splittable, rng.randint(1, max(1, int(MOST_PART * len(splittable)))))
    axes = {number: _drawn_dims(rng, arguments[number], mesh, uneven) for number in sorted(chosen)}
    return PlanOptions(mesh=mesh, argument_axes=axes, stages=1)


def _drawn_dims(rng: random.Random, shape: tuple[int, ...], mesh: Mapping[str, int], uneven: float) -> Dims:
    """Each axis on one dimension that it divides, seldom on another, or on none."""
    dims: list[tuple[str, ...]] = [()] * len(shape)
    left = list(shape)
    for axis, size in mesh.items():
        fits = divides_or_pays if rng.random() < uneven else divides
        fitting = [dim for dim, length in enumerate(left) if fits(length, [size])]
        if fitting and rng.random() > WHOLE:
            dim = rng.choice(fitting)
            dims[dim] = (*dims[dim], axis)
            left[dim] = -(-left[dim] // size)
    return tuple(dims)


def drawn_cluster(rng: random.Random, cluster: Cluster) -> Cluster:
    link = Link(bandwidth_bytes_per_s=10 ** rng.uniform(*LINK_POWERS))
    return replace(cluster, hardware=rng.choice(("cpu", "a100")), intra_node=link)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SMALL), help=f"also {RANDOM} (default: %(default)s)")
    parser.add_argument("--cluster", default="8", help="as of oracles.collectives (default: %(default)s)")
    parser.add_argument("--seeds", default="0:10", help="of each model, first:last (default: %(default)s)")
    parser.add_argument(
        "--uneven", type=float, default=UNEVEN,
        help="chance that an axis may split what it does not divide (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--explain", action="store_true", help="print the proofs that do not hold")
    options = parser.parse_args()
    cluster = cluster_named(options.cluster)
    seeds = range(*map(int, options.seeds.split(":")))
    held = refused = failed = 0
    with CompileService(cluster.device_count) as service:
        for model in options.models.split(","):
            text = "" if model == RANDOM else SMALL[model]()
            for seed in seeds:
                rng = random.Random(f"{model} {seed}")
                words, step = random_step(rng) if model == RANDOM else ("", text)
                said, proof = judged(service, step, cluster, rng, options.uneven)
                print(" ".join(filter(None, (model, str(seed), words, said))), flush=True)
                held += proof is not None and proof.holds
                refused += proof is None and said.startswith("refused")
                failed += not (proof.holds if proof else said.startswith("refused"))
                if options.explain and proof is not None and not proof.holds:
                    print(proof.explain(width=140), flush=True)
    print(f"{held} hold, {failed} do not, {refused} refused")
    return int(failed > 0)


def judged(
    service: CompileService, text: str, cluster: Cluster, rng: random.Random, uneven: float
) -> tuple[str, Proof | None]:
    """One case in words, and its proof where there is a plan."""
    shapes = [leaf.dimensions for each in parse(text).entry.parameters for leaf in each.shape.leaves]
    options = drawn(rng, shapes, cluster.device_count, uneven)
    asked = f"{dict(options.mesh or {})} {dict(options.argument_axes)}"
    try:
        step_plan = plan(text, drawn_cluster(rng, cluster), options)
        program = service.compile(step_plan.require_hlo(), step_plan, want_executable=False, inspect="partition-pass")
    except AnnotationError as error:
        return f"refused: {error.message.splitlines()[0]}", None
    except ShardwrightError as error:
        return f"{asked}: {type(error).__name__}: {error.message.splitlines()[0]}", None
    proof = prove(step_plan, program.collectives)
    unlike = f"{len(proof.differences)} of {len(proof.lines)} lines, {proof.difference:.2%} of the bytes"
    return f"{asked}: {'holds' if proof.holds else 'does not hold'}, {unlike} differ", proof


if __name__ == "__main__":
    sys.exit(main())
