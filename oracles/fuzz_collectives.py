"""Predicted collectives beside XLA's under random layouts of random arguments.

A search on one machine takes few of the possible layouts. Each seed draws a mesh of one to three axes, the bandwidth of
the links, and the layouts of some of the step's arguments. The search plans the rest, and the plan is proven as in
`collectives`. For the model `random` each seed also draws the step (`random_steps`). A seed reproduces its case. Exit
code 1 if a proof does not hold.

    python -m oracles.fuzz_collectives [--models mlp,gpt2,random] [--cluster 8] [--seeds 0:20] [--uneven 0.5]
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from oracles.collectives import SMALL, find_cluster
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

#: Largest part of the arguments with a drawn layout; chances that an axis splits none of an argument's dimensions, and
#: that it may split one unevenly.
MAX_PART = 0.5
REPLICATED_CHANCE = 0.2
UNEVEN_CHANCE = 0.1

#: The model with another step for each seed.
RANDOM = "random"

Dims = tuple[tuple[str, ...], ...]


def list_mesh_shapes(devices: int) -> Iterator[tuple[int, ...]]:
    """Every ordered factorization of a number of devices into one to three axes."""
    yield (devices,)
    for first in range(2, devices):
        if devices % first == 0:
            rest = devices // first
            yield (first, rest)
            yield from ((first, second, rest // second) for second in range(2, rest) if rest % second == 0)


def draw_layout_options(
    rng: random.Random, arguments: Sequence[tuple[int, ...]], devices: int, uneven: float = UNEVEN_CHANCE
) -> PlanOptions:
    """Draw a mesh, and layouts of a few arguments.

    arguments: the dimensions of each. uneven: chance that an axis may split a dimension unevenly.
    """
    mesh = dict(zip(DEFAULT_AXES, rng.choice(list(list_mesh_shapes(devices))), strict=False))
    splittable = [number for number, shape in enumerate(arguments) if shape]
    chosen = rng.sample(splittable, rng.randint(1, max(1, int(MAX_PART * len(splittable)))))
    axes = {number: _draw_dims(rng, arguments[number], mesh, uneven) for number in sorted(chosen)}
    return PlanOptions(mesh=mesh, argument_axes=axes, stages=1)


def _draw_dims(rng: random.Random, shape: tuple[int, ...], mesh: Mapping[str, int], uneven: float) -> Dims:
    """Draw for each axis a dimension that it divides, seldom another, or none."""
    dims: list[tuple[str, ...]] = [()] * len(shape)
    shard_shape = list(shape)
    for axis, size in mesh.items():
        fits = divides_or_pays if rng.random() < uneven else divides
        fitting = [dim for dim, length in enumerate(shard_shape) if fits(length, [size])]
        if fitting and rng.random() > REPLICATED_CHANCE:
            dim = rng.choice(fitting)
            dims[dim] = (*dims[dim], axis)
            shard_shape[dim] = -(-shard_shape[dim] // size)
    return tuple(dims)


def draw_cluster(rng: random.Random, cluster: Cluster) -> Cluster:
    link = Link(bandwidth_bytes_per_s=10 ** rng.uniform(*LINK_POWERS))
    return replace(cluster, hardware=rng.choice(("cpu", "a100")), intra_node=link)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SMALL), help=f"also {RANDOM} (default: %(default)s)")
    parser.add_argument("--cluster", default="8", help="as of oracles.collectives (default: %(default)s)")
    parser.add_argument("--seeds", default="0:10", help="of each model, first:last (default: %(default)s)")
    parser.add_argument(
        "--uneven", type=float, default=UNEVEN_CHANCE,
        help="chance that an axis may split what it does not divide (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--explain", action="store_true", help="print the proofs that do not hold")
    options = parser.parse_args()
    cluster = find_cluster(options.cluster)
    seeds = range(*map(int, options.seeds.split(":")))
    held = refused = failed = 0
    with CompileService(cluster.device_count) as service:
        for model in options.models.split(","):
            text = "" if model == RANDOM else SMALL[model]()
            for seed in seeds:
                rng = random.Random(f"{model} {seed}")
                description, step = random_step(rng) if model == RANDOM else ("", text)
                message, proof = prove_case(service, step, cluster, rng, options.uneven)
                print(" ".join(filter(None, (model, str(seed), description, message))), flush=True)
                held += proof is not None and proof.holds
                refused += proof is None and message.startswith("refused")
                failed += not (proof.holds if proof else message.startswith("refused"))
                if options.explain and proof is not None and not proof.holds:
                    print(proof.explain(width=140), flush=True)
    print(f"{held} hold, {failed} do not, {refused} refused")
    return int(failed > 0)


def prove_case(
    service: CompileService, text: str, cluster: Cluster, rng: random.Random, uneven: float
) -> tuple[str, Proof | None]:
    """Plan and prove one case: a line of text, and the proof if there is a plan."""
    shapes = [leaf.dimensions for parameter in parse(text).entry.parameters for leaf in parameter.shape.leaves]
    options = draw_layout_options(rng, shapes, cluster.device_count, uneven)
    request = f"{dict(options.mesh or {})} {dict(options.argument_axes)}"
    try:
        step_plan = plan(text, draw_cluster(rng, cluster), options)
        program = service.compile(step_plan.require_hlo(), step_plan, want_executable=False, inspect="partition-pass")
    except AnnotationError as error:
        return f"refused: {error.message.splitlines()[0]}", None
    except ShardwrightError as error:
        return f"{request}: {type(error).__name__}: {error.message.splitlines()[0]}", None
    proof = prove(step_plan, program.collectives)
    differences = f"{len(proof.differences)} of {len(proof.lines)} lines, {proof.difference:.2%} of the bytes"
    return f"{request}: {'holds' if proof.holds else 'does not hold'}, {differences} differ", proof


if __name__ == "__main__":
    sys.exit(main())
