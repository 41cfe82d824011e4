"""Plans that follow from how a program's arguments lie: each instruction takes the factors its operands suggest.

Nothing is searched or priced; sums are reduced where they are made. For tests that need a plan of a whole program
and must not depend on the planner.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shardwright.hlo import Computation, Instruction, Module, TupleShape, parse
from shardwright.planner.rules import Factor, find_xla_bug, rule_of
from shardwright.plans.plan import InstructionPlan, Plan
from shardwright.plans.shardings import Mesh, TensorSharding, ValueSharding
from tests.xla.hand import Dims, plan, sharding

_HANDING_ON = ("tuple", "opt-barrier", "optimization-barrier")


def propagated(hlo: str, mesh: Mapping[str, int], arguments: Mapping[int, Dims], outputs: Mapping[int, Dims]) -> Plan:
    """The plan of `hlo` whose arguments lie as given (whole where they are left out)."""
    module = parse(hlo)
    walker = _Walker(module, Mesh.of(mesh), arguments, outputs)
    walker.walk(module.entry)
    return plan(hlo, mesh, arguments, outputs, walker.entries)


class _Walker:
    def __init__(self, module: Module, mesh: Mesh, arguments: Mapping[int, Dims], outputs: Mapping[int, Dims]) -> None:
        self.mesh, self.root = mesh, module.entry.root
        self.lies: dict[Instruction, ValueSharding] = {}
        self.entries: list[InstructionPlan] = []
        self.given = {
            p: (sharding(arguments.get(p.index, (None,) * p.shape.leaves[0].rank)),) for p in module.entry.parameters
        }
        leaves = enumerate(self.root.shape.leaves)
        self.returned = tuple(sharding(outputs.get(i, (None,) * leaf.rank)) for i, leaf in leaves)

    def walk(self, computation: Computation, root: ValueSharding | None = None) -> None:
        """Plan a computation whose parameters are given; `root`: how its result has to lie."""
        if computation.root in self.lies:
            return
        for instruction in computation:
            wanted = self.returned if instruction is self.root else root if instruction is computation.root else None
            used, partial = self._plan(instruction, wanted)
            self.entries.append(
                InstructionPlan(
                    computation=computation.name, name=instruction.name, opcode=instruction.opcode,
                    operands=used, result=self.lies[instruction], partial=partial,
                )
            )  # fmt: skip

    def _plan(
        self, instruction: Instruction, result: ValueSharding | None
    ) -> tuple[tuple[ValueSharding, ...], tuple[str, ...]]:
        have = tuple(self.lies[operand] for operand in instruction.operands)
        opcode = instruction.opcode
        if opcode == "parameter":
            self.lies[instruction] = self.given[instruction]
        elif opcode == "get-tuple-element":
            shape = instruction.operands[0].shape
            assert isinstance(shape, TupleShape)
            first = sum(len(each.leaves) for each in shape.elements[: instruction.index])
            self.lies[instruction] = have[0][first : first + len(instruction.shape.leaves)]
        elif opcode in _HANDING_ON:
            flat = result or tuple(leaf for value in have for leaf in value)
            self.lies[instruction] = flat
            have = _grouped(instruction, flat)
        elif opcode == "while":
            self._enter(instruction, ("condition", "body"), have)
            self.lies[instruction] = have[0]
        elif opcode == "call":
            (callee,) = instruction.called["to_apply"]
            self._enter(instruction, ("to_apply",), have)
            self.lies[instruction] = self.lies[callee.root]
            have = tuple(self.lies[parameter] for parameter in callee.parameters)
        else:
            return self._compute(instruction, have)
        return have, ()

    def _enter(self, instruction: Instruction, names: Sequence[str], shardings: tuple[ValueSharding, ...]) -> None:
        for name in names:
            for called in instruction.called[name]:
                for parameter, value in zip(called.parameters, shardings, strict=True):
                    self.given.setdefault(parameter, value)
                self.walk(called, shardings[0] if name == "body" else None)

    def _compute(
        self, instruction: Instruction, have: tuple[ValueSharding, ...]
    ) -> tuple[tuple[ValueSharding, ...], tuple[str, ...]]:
        flat = [leaf for value in have for leaf in value]
        taken: dict[str, Factor | None] = {}
        for axis in self.mesh.axes:
            splits = [next((d for d, axes in enumerate(leaf.dims) if axis.name in axes), None) for leaf in flat]
            taken[axis.name] = self._factor(instruction, splits, taken, axis.name)
        operands = _laid_out(taken, [leaf.rank for o in instruction.operands for leaf in o.shape.leaves], "operands")
        self.lies[instruction] = _laid_out(taken, [leaf.rank for leaf in instruction.shape.leaves], "results")
        partial = tuple(axis for axis, factor in taken.items() if factor is not None and factor.contracted)
        return _grouped(instruction, operands), partial

    def _factor(
        self, instruction: Instruction, splits: list[int | None], factors: dict[str, Factor | None], axis: str
    ) -> Factor | None:
        """The factor that most operands agree with, and none contradicts."""
        best, score = None, 0
        for factor in rule_of(instruction).factors:
            pairs = [(f, s) for f, s in zip(factor.operands, splits, strict=True) if s is not None]
            parts = self.mesh.size(tuple(a for a, f in factors.items() if f is factor)) * self.mesh.sizes[axis]
            if any(f != s for f, s in pairs) or factor.size % parts or factor.reduction not in (None, "add"):
                continue
            if len(pairs) > score and not find_xla_bug(instruction, factors | {axis: factor}, self.mesh):
                best, score = factor, len(pairs)
        return best


def _laid_out(factors: Mapping[str, Factor | None], ranks: Sequence[int], side: str) -> ValueSharding:
    results = []
    for leaf, rank in enumerate(ranks):
        dims: list[tuple[str, ...]] = [()] * rank
        for axis, factor in factors.items():
            dim = None if factor is None else getattr(factor, side)[leaf]
            if dim is not None:
                dims[dim] = (*dims[dim], axis)
        results.append(TensorSharding(tuple(dims)))
    return tuple(results)


def _grouped(instruction: Instruction, flat: ValueSharding) -> tuple[ValueSharding, ...]:
    grouped, first = [], 0
    for operand in instruction.operands:
        count = len(operand.shape.leaves)
        grouped.append(flat[first : first + count])
        first += count
    return tuple(grouped)
