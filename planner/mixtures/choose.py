"""Which blocks are worth a search, and what the plan says of the choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import gcd, prod

from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.mixtures.blocks import Blocks
from shardwright.planner.mixtures.recognise import Mixture
from shardwright.planner.mixtures.tuning import MAX_FORMS
from shardwright.plans.plan import MIXTURES
from shardwright.units import format_seconds


def list_blocks(mixtures: Sequence[Mixture], cluster: Cluster, options: PlanOptions) -> list[Blocks]:
    """The blocks to plan with, the likeliest first: experts over the devices of a node, over all, over fewer, and all
    experts for each block, which sends no row and has room for all. Without a bound that is the likeliest."""
    devices = cluster.device_count
    if devices == 1 or not mixtures:
        return []
    groups = gcd(*(mixture.groups for mixture in mixtures))
    rows = gcd(*(mixture.rows for mixture in mixtures))
    if options.mesh is not None:
        pairs = _of_mesh(options.mesh, groups)
    else:
        pairs = _of_cluster(devices, min(node.device_count for node in cluster.workers), groups)
    fitting = [
        Blocks(replicas=replicas, experts=experts, bound=options.expert_capacity)
        for replicas, experts in dict.fromkeys(pairs)
        if experts > 1 and groups % experts == 0 and rows % (replicas * experts) == 0
    ]
    sending = fitting[: MAX_FORMS - 1]
    own = [Blocks(replicas=devices, experts=1)] if rows % devices == 0 else []
    return [*own, *sending] if options.expert_capacity is None else [*sending, *own]


def _of_cluster(devices: int, per_node: int, groups: int) -> list[tuple[int, int]]:
    """(replicas, experts): within nodes, across all devices."""
    inside, across = gcd(groups, per_node), gcd(groups, devices)
    return [(devices // experts, experts) for experts in (inside, across) if experts > 1]


def _of_mesh(mesh: Mapping[str, int], groups: int) -> list[tuple[int, int]]:
    """The same by axes: experts over some that divide them, rows over all others, or all but one."""
    axes = list(mesh)
    found = []
    for count in range(1, len(axes) + 1):
        for own in combinations(axes, count):
            experts = prod(mesh[axis] for axis in own)
            others = [axis for axis in axes if axis not in own]
            if groups % experts == 0:
                found += [(prod(mesh[axis] for axis in others), experts)]
                found += [(prod(mesh[axis] for axis in others if axis != left), experts) for left in others]
    return sorted(found, key=lambda pair: (-pair[0] * pair[1], -pair[1]))


def describe_choice(taken: Blocks | None, steps: Mapping[Blocks | None, float | str]) -> str:
    """The plan's note: the form it has, and the step of every other one; a text says why one has no step."""
    form = "rows stay with their tokens" if taken is None else taken.describe()
    others = [_describe_other(blocks, step) for blocks, step in steps.items() if blocks != taken]
    return f"{MIXTURES} {form}" + (f" ({'; '.join(others)})" if others else "")


def _describe_other(blocks: Blocks | None, step: float | str) -> str:
    name = "without blocks" if blocks is None else blocks.describe()
    return f"{name}: {step}" if isinstance(step, str) else f"{name}: {format_seconds(step)} a step"
