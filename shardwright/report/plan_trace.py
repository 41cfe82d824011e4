"""The trace of a plan: its predicted timeline above a step's measurements."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan
from shardwright.report.trace import DevicePlace, MeasuredTask, step_trace
from shardwright.tasks import ProgramSpec, Schedule, StepSpec, StepValue, TaskGraph, simulate, task_graph

#: Where the program stands in the graph of a plan of one program, behind `input`.
_POSITION = 1


def plan_trace(
    plan: Plan | PipelinePlan,
    *,
    measured: Sequence[MeasuredTask] = (),
    measured_s: float | None = None,
    node_of: Callable[[int], int] = lambda device: 0,
) -> dict[str, Any]:
    """A plan's step in Perfetto's trace format, in data for JSON (`trace.write_trace`).

    measured: the measured tasks of a pipeline's step; measured_s: seconds of a step of one program. node_of: node of
    each device of the cluster; it assigns measurements to tracks.
    """
    if isinstance(plan, PipelinePlan):
        graph, ranges = plan.tasks, [stage.devices for stage in plan.stages]
    else:
        graph, ranges = _one_program(plan), [range(plan.mesh.device_count)]
        if measured_s is not None:
            measured = [
                MeasuredTask(node=node, stage=0, position=_POSITION, begin_s=0.0, end_s=measured_s)
                for node in sorted({node_of(device) for device in ranges[0]})
            ]
    return step_trace(
        graph,
        simulate(graph),
        devices=[[DevicePlace(device=device, node=node_of(device)) for device in devices] for devices in ranges],
        measured=measured,
        name=plan.module_name,
    )


def _one_program(plan: Plan) -> TaskGraph:
    """A graph of one task, for a plan of one program."""
    memory = plan.memory
    arguments, outputs = (
        StepValue(name=name, scope="step", sizes={0: size})
        for name, size in (("arguments", memory.arguments_bytes), ("outputs", memory.outputs_bytes))
    )
    program = ProgramSpec(
        program=plan.module_name, kind="apply", stage=0, reads=("arguments",), writes=("outputs",),
        time_s=plan.cost.step_s, workspace_bytes=memory.temporaries_bytes,
    )  # fmt: skip
    pieces = StepSpec(
        micro_batches=1, stage_of_chunk=(0,), values=(arguments, outputs), programs=(program,),
        arguments=(("arguments", 0),), outputs=(("outputs", 0),),
    )  # fmt: skip
    return task_graph(pieces, Schedule("gpipe"))
