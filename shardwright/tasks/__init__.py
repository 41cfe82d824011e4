"""Tasks: from the programs of a pipelined step to ordered task lists of workers, and their predicted times.

`StepSpec` describes the step's programs and values; `task_graph` puts them in the order of a `Schedule` and derives
transfers and buffer lifetimes; `simulate` predicts all times. Pure data and functions.
"""

from shardwright.tasks.build import task_graph
from shardwright.tasks.check import channel_capacity
from shardwright.tasks.graph import COMPUTE_KINDS, MICRO_BATCH, TASK_KINDS, Buffer, Task, TaskGraph, TaskId
from shardwright.tasks.schedules import SCHEDULE_NAMES, Cell, Schedule, in_flight
from shardwright.tasks.simulate import StageMemory, Timeline, memory_over_time, simulate
from shardwright.tasks.step_estimate import ChunkEdge, ChunkTime, StepEstimate, estimate_step
from shardwright.tasks.step_spec import ProgramKind, ProgramSpec, Scope, StepSpec, StepValue

__all__ = [
    "COMPUTE_KINDS",
    "MICRO_BATCH",
    "SCHEDULE_NAMES",
    "TASK_KINDS",
    "Buffer",
    "Cell",
    "ChunkEdge",
    "ChunkTime",
    "ProgramKind",
    "ProgramSpec",
    "Schedule",
    "Scope",
    "StageMemory",
    "StepEstimate",
    "StepSpec",
    "StepValue",
    "Task",
    "TaskGraph",
    "TaskId",
    "Timeline",
    "channel_capacity",
    "estimate_step",
    "in_flight",
    "memory_over_time",
    "simulate",
    "task_graph",
]
