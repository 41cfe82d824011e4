"""What runs on the host's processors: JAX's `compute_on("device_host")`.

JAX writes it on each instruction, `frontend_attributes={_xla_compute_type="host"}`. XLA cuts such instructions out into
a computation of the host's (HostOffloadingPrepare, xla/hlo/transforms/host_offloading_prepare.cc).
"""

from __future__ import annotations

from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import Instruction, Module

#: The frontend attribute that names what computes an instruction.
COMPUTE_ATTRIBUTE = "_xla_compute_type"

_HOST = "host"

#: What else JAX writes there, and this planner does not price: a TPU's sparse cores.
_OTHERS = frozenset({"sparse", "sparseoffload"})


def computes_on_host(instruction: Instruction) -> bool:
    """Whether the host's processors compute an instruction."""
    attributes = instruction.attributes.get("frontend_attributes")
    return attributes is not None and attributes.value.get(COMPUTE_ATTRIBUTE) == _HOST


def check_compute_types(module: Module) -> None:
    """Raises UnsupportedProgramError at an instruction for processors that are neither the device's nor its host's."""
    for instruction in module.instructions():
        attributes = instruction.attributes.get("frontend_attributes")
        kind = attributes.value.get(COMPUTE_ATTRIBUTE, "") if attributes is not None else ""
        if kind in _OTHERS:
            raise UnsupportedProgramError(
                f"{instruction.name} is to be computed by {kind!r} processors, which plans do not price",
                where=str(module.source(instruction) or instruction.name),
                remedy='take compute_on away there, or use compute_on("device_host")',
            )
