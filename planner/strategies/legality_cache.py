"""Checks an entry once for all equal instructions: deep models repeat their layers.

Two instructions are equal if the rules and tables cannot distinguish them: opcode, shapes, attributes, regions by their
computation, shapes of the operands, and known constants among them.
"""

from __future__ import annotations

from collections.abc import Hashable

from shardwright.hlo import Computation, Instruction
from shardwright.planner.graph.manual_regions import Inside
from shardwright.planner.rules import Place
from shardwright.planner.rules.linear import is_zero
from shardwright.planner.strategies.legality import entry_inside, form_problems, place_problems, rule_problems
from shardwright.planner.tuning import MAX_NUMBER_LENGTH
from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh

#: Attributes without influence on the computation.
_SILENT = frozenset({"metadata", "sharding", "frontend_attributes"})


class LegalityCache:
    """Checks entries over one mesh. Modules and plans passed to it must outlive it: they are keyed by identity.

    inside: what stands in manual regions.
    """

    def __init__(self, mesh: Mesh, inside: Inside | None = None) -> None:
        self._mesh = mesh
        self._inside = inside or Inside()
        self._verdicts: dict[Hashable, tuple[str, ...]] = {}
        self._numbers = _Numbers()
        self._regions: dict[Computation, int] = {}
        self._constants: dict[Instruction, Hashable] = {}

    def problems(self, instruction: Instruction, entry: InstructionPlan, *, hands_on: bool) -> tuple[str, ...]:
        """Problems of the entry's form; else, unless the instruction only hands values on, of its rule."""
        place = self._inside.places.get(instruction)
        around = self._inside.axes.get(instruction, frozenset[tuple[str, int]]())
        key = (self._signature(instruction, hands_on), self._layout(entry), entry.opcode, place, around)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._verdicts[key] = self._judge(instruction, entry, place, around, hands_on=hands_on)
        return verdict

    def _judge(
        self,
        instruction: Instruction,
        entry: InstructionPlan,
        place: Place | None,
        around: frozenset[tuple[str, int]],
        *,
        hands_on: bool,
    ) -> tuple[str, ...]:
        mesh = self._mesh
        if place is not None:
            problem = place_problems(entry, place, around, mesh)
            if problem is not None:
                return (problem,)
        if place is not None and place.border is not None:
            seen = entry_inside(entry, instruction, place, mesh)
            if seen is None:
                return (f"is not split over manual axes as its region says: {entry.operands} -> {entry.result}",)
            entry = seen
        verdict = form_problems(instruction, entry, mesh)
        return verdict if verdict or hands_on else rule_problems(instruction, entry, mesh, place)

    def _layout(self, entry: InstructionPlan) -> Hashable:
        number = self._numbers.of
        operands = tuple([tuple([number(sharding) for sharding in value]) for value in entry.operands])
        results = tuple([tuple([number(sharding) for sharding in value]) for value in (entry.result, entry.shared)])
        return operands, results, entry.partial

    def _signature(self, instruction: Instruction, hands_on: bool) -> Hashable:
        number = self._numbers.of
        shapes = tuple([number(operand.shape) for operand in instruction.operands])
        if hands_on:
            return instruction.opcode, number(instruction.shape), shapes
        return (
            instruction.opcode,
            number(instruction.shape),
            shapes,
            tuple([self._constant(operand) for operand in instruction.operands]),
            self._attributes(instruction),
            instruction.payload,
            tuple([self._region(region) for regions in instruction.called.values() for region in regions]),
        )

    def _attributes(self, instruction: Instruction) -> tuple[int, ...]:
        called = instruction.called
        return tuple([id(a) for n, a in instruction.attributes.items() if n not in _SILENT and n not in called])

    def _constant(self, operand: Instruction) -> Hashable:
        """The known content of an operand: all zero, or one number."""
        if operand not in self._constants:
            is_number = operand.opcode == "constant" and len(operand.payload) < MAX_NUMBER_LENGTH
            self._constants[operand] = operand.payload if is_number else is_zero(operand)
        return self._constants[operand]

    def _region(self, region: Computation) -> int:
        if region not in self._regions:
            places = {instruction: i for i, instruction in enumerate(region)}
            body = tuple(
                (self._signature(i, False), i.index, tuple(places[operand] for operand in i.operands)) for i in region
            )
            self._regions[region] = self._numbers.of_value((body, places[region.root]))
        return self._regions[region]


class _Numbers:
    """A number per distinct value. Known objects are found by identity, much cheaper than by value."""

    def __init__(self) -> None:
        self._by_identity: dict[int, int] = {}
        self._by_value: dict[Hashable, int] = {}

    def of(self, thing: Hashable) -> int:
        number = self._by_identity.get(id(thing))
        if number is None:
            number = self._by_identity[id(thing)] = self.of_value(thing)
        return number

    def of_value(self, value: Hashable) -> int:
        return self._by_value.setdefault(value, len(self._by_value))
