"""Predicted memory of one device beside XLA's own analysis of the compiled program."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from shardwright.plans.plan import Plan
from shardwright.report.proof import ProvenMemory
from shardwright.report.text import plain_table, plain_text
from shardwright.units import format_bytes


def explain_memory(
    plan: Plan,
    *,
    arguments_bytes: int,
    outputs_bytes: int,
    aliased_bytes: int,
    temporaries_bytes: int,
    width: int = 120,
) -> str:
    """Predicted and compiled bytes in plain text.

    outputs_bytes, aliased_bytes: in XLA's count; both include outputs that reuse an argument's buffer.
    """
    memory = compare_memory(
        plan,
        arguments_bytes=arguments_bytes,
        outputs_bytes=outputs_bytes,
        aliased_bytes=aliased_bytes,
        temporaries_bytes=temporaries_bytes,
    )
    return plain_text(memory_table(memory), width)


def compare_memory(
    plan: Plan, *, arguments_bytes: int, outputs_bytes: int, aliased_bytes: int, temporaries_bytes: int
) -> ProvenMemory:
    """The plan's bytes beside the compiler's; outputs_bytes, aliased_bytes: as `explain_memory` takes them."""
    return ProvenMemory(
        predicted_arguments_bytes=plan.memory.arguments_bytes,
        predicted_outputs_bytes=plan.memory.outputs_bytes,
        predicted_temporaries_bytes=plan.memory.temporaries_bytes,
        compiled_arguments_bytes=arguments_bytes,
        compiled_outputs_bytes=outputs_bytes - aliased_bytes,
        compiled_temporaries_bytes=temporaries_bytes,
    )


def memory_table(memory: ProvenMemory) -> Table:
    """The same in a form printed by rich."""
    table = plain_table([("memory of a device", "left"), ("predicted", "right"), ("compiled", "right")])
    for name, predicted, compiled in (
        ("arguments", memory.predicted_arguments_bytes, memory.compiled_arguments_bytes),
        ("outputs, updates in place left out", memory.predicted_outputs_bytes, memory.compiled_outputs_bytes),
        ("temporaries", memory.predicted_temporaries_bytes, memory.compiled_temporaries_bytes),
    ):
        table.add_row(Text(name), format_bytes(predicted), format_bytes(compiled))
    table.add_section()
    table.add_row("all", format_bytes(memory.predicted_bytes), format_bytes(memory.compiled_bytes))
    return table
