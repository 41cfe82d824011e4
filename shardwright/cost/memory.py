"""Peak bytes on one device: the buffers of the program that the device runs, over the order it runs them in."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from shardwright.cost.buffers import buffers_of
from shardwright.cost.fusion import Program
from shardwright.cost.inline import inlined
from shardwright.cost.lowered import Lowering
from shardwright.cost.profiles import HardwareProfile, hardware_profile
from shardwright.hlo import Computation, Module
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.plans import InstructionPlan, MemorySummary, Mesh, TensorSharding, VariablePlan

#: Attributes that name the computations an instruction runs, by opcode.
_BODIES = {
    "while": ("body",),
    "call": ("to_apply",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}


def memory(
    module: Module,
    instructions: Iterable[InstructionPlan],
    parameters: Sequence[VariablePlan],
    outputs: Sequence[VariablePlan],
    mesh: Mesh,
    profile: HardwareProfile | None = None,
) -> MemorySummary:
    """Predicted bytes on one device for a program planned as given.

    instructions: one entry per instruction of the entry computation and of the bodies of
    while, conditional and call; an instruction without an entry counts as replicated.
    profile: whose compiler to follow; the CPU's where none is given.
    """
    estimate = _Estimate(mesh, {entry.name: entry for entry in instructions}, profile or hardware_profile("cpu"))
    return MemorySummary(
        arguments_bytes=sum(_stored_bytes(variable, mesh) for variable in parameters),
        outputs_bytes=sum(_stored_bytes(variable, mesh) for variable in outputs if variable.alias is None),
        temporaries_bytes=estimate.peak_bytes(module.entry, carried=False),
    )


def shard_bytes(element_type: str, shape: tuple[int, ...], sharding: TensorSharding, mesh: Mesh) -> int:
    """Bytes of one device's shard of an array."""
    return (prod(sharding.shard_shape(shape, mesh)) * ELEMENT_BITS[element_type] + 7) // 8


def _stored_bytes(variable: VariablePlan, mesh: Mesh) -> int:
    return shard_bytes(variable.element_type, variable.stored_shape, variable.sharding, mesh)


class _Estimate:
    def __init__(self, mesh: Mesh, plans: dict[str, InstructionPlan], profile: HardwareProfile) -> None:
        self._lowering = Lowering(mesh, plans, profile)
        self._profile = profile
        self._peaks: dict[Computation, int] = {}

    def peak_bytes(self, computation: Computation, carried: bool) -> int:
        """Most bytes of intermediate values at once; parameters and results are the caller's.

        carried: whether the results are written over the parameters, as in a loop's body.
        """
        program = self._lowering.program(inlined(computation))
        buffers = buffers_of(program, self._profile.compiler)
        return max(buffers.live_bytes(self._transient(program)), default=0)

    def _transient(self, program: Program) -> dict[int, int]:
        """What instructions with bodies need while they run."""
        transient = {}
        for node, opcode in enumerate(program.opcodes):
            if opcode in _BODIES:
                called = program.instructions[node].called
                bodies = [computation for name in _BODIES[opcode] for computation in called.get(name, ())]
                transient[node] = max((self._body_peak(body, opcode == "while") for body in bodies), default=0)
        return transient

    def _body_peak(self, computation: Computation, carried: bool) -> int:
        if computation not in self._peaks:
            self._peaks[computation] = self.peak_bytes(computation, carried)
        return self._peaks[computation]
