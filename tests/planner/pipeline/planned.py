"""Pipelines of the cases, and their steps beside JAX's."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from shardwright.client.annotate import keep_annotations
from shardwright.clusters.cluster import Cluster
from shardwright.hlo import Module, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.graph.inlining import inline_calls
from shardwright.planner.pipeline import PipelineSpec, StageGroup, make_pipeline
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.shardings import Mesh
from tests.planner.pipeline.cases import Case, chunk_of
from tests.planner.pipeline.executor import Executor


def lower_text(case: Case) -> tuple[str, Module]:
    """HLO text of a case, and its module with calls written out."""
    step, arguments, donated = case

    def function(*arguments: Any) -> Any:  # new each time: JAX caches by function, annotations or not
        return step(*arguments)

    with keep_annotations():
        lowering = jax.jit(function, donate_argnums=donated, keep_unused=True).lower(*arguments)
    text = lowering.as_text("hlo", debug_info=True)
    return text, inline_calls(parse(text))


def pipeline(
    case: Case,
    *,
    stages: int,
    micro_batches: int,
    schedule: str,
    devices: int = 1,
    chunks: int = 1,
    options: PlanOptions | None = None,
) -> PipelinePlan:
    """A plan that cuts a case where its scopes say; every stage has a mesh `data` of so many devices."""
    text, module = lower_text(case)
    choice = PipelineSpec(
        module=module,
        groups=tuple(StageGroup(first_device=s * devices, mesh=Mesh.of({"data": devices})) for s in range(stages)),
        chunk_of=chunk_of(module),
        micro_batches=micro_batches,
        schedule=schedule,
        chunks=chunks,
    )
    return make_pipeline(text, Cluster.local(stages * devices), options or PlanOptions(), choice)


def assert_follows_jax(case: Case, plan: PipelinePlan, steps: int = 3) -> None:
    """Every output of every step is JAX's, within 1e-5 of its norm; donated arguments are replaced by outputs."""
    step, arguments, donated = case
    reference = jax.jit(step)
    flat = jax.tree.leaves(arguments)
    state = len(jax.tree.leaves(arguments[: len(donated)]))
    executor, ours, theirs = Executor(plan), list(flat), arguments
    for _ in range(steps):
        result, expected = executor.step(ours), reference(*theirs)
        for a, b in zip(result, jax.tree.leaves(expected), strict=True):
            assert a.shape == b.shape
            assert np.linalg.norm(a - np.asarray(b)) <= 1e-5 * max(1e-3, np.linalg.norm(b))
        ours = result[:state] + flat[state:]
        theirs = (*expected[: len(donated)], *arguments[len(donated) :]) if isinstance(expected, tuple) else arguments
