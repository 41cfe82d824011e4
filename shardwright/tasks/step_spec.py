"""The parts of a pipelined step, before any order: values, and the programs that make them.

`build.task_graph` derives everything else: transfers, lifetimes of buffers, the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwright.clusters.links import Link

#: "micro_batch": every micro-batch has its own; "step": there is one.
Scope = Literal["step", "micro_batch"]

ProgramKind = Literal["start", "split", "forward", "backward", "weight", "accumulate", "apply"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValue:
    """A value written and read by pieces.

    sizes: bytes on one device, for every stage with the value. sent_bytes: one device's bytes on a link when it is sent
    to another stage.
    """

    name: str
    scope: Scope
    sizes: Mapping[int, int]
    sent_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramSpec:
    """A program of one stage, with the values that are its parameters and outputs, in order.

    forward, backward, weight, split and accumulate run once a micro-batch; start (before them) and apply (after them)
    once a step. A program of the first kind reads and writes micro-batch i's buffers of micro-batch values; `start` and
    `apply` read those of all micro-batches, in order.

    chunk: part of the model of forward, backward and weight. donates: reads whose memory is taken over. A value of the
    step read, donated and written is updated in place (an accumulator); readers on another stage, or in `apply`, see
    its content after the last micro-batch.
    """

    program: str
    kind: ProgramKind
    stage: int
    chunk: int | None = None
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    donates: tuple[str, ...] = ()
    time_s: float = 0.0
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpec:
    """A whole step: pieces, values, and the step's arguments and outputs with their stages.

    stage_of_chunk: the stage that computes each chunk; values flow to higher chunks in forward pieces.
    arguments: (value, stage) present at the beginning of the step; a value may be present on several stages.
    outputs: (value, stage) handed over at its end.
    arrivals_s: seconds until the client's arguments of the step are on a stage.
    links: for each (source, target), the link from one device of the first stage to the second; empty: transfers cost
        nothing.
    """

    micro_batches: int
    stage_of_chunk: tuple[int, ...]
    values: tuple[StepValue, ...]
    programs: tuple[ProgramSpec, ...]
    arguments: tuple[tuple[str, int], ...] = ()
    outputs: tuple[tuple[str, int], ...] = ()
    arrivals_s: Mapping[int, float] = field(default_factory=dict)
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)

    @property
    def stage_count(self) -> int:
        return max(self.stage_of_chunk) + 1
