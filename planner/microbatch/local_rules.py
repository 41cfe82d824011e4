"""One micro-batch's computation of one instruction, from the instruction's sharding rule.

The rules (`planner.rules`) give, for one mesh axis, the dimensions that go together and those that are summed. Time is
such an axis. Left out are ways for partitioners only: halo exchanges between neighbours, and table lookups by
device. Added are opcodes with independent batch elements that XLA's partitioner gathers.
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
from shardwright.regions import Border, border_of

#: Instructions with another result or effect in a second run.
IMPURE = frozenset({"rng", "rng-get-and-update-state", "infeed", "outfeed", "send", "recv"})


@dataclass(frozen=True, slots=True)
class LocalRule:
    """One way to compute an instruction in a micro-batch.

    operands: the kind read of each array leaf of the operands.
    results: the kinds of the result's leaves.
    divisor: a multiple of every legal number of micro-batches; 0: no limit.
    """

    operands: tuple[Kind, ...]
    results: tuple[Kind, ...]
    divisor: int = 0


class LocalRules:
    """Cached local rules: one per class of equal instructions on parts of the batch.

    Labels of the batch dimension ask first for most instructions' sharding rules, in `rules`.
    """

    def __init__(self, rules: RuleCache) -> None:
        self.rules = rules
        self._along: dict[tuple[int, tuple[Kind, ...]], LocalRule | None] = {}

    def of(self, instruction: Instruction, kinds: tuple[Kind, ...], *, adds_whole: bool) -> LocalRule | None:
        """The local rule of `instruction` for operand leaves of these kinds; None: a micro-batch cannot run it.

        adds_whole: a whole value may be added to terms, in the first micro-batch; else only zeros may.
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


#: Kind types of operands that are all whole.
_WHOLE_ALONE = frozenset({Whole})


def localize(instruction: Instruction, leaf: int, along: Along, rules: RuleCache) -> LocalRule | None:
    """A micro-batch's part of a whole value, from parts of the operands; None: it must be cut out."""
    if instruction.opcode == "reshape":
        source, target = instruction.operands[0].shape.leaves[0], instruction.shape.leaves[0]
        cut = _cut_after_reshape(target.dimensions, source.dimensions, along)
        return None if cut is None else LocalRule((cut[0],), (along,), cut[1])
    border = border_of(instruction)
    if border is not None:
        read = _across(border, along, inwards=not border.enters)
        return None if read is None else LocalRule((read,), (along,), _size_inside(instruction, border, along))
    for candidate in _factors(instruction, rules):
        if (
            candidate.contracted
            or candidate.results[leaf] != along.dim
            or not _keeps(instruction, candidate, along.outer)
        ):
            continue
        return LocalRule(
            _cut(candidate.operands, along.outer),
            _cut_results(candidate, along.outer),
            candidate.size // along.outer,
        )
    return None


def localize_inexactly(instruction: Instruction, kinds: tuple[Kind, ...]) -> LocalRule | None:
    """The micro-batch's own run of an instruction through the whole batch: a running sum, a sort.

    None for every other instruction.
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
    """Whether a reduce-window is a running reduction along `dim`: a window of full length, padded on one side."""
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
        moved = _cut_after_reshape(source.dimensions, target.dimensions, kind)
        return None if moved is None else LocalRule(kinds, (moved[0],), moved[1])
    border = border_of(instruction)
    if border is not None:
        (kind,) = cut.values()
        given = _across(border, kind, inwards=border.enters)
        return None if given is None else LocalRule(kinds, (given,), _size_inside(instruction, border, given))
    for candidate in _factors(instruction, rules):
        if any(candidate.operands[i] != kind.dim for i, kind in cut.items()) or not _keeps(
            instruction, candidate, outer
        ):
            continue
        operands = _cut(candidate.operands, outer)
        if candidate.reduction is not None and instruction.opcode == "scatter" and candidate.reduction == "add":
            operands = (SUM, *operands[1:])  # the scatter's operand counts once
        if any(isinstance(kind, Term) and kind != operands[i] for i, kind in enumerate(kinds)):
            continue
        count = len(candidate.results)
        results = (
            _cut_results(candidate, outer) if candidate.reduction is None else (Term(candidate.reduction),) * count
        )
        return LocalRule(operands, results, candidate.size // outer)
    return None


def _across(border: Border, along: Along, *, inwards: bool) -> Along | None:
    """A cut on the other side of a manual region's border: outside, each of the parts that manual axes make of a
    dimension is cut; None for a cut outside that goes through these parts."""
    parts = border.parts[along.dim] if border.parts else 1
    if not inwards:
        return Along(along.dim, along.outer * parts)
    return Along(along.dim, along.outer // parts) if along.outer % parts == 0 else None


def _size_inside(instruction: Instruction, border: Border, result: Along) -> int:
    """Elements that are cut, of one block of the array inside. result: the cut of what the border gives."""
    inside = instruction if border.enters else instruction.operands[0]
    parts = 1 if border.enters or not border.parts else border.parts[result.dim]
    return inside.shape.leaves[0].dimensions[result.dim] // (result.outer // parts)


def _cut_results(factor: Factor, outer: int) -> tuple[Kind, ...]:
    """The kinds of the results of an exact factor, of which some may be sums (`Factor.summed`)."""
    kinds = enumerate(_cut(factor.results, outer))
    return tuple([SUM if number in factor.summed else kind for number, kind in kinds])


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
    """The rule's factors for one micro-batch alone."""
    rule = rules(instruction)
    if rule.leafwise:
        return
    looked_up = _lookup_predicate(instruction)
    for candidate in (*rule.factors, *(each for each in rule.exchange_factors if each.summed)):
        if candidate.reduction != "gather" and not looked_up(candidate) and not _repeats(instruction, candidate):
            yield candidate
    extra = _BATCHED.get(instruction.opcode)
    if extra is not None:
        yield from extra(instruction)


