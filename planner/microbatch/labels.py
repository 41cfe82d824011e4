"""Labels the kind of every value of a program by following the batch through it.

Kinds only rise: whole, then a part or a term, then done. Loops therefore reach a fixed point: a carried value has the
join of the kinds of its first value and of each trip's result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from shardwright.hlo import Computation, Instruction, TupleShape
from shardwright.planner.microbatch.kinds import DONE, WHOLE, Along, Done, Kind, Term, Whole, join_kinds
from shardwright.planner.microbatch.local_rules import LocalRule, LocalRules, localize_inexactly
from shardwright.planner.strategies.rule_cache import RuleCache

#: Instructions whose result leaves are operand leaves, in order.
TRANSPARENT = frozenset({"tuple", "optimization-barrier", "opt-barrier", "domain", "add-dependency"})

#: Computations that branches run, in the order of the operands after the first.
BRANCHES = ("branch_computations", "true_computation", "false_computation")

#: Work that is no side computation: never done for the whole batch ahead of the micro-batches.
HEAVY = frozenset({"dot", "convolution", "ragged-dot"})

#: Kind types of operands available before the first micro-batch, or made after the last.
_FINISHED = frozenset({Whole, Done})

_NEVER_EARLY = HEAVY | {"while", "call", "conditional", "custom-call", "fft", "cholesky", "triangular-solve", "sort"}


@dataclass(slots=True)
class KindLabels:
    """Labels of one computation, for parameters of given kinds.

    computation: the computation.
    kinds: per instruction, the kinds of its result leaves.
    local_rules: per instruction, its computation in a micro-batch.
    regions: per control flow instruction, the labels of its computations (condition and body; the branches).
    done: instructions that run once without an operand that is done.
    cheap: instructions of terms and parts also computable for the whole batch, ahead of the micro-batches.
    collecting: done instructions that put parts of the batch together, and their consumers.
    conflicts: instructions with parts of the batch and a value of the whole batch as operands; products and loops over
        collected parts: the model itself, run for the whole batch.
    """

    computation: Computation
    kinds: dict[Instruction, tuple[Kind, ...]] = field(default_factory=dict)
    local_rules: dict[Instruction, LocalRule] = field(default_factory=dict)
    regions: dict[Instruction, tuple[KindLabels, ...]] = field(default_factory=dict)
    done: dict[Instruction, None] = field(default_factory=dict)
    cheap: set[Instruction] = field(default_factory=set)
    collecting: set[Instruction] = field(default_factory=set)
    conflicts: list[Instruction] = field(default_factory=list)

    @property
    def root(self) -> tuple[Kind, ...]:
        return self.kinds[self.computation.root]


def operand_kinds(labels: KindLabels, instruction: Instruction) -> tuple[Kind, ...]:
    """Kinds of the array leaves of all operands, in order."""
    return tuple([kind for operand in instruction.operands for kind in labels.kinds[operand]])


def first_leaf(instruction: Instruction) -> int:
    """The number of a get-tuple-element's first leaf among its operand's leaves."""
    shape = instruction.operands[0].shape
    assert isinstance(shape, TupleShape)
    return sum(len(element.leaves) for element in shape.elements[: instruction.index])


def find_cause(labels: KindLabels, reader: Instruction) -> Instruction:
    """The cause of a whole-batch dependency: a sum over the batch, or an instruction on all of it."""
    current = reader
    while True:
        beside = [
            operand
            for operand in current.operands
            if operand not in labels.cheap and any(isinstance(kind, Term | Done) for kind in labels.kinds[operand])
        ]
        if not beside:
            return current
        current = beside[0]


def branches(instruction: Instruction) -> list[Computation]:
    """The branch computations of a conditional."""
    return [computation for name in BRANCHES for computation in instruction.called.get(name, ())]


class Labeller:
    """Labels computations.

    most_early: elements of the largest value computable ahead of the micro-batches.
    inexact: micro-batches may use their own part in place of the whole batch; `inexact_sites` lists the places.
    rules: cached rules of the instructions, or None.
    """

    def __init__(self, most_early: int, *, inexact: bool = False, rules: RuleCache | None = None) -> None:
        self._most_early = most_early
        self.inexact = inexact
        self.rules = rules or RuleCache()
        self.local_rules = LocalRules(self.rules)
        self.inexact_sites: dict[Instruction, None] = {}
        self._reasons: dict[Instruction, Instruction] = {}

    def entry(self, computation: Computation, kinds: Mapping[Instruction, tuple[Kind, ...]]) -> KindLabels:
        """Labels of the entry. kinds: those of its parameters."""
        return _Region(self, computation, kinds, adds_whole=False, is_entry=True).run()

    def region(self, computation: Computation, kinds: Sequence[Kind], *, adds_whole: bool) -> KindLabels:
        """Labels of a control flow computation. kinds: those of its parameters' leaves."""
        rest = list(kinds)
        given: dict[Instruction, tuple[Kind, ...]] = {}
        for parameter in computation.parameters:
            count = len(parameter.shape.leaves)
            given[parameter], rest = tuple(rest[:count]), rest[count:]
        return _Region(self, computation, given, adds_whole=adds_whole, is_entry=False).run()

    def loop(self, loop: Instruction, kinds: Sequence[Kind]) -> tuple[tuple[Kind, ...], tuple[KindLabels, ...]] | None:
        """Kinds carried by a loop from these initial ones, and labels of condition and body.

        None: a micro-batch cannot run the loop.
        """
        (condition,), (body,) = loop.called["condition"], loop.called["body"]
        carried = tuple(kinds)
        adds_whole = any(isinstance(kind, Along) for kind in carried)
        while True:
            labels = self.region(body, carried, adds_whole=adds_whole)
            now = tuple(join_kinds(old, new) for old, new in zip(carried, labels.root, strict=True))
            if self._fails(loop, body, now, labels):
                return None
            if now == carried:
                break
            carried = now
        tested = self.region(condition, carried, adds_whole=False)
        if tested.root != (WHOLE,):
            self._reasons[loop] = find_cause(tested, next(iter(tested.done), condition.root))
            return None
        return carried, (tested, labels)

    def choice(
        self, choice: Instruction, kinds: Sequence[Kind]
    ) -> tuple[tuple[Kind, ...], tuple[KindLabels, ...]] | None:
        """Result kinds of a conditional on operands of these kinds, and labels of its branches.

        None: a micro-batch cannot run it.
        """
        if kinds[0] != WHOLE:
            return None
        rest = list(kinds[1:])
        branch_labels: list[KindLabels] = []
        results: tuple[Kind, ...] = (WHOLE,) * len(choice.shape.leaves)
        for branch in branches(choice):
            count = sum(len(parameter.shape.leaves) for parameter in branch.parameters)
            labels = self.region(branch, rest[:count], adds_whole=True)
            rest = rest[count:]
            results = tuple(join_kinds(a, b) for a, b in zip(results, labels.root, strict=True))
            if self._fails(choice, branch, results, labels):
                return None
            branch_labels.append(labels)
        return results, tuple(branch_labels)

    def reason(self, instruction: Instruction) -> Instruction:
        """The instruction no micro-batch can compute: inside control flow, or the instruction itself."""
        return self._reasons.get(instruction, instruction)

    def _fails(self, caller: Instruction, region: Computation, kinds: Collection[Kind], labels: KindLabels) -> bool:
        """Whether a control flow computation needs the whole batch; stores the reason."""
        fails = _has_unfinished(kinds)
        if fails:
            cause = find_cause(labels, next(iter(labels.done), region.root))
            self._reasons[caller] = self._reasons.get(cause, cause)
        return fails

    def is_early(self, labels: KindLabels, instruction: Instruction) -> bool:
        """Whether `instruction` on the whole batch is a side computation, not part of the model."""
        if instruction.opcode in _NEVER_EARLY:
            return False
        if max((prod(leaf.dimensions) for leaf in instruction.shape.leaves if leaf.rank), default=0) > self._most_early:
            return False
        return all(
            operand in labels.cheap or all(isinstance(kind, Whole) for kind in labels.kinds[operand])
            for operand in instruction.operands
        )


