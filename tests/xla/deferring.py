"""A plan that reduces every sum where it is made, turned into one that keeps sums partial for as long as it can.

Greedy, and made of nothing but the table of linear instructions and the program's own structure: what may be
partial is the greatest set in which every value has a reason (a summed factor, a linear instruction of partial
values, zero, or a loop that carries it from a partial value to a partial value).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from shardwright.hlo import Computation, Instruction, Module, TupleShape
from shardwright.planner.rules.linear import is_zero, linear_ways, why_not_partial
from shardwright.plans.plan import InstructionPlan, Plan
from shardwright.plans.shardings import TensorSharding

_CALLED = {
    "while": ("body", "condition"),
    "call": ("to_apply",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}
_HANDING_ON = ("tuple", "get-tuple-element", "opt-barrier", *_CALLED)

Leaf = tuple[Instruction, int]


def deferred(module: Module, plan: Plan) -> Plan:
    """`plan` with sums left partial over every axis wherever that is linear; collectives are not predicted anew."""
    entries = {entry.name: entry for entry in plan.instructions}
    for axis in plan.mesh.axes:
        if axis.size > 1:
            entries = _Axis(module, entries, axis.name, tuple(plan.mesh.sizes)).rewritten()
    return replace(plan, instructions=tuple(entries.values()), collectives=())


class _Axis:
    """One mesh axis: `partial` holds the leaves that may be partial over it, and shrinks until all have a reason."""

    def __init__(self, module: Module, entries: dict[str, InstructionPlan], axis: str, axes: tuple[str, ...]) -> None:
        self.module, self.entries, self.axis, self.axes = module, entries, axis, axes
        self.callers: dict[Computation, list[Instruction]] = {}
        self.home: dict[Instruction, Computation] = {}
        todo = [module.entry]
        while todo:
            computation = todo.pop()
            for instruction in computation:
                self.home[instruction] = computation
                for called in _called(instruction):
                    if called not in self.callers:
                        todo.append(called)
                    self.callers.setdefault(called, []).append(instruction)
        self.looped = {operand: i for i in self.home if i.opcode == "while" for operand in i.operands}
        self.partial = {
            (instruction, leaf): True for instruction in self.home for leaf in range(len(instruction.shape.leaves))
        }
        while self._shrink():
            pass

    def _shrink(self) -> bool:
        before = sum(self.partial.values())
        for instruction, leaf in self.partial:
            self.partial[instruction, leaf] = self.partial[instruction, leaf] and self._has_reason(instruction, leaf)
        return sum(self.partial.values()) < before

    def _has_reason(self, instruction: Instruction, leaf: int) -> bool:
        if instruction is self.module.entry.root:
            return False
        if instruction.opcode == "parameter":
            return instruction in self.home and self._is_fed(instruction, leaf)
        if instruction.opcode in _HANDING_ON:
            return all(self._is_available(source) for source in self._sources(instruction, leaf)) and all(
                self.partial[target] for target in self._bound(instruction, leaf)
            )
        if is_zero(instruction):
            return False  # whole as it is, and used as partial where that is wanted
        return self._is_seed(instruction) or self._way(instruction) is not None

    def _is_fed(self, parameter: Instruction, leaf: int) -> bool:
        callers = self.callers.get(self.home[parameter], [])
        return bool(callers) and all(self._is_available(self._argument(c, parameter, leaf)) for c in callers)

    def _argument(self, caller: Instruction, parameter: Instruction, leaf: int) -> Leaf:
        if caller.opcode == "while":
            return caller, leaf
        if caller.opcode == "conditional":
            return caller.operands[1 + _called(caller).index(self.home[parameter])], leaf
        return caller.operands[parameter.index], leaf

    def _sources(self, instruction: Instruction, leaf: int) -> Iterator[Leaf]:
        """The leaves that leaf `leaf` of an instruction that hands on is one of."""
        if instruction.opcode == "get-tuple-element":
            shape = instruction.operands[0].shape
            assert isinstance(shape, TupleShape)
            yield instruction.operands[0], leaf + sum(len(e.leaves) for e in shape.elements[: instruction.index])
        elif instruction.opcode == "while":
            yield instruction.operands[0], leaf
            yield _called(instruction)[0].root, leaf
        elif instruction.opcode in _CALLED:
            yield from ((called.root, leaf) for called in _called(instruction))
        else:
            flat = [(operand, i) for operand in instruction.operands for i in range(len(operand.shape.leaves))]
            yield flat[leaf]

    def _bound(self, instruction: Instruction, leaf: int) -> Iterator[Leaf]:
        """What a tuple has to be like: the loop that it enters, the loop or branch that it ends."""
        if instruction in self.looped:
            yield self.looped[instruction], leaf
        if instruction is self.home[instruction].root:
            yield from (
                (caller, leaf)
                for caller in self.callers.get(self.home[instruction], [])
                if self._ends(caller, instruction)
            )

    def _ends(self, caller: Instruction, root: Instruction) -> bool:
        return caller.opcode != "while" or _called(caller)[0].root is root

    def _is_available(self, leaf: Leaf) -> bool:
        return self.partial.get(leaf, False) or is_zero(leaf[0])

    def _is_seed(self, instruction: Instruction) -> bool:
        entry = self.entries[instruction.name]
        splits = any(self.axis in sharding.axes for sharding in entry.result)
        sums = instruction.opcode in ("dot", "convolution", "scatter") or any(
            way.operands for way in linear_ways(instruction)
        )
        return self.axis in entry.partial and not splits and sums and not why_not_partial(instruction)

    def _way(self, instruction: Instruction) -> frozenset[int] | None:
        entry = self.entries[instruction.name]
        flat = [(operand, i) for operand in instruction.operands for i in range(len(operand.shape.leaves))]
        used = [sharding for value in entry.operands for sharding in value]
        if self.axis in entry.partial or any(self.axis in sharding.axes for sharding in (*used, *entry.result)):
            return None
        for way in linear_ways(instruction):
            if way.operands and all(self._is_available(flat[i]) for i in way.operands):
                return way.operands
        return None

    # ---- the new entries -------------------------------------------------------
    def rewritten(self) -> dict[str, InstructionPlan]:
        by_name = {instruction.name: instruction for instruction in self.home}
        return {name: self._entry(by_name[name], entry) for name, entry in self.entries.items()}

    def _entry(self, instruction: Instruction, entry: InstructionPlan) -> InstructionPlan:
        results = [self.partial[instruction, i] for i in range(len(entry.result))]
        used = self._used(instruction)
        operands, position = [], 0
        for value in entry.operands:
            operands.append(tuple(self._marked(s, used[position + i]) for i, s in enumerate(value)))
            position += len(value)
        summed = set(entry.partial)
        if instruction.opcode not in _HANDING_ON and (any(results) or any(used)):
            summed = (
                summed - {self.axis} if any(results) else summed | {self.axis}
            )  # a program's result is reduced here
        return replace(
            entry,
            operands=tuple(operands),
            result=tuple(self._marked(s, is_made) for s, is_made in zip(entry.result, results, strict=True)),
            partial=tuple(axis for axis in self.axes if axis in summed),
        )

    def _used(self, instruction: Instruction) -> list[bool]:
        """Per operand leaf, whether it is used as partial."""
        flat = [(operand, i) for operand in instruction.operands for i in range(len(operand.shape.leaves))]
        if instruction.opcode == "get-tuple-element":
            return [self.partial[leaf] for leaf in flat]
        if instruction.opcode in ("tuple", "opt-barrier", "while"):
            return [self.partial[instruction, i] for i in range(len(flat))]
        if instruction.opcode == "call":
            (callee,) = _called(instruction)
            return [self.partial[p, i] for p in callee.parameters for i in range(len(p.shape.leaves))]
        if instruction.opcode == "conditional":
            taken = [
                (b.parameters[0], i) for b in _called(instruction) for i in range(len(b.parameters[0].shape.leaves))
            ]
            return [False, *(self.partial[leaf] for leaf in taken)]
        way = None if self._is_seed(instruction) or is_zero(instruction) else self._way(instruction)
        return [way is not None and i in way for i in range(len(flat))]

    def _marked(self, sharding: TensorSharding, is_partial: bool) -> TensorSharding:
        if not is_partial:
            return sharding
        return TensorSharding(sharding.dims, (*sharding.unreduced, self.axis))


def _called(instruction: Instruction) -> list[Computation]:
    return [c for name in _CALLED.get(instruction.opcode, ()) for c in instruction.called.get(name, ())]
