"""Predicted memory of one device beside XLA's own analysis of the compiled program."""

from __future__ import annotations

from rich.text import Text

from shardwright.plans.plan import Plan
from shardwright.report.text import plain_table, plain_text
from shardwright.report.units import format_bytes


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
    predicted, fresh = plan.memory, outputs_bytes - aliased_bytes
    table = plain_table([("memory of a device", "left"), ("predicted", "right"), ("compiled", "right")])
    for name, ours, theirs in (
        ("arguments", predicted.arguments_bytes, arguments_bytes),
        ("outputs, updates in place left out", predicted.outputs_bytes, fresh),
        ("temporaries", predicted.temporaries_bytes, temporaries_bytes),
    ):
        table.add_row(Text(name), format_bytes(ours), format_bytes(theirs))
    table.add_section()
    table.add_row("all", format_bytes(predicted.peak_bytes), format_bytes(arguments_bytes + fresh + temporaries_bytes))
    return plain_text(table, width)