def _lookup_predicate(instruction: Instruction) -> Callable[[Factor], bool]:
    """A predicate for table factors: each part holds some rows and serves the indices into them."""
    if instruction.opcode in ("gather", "dynamic-slice"):
        return lambda factor: factor.operands[1] is None and factor.contracted
    if instruction.opcode == "dynamic-update-slice":
        return lambda factor: factor.operands[1] is None
    if instruction.opcode == "scatter":
        return lambda factor: factor.operands[-1] is None
    return lambda factor: False


def _repeats(instruction: Instruction, factor: Factor) -> bool:
    """Whether a scatter's operand would count in every micro-batch."""
    return instruction.opcode == "scatter" and factor.reduction not in (None, "add", "maximum", "minimum")


def _keeps(instruction: Instruction, factor: Factor, outer: int) -> bool:
    """Whether every dimension of the factor is cut alike: of one size for a cut below outer blocks."""
    if outer == 1:
        return factor.size > 1
    inputs, outputs = operand_leaves(instruction), instruction.shape.leaves
    sizes = {
        leaves[i].dimensions[dim]
        for leaves, dims in ((inputs, factor.operands), (outputs, factor.results))
        for i, dim in enumerate(dims)
        if dim is not None
    }
    return len(sizes) == 1 and factor.size % outer == 0 and factor.size > outer


@lru_cache(maxsize=4096)
def _cut_after_reshape(source: tuple[int, ...], target: tuple[int, ...], kind: Along) -> tuple[Along, int] | None:
    """The cut of `source` in the dimensions `target`, and the divisor of the number of parts; None: no such cut.

    In memory the cut is of `before` blocks, each into M equal parts; the same holds in the target.
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
    """The first dimensions common to all operands and results."""
    for dim in range(count):
        leading = factor(
            instruction,
            f"b{dim}",
            {i: dim for i, leaf in enumerate(operand_leaves(instruction)) if leaf.rank > dim},
            dict.fromkeys(range(len(instruction.shape.leaves)), dim),
        )
        if leading is not None:
            yield leading


def _fourier(instruction: Instruction) -> Iterator[Factor]:
    yield from _leading(instruction, instruction.shape.leaves[0].rank - len(instruction.get("fft_length", ())))


def _top(instruction: Instruction) -> Iterator[Factor]:
    yield from _leading(instruction, instruction.shape.leaves[0].rank - 1)


def _normalization_factors(instruction: Instruction) -> Iterator[Factor]:
    """Batch normalization with given statistics: each element is normalized by itself."""
    for dim in range(instruction.shape.leaves[0].rank):
        elementwise = factor(instruction, f"d{dim}", {0: dim}, {0: dim})
        if elementwise is not None and dim != instruction.get("feature_index"):
            yield elementwise


def _convolution_factors(instruction: Instruction) -> Iterator[Factor]:
    dims = instruction.get("dim_labels")
    if instruction.get("batch_group_count", 1) == 1:
        batch = factor(instruction, "n", {0: dims.input_batch}, {0: dims.output_batch})
        if batch is not None:
            yield batch


_BATCHED: dict[str, Callable[[Instruction], Iterator[Factor]]] = {
    "batch-norm-inference": _normalization_factors,
    "convolution": _convolution_factors,
    "fft": _fourier,
    "topk": _top,
}
