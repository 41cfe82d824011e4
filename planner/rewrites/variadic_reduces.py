"""A reduce of several independent arrays becomes one reduce per array.

XLA gathers the partial results of a reduce of several arrays, for any function. It sums those of one array by an
all-reduce, or leaves them partial. A region that mixes the arrays (argmax) keeps them together.
"""

from __future__ import annotations

from shardwright.hlo import Computation, Instruction, Module
from shardwright.planner.rewrites import edit
from shardwright.planner.rewrites.instruction_writer import reduction_region, rewrite_instructions
from shardwright.planner.rules.reduction import reductions_of


def split_variadic_reduces(module: Module) -> Module:
    """`module` with one reduce per independent array; `module` itself for nothing to split.

    The tuple of such a reduce's results has its name.
    """
    return rewrite_instructions(module, lambda instruction: _kinds(instruction) is not None, _write_reduces)


def _kinds(instruction: Instruction) -> tuple[str, ...] | None:
    """The operation of a reduce on each of its arrays."""
    if instruction.opcode != "reduce" or len(instruction.operands) == 2:
        return None
    return reductions_of(instruction.called["to_apply"][0])


def _write_reduces(together: Instruction, names: edit.Names, regions: dict[str, Computation]) -> list[Instruction]:
    """Replace a reduce by a tuple of new reduces. regions: shared by the module's reduces."""
    count = len(together.operands) // 2
    kinds = _kinds(together)
    assert kinds is not None
    reduces = []
    for number, (kind, shape) in enumerate(zip(kinds, together.shape.leaves, strict=True)):
        key = f"{kind} {shape.element_type}"
        if key not in regions:
            regions[key] = reduction_region(names.like(kind, shape.element_type), kind, shape.element_type)
        called = {"to_apply": (regions[key],)}
        reduce = edit.copy_of(
            together,
            (together.operands[number], together.operands[count + number]),
            name=names.like(together.name, str(number)),
            shape=shape,
            attributes=together.attributes | edit.callee_attributes(called),
            called=called,
            is_root=False,
        )
        reduces.append(edit.check_consistency(reduce))
    together.opcode, together.operands, together.called = "tuple", tuple(reduces), {}
    together.attributes = {n: a for n, a in together.attributes.items() if n not in ("dimensions", "to_apply")}
    return reduces
