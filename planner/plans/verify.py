"""The plan checker: reads a finished plan beside its module, independent of the search.

Conditions, and the functions that check them:

1. the plan is of this program (`_check_program`);
2. every instruction of the entry computation and of the bodies it calls has exactly one entry; there are no other
   entries (`_Checker.run`);
3. an entry is legal for its instruction: ranks, axes, factors, combinations (`legality`);
4. a second layout for readers (`InstructionPlan.shared`) is of whole values, over axes of the mesh (`legality`);
5. a partial sum is valid: it comes from a summed factor, passes through instructions that are linear in it
   (`legality`), is used as partial only if it was computed as partial or is whole (`_check_partial_uses`), and no
   argument or output is partial (`boundary`; between programs of one step they may be, with the terms of one value).
   By induction along the program, and around loops from their inputs, the summands of every value marked partial
   then add up to the value;
6. tuples, loops, calls and conditionals pass their leaves on unchanged (`_check_carried`);
7. parameters and outputs of the plan are those of the program, an alias has one layout (`boundary`);
8. in manual regions and at their borders manual axes are used as the program says, and not otherwise (`legality`);
9. predicted collectives name instructions and axes that exist (`_check_collectives`).

Deep models repeat their layers: an entry is checked once for all equal instructions (`LegalityCache`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from shardwright.errors import PlanCheckError
from shardwright.hlo import Computation, Instruction, Module, TupleShape
from shardwright.planner.graph.manual_regions import find_inside
from shardwright.planner.plans.boundary import boundary_problems
from shardwright.planner.rules.linear import becomes_partial
from shardwright.planner.strategies.legality import flat
from shardwright.planner.strategies.legality_cache import LegalityCache
from shardwright.plans.plan import InstructionPlan, Plan
from shardwright.plans.shardings import TensorSharding, ValueSharding

#: Problems that one error lists before it only counts.
_LISTED = 20

#: Instructions that call computations which are planned like the entry: attribute names by opcode.
CALLING = {
    "while": ("body", "condition"),
    "call": ("to_apply",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
}

#: Instructions whose result leaves are their operands' leaves, in order.
_IDENTITY = ("tuple", "opt-barrier", "optimization-barrier", "domain", "add-dependency")

#: Instructions that compute nothing themselves.
_HANDING_ON = frozenset({"parameter", "get-tuple-element", *_IDENTITY, *CALLING})


def check_plan(module: Module, plan: Plan, *, is_piece: bool = False) -> None:
    """Check `plan` against `module`; raises PlanCheckError with a list of problems and their places.

    is_piece: it is one of several programs of a step: these may pass partial sums to each other.
    """
    problems = _Checker(module, plan, is_piece).run()
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems[:_LISTED])
        more = f"\n  and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
        raise PlanCheckError(
            f"{len(problems)} problem(s) in the plan over {plan.mesh}:\n{listed}{more}",
            where=f"plan of {module.name}",
            remedy="this is a defect of the planner: report it with the HLO text",
        )


def reachable_by_name(module: Module) -> dict[str, Computation]:
    """The entry and every computation it reaches through while, call and conditional, by name."""
    computations: dict[str, Computation] = {}
    todo = [module.entry]
    while todo:
        computation = todo.pop()
        if computation.name in computations:
            continue
        computations[computation.name] = computation
        for instruction in computation.instructions:
            for name in CALLING.get(instruction.opcode, ()):
                todo.extend(instruction.called.get(name, ()))
    return computations


@dataclass(slots=True)
class _Checker:
    module: Module
    plan: Plan
    is_piece: bool = False
    problems: list[str] = field(default_factory=list)
    entries: dict[str, InstructionPlan] = field(default_factory=dict)

    def run(self) -> list[str]:
        self._check_program()
        computations = reachable_by_name(self.module)
        self._collect_entries(computations)
        judge = LegalityCache(self.plan.mesh, find_inside(self.module))
        for computation in computations.values():
            for instruction in computation.instructions:
                for problem in self._problems(instruction, judge):
                    self._report(computation, instruction, problem)
        self.problems += boundary_problems(self.module, self.plan, self.entries, is_piece=self.is_piece)
        self._check_collectives()
        return self.problems

    def _problems(self, instruction: Instruction, judge: LegalityCache) -> Sequence[str]:
        entry = self.entries.get(instruction.name)
        if entry is None:
            return ("has no entry in the plan",)
        hands_on = instruction.opcode in _HANDING_ON
        problems = judge.problems(instruction, entry, hands_on=hands_on)
        if problems:
            return problems
        problems = tuple(self._check_partial_uses(instruction, entry))
        return (*problems, *self._check_carried(instruction, entry)) if hands_on else problems

    def _report(self, computation: Computation, instruction: Instruction, problem: str) -> None:
        line = f" (line {instruction.line})" if instruction.line else ""
        self.problems.append(f"{computation.name}/{instruction.name}{line}, {instruction.opcode}: {problem}")

    def _check_program(self) -> None:
        if self.plan.module_name != self.module.name:
            self.problems.append(f"plan of module {self.plan.module_name!r}, not {self.module.name!r}")
        text = self.plan.hlo_text
        if text is not None and sha256(text.encode()).hexdigest() != self.plan.hlo_sha256:
            self.problems.append("hlo_sha256 is not the hash of the plan's HLO text")

    def _collect_entries(self, computations: Mapping[str, Computation]) -> None:
        names = {
            instruction.name: computation.name
            for computation in computations.values()
            for instruction in computation.instructions
        }
        for entry in self.plan.instructions:
            if entry.name in self.entries:
                self.problems.append(f"{entry.computation}/{entry.name}: two entries in the plan")
            elif names.get(entry.name) != entry.computation:
                self.problems.append(f"{entry.computation}/{entry.name}: the program has no such instruction")
            else:
                self.entries[entry.name] = entry

    # ---- one instruction ---------------------------------------------------

    def _check_partial_uses(self, instruction: Instruction, entry: InstructionPlan) -> Iterator[str]:
        """A partial use is legal if the value is partial, or is whole and can be kept on one device."""
        for i, (operand, used) in enumerate(zip(instruction.operands, entry.operands, strict=True)):
            if not any(sharding.unreduced for sharding in used):
                continue
            producer = self.entries.get(operand.name)
            if producer is None:
                continue
            for have, want, leaf in zip(producer.result, used, operand.shape.leaves, strict=False):
                new = set(want.unreduced) - set(have.unreduced)
                split = new & set(have.axes)
                if split:
                    axes = _join_sorted(split)
                    yield f"operand {i} is used as partial over {axes}, but {operand.name} is split over it"
                elif new and not becomes_partial(leaf.element_type):
                    axes, kind = _join_sorted(new), leaf.element_type
                    yield f"operand {i} is used as partial over {axes}, but {operand.name} is a whole {kind}"

    def _check_carried(self, instruction: Instruction, entry: InstructionPlan) -> Iterator[str]:
        """Forwarded leaves keep their sharding, into and out of called computations."""
        opcode = instruction.opcode
        if entry.partial:
            yield f"reduces over {', '.join(entry.partial)}, but only hands values on"
        if opcode in _IDENTITY:
            yield from _differ("the result", entry.result, "its operands", flat(entry.operands))
        elif opcode == "get-tuple-element":
            first = _leaves_before(instruction)
            element = entry.operands[0][first : first + len(entry.result)]
            yield from _differ("the result", entry.result, f"element {instruction.index}", element)
        elif opcode == "while":
            yield from _differ("the result", entry.result, "the initial value", entry.operands[0])
            yield from self._check_called(instruction, "body", entry.operands[0], entry.result)
            yield from self._check_called(instruction, "condition", entry.operands[0], None)
        elif opcode == "call":
            yield from self._check_called(instruction, "to_apply", flat(entry.operands), entry.result)
        elif opcode == "conditional":
            yield from self._check_conditional(instruction, entry)

    def _check_conditional(self, instruction: Instruction, entry: InstructionPlan) -> Iterator[str]:
        branches = [(name, branch) for name in CALLING["conditional"] for branch in instruction.called.get(name, ())]
        if not all(sharding.is_replicated for sharding in entry.operands[0]):
            yield "its predicate is split"
        for i, (name, branch) in enumerate(branches):
            yield from self._check_computation(f"{name} {branch.name}", branch, entry.operands[i + 1], entry.result)

    def _check_called(
        self, instruction: Instruction, name: str, arguments: ValueSharding, result: ValueSharding | None
    ) -> Iterator[str]:
        for computation in instruction.called.get(name, ()):
            yield from self._check_computation(f"{name} {computation.name}", computation, arguments, result)

    def _check_computation(
        self, what: str, computation: Computation, arguments: ValueSharding, result: ValueSharding | None
    ) -> Iterator[str]:
        entries = [self.entries.get(parameter.name) for parameter in computation.parameters]
        if all(entries):
            parameters = flat([entry.result for entry in entries if entry])
            yield from _differ(f"the parameters of {what}", parameters, "what it is given", arguments)
        root = self.entries.get(computation.root.name)
        if root is not None and result is not None:
            yield from _differ(f"the root of {what}", root.result, "the result", result)

    # ---- the whole program ---------------------------------------------------

    def _check_collectives(self) -> None:
        for collective in self.plan.collectives:
            where = f"collective {collective.kind} at {collective.instruction}"
            if collective.instruction not in self.entries:
                self.problems.append(f"{where}: the program has no such instruction")
            unknown = [axis for axis in collective.axes if axis not in self.plan.mesh.sizes]
            if unknown or not collective.axes:
                self.problems.append(f"{where}: axes {collective.axes} are not of the mesh")
            if collective.count < 1 or collective.wire_bytes < 0 or collective.time_s < 0:
                self.problems.append(f"{where}: count, bytes or time out of range")


# ---- values ----------------------------------------------------------------


def _join_sorted(axes: Iterable[str]) -> str:
    return ", ".join(sorted(axes))


def _differ(what: str, left: Sequence[TensorSharding], other: str, right: Sequence[TensorSharding]) -> Iterator[str]:
    """Differences between two values' leaves that should have equal layouts."""
    if len(left) != len(right):
        yield f"{what} has {len(left)} arrays, {other} {len(right)}"
        return
    for i, (a, b) in enumerate(zip(left, right, strict=True)):
        if a is not b and a != b:
            yield f"{what} is {a} in leaf {i}, {other} is {b}"


def _leaves_before(element: Instruction) -> int:
    """Array leaves of a tuple before the element that a get-tuple-element reads."""
    shape = element.operands[0].shape
    elements = shape.elements if isinstance(shape, TupleShape) else ()
    return sum(len(part.leaves) for part in elements[: element.index])
