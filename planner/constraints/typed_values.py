"""Programs whose types hold shardings: how many of their values are pinned by that.

Under a mesh with Explicit axes JAX derives a sharding for every value and writes each of them into the text, as a
`Sharding` call right behind the instruction. To a planner they are pins like those that somebody wrote. A program that
was annotated by hand has them at a few per cent of its values.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.hlo import ArrayShape, Instruction, Module
from shardwright.planner.rewrites.dim_classes import reachable_computations
from shardwright.planner.tuning import MIN_TYPED_VALUES, TYPED_FRACTION
from shardwright.plans.plan import TYPED
from shardwright.reserved_names import TYPES_NEED
from shardwright.units import format_seconds

#: Opcodes that compute no array of their own.
_HANDED_ON = frozenset({"parameter", "constant", "tuple", "get-tuple-element", "while", "conditional", "call"})


@dataclass(frozen=True, slots=True, kw_only=True)
class TypedValues:
    """pinned: of `count` values. need: why the program was traced with them; "": nobody says."""

    pinned: int
    count: int
    need: str

    def describe(self, step_s: float, free_step_s: float | None) -> str:
        """free_step_s: of the plan without them; None: there is none."""
        text = f"{TYPED} {self.pinned} of {self.count} values: {format_seconds(step_s)} a step"
        if free_step_s is not None and free_step_s < step_s:
            text += f"; without them {format_seconds(free_step_s)} or less (constraints='ignore')"
        return f"{text}; they are kept: {self.need}" if self.need else text


def find_typed_values(module: Module) -> TypedValues | None:
    """None where the program's types say nothing."""
    computed: set[Instruction] = set()
    pinned: set[Instruction] = set()
    for computation in reachable_computations(module):
        for instruction in computation:
            if not isinstance(instruction.shape, ArrayShape) or not instruction.shape.rank:
                continue
            if instruction.get("custom_call_target") == "Sharding":
                pinned.add(instruction.operands[0])
            elif instruction.opcode not in _HANDED_ON:
                computed.add(instruction)
    pinned &= computed
    attributes = module.header["frontend_attributes"].value if "frontend_attributes" in module.header else {}
    need = attributes.get(TYPES_NEED, "")
    is_typed = len(pinned) >= max(MIN_TYPED_VALUES, TYPED_FRACTION * len(computed))
    return TypedValues(pinned=len(pinned), count=len(computed), need=need) if pinned and (is_typed or need) else None