def _has_unfinished(kinds: Collection[Kind]) -> bool:
    """Whether a control flow result is done or a term other than a sum: loops only add up sums."""
    return any(isinstance(kind, Done) or (isinstance(kind, Term) and kind.reduction != "add") for kind in kinds)


class _Region:
    def __init__(
        self,
        labeller: Labeller,
        computation: Computation,
        parameters: Mapping[Instruction, tuple[Kind, ...]],
        *,
        adds_whole: bool,
        is_entry: bool,
    ) -> None:
        self._labeller = labeller
        self._parameters = parameters
        self._adds_whole = adds_whole
        self._is_entry = is_entry
        self.labels = KindLabels(computation)

    def run(self) -> KindLabels:
        labels = self.labels
        for instruction in labels.computation.instructions:
            labels.kinds[instruction] = self._kinds(instruction)
        return labels

    def _kinds(self, instruction: Instruction) -> tuple[Kind, ...]:
        labels, opcode = self.labels, instruction.opcode
        if opcode == "parameter":
            kinds = self._parameters[instruction]
            if self._is_entry and any(isinstance(kind, Along) for kind in kinds):
                labels.cheap.add(instruction)
            return kinds
        if self._reads_collected(instruction):
            labels.collecting.add(instruction)
        if opcode == "get-tuple-element":
            first = first_leaf(instruction)
            return labels.kinds[instruction.operands[0]][first : first + len(instruction.shape.leaves)]
        kinds = operand_kinds(labels, instruction)
        if opcode in TRANSPARENT:
            return kinds[: len(instruction.shape.leaves)]
        if opcode in ("while", "conditional"):
            return self._control_flow(instruction, kinds)
        return self._label_computation(instruction, kinds)

    # ---- control flow ----------------------------------------------------------
    def _control_flow(self, instruction: Instruction, kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
        is_loop = instruction.opcode == "while"
        if DONE not in kinds and not (self._is_entry and _only_sums(kinds)):
            solution = (self._labeller.loop if is_loop else self._labeller.choice)(instruction, kinds)
            if solution is not None:
                results, self.labels.regions[instruction] = solution
                return results
        return self._once(instruction, kinds)

    # ---- what computes -----------------------------------------------------------
    def _label_computation(self, instruction: Instruction, kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
        labels = self.labels
        if DONE in kinds and _FINISHED.issuperset(map(type, kinds)):  # most of an optimizer
            return self._once(instruction, kinds)
        rule = (
            self._labeller.local_rules.of(instruction, kinds, adds_whole=self._adds_whole)
            if DONE not in kinds
            else None
        )
        if rule is None:
            early = tuple(self._early(instruction, kinds))
            if early != kinds:
                rule = self._labeller.local_rules.of(instruction, early, adds_whole=self._adds_whole)
        if rule is None and self._labeller.inexact:
            rule = self._inexact(instruction, kinds)
        if rule is not None:
            labels.local_rules[instruction] = rule
            if kinds and self._is_entry and self._is_cheap(instruction, rule):
                labels.cheap.add(instruction)
            return rule.results
        return self._once(instruction, kinds)

    def _early(self, instruction: Instruction, kinds: tuple[Kind, ...]) -> Iterator[Kind]:
        """The operands' kinds with cheap values computed ahead: sums over the batch; all of them in a side
        computation."""
        cheap = self.labels.cheap
        everything = self._labeller.is_early(self.labels, instruction)
        position = 0
        for operand in instruction.operands:
            for _ in operand.shape.leaves:
                kind = kinds[position]
                is_early = operand in cheap and (everything or isinstance(kind, Term))
                yield WHOLE if is_early else kind
                position += 1

    def _inexact(self, instruction: Instruction, kinds: tuple[Kind, ...]) -> LocalRule | None:
        """The local rule with a micro-batch's own terms in place of the whole batch's, beside parts of it."""
        if not any(isinstance(kind, Along) for kind in kinds):
            return None
        owners = [operand for operand in instruction.operands for _ in operand.shape.leaves]
        own = tuple(
            WHOLE if isinstance(kind, Term | Done) and self._has_own(owner) else kind
            for owner, kind in zip(owners, kinds, strict=True)
        )
        if own == kinds:
            rule = localize_inexactly(instruction, kinds)
        else:
            rule = self._labeller.local_rules.of(instruction, own, adds_whole=self._adds_whole)
        if rule is not None:
            beside = [owner for owner, kind, now in zip(owners, kinds, own, strict=True) if kind != now]
            self._labeller.inexact_sites |= dict.fromkeys(
                find_cause(self.labels, site) for site in beside or [instruction]
            )
        return rule

    def _has_own(self, value: Instruction) -> bool:
        """Whether a micro-batch can make its own value in place of the whole batch's, from its own terms."""
        todo, seen = [value], {value}
        while todo:
            current = todo.pop()
            kinds = self.labels.kinds[current]
            if current in self.labels.cheap or all(isinstance(kind, Whole | Term) for kind in kinds):
                if any(isinstance(kind, Term) and kind.reduction == "multiply" for kind in kinds):
                    return False
                continue
            if DONE not in kinds or current.opcode in ("parameter", "while", "conditional", "call"):
                return False
            todo += [operand for operand in current.operands if operand not in seen]
            seen.update(current.operands)
        return True

    def _is_cheap(self, instruction: Instruction, rule: LocalRule) -> bool:
        is_whole = rule.results.count(WHOLE) == len(rule.results)
        return not is_whole and self._labeller.is_early(self.labels, instruction)

    def _once(self, instruction: Instruction, kinds: tuple[Kind, ...]) -> tuple[Kind, ...]:
        """Label as done: made after the last micro-batch. A conflict: it needs parts of the batch beside done
        values."""
        labels = self.labels
        if Along in map(type, kinds):  # parts of the batch have to be put together for it
            labels.collecting.add(instruction)
        if instruction in labels.collecting and self._is_conflict(instruction, kinds):
            labels.conflicts.append(instruction)
        if DONE not in kinds:
            labels.done[instruction] = None
        return (DONE,) * len(instruction.shape.leaves)

    def _is_conflict(self, instruction: Instruction, kinds: tuple[Kind, ...]) -> bool:
        """Whether an instruction on collected parts of the batch is part of the model."""
        if instruction.opcode in HEAVY or instruction.opcode == "while":
            return True
        model = any(operand not in self.labels.cheap and self._is_part(operand) for operand in instruction.operands)
        return model and any(isinstance(kind, Done | Term) for kind in kinds)

    def _reads_collected(self, instruction: Instruction) -> bool:
        return not self.labels.collecting.isdisjoint(instruction.operands)

    def _is_part(self, operand: Instruction) -> bool:
        return any(isinstance(kind, Along) for kind in self.labels.kinds[operand])


def _only_sums(kinds: tuple[Kind, ...]) -> bool:
    """A loop over finished sums (an optimizer's, over layers) runs once."""
    return any(isinstance(kind, Term) for kind in kinds) and not any(isinstance(kind, Along) for kind in kinds)
