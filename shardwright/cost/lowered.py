"""The program that one device runs under a plan, as far as memory is concerned: shards, and what a plan adds.

A plan adds collectives and slices: where an operand is used in another layout than it has, and where
a partial result is reduced. A value brought to one layout for several readers is brought there once.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from shardwright.cost.fusion import Program
from shardwright.cost.inline import FlatComputation
from shardwright.cost.opcodes import MARKER_TARGETS
from shardwright.cost.profiles import HardwareProfile
from shardwright.cost.reshard import reshard
from shardwright.hlo import Instruction
from shardwright.hlo.shapes import ELEMENT_BITS, ArrayShape
from shardwright.plans import InstructionPlan, Mesh, TensorSharding, ValueSharding

#: Opcode of what a device cuts out of a value that it holds.
SLICE = "dynamic-slice"


class Lowering:
    """Makes the per-device programs of one plan.

    plans: by instruction name; an instruction without an entry counts as replicated.
    profile: whose compiler to follow.
    """

    def __init__(self, mesh: Mesh, plans: Mapping[str, InstructionPlan], profile: HardwareProfile) -> None:
        self._mesh = mesh
        self._plans = plans
        self._reduce_scatter_runs_as = profile.reduce_scatter_runs_as
        self._copies_dot_operands = profile.compiler.copies_dot_operands
        self._shard_sizes: dict[tuple[ArrayShape, TensorSharding], tuple[int, int]] = {}

    def program(self, flat: FlatComputation) -> Program:
        """What one device runs of a computation."""
        program = Program()
        made: list[int] = []  # the node that holds each node's final result
        moved: dict[tuple[int, ValueSharding], int] = {}
        copies: dict[tuple[int, tuple[int, ...]], int] = {}
        for node, instruction in enumerate(flat.instructions):
            plan = self._plans.get(instruction.name)
            operands = flat.operands[node]
            used = [made[operand] for operand in operands]
            if plan is not None and instruction.opcode not in ("parameter", "get-tuple-element"):
                for i, (operand, wanted) in enumerate(zip(operands, plan.operands, strict=True)):
                    have = self._result_of(flat.instructions[operand])
                    if have == wanted:
                        continue
                    key = (operand, wanted)
                    if key not in moved:
                        moved[key] = self._moved(program, flat.instructions[operand], made[operand], have, wanted)
                    used[i] = moved[key]
            if instruction.opcode == "dot" and self._copies_dot_operands:
                for i, order in enumerate(_operand_orders(instruction)):
                    if order is not None:
                        turned = (used[i], order)
                        if turned not in copies:
                            copies[turned] = self._copy(program, instruction.operands[i], used[i])
                        used[i] = copies[turned]
            made.append(self._computed(program, instruction, tuple(used), plan))
            if instruction.opcode == "parameter":
                program.parameters.append(made[-1])
        program.root = made[flat.root]
        return program

    def _computed(
        self, program: Program, instruction: Instruction, operands: tuple[int, ...], plan: InstructionPlan | None
    ) -> int:
        opcode = instruction.opcode
        if opcode == "custom-call" and instruction.get("custom_call_target") in MARKER_TARGETS:
            opcode = "bitcast"
        result = self._result_of(instruction)
        local = result
        if plan is not None and plan.partial:
            local = tuple(_before_reduction(sharding, plan.partial) for sharding in result)
        node = self._add(program, opcode, instruction, operands, local)
        if local is not result:
            unreduced = tuple(TensorSharding(s.dims, plan.partial) for s in local) if plan is not None else local
            node = self._moved(program, instruction, node, unreduced, result)
        return node

    def _moved(
        self, program: Program, instruction: Instruction, node: int, have: ValueSharding, wanted: ValueSharding
    ) -> int:
        """The node that holds a value in another layout."""
        leaves = instruction.shape.leaves
        if len(leaves) != 1:
            return self._add(program, "all-gather", instruction, (node,), wanted)
        (shape,), (source,), (target,) = leaves, have, wanted
        for move in reshard(shape.element_type, shape.dimensions, source, target, self._mesh):
            kind = self._reduce_scatter_runs_as if move.kind == "reduce-scatter" else move.kind
            size = move.payload_bytes
            if kind == "reduce-scatter":
                size //= move.group_size
            elements = size * 8 // ELEMENT_BITS[shape.element_type]
            node = program.add(kind, instruction, (node,), (size,), elements)
        if program.sizes_bytes[node] != (self._shard(shape, target)[0],):
            node = self._add(program, SLICE, instruction, (node,), wanted)
        return node

    def _add(
        self,
        program: Program,
        opcode: str,
        instruction: Instruction,
        operands: tuple[int, ...],
        shardings: ValueSharding,
    ) -> int:
        shards = [self._shard(*pair) for pair in zip(instruction.shape.leaves, shardings, strict=True)]
        sizes = tuple(size for size, _ in shards)
        return program.add(opcode, instruction, operands, sizes, sum(elements for _, elements in shards))

    def _copy(self, program: Program, instruction: Instruction, node: int) -> int:
        """A copy with its dimensions in another order."""
        return program.add("transpose", instruction, (node,), program.sizes_bytes[node], program.elements[node])

    def _result_of(self, instruction: Instruction) -> ValueSharding:
        plan = self._plans.get(instruction.name)
        if plan is not None:
            return plan.result
        return tuple(TensorSharding.replicated(leaf.rank) for leaf in instruction.shape.leaves)

    def _shard(self, shape: ArrayShape, sharding: TensorSharding) -> tuple[int, int]:
        """Bytes and elements of one device's shard."""
        key = (shape, sharding)
        found = self._shard_sizes.get(key)
        if found is None:
            elements = prod(sharding.shard_shape(shape.dimensions, self._mesh))
            found = self._shard_sizes[key] = ((elements * ELEMENT_BITS[shape.element_type] + 7) // 8, elements)
        return found


def _before_reduction(result: TensorSharding, partial: tuple[str, ...]) -> TensorSharding:
    """How a partial result lies before it is reduced over the axes `partial`."""
    return TensorSharding(tuple(tuple(axis for axis in dim if axis not in partial) for dim in result.dims))


def _operand_orders(dot: Instruction) -> tuple[tuple[int, ...] | None, tuple[int, ...] | None]:
    """The order of dimensions that XLA's DotDecomposer copies each operand into; None where it need not."""
    orders = []
    for side, contracted_first in (("lhs", False), ("rhs", True)):
        rank = dot.operands[0 if side == "lhs" else 1].shape.leaves[0].rank
        batch = tuple(dot.get(f"{side}_batch_dims", ()))
        contracted = tuple(dot.get(f"{side}_contracting_dims", ()))
        free = tuple(dim for dim in range(rank) if dim not in batch and dim not in contracted)
        order = (*batch, *contracted, *free) if contracted_first else (*batch, *free, *contracted)
        turned = (*batch, *free, *contracted) if contracted_first else (*batch, *contracted, *free)
        natural = tuple(range(rank))
        can_turn = len(free) == len(contracted) == 1 and turned == natural
        orders.append(None if order == natural or can_turn else order)
    return orders[0], orders[1]
