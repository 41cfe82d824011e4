"""A loaded plan in text: what was predicted beside what XLA made of it."""

from __future__ import annotations

from shardwright.proto.v1 import master_pb2
from shardwright.protocol import plan_messages
from shardwright.report.collectives import explain_collectives
from shardwright.report.memory import explain_memory
from shardwright.user_plans import PipelinePlan, Plan


def report_program(plan: Plan | PipelinePlan, load: master_pb2.LoadResult) -> str:
    """Collectives and memory of a device; of a pipeline the collectives of each part."""
    if isinstance(plan, PipelinePlan):
        return "\n".join(
            f"{part.name} (stage {part.stage})\n"
            f"{explain_collectives(plan.program[part.name].plan, plan_messages.collectives_from_result(part.result))}"
            for part in load.parts
        )
    memory = explain_memory(
        plan,
        arguments_bytes=load.arguments_bytes,
        outputs_bytes=load.outputs_bytes,
        aliased_bytes=load.aliased_bytes,
        temporaries_bytes=load.temporaries_bytes,
    )
    return f"{explain_collectives(plan, plan_messages.collectives_from_result(load))}\n{memory}"
