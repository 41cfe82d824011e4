"""What a pipelined step is made of, before it has an order: values, and the programs that make them.

`build.task_graph` derives everything else from it: which value is sent where, when buffers are freed, the order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shardwright.links import Link

#: "micro_batch": every micro-batch has its own; "step": there is one.
Scope = Literal["step", "micro_batch"]

ProgramKind = Literal["start", "split", "forward", "backward", "weight", "accumulate", "apply"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepValue:
    """Something that pieces write and read.

    sizes: bytes on one device, for every stage where it lies. sent_bytes: what one device puts on a link where it is
    sent to another stage.
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

    chunk: which part of the model forward, backward and weight compute. donates: reads whose memory is taken over;
    a value of the step that is read, donated and written is updated in place (an accumulator), and who reads
    it on another stage, or in `apply`, sees what the last micro-batch left.
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
    """A whole step: pieces, values, and which of them the step takes and leaves, on which stages.

    stage_of_chunk: the stage that computes each chunk; values flow to higher chunks in forward pieces.
    arguments: (value, stage) of what is there when the step begins; a value may be there on several stages.
    outputs: (value, stage) of what is handed over at its end.
    arrivals_s: seconds until what the client sends with the step is on a stage.
    links: the link that one device of the first stage has to the second, for each (source, target); empty: transfers
        are taken to cost nothing.
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
