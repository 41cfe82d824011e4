"""The PipelinePlan: a step in programs of several stages, and their order.

Frozen data, produced by `planner.pipeline`, carried out by the servers. Each stage is a mesh over devices of its own.
All computation is in *programs*: ordinary HLO modules with an ordinary, checked `Plan` on their stage's mesh. Programs
exchange *values*, known by name, with each other and the user; `tasks` orders programs, micro-batches, transfers and
the freeing of buffers.

Kinds of programs (`PipelineProgram.kind`), in the order of execution on a stage:
  start     once a step: sums over micro-batches set to zero; variables resharded to the micro-batches' use
  split     per micro-batch: its part of the batch arguments
  forward   per micro-batch: one chunk of the model
  backward  per micro-batch: the chunk's gradients, added to the sums of the step (the last chunk's forward with it)
  apply     once a step, in phases: computations on the whole step's gradients (`apply.PHASE.STAGE`)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from shardwright.errors import PlanError
from shardwright.plans.attention_note import AttentionNote
from shardwright.plans.plan import MemorySummary, Plan, VariablePlan
from shardwright.plans.shardings import Mesh
from shardwright.tasks import MICRO_BATCH, ProgramKind, Scope, TaskGraph

__all__ = [
    "MICRO_BATCH",
    "TASKS_FILE",
    "ArgumentEntry",
    "OutputEntry",
    "PipelineCandidate",
    "PipelinePlan",
    "PipelineProgram",
    "PipelineStage",
    "PipelineValue",
]

#: Where the task graph is written, in a folder of a pipeline's programs.
TASKS_FILE = "tasks.dot"

#: Version of the JSON that `pipeline_json` writes; readers refuse another major number.
PIPELINE_FORMAT = "1.2"


#: How the note begins that says why stages take unequal time.
UNEVEN = "stages take unequal time"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStage:
    """The devices [first_device, first_device + mesh.device_count) of the cluster, and their work.

    chunks: parts of the model computed there, in forward order; several if the schedule interleaves them.
    memory: bytes on one device at the stage's peak: `arguments_bytes` are the variables it keeps.
    busy_s: compute seconds a step.
    """

    number: int
    first_device: int
    mesh: Mesh
    chunks: tuple[int, ...]
    memory: MemorySummary
    busy_s: float

    @property
    def devices(self) -> range:
        """Positions in the cluster's device order."""
        return range(self.first_device, self.first_device + self.mesh.device_count)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineProgram:
    """One program of one stage.

    name: unique, `forward.2`. chunk: of forward and backward programs.
    reads / writes: value names of `plan.parameters` and `plan.outputs`, in order. An output reusing a parameter's
    buffer (`alias`) takes over the value's memory.
    """

    name: str
    kind: ProgramKind
    stage: int
    chunk: int | None
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    plan: Plan

    @property
    def donates(self) -> tuple[str, ...]:
        """The values whose buffers the program takes over."""
        return tuple(self.reads[v.number] for v in self.plan.parameters if v.alias is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineValue:
    """Sharding of a value on one stage. scope: one buffer a step, or one per micro-batch."""

    name: str
    stage: int
    scope: Scope
    variable: VariablePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class ArgumentEntry:
    """A flat argument of the user's step, on one stage at the beginning of the step.

    rows: range of rows of its first dimension, if stages store parts of it; None: all of it.
    A batch argument is stored in a view, `[M, B/M, …]` of `[B, …]`; `variable.user_shape` is the user's.
    """

    argument: int
    stage: int
    value: str
    variable: VariablePlan
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputEntry:
    """A flat output of the user's step, or rows of one, and its stage at the end of the step.

    alias: position in `PipelinePlan.arguments` of the entry whose buffer it may reuse: the next step's argument, with
    the same layout.
    """

    output: int
    stage: int
    value: str
    variable: VariablePlan
    alias: int | None = None
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCandidate:
    """A pipeline priced by the search, or the reason of its exclusion. mesh: of each stage."""

    stages: int
    mesh: Mesh
    micro_batches: int
    schedule: str
    step_s: float | None
    bubble_fraction: float = 0.0
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class PipelinePlan:
    """A checked parallelization of one HLO module over several stages.

    step_s, bubble_fraction: of the simulated schedule; the bubble is the idle fraction of the stages' time. hlo_text,
    hlo_sha256: of the user's program. program_sha256, attention: see `Plan`. `tasks`: see `shardwright.tasks`.
    """

    module_name: str
    hlo_sha256: str
    hardware: str
    origin: str
    stages: tuple[PipelineStage, ...]
    programs: tuple[PipelineProgram, ...]
    values: tuple[PipelineValue, ...]
    arguments: tuple[ArgumentEntry, ...]
    outputs: tuple[OutputEntry, ...]
    tasks: TaskGraph
    micro_batches: int
    schedule: str
    step_s: float
    bubble_fraction: float
    candidates: tuple[PipelineCandidate, ...] = ()
    attention: tuple[AttentionNote, ...] = ()
    notes: tuple[str, ...] = ()
    planning_s: float = 0.0
    program_sha256: str = ""
    hlo_text: str | None = field(default=None, compare=False, repr=False)

    @property
    def device_count(self) -> int:
        return sum(stage.mesh.device_count for stage in self.stages)

    @cached_property
    def program(self) -> Mapping[str, PipelineProgram]:
        """Programs by name."""
        return {program.name: program for program in self.programs}

    @cached_property
    def value(self) -> Mapping[tuple[str, int], PipelineValue]:
        """Values by (name, stage)."""
        return {(value.name, value.stage): value for value in self.values}

    def require_hlo(self) -> str:
        if self.hlo_text is None:
            raise PlanError(
                f"the plan of {self.module_name} came without its HLO text",
                remedy="pass hlo_text= to PipelinePlan.from_json, or --hlo FILE on the command line",
            )
        return self.hlo_text
