"""Tasks: from the programs of a pipelined step to ordered lists that workers run, and to the time they will take.

`StepPieces` says what there is; `task_graph` puts it in the order of a `Schedule` and derives what is sent and when
buffers go; `simulate` tells when everything happens. Pure data and functions.
"""

from shardwright.tasks.build import task_graph
from shardwright.tasks.check import channel_capacity
from shardwright.tasks.graph import COMPUTE_KINDS, MICRO_BATCH, TASK_KINDS, Buffer, Task, TaskGraph, TaskId
from shardwright.tasks.pace import ChunkEdge, ChunkTime, Pace, pace
from shardwright.tasks.pieces import Piece, PieceKind, Scope, StepPieces, Value
from shardwright.tasks.schedules import SCHEDULE_NAMES, Cell, Schedule, in_flight
from shardwright.tasks.simulate import StageMemory, Timeline, memory_over_time, simulate

__all__ = [
    "COMPUTE_KINDS",
    "MICRO_BATCH",
    "SCHEDULE_NAMES",
    "TASK_KINDS",
    "Buffer",
    "Cell",
    "ChunkEdge",
    "ChunkTime",
    "Pace",
    "Piece",
    "PieceKind",
    "Schedule",
    "Scope",
    "StageMemory",
    "StepPieces",
    "Task",
    "TaskGraph",
    "TaskId",
    "Timeline",
    "Value",
    "channel_capacity",
    "in_flight",
    "memory_over_time",
    "pace",
    "simulate",
    "task_graph",
]
