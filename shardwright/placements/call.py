"""The custom call that moves a value between the memories of a device and of its host, read and written.

    moved = f32[8] custom-call(x), custom_call_target="annotate_device_placement",
        custom_call_has_side_effect=true, frontend_attributes={_xla_buffer_placement="pinned_host"}

That is what JAX writes for `jax.device_put(x, jax.memory.Space.Host)`, for a sharding with a `memory_kind`, and for the
remat policies that offload. The result has the operand's elements; only where they lie differs. XLA's
ConvertMemoryPlacementToInternalAnnotations (xla/hlo/transforms/) takes the kinds below and fails on any other.
"""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import Instruction, Module
from shardwright.hlo.attributes import parse_value
from shardwright.hlo.ir import Attribute
from shardwright.reserved_names import PLACEMENT_TARGET

#: The frontend attribute that names the memory.
KIND_ATTRIBUTE = "_xla_buffer_placement"

#: The device's own memory, and its host's, as this package writes them.
DEVICE, HOST = "device", "pinned_host"

#: Kinds of memory on the host.
HOST_KINDS = frozenset({HOST, "unpinned_host"})


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a call puts its operand. kind: of memory, as the program names it."""

    kind: str

    @property
    def is_to_host(self) -> bool:
        return self.kind in HOST_KINDS


def read_placement(instruction: Instruction) -> Placement | None:
    """Where a custom call puts its operand; None for any other instruction, and for a call that names no known
    memory."""
    if instruction.opcode != "custom-call" or instruction.get("custom_call_target") != PLACEMENT_TARGET:
        return None
    kind = (instruction.get("frontend_attributes") or {}).get(KIND_ATTRIBUTE, "")
    is_known = kind == DEVICE or kind in HOST_KINDS
    return Placement(kind) if is_known and len(instruction.operands) == 1 else None


def check_placements(module: Module) -> None:
    """Raises UnsupportedProgramError at a call to memory that no compiler has."""
    for instruction in module.instructions():
        if instruction.get("custom_call_target") == PLACEMENT_TARGET and read_placement(instruction) is None:
            kind = (instruction.get("frontend_attributes") or {}).get(KIND_ATTRIBUTE, "")
            raise UnsupportedProgramError(
                f"{instruction.name} puts a value into memory of the kind {kind!r}",
                where=str(module.source(instruction) or instruction.name),
                remedy=f"use one of {', '.join([DEVICE, *sorted(HOST_KINDS)])}",
            )


def place(value: Instruction, kind: str, name: str) -> Instruction:
    """A call that puts an array value into memory of a kind (`HOST`, `DEVICE`), with its producer's metadata.

    name: of the call, unique in its module. The caller puts it behind `value` and has readers read it instead.
    """
    attributes = {
        each: Attribute(each, text, parse_value(each, text))
        for each, text in (
            ("custom_call_target", f'"{PLACEMENT_TARGET}"'),
            ("custom_call_has_side_effect", "true"),
            ("frontend_attributes", f'{{{KIND_ATTRIBUTE}="{kind}"}}'),
        )
    }
    if "metadata" in value.attributes:
        attributes["metadata"] = value.attributes["metadata"]
    return Instruction(name, "custom-call", value.shape, (value,), attributes, line=value.line)
