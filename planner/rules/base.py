"""Strategy rules: the factors of one instruction.

A rule is written in terms of ONE mesh axis: the factors of the operation in the einsum sense. `dot: "b m k, b k n -> b
m n"` has the factors b, m, n and the contracted factor k. Giving a factor to a mesh axis splits every dimension the
factor names; a factor missing in the result leaves each device with a partial result, combined by `reduction`. A
strategy on a mesh gives each axis at most one factor (or none: the axis replicates); rules know nothing else of meshes.

The notation follows Shardy's op sharding rules (https://openxla.org/shardy/sharding_representation) and the one-axis
strategies of Alpa and AutoParallel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import TYPE_CHECKING

from shardwright.errors import InternalError
from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.rules.halo import Halo
from shardwright.planner.tuning import MAX_BORDER_PARTS

if TYPE_CHECKING:
    from shardwright.planner.rules.manual import ManualPart


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One dimension of an operation's iteration space.

    name: human-readable, unique in its rule.
    size: elements; a mesh axis (or a product of axes) may take the factor only if its number of devices divides `size`.
        Every dimension the factor names has this size, or a multiple of it (a reshape that merges or splits).
    operands: per array leaf of all operands in order, the dimension split by the factor, or None: that leaf is used
        whole.
    results: the same, per array leaf of the result.
    reduction: how partial results of a contracted factor combine (`add`, `maximum`, `minimum`, `multiply`, `and`,
        `or`); None when every result leaf is exact. `gather`: no all-reduce combines them; every device gathers all
        partial results and reduces once more.
    may_pad: a mesh axis may take the factor without dividing `size`: XLA pads the last shards, computes the right
        result (a contracted factor's padding is masked) and moves no data. Only when every dimension the factor names
        has `size` elements: all shards are then cut alike.
    halo: the borders exchanged between devices when the factor is split; see `Halo.permutes`.
    summed: result leaves of which each device has a term; they are added up inside the instruction, by all-reduces.
    """

    name: str
    size: int
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    reduction: str | None = None
    may_pad: bool = False
    halo: tuple[Halo, ...] = ()
    summed: tuple[int, ...] = ()

    @property
    def contracted(self) -> bool:
        return self.reduction is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """The factors of one instruction.

    reason: why there are none, or the dimensions left out.
    leafwise: the instruction only forwards leaves (tuple, get-tuple-element, while, …): a mesh axis may take one factor
        per leaf, each leaf independently. False everywhere else.
    exchange_factors: further legal factors, with communication inside the instruction: neighbours exchange borders
        (`Factor.halo`; a mesh axis may take one when each halo's `permutes` is not None), partial results are gathered,
        or some of the results are summed (`Factor.summed`).
    manual: what stands in a manual region, or at its border; None for anything else.
    """

    factors: tuple[Factor, ...]
    reason: str = ""
    leafwise: bool = False
    exchange_factors: tuple[Factor, ...] = ()
    manual: ManualPart | None = None


RuleFunction = Callable[[Instruction], OpRule]

RULES: dict[str, RuleFunction] = {}

#: Opcodes that are only ever replicated, with the reason. Filled by `register_replicated`.
REPLICATED: dict[str, str] = {}


