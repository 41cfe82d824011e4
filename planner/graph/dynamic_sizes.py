"""Refuses arrays whose size is known only at run time: XLA's partitioner takes none, and its words come late."""

from __future__ import annotations

from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import Module
from shardwright.planner.graph.per_device_programs import location_of

_SETTING = frozenset({"set-dimension-size", "dynamic-reshape"})


def refuse_dynamic_sizes(module: Module) -> None:
    """Raises UnsupportedProgramError at the first instruction that sets a size at run time."""
    instruction = next((each for each in module.instructions() if each.opcode in _SETTING), None)
    if instruction is not None:
        raise UnsupportedProgramError(
            f"how many elements {instruction.opcode} {instruction.name} has is known only at run time",
            where=location_of(module, instruction),
            remedy="give it a fixed size: select by where() and masks instead of boolean_mask, unique or nonzero; of "
            "sparse gradients (Keras: Embedding with Adagrad, RMSprop) take dense ones (tf.convert_to_tensor), or Adam",
        )
