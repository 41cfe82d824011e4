"""`two_stages` as a PipelinePlan: every piece planned alone, with its boundary pinned."""

from __future__ import annotations

from hashlib import sha256

from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan as search
from shardwright.plans.layouts import Layout
from shardwright.plans.pipeline_plan import (
    ArgumentEntry,
    OutputEntry,
    PipelinePlan,
    PipelineProgram,
    PipelineStage,
    PipelineValue,
)
from shardwright.plans.plan import MemorySummary, VariablePlan
from shardwright.tasks import MICRO_BATCH
from tests.server import two_stages as step

_NO_MEMORY = MemorySummary(arguments_bytes=0, outputs_bytes=0, temporaries_bytes=0)
_MICRO = ("x_part", "y_part", "h", "dh")


def pipeline_plan(micro_batches: int, schedule: str) -> PipelinePlan:
    lying = step.layouts(micro_batches)
    graph = step.graph(micro_batches, schedule)
    aliases = {"w0_new": 0, "w1_new": 1}
    user_shapes = {"x": (step.ROWS, step.WIDTH), "y": (step.ROWS,)}
    return PipelinePlan(
        module_name="two_stages", hlo_sha256=sha256(b"two_stages").hexdigest(), hardware="cpu", origin="by hand",
        stages=tuple(
            PipelineStage(
                number=number, first_device=first, mesh=mesh, chunks=(number,), memory=_NO_MEMORY, busy_s=0.0
            )
            for number, (first, mesh) in enumerate(step.STAGES)
        ),
        programs=tuple(_program(each, lying, micro_batches) for each in step.PIECES),
        values=tuple(
            PipelineValue(
                name=name, stage=stage, scope="micro_batch" if name in _MICRO else "step",
                variable=_variable(0, name, layout),
            )
            for (name, stage), layout in lying.items()
            if name != MICRO_BATCH
        ),
        arguments=tuple(
            ArgumentEntry(
                argument=number, stage=stage, value=name,
                variable=_variable(number, name, lying[name, stage], user_shapes.get(name)),
            )
            for number, (name, stage) in enumerate(step.ARGUMENTS)
        ),
        outputs=tuple(
            OutputEntry(
                output=number, stage=stage, value=name, variable=_variable(number, name, lying[name, stage]),
                alias=aliases.get(name),
            )
            for number, (name, stage) in enumerate(step.OUTPUTS)
        ),
        tasks=graph, micro_batches=micro_batches, schedule=schedule, step_s=0.0, bubble_fraction=0.0,
    )  # fmt: skip


def _variable(number: int, name: str, layout: Layout, user_shape: tuple[int, ...] | None = None) -> VariablePlan:
    return VariablePlan(
        number=number, name=name, element_type=layout.element_type, shape=layout.shape, sharding=layout.sharding,
        stored_shape=layout.stored_shape, view_of=user_shape,
    )  # fmt: skip


def _program(hand_piece: step.HandPiece, lying: dict[tuple[str, int], Layout], micro_batches: int) -> PipelineProgram:
    piece = hand_piece.piece

    def axes(names: tuple[str, ...]) -> dict[int, tuple[tuple[str, ...], ...]]:
        return {number: lying[name, piece.stage].sharding.dims for number, name in enumerate(names)}

    mesh = step.STAGES[piece.stage][1]
    options = PlanOptions(
        mesh=mesh.sizes, argument_axes=axes(piece.reads), output_axes=axes(piece.writes), rewrites="none"
    )
    match = search(step.lower_text(hand_piece, micro_batches), Cluster.local(mesh.device_count), options)
    return PipelineProgram(
        name=piece.program, kind=piece.kind, stage=piece.stage, chunk=piece.chunk, reads=piece.reads,
        writes=piece.writes, plan=match,
    )  # fmt: skip
