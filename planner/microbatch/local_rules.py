"""What one micro-batch can compute of one instruction, from the instruction's sharding rule.

The rules (`planner.rules`) say for one mesh axis which dimensions go together and which are summed; time is such an
axis. Left out are the ways that only a partitioner can take: borders sent by neighbours, and rows that each device
looks up in its own part of a table. Added are opcodes that XLA's partitioner gathers although each element of their
batch is computed for itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import gcd, prod

from shardwright.hlo import Instruction
from shardwright.planner.microbatch.kinds import SUM, WHOLE, Along, Kind, Term, Whole
from shardwright.planner.rules import Factor
from shardwright.planner.rules.base import factor, operand_leaves
from shardwright.planner.rules.linear import becomes_partial, is_zero, linear_ways
from shardwright.planner.strategies.rule_cache import RuleCache

#: Instructions that do or give something else when they run again.
IMPURE = frozenset({"rng", "rng-get-and-update-state", "infeed", "outfeed", "send", "recv"})


@dataclass(frozen=True, slots=True)
class LocalRule:
    """One way to compute an instruction in a micro-batch.

    operands: the kind in which each array leaf of the operands is read. results: the kinds of the result's leaves.
    divisor: what the number of micro-batches must divide; 0: anything.
    """

    operands: tuple[Kind, ...]
    results: tuple[Kind, ...]
    divisor: int = 0


class LocalRules:
    """How micro-batches compute instructions; equal instructions that read parts of the batch are asked for once."""

    def __init__(self, rules: RuleCache) -> None:
        self.rules = rules
        self._along: dict[tuple[int, tuple[Kind, ...]], LocalRule | None] = {}

    def of(self, instruction: Instruction, kinds: tuple[Kind, ...], *, adds_whole: bool) -> LocalRule | None:
        """How a micro-batch computes `instruction` of operand leaves of these kinds; None where it cannot.

        adds_whole: a whole value may be added to terms, as the first one's part; else only zeros may.
        """
        types = set(map(type, kinds))
        if types <= _WHOLE_ALONE:
            whole = (WHOLE,) * len(instruction.shape.leaves)
            return None if instruction.opcode in IMPURE else LocalRule(kinds, whole)
        if Along in types:
            key = self.rules.number(instruction), kinds
            if key not in self._along:
                self._along[key] = _along(instruction, kinds, self.rules)
            return self._along[key]
        if all(kind in (WHOLE, SUM) for kind in kinds):
            return _linear(instruction, kinds, adds_whole=adds_whole)
        return None


#: Types of the operands' kinds where all are whole.
_WHOLE_ALONE = frozenset({Whole})


def localize(instruction: Instruction, leaf: int, wanted: Along, rules: RuleCache) -> LocalRule | None:
    """How a micro-batch makes its part of a whole value from parts of the operands; None where it must cut it out."""
    if instruction.opcode == "reshape":
        source, target = instruction.operands[0].shape.leaves[0], instruction.shape.leaves[0]
        found = _cut_after_reshape(target.dimensions, source.dimensions, wanted)
        return None if found is None else LocalRule((found[0],), (wanted,), found[1])
    for each in _factors(instruction, rules):
        if each.contracted or each.results[leaf] != wanted.dim or not _keeps(instruction, each, wanted.outer):
            continue
        return LocalRule(_cut(each.operands, wanted.outer), _cut(each.results, wanted.outer), each.size // wanted.outer)
    return None


def localize_inexactly(instruction: Instruction, kinds: tuple[Kind, ...]) -> LocalRule | None:
    """How a micro-batch computes for itself alone what runs through the whole batch: a running sum, a sort.

    None where the instruction is neither.
    """
    cut = {kind for kind in kinds if isinstance(kind, Along)}
    if len(cut) != 1 or instruction.opcode not in ("reduce-window", "sort"):
        return None
    (kind,) = cut
    dimensions = operand_leaves(instruction)[0].dimensions
    if kind.outer > 1 or (instruction.opcode == "reduce-window" and not is_running(instruction, kind.dim)):
        return None
    arrays = [leaf.dimensions == dimensions for leaf in operand_leaves(instruction)]
    operands = tuple([kind if is_array else WHOLE for is_array in arrays])
    return LocalRule(operands, (kind,) * len(instruction.shape.leaves), dimensions[kind.dim])


def is_running(instruction: Instruction, dim: int) -> bool:
    """Whether a reduce-window is a running reduction along `dim`: a window as long as it, padded on one side."""
    window, size = instruction.get("window"), operand_leaves(instruction)[0].dimensions[dim]
    padding = {window.padding_low[dim], window.padding_high[dim]}
    return window.sizes[dim] == size and window.strides[dim] == 1 and padding == {0, size - 1}


def _along(instruction: Instruction, kinds: tuple[Kind, ...], rules: RuleCache) -> LocalRule | None:
    cut = {i: kind for i, kind in enumerate(kinds) if isinstance(kind, Along)}
    outers = {kind.outer for kind in cut.values()}
    if len(outers) > 1:
        return None
    (outer,) = outers
    if instruction.opcode == "reshape":
        (kind,) = cut.values()
        source, target = instruction.operands[0].shape.leaves[0], instruction.shape.leaves[0]
        found = _cut_after_reshape(source.dimensions, target.dimensions, kind)
        return None if found is None else LocalRule(kinds, (found[0],), found[1])
    for each in _factors(instruction, rules):
        if any(each.operands[i] != kind.dim for i, kind in cut.items()) or not _keeps(instruction, each, outer):
            continue
        operands = _cut(each.operands, outer)
        if each.reduction is not None and instruction.opcode == "scatter" and each.reduction == "add":
            operands = (SUM, *operands[1:])  # what is scattered into counts once
        if any(isinstance(kind, Term) and kind != operands[i] for i, kind in enumerate(kinds)):
            continue
        count = len(each.results)
        results = _cut(each.results, outer) if each.reduction is None else (Term(each.reduction),) * count
        return LocalRule(operands, results, each.size // outer)
    return None


def _cut(dims: tuple[int | None, ...], outer: int) -> tuple[Kind, ...]:
    return tuple([WHOLE if dim is None else Along(dim, outer) for dim in dims])


def _linear(instruction: Instruction, kinds: tuple[Kind, ...], *, adds_whole: bool) -> LocalRule | None:
    terms = {i for i, kind in enumerate(kinds) if kind == SUM}
    leaves = operand_leaves(instruction)
    for way in linear_ways(instruction):
        if not terms <= way.operands:
            continue
        others = way.operands - terms
        if all(_may_be_term(instruction, i, leaves[i].element_type, adds_whole) for i in others):
            return LocalRule(
                tuple([SUM if i in way.operands else WHOLE for i in range(len(kinds))]),
                (SUM,) * len(instruction.shape.leaves),
            )
    return None


#: A sum of terms and of something whole is finished first: the result is the same, and adds up more exactly.
_FINISHED_FIRST = frozenset({"add", "subtract", "complex", "concatenate", "select"})


def _may_be_term(instruction: Instruction, leaf: int, element_type: str, adds_whole: bool) -> bool:
    operand = instruction.operands[leaf] if len(instruction.operands) > leaf else None
    if operand is not None and is_zero(operand):
        return True
    return becomes_partial(element_type) and (adds_whole or instruction.opcode not in _FINISHED_FIRST)


# ---- factors -----------------------------------------------------------------


def _factors(instruction: Instruction, rules: RuleCache) -> Iterator[Factor]:
    """The factors that one micro-batch can take by itself."""
    rule = rules(instruction)
    if rule.leafwise:
        return
    looked_up = _lookup_predicate(instruction)
    for each in rule.factors:
        if each.reduction != "gather" and not looked_up(each) and not _repeats(instruction, each):
            yield each
    extra = _BATCHED.get(instruction.opcode)
    if extra is not None:
        yield from extra(instruction)


def _lookup_predicate(instruction: Instruction) -> Callable[[Factor], bool]:
    """Factors by which each part holds some rows of a table, and takes of all indices those that fall into it."""
    if instruction.opcode == "gather":
        return lambda each: each.operands[1] is None and each.contracted
    if instruction.opcode == "scatter":
        return lambda each: each.operands[-1] is None
    return lambda each: False


def _repeats(instruction: Instruction, each: Factor) -> bool:
    """Whether what is scattered into would count in every micro-batch."""
    return instruction.opcode == "scatter" and each.reduction not in (None, "add", "maximum", "minimum")


def _keeps(instruction: Instruction, each: Factor, outer: int) -> bool:
    """Whether every dimension that the factor names is cut alike: of one size where outer blocks are cut."""
    if outer == 1:
        return each.size > 1
    inputs, outputs = operand_leaves(instruction), instruction.shape.leaves
    sizes = {
        leaves[i].dimensions[dim]
        for leaves, dims in ((inputs, each.operands), (outputs, each.results))
        for i, dim in enumerate(dims)
        if dim is not None
    }
    return len(sizes) == 1 and each.size % outer == 0 and each.size > outer


@lru_cache(maxsize=4096)
def _cut_after_reshape(source: tuple[int, ...], target: tuple[int, ...], kind: Along) -> tuple[Along, int] | None:
    """Where a cut of `source` lies in `target`, and what the number of cuts must divide.

    In memory the cut is of `before` blocks, each into M equal parts; so it must be in the target.
    """
    size = source[kind.dim] // kind.outer
    before = prod(source[: kind.dim]) * kind.outer
    prefix = 1
    for dim, length in enumerate(target):
        if prefix * length > before:
            outer, rest = divmod(before, prefix)
            if rest or length % outer:
                return None
            divisor = gcd(size, length // outer)
            return (Along(dim, outer), divisor) if divisor > 1 else None
        prefix *= length
    return None


# ---- opcodes whose batch XLA gathers, and a micro-batch need not -----------------


def _leading(instruction: Instruction, count: int) -> Iterator[Factor]:
    """The first dimensions, which all operands and results share."""
    for dim in range(count):
        found = factor(
            instruction,
            f"b{dim}",
            {i: dim for i, leaf in enumerate(operand_leaves(instruction)) if leaf.rank > dim},
            dict.fromkeys(range(len(instruction.shape.leaves)), dim),
        )
        if found is not None:
            yield found


def _fourier(instruction: Instruction) -> Iterator[Factor]:
    yield from _leading(instruction, instruction.shape.leaves[0].rank - len(instruction.get("fft_length", ())))


def _top(instruction: Instruction) -> Iterator[Factor]:
    yield from _leading(instruction, instruction.shape.leaves[0].rank - 1)


def _normalization_factors(instruction: Instruction) -> Iterator[Factor]:
    """With given statistics every element is normalised for itself."""
    for dim in range(instruction.shape.leaves[0].rank):
        found = factor(instruction, f"d{dim}", {0: dim}, {0: dim})
        if found is not None and dim != instruction.get("feature_index"):
            yield found


def _convolution_factors(instruction: Instruction) -> Iterator[Factor]:
    dims = instruction.get("dim_labels")
    if instruction.get("batch_group_count", 1) == 1:
        found = factor(instruction, "n", {0: dims.input_batch}, {0: dims.output_batch})
        if found is not None:
            yield found


_BATCHED: dict[str, Callable[[Instruction], Iterator[Factor]]] = {
    "batch-norm-inference": _normalization_factors,
    "convolution": _convolution_factors,
    "fft": _fourier,
    "topk": _top,
}
