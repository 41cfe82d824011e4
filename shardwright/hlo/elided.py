"""Constants with values left out of the text (`constant({...})`): such programs can be planned but not run."""

from __future__ import annotations

from shardwright.errors import UnsupportedProgramError
from shardwright.hlo.ir import Instruction, Module
from shardwright.hlo.parser import parse

#: How each that leaves them out is told not to.
PRINT_THEM = (
    "print them: computation.as_hlo_text(print_large_constants=True), or XLA_FLAGS=--xla_dump_large_constants beside "
    'XLA\'s --xla_dump_to; jax.jit(f).lower(...).as_text("hlo") does by itself; '
    'of TensorFlow take stage="hlo_serialized"'
)


def elided(module: Module) -> list[Instruction]:
    """The constants of a module without a value in its text."""
    return [instruction for instruction in module.instructions() if instruction.is_elided]


def require_values(text: str) -> None:
    """Raises UnsupportedProgramError, naming the constant, if HLO text leaves out the value of one."""
    left_out = elided(parse(text)) if "..." in text else []
    if left_out:
        raise UnsupportedProgramError(
            f"the value of {count_of(left_out)} was left out when the text was printed: the program can be planned, "
            "not run",
            where=left_out[0].name,
            remedy=f"{PRINT_THEM}; then plan that text",
        )


def count_of(constants: list[Instruction]) -> str:
    """`one constant`, `3 constants`."""
    return "one constant" if len(constants) == 1 else f"{len(constants)} constants"
