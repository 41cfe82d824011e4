"""Result of the pipeline search: stages, their devices, micro-batches, schedule, and reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwright.hlo import Module
from shardwright.planner.microbatch import StepSplit
from shardwright.planner.rewrites.split_loops import VariableRows
from shardwright.plans.pipeline_plan import PipelineCandidate
from shardwright.plans.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.solutions import CandidatePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """The user's decisions about a pipeline; None: left to the search.

    stages: 1 is no pipeline.
    mesh: of each stage.
    micro_batches, schedule: see `shardwright.tasks`.
    imbalance: allowed excess of the slowest stage's time over the average, relative to the average.
    """

    stages: int | None = None
    mesh: Mapping[str, int] | None = None
    micro_batches: int | None = None
    schedule: str | None = None
    imbalance: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StageGroup:
    """The devices of a stage: `mesh` over devices first_device, first_device + 1, … of the cluster's order."""

    first_device: int
    mesh: Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineChoice:
    """A step as a pipeline.

    module: the program to split into micro-batches and stages, its loops over layers split at the stages' borders.
    arguments, outputs: per leaf, its rows and array leaf of the planned program.
    groups: the devices of each stage.
    chunk_of: entry instruction of `module` → chunk; others are rematerialized per reader. Chunk c runs on
        stage c % stages.
    stage_s: compute seconds of each stage, a step.
    memory_bytes: of one device of each stage.
    crossing_bytes: sent between stages for one micro-batch.
    notes: why this pipeline, and why a pipeline.
    whole: the step accumulated over its micro-batches, its loops not split.
    whole_split: the split of this step.
    stage_plans: per stage, the plan of `whole` its part comes from (the same object for equal stages).
    """

    module: Module
    arguments: tuple[VariableRows, ...]
    outputs: tuple[VariableRows, ...]
    groups: tuple[StageGroup, ...]
    chunks: int
    micro_batches: int
    schedule: str
    chunk_of: Mapping[str, int]
    step_s: float
    bubble_fraction: float
    stage_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    crossing_bytes: float
    imbalance: float
    candidates: tuple[PipelineCandidate, ...]
    notes: tuple[str, ...]
    whole: Module = field(repr=False)
    whole_split: StepSplit = field(repr=False)
    stage_plans: tuple[CandidatePlan, ...] = field(repr=False)

    @property
    def stages(self) -> int:
        return len(self.groups)
