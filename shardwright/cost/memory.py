"""Peak bytes on one device: the buffers of the program that the device runs, over the order it runs them in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod

from shardwright.cost.buffers import buffers_of
from shardwright.cost.fusion import Program
from shardwright.cost.heap import Interval, heap_bytes
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
        self._known: dict[Computation, tuple[list[Interval], int]] = {}

    def peak_bytes(self, computation: Computation, carried: bool) -> int:
        """Bytes of intermediate values; parameters and results are the caller's."""
        intervals, _ = self._intervals(computation, carried)
        return heap_bytes(intervals)

    def _intervals(self, computation: Computation, carried: bool) -> tuple[list[Interval], int]:
        """Lifetimes of a computation's buffers and of those of the bodies it runs, and how long it takes.

        carried: whether the results are written over the parameters, as in a loop's body.
        """
        program = self._lowering.program(inlined(computation))
        buffers = buffers_of(program, self._profile.compiler)
        found: list[Interval] = []
        begins = [0]  # time of each position; what runs a body takes as long as that
        for step in buffers.order:
            duration = 1
            for node in step:
                for body, is_loop in _bodies(program, node):
                    inner, takes = self._body(body, is_loop)
                    found += [Interval(size, begins[-1] + start, begins[-1] + end) for size, start, end in inner]
                    duration = max(duration, takes)
            begins.append(begins[-1] + duration)
        found += [Interval(size, begins[start], begins[end + 1] - 1) for size, start, end in buffers.lifetimes()]
        return found, begins[-1]

    def _body(self, computation: Computation, carried: bool) -> tuple[list[Interval], int]:
        if computation not in self._known:
            self._known[computation] = self._intervals(computation, carried)
        return self._known[computation]


def _bodies(program: Program, node: int) -> Iterator[tuple[Computation, bool]]:
    """The computations that a node runs, and whether each is a loop's."""
    opcode = program.opcodes[node]
    for name in _BODIES.get(opcode, ()):
        for computation in program.instructions[node].called.get(name, ()):
            yield computation, opcode == "while"
