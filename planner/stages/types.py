"""What the search for a pipeline answers: stages, where each lies, micro-batches, schedule, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shardwright.hlo import Module
from shardwright.pipelines import PipelineCandidate
from shardwright.planner.microbatch import StepSplit
from shardwright.planner.rewrites.split_loops import VariableRows
from shardwright.shardings import Mesh

if TYPE_CHECKING:
    from shardwright.planner.search.solutions import CandidatePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineRequest:
    """What the user decides of a pipeline; None: the search does.

    stages: 1 is no pipeline. mesh: of each stage. micro_batches, schedule: see `shardwright.tasks`.
    imbalance: how much longer than the average stage the slowest one may take, as a part of that.
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

    module: the program, its loops over layers split at the stages' borders; what is split into micro-batches and
        stages. arguments / outputs: rows of which array leaf of the planned program each of its leaves is.
    groups: the devices of each stage. chunk_of: of every entry instruction of `module` that belongs to one, by name;
        others are made anew where they are read. Chunk c lies on stage c % stages.
    stage_s: seconds a step that each stage computes. memory_bytes: of one device of each stage.
    crossing_bytes: sent between stages for one micro-batch. notes: why this one, and why a pipeline.
    whole: the step accumulated over its micro-batches, its loops not split, of the step that is cut in `whole_split`;
        measured: the plan of it that each stage's part is taken from (the same object for stages that are alike).
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
