"""A reduce with an initial value of its own becomes one from the neutral element.

`reduce(x, c, ∘)` is `c ∘ reduce(x, e, ∘)` with the neutral element e. In XLA every device starts its part of a
reduction from the initial value: reduced dimensions can be split only at the initial value e (`rules/reduction.py`).
"""

from __future__ import annotations

from shardwright.hlo import Computation, Instruction, Module
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.instruction_writer import InstructionWriter, rewrite_instructions
from shardwright.planner.rules.linear import SIGNIFICANT_BITS
from shardwright.planner.rules.reduction import has_initial_value, neutral_element, reduction_of


def neutralize_initial_values(module: Module) -> Module:
    """`module` with initial values moved out of its reduces; `module` itself for neutral ones.

    The instruction that combines the initial value has the name of the reduce.
    """
    return rewrite_instructions(module, _can_extract, _extract_initial_value)


def _can_extract(instruction: Instruction) -> bool:
    if not has_initial_value(instruction):
        return False
    kind = instruction.shape.leaves[0].element_type
    return kind[0] in "su" or kind == "pred" or kind in SIGNIFICANT_BITS  # their neutral elements can be written down


def _extract_initial_value(reduce: Instruction, names: edit.Names, _: dict[str, Computation]) -> list[Instruction]:
    """Make a reduce the combination of its initial value and a new, neutral reduce."""
    array, start = reduce.operands
    (region,) = reduce.called["to_apply"]
    opcode = reduction_of(region)
    assert opcode is not None
    (shape,) = reduce.shape.leaves
    writer = InstructionWriter(reduce, names)
    number = neutral_element(opcode, shape.element_type)
    neutral = writer.constant(shape.element_type, number)
    if shape.element_type == "pred":
        neutral.payload = "true" if number else "false"
    whole = writer.reduce(shape, region, reduce.get("dimensions"), array, neutral)
    spread = writer.spread(start, shape.dimensions, ()) if shape.rank else start
    reduce.opcode, reduce.operands, reduce.called = opcode, (edit.check_consistency(whole), spread), {}
    reduce.attributes = {n: a for n, a in reduce.attributes.items() if n not in ("dimensions", "to_apply")}
    return writer.written
