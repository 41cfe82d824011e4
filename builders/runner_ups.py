"""Other ways to plan a step, worth a measurement beside the plan that is predicted fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardwright.builders.choices import PlanChoice
from shardwright.clusters.cluster import Cluster
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan
from shardwright.tuning import RUNNER_UP_MESHES

#: Strategies that experts write by hand; those that a program has no room for cannot be planned, and are left out.
_STRATEGIES = ("data", "zero1", "fsdp", "megatron", "expert")
#: Most bytes of a combined collective beside the compiler's 30 MiB; only XLA:GPU's combiner has the option.
_BUCKETS = {"8 MiB": 8 << 20, "128 MiB": 128 << 20}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerUp:
    """A way to plan the step.

    name: in a word. changes: fields of `PlanOptions` that differ from the step's own, or `{"choice": name}` of a
    builder's; they can be written as JSON. choice: what is planned.
    """

    name: str
    changes: Mapping[str, Any]
    choice: PlanChoice


def list_runner_ups(
    choices: Sequence[PlanChoice], name: str, plan: Plan | PipelinePlan, cluster: Cluster
) -> tuple[RunnerUp, ...]:
    """Ways beside a plan, of the choice of that name: the other choices, or changes of the options.

    Changed are, where the options leave it open: the strategy, the mesh (of those that the search compared, the
    next fastest), the number of micro-batches (half and twice the plan's, if it has any), and on GPUs the bucket.
    """
    if len(choices) > 1:
        return tuple(
            RunnerUp(name=choice.name or "search", changes={"choice": choice.name}, choice=choice)
            for choice in choices
            if choice.name != name
        )
    choice = choices[0]
    changes = [*_micro_batches(choice, plan), *_buckets(choice, cluster)]
    if not (choice.name or choice.options.argument_axes):  # a builder's pins and arrays that stay settle the rest
        changes += [*_strategies(choice), *_meshes(choice, plan)]
    return tuple(
        RunnerUp(name=name, changes=change, choice=change_choice([choice], change)) for name, change in changes
    )


def change_choice(choices: Sequence[PlanChoice], changes: Mapping[str, Any]) -> PlanChoice:
    """The choice that a runner-up's changes say. Raises KeyError where there is none of that name.

    Raises TypeError on unknown fields.
    """
    if "choice" in changes:
        return {choice.name: choice for choice in choices}[changes["choice"]]
    return replace(choices[0], options=replace(choices[0].options, **changes))


def _strategies(choice: PlanChoice) -> list[tuple[str, dict[str, Any]]]:
    options = choice.options
    if options.force is not None or options.rest != "search" or options.mode != "search":
        return []
    return [(strategy, {"force": strategy}) for strategy in _STRATEGIES]


def _meshes(choice: PlanChoice, plan: Plan | PipelinePlan) -> list[tuple[str, dict[str, Any]]]:
    if choice.options.mesh is not None or isinstance(plan, PipelinePlan):
        return []
    priced = [each for each in plan.candidates if each.step_s is not None and each.name in ("", "search")]
    others = [
        each.mesh for each in sorted(priced, key=lambda candidate: candidate.step_s or 0.0) if each.mesh != plan.mesh
    ]
    return [(f"mesh {mesh}", {"mesh": mesh.sizes}) for mesh in list(dict.fromkeys(others))[:RUNNER_UP_MESHES]]


def _micro_batches(choice: PlanChoice, plan: Plan | PipelinePlan) -> list[tuple[str, dict[str, Any]]]:
    count = plan.micro_batches
    if choice.options.micro_batches is not None or count == 1:
        return []
    counts = [count * 2, *([count // 2] if count % 2 == 0 else [])]
    return [(f"{number} micro-batches", {"micro_batches": number}) for number in counts]


def _buckets(choice: PlanChoice, cluster: Cluster) -> list[tuple[str, dict[str, Any]]]:
    if choice.options.bucket_bytes is not None or cluster.platform != "cuda":
        return []
    return [(f"buckets of {name}", {"bucket_bytes": size}) for name, size in _BUCKETS.items()]
