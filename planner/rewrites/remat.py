"""Rematerialization: the backward pass recomputes forward values instead of storing them.

Chen et al., "Training Deep Nets with Sublinear Memory Cost" (2016), on HLO: a value not stored is cloned ahead of its
first use in the backward pass. The clones read stored values through an optimization barrier: XLA then cannot see
their equality to the originals. The barrier also takes a value of the backward pass: no clone is computed before
the backward pass reaches that point.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

from shardwright.errors import PlanError
from shardwright.hlo import Instruction, Module, TupleShape
from shardwright.planner.rewrites import edit
from shardwright.regions import border_of

#: Instructions with another result or effect in a second run.
_ONCE = frozenset({"rng", "rng-get-and-update-state", "infeed", "outfeed", "send", "recv"})

#: JAX's marks of transposed instructions (the backward pass) and differentiated ones (the forward pass).
_BACKWARD_MARK, _FORWARD_MARK = "transpose(", "jvp("


@dataclass(frozen=True, slots=True, kw_only=True)
class Rematerialized:
    """The rewritten program.

    twins: added instruction → its original in `recompute`, or the original of the clones it belongs to.
    """

    module: Module
    twins: Mapping[str, str]


def rematerialize(
    module: Module, *, keep: Set[str], recompute: Set[str], stages: Mapping[str, int] | None = None
) -> Rematerialized:
    """The program with clones of the instructions in `recompute` for the backward pass.

    keep, recompute: names of instructions of the entry computation, together its forward pass; the rest is the backward
        pass, but for arguments, constants and values of these alone. Only these and values in `keep` are
        stored for the backward pass. Connected values of `recompute` form a segment, recomputed up to the backward
        pass's needs. From then on the backward pass also reads arguments behind the segment's barrier: it can
        gather weights again instead of holding the forward pass's copy.
    stages: numbers of values of the forward pass, in its order. The backward pass goes through them in reverse: readers
        of early stages come late. Without stages it keeps the order of the text; JAX puts factors made of
        the forward pass alone first.

    Results equal the original program's, bit for bit under equal compilation by XLA. `module` is not changed; it is
    returned for a backward pass that reads nothing in `recompute`.
    Raises PlanError for a name outside the entry computation or in both sets, and for an instruction that must not run
    twice.
    """
    by_name = {instruction.name: instruction for instruction in module.entry}
    _check(by_name, keep, recompute)
    with edit.without_gc():
        stored, again = {by_name[name] for name in keep}, {by_name[name] for name in recompute}
        numbers = {by_name[name]: number for name, number in (stages or {}).items() if name in by_name}
        return _Rematerializer(module, stored, again, numbers).run()


def forward_pass(module: Module) -> list[str]:
    """Names of the entry's instructions in the forward pass of a JAX program, in order.

    The forward pass: instructions JAX marks as differentiated, and their inputs. The backward pass: those it marks as
    transposed, and their consumers. Arguments and functions of constants alone are in neither.
    Empty for a program without a backward pass, or without JAX's names.
    """
    backward: set[Instruction] = set()
    for instruction in module.entry:
        if _BACKWARD_MARK in instruction.op_name or any(operand in backward for operand in instruction.operands):
            backward.add(instruction)
    left_out = backward | available_values(module)
    forward: set[Instruction] = set()
    for instruction in reversed(module.entry.instructions):
        if instruction not in left_out and (instruction in forward or _FORWARD_MARK in instruction.op_name):
            forward.add(instruction)
            forward.update(operand for operand in instruction.operands if operand not in left_out)
    return [instruction.name for instruction in module.entry if instruction in forward] if backward else []


def _check(by_name: dict[str, Instruction], keep: Set[str], recompute: Set[str]) -> None:
    for name in sorted(keep | recompute):
        if name not in by_name:
            raise PlanError(
                f"there is no instruction {name!r} in the entry computation", where=name, remedy="inline calls first"
            )
    for name in sorted(recompute):
        instruction = by_name[name]
        if name in keep:
            raise PlanError(f"{name!r} is to be kept and to be computed again", where=name)
        if runs_once(instruction):
            raise PlanError(
                f"{instruction.opcode} {name!r} must not run twice", where=name, remedy="keep its result instead"
            )


def runs_once(instruction: Instruction) -> bool:
    """Whether a second run would have another result or effect."""
    return instruction.opcode in _ONCE or bool(instruction.get("custom_call_has_side_effect", False))


def available_values(module: Module) -> set[Instruction]:
    """Arguments, and functions of constants alone: available at any time, too cheap for a clone."""
    available: set[Instruction] = set()
    for instruction in module.entry:
        is_source = instruction.opcode in ("parameter", "constant", "iota")
        made_of_constants = instruction.operands and all(
            operand in available and operand.opcode != "parameter" for operand in instruction.operands
        )
        if is_source or made_of_constants:
            available.add(instruction)
    return available


def reverse_by_stage(backward: Sequence[Instruction], stages: Mapping[Instruction, int]) -> list[Instruction]:
    """The backward pass from the last stage to the first, then what updates state, each in program order."""
    if not stages:
        return list(backward)
    last = max(stages.values())
    stage: dict[Instruction, int] = dict(stages)
    for instruction in backward:
        stage[instruction] = min((stage.get(operand, last) for operand in instruction.operands), default=last)
    needed: set[Instruction] = set()
    for instruction in reversed(backward):
        if _BACKWARD_MARK in instruction.op_name or instruction in needed:
            needed.add(instruction)
            needed.update(instruction.operands)
    return sorted(backward, key=lambda i: -stage[i] if i in needed else 1)


def _find_in_regions(in_order: Sequence[Instruction]) -> frozenset[Instruction]:
    """The instructions whose values are of a manual region. in_order: operands ahead of what reads them."""
    regions: dict[Instruction, frozenset[int]] = {}
    for instruction in in_order:
        around = frozenset[int]().union(*(regions.get(operand, ()) for operand in instruction.operands))
        border = border_of(instruction)
        if border is not None:
            around = around | {border.region} if border.enters else around - {border.region}
        if around:
            regions[instruction] = around
    return frozenset(regions)


class _Rematerializer:
    """Rewrites the entry computation: one group of clones per segment, ahead of its first backward reader."""

    def __init__(
        self,
        module: Module,
        keep: set[Instruction],
        recompute: set[Instruction],
        stages: Mapping[Instruction, int],
    ) -> None:
        self.module = module
        self.root = module.entry.root
        self.recompute = recompute
        self.names = edit.Names(module)
        self.fixed = available_values(module)
        others = keep | recompute | self.fixed
        # The text may interleave the passes. Forward first is a legal order too, and makes order numbers comparable.
        forward = [instruction for instruction in module.entry if instruction in others]
        self.backward = dict.fromkeys(reverse_by_stage([i for i in module.entry if i not in others], stages))
        self.in_order = [*forward, *self.backward]
        self.order = {instruction: number for number, instruction in enumerate(self.in_order)}
        self.depth: dict[Instruction, int] = {}  # of the backward pass, how many instructions follow one another
        for instruction in self.backward:
            self.depth[instruction] = 1 + max((self.depth.get(source, 0) for source in instruction.operands), default=0)
        self.in_regions = _find_in_regions(self.in_order)
        self.readers: dict[Instruction, list[Instruction]] = {}  # recomputed value → its backward consumers
        for user in self.backward:
            for operand in user.operands if user is not self.root else ():
                if operand in recompute:
                    self.readers.setdefault(operand, []).append(user)
        self.made: dict[Instruction, Instruction] = {}  # original → its copy
        self.clones: dict[Instruction, Instruction] = {}  # original → the backward pass's substitute
        self.arguments: dict[Instruction, Instruction] = {}  # argument → its element of the last barrier
        self.twins: dict[str, str] = {}
        self.out: list[Instruction] = []

    def run(self) -> Rematerialized:
        self._check_passes()
        due = self._segments_by_first_reader()
        if not due:
            return Rematerialized(module=self.module, twins={})
        for old in self.in_order:
            for segment in due.get(old, ()):
                self._clone(segment, old)
            self.made[old] = edit.copy_of(old, [self._read_by(old, operand) for operand in old.operands])
            self.out.append(self.made[old])
        entry = self.module.entry
        edited = edit.computation_of(entry, self.out, self.made[self.root])
        module = edit.module_of(self.module, [edited if c is entry else c for c in self.module.computations])
        return Rematerialized(module=module, twins=self.twins)

    def _read_by(self, old: Instruction, operand: Instruction) -> Instruction:
        """The substitute for an original's operand.

        The first clone comes after the forward pass; the program's outputs are the originals.
        """
        if old is not self.root:
            if operand in self.clones:
                return self.clones[operand]
            if operand in self.arguments and _BACKWARD_MARK in old.op_name:
                return self.arguments[operand]
        return self.made[operand]

    def _check_passes(self) -> None:
        for instruction, number in self.order.items():
            for operand in instruction.operands:
                if self.order[operand] > number:
                    raise PlanError(
                        f"{instruction.name!r} of the forward pass reads {operand.name!r}, which is not of it",
                        where=instruction.name,
                        remedy="name the whole forward pass in keep and recompute, and nothing else",
                    )

    # ---- what is cloned, and where -------------------------------------------
    def _segments_by_first_reader(self) -> dict[Instruction, list[list[Instruction]]]:
        """Per instruction of the backward pass, the needed parts of segments it is the first to read."""
        due: dict[Instruction, list[list[Instruction]]] = {}
        for segment in self._split_into_segments(self._find_needed(self.readers)):
            first = min(self._readers_of(segment), key=self.order.__getitem__)
            due.setdefault(first, []).append(segment)
        return due

    def _readers_of(self, segment: Sequence[Instruction]) -> list[Instruction]:
        return [user for value in segment for user in self.readers.get(value, ())]

    def _find_needed(self, roots: Collection[Instruction]) -> list[Instruction]:
        """The values read, and their inputs in `recompute`, in program order."""
        needed = dict.fromkeys(roots)
        for instruction in reversed(self.in_order):
            if instruction in needed:
                needed.update(dict.fromkeys(operand for operand in instruction.operands if operand in self.recompute))
        return sorted(needed, key=self.order.__getitem__)

    def _split_into_segments(self, values: Sequence[Instruction]) -> list[list[Instruction]]:
        """The values by segment: the connected components of direct reads."""
        from networkx.utils import UnionFind  # loads as long as half of the planner does, and few plans recompute

        together = UnionFind(values)
        for value in values:
            for operand in value.operands:
                if operand in self.recompute:
                    together.union(value, operand)
        segments: dict[Instruction, list[Instruction]] = {}
        for value in values:
            segments.setdefault(together[value], []).append(value)
        return list(segments.values())

    # ---- cloning -------------------------------------------------------------
    def _clone(self, segment: Sequence[Instruction], reader: Instruction) -> None:
        """Clones of a segment, ahead of its first reader."""
        inputs = dict.fromkeys(
            operand
            for value in segment
            for operand in value.operands
            if operand not in self.recompute and (operand not in self.fixed or operand.opcode == "parameter")
        )
        first = len(self.out)
        held = self._behind_barrier(list(inputs), self._trigger(segment, reader), segment[0].name)
        self.twins.update({added.name: segment[-1].name for added in self.out[first:]})
        self.arguments.update({value: held[value] for value in inputs if value.opcode == "parameter"})
        for value in segment:
            operands = [self._read_by_clone(operand, held) for operand in value.operands]
            clone = edit.copy_of(value, operands, name=self.names.like(value.name, "remat"))
            self.twins[clone.name] = value.name
            self.clones[value] = clone
            self.out.append(clone)

    def _read_by_clone(self, operand: Instruction, stand_ins: dict[Instruction, Instruction]) -> Instruction:
        if operand in self.recompute:
            return self.clones[operand]
        return stand_ins.get(operand) or self.made[operand]

    def _trigger(self, segment: Sequence[Instruction], reader: Instruction) -> Instruction | None:
        """The value of the backward pass a segment waits for, made before all its readers.

        Among their inputs, the end of the longest chain: the incoming gradient, not a factor beside it. No value of a
        manual region, which nothing outside of it reads.
        """
        before = self.order[reader]
        todo: list[Instruction] = self._readers_of(segment)
        seen, made_before = set(todo), dict[Instruction, None]()
        while todo:
            for operand in todo.pop().operands:
                if operand not in self.backward:
                    continue
                if self.order[operand] < before and operand not in self.in_regions:
                    made_before[operand] = None
                elif operand not in seen:
                    seen.add(operand)
                    todo.append(operand)
        if made_before:
            return max(made_before, key=lambda value: (self.depth[value], self.order[value]))
        earlier = (self.in_order[number] for number in range(before - 1, -1, -1))
        previous = next((value for value in earlier if value not in self.in_regions), None)
        return previous if previous in self.backward else None

    def _behind_barrier(
        self, inputs: Sequence[Instruction], trigger: Instruction | None, name: str
    ) -> dict[Instruction, Instruction]:
        """Each input behind a barrier that also waits for the trigger.

        Later consumers of the trigger read it behind the barrier too: XLA drops an unread element.
        """
        passed = [*inputs, *([trigger] if trigger else [])]
        values = tuple(self.made[value] for value in passed)
        shape = TupleShape(tuple(value.shape for value in values))
        together = Instruction(self.names.like(name, "held"), "tuple", shape, values)
        barrier = Instruction(self.names.like(name, "barrier"), "opt-barrier", shape, (together,))
        self.out += [together, barrier]
        held = {value: self._element(barrier, number, value.name) for number, value in enumerate(passed)}
        if trigger:
            self.made[trigger] = held[trigger]
        return held

    def _element(self, barrier: Instruction, number: int, name: str) -> Instruction:
        shape = barrier.operands[0].operands[number].shape
        element = Instruction(self.names.like(name, "held"), "get-tuple-element", shape, (barrier,))
        element.attributes["index"] = edit.attribute("index", str(number))
        element.index = number
        self.out.append(element)
        return element
