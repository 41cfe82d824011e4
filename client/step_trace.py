"""The workers' measurements of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwright.proto.v1 import master_pb2
from shardwright.report.trace import MeasuredTask


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakBuffers:
    """Peak of live buffers on one stage, measured by one of its nodes.

    micro_batches: number of those with a live buffer. size_bytes: on one device, the step's arguments included.
    """

    node: int
    stage: int
    buffers: int
    micro_batches: int
    size_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTrace:
    """One step of a pipeline. Node clocks are used unadjusted: nodes of one machine share one.

    run_s: from dispatch to ready, on the slowest node. tasks, live: empty when the step is one program.
    """

    run_s: float
    tasks: tuple[MeasuredTask, ...]
    live: tuple[PeakBuffers, ...]

    @classmethod
    def of(cls, traces: Sequence[master_pb2.StageTrace], run_s: float) -> StepTrace:
        begin_s = min((span.start_s for trace in traces for span in trace.spans), default=0.0)
        return cls(
            run_s=run_s,
            tasks=tuple(
                MeasuredTask(
                    node=trace.node,
                    stage=trace.stage,
                    position=span.task,
                    begin_s=span.start_s - begin_s,
                    end_s=span.end_s - begin_s,
                )
                for trace in traces
                for span in trace.spans
            ),
            live=tuple(
                PeakBuffers(
                    node=trace.node,
                    stage=trace.stage,
                    buffers=trace.peak_buffers,
                    micro_batches=trace.peak_micro_batches,
                    size_bytes=trace.peak_bytes,
                )
                for trace in traces
            ),
        )