def strategy_rule(*opcodes: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register the rule of one or more opcodes; a second rule of an opcode is refused."""

    def register(function: RuleFunction) -> RuleFunction:
        for opcode in opcodes:
            _refuse_second(opcode)
            RULES[opcode] = function
        return function

    return register


def register_replicated(reason: str, *opcodes: str) -> None:
    """Register opcodes without factors, with their common reason."""
    for opcode in opcodes:
        _refuse_second(opcode)
        REPLICATED[opcode] = reason


def _refuse_second(opcode: str) -> None:
    if opcode in RULES or opcode in REPLICATED:
        raise InternalError(f"opcode {opcode} has two strategy rules")


def no_factors(reason: str) -> OpRule:
    """The rule of an instruction computed whole on every device."""
    return OpRule(factors=(), reason=reason)


def operand_leaves(instruction: Instruction) -> tuple[ArrayShape, ...]:
    """Array leaves of all operands, in order: `Factor.operands` is indexed by them."""
    return tuple(leaf for operand in instruction.operands for leaf in operand.shape.leaves)


def factor(
    instruction: Instruction,
    name: str,
    operands: Mapping[int, int],
    results: Mapping[int, int],
    reduction: str | None = None,
    parts: int = 0,
    *,
    may_pad: bool = True,
    halo: tuple[Halo, ...] = (),
    summed: Iterable[int] = (),
) -> Factor | None:
    """The factor splitting dimension `d` of leaf `i` per `{i: d}`; None when its size is 1 or borders reach too far.

    Its size is the greatest common divisor of its dimensions, and of `parts` when given: all of them have that many
    equal, contiguous blocks.
    may_pad: False when XLA moves data on uneven shards; factors over dimensions of different sizes, or with borders,
        are never padded.
    """
    inputs, outputs = operand_leaves(instruction), instruction.shape.leaves
    sizes = [
        leaves[leaf].dimensions[dim]
        for leaves, dims in ((inputs, operands), (outputs, results))
        for leaf, dim in dims.items()
    ]
    size = gcd(parts, *sizes)
    if size <= 1 or (halo and not _reachable(halo, size)):
        return None
    return Factor(
        name=name,
        size=size,
        operands=tuple(operands.get(i) for i in range(len(inputs))),
        results=tuple(results.get(i) for i in range(len(outputs))),
        reduction=reduction,
        may_pad=may_pad and not halo and all(dim_size == size for dim_size in sizes),
        halo=halo,
        summed=tuple(summed),
    )


def _reachable(halo: tuple[Halo, ...], size: int) -> bool:
    """Whether direct neighbours hold all borders at any number of parts."""
    counts = (parts for parts in range(2, min(size, MAX_BORDER_PARTS) + 1) if size % parts == 0)
    return any(all(border.permutes(parts) is not None for border in halo) for parts in counts)


def rule(factors: Iterable[Factor | None], reason: str = "", *, leafwise: bool = False) -> OpRule:
    """An OpRule of the existing factors; `reason` gives the dimensions left out and why."""
    existing = [one for one in factors if one is not None]
    plain = tuple(one for one in existing if not one.halo and not one.summed and one.reduction != "gather")
    return OpRule(
        factors=plain,
        reason=reason,
        leafwise=leafwise,
        exchange_factors=tuple(one for one in existing if one not in plain),
    )


def rule_of(instruction: Instruction) -> OpRule:
    """The factors of `instruction`; replicated, with a reason, without a known rule.

    Never raises: an instruction with attributes contradicting its shapes is replicated too.
    """
    function = RULES.get(instruction.opcode)
    if function is None:
        return no_factors(REPLICATED.get(instruction.opcode, f"no strategy rule for opcode {instruction.opcode}"))
    try:
        op_rule = function(instruction)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return no_factors(f"its attributes do not fit its shapes ({type(error).__name__}: {error})")
    return _without_dynamic(instruction, op_rule)


def coverage() -> dict[str, str]:
    """Every known opcode, sorted: `rule`, or the reason for replication."""
    return dict(sorted({**dict.fromkeys(RULES, "rule"), **REPLICATED}.items()))


def _without_dynamic(instruction: Instruction, op_rule: OpRule) -> OpRule:
    """Drop factors over dimensions of dynamic size: no even split exists."""
    inputs, outputs = operand_leaves(instruction), instruction.shape.leaves
    if not any(leaf.dynamic and any(leaf.dynamic) for leaf in (*inputs, *outputs)):
        return op_rule
    static = [f for f in (*op_rule.factors, *op_rule.exchange_factors) if not _splits_dynamic(f, inputs, outputs)]
    return rule(static, "a dimension has a size known only at run time", leafwise=op_rule.leafwise)


def _splits_dynamic(factor: Factor, inputs: tuple[ArrayShape, ...], outputs: tuple[ArrayShape, ...]) -> bool:
    pairs = [*zip(inputs, factor.operands, strict=True), *zip(outputs, factor.results, strict=True)]
    return any(dim is not None and leaf.dynamic and leaf.dynamic[dim] for leaf, dim in pairs)
