"""What a strategy rule says: the factors of one instruction.

A rule is written for ONE mesh axis, as the factors of the operation in the
einsum sense: `dot: "b m k, b k n -> b m n"` has the factors b, m, n and the
contracted factor k. Giving a factor to a mesh axis splits every dimension that
the factor names; a factor that the result lacks leaves each device with a
partial result, combined by `reduction`. A strategy on a mesh gives each axis at
most one factor (or none: the axis replicates); the rules know nothing of
meshes beyond that.

The factor notation follows Shardy's op sharding rules
(https://openxla.org/shardy/sharding_representation) and Alpa's and
AutoParallel's one-axis strategies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import gcd

from shardwright.errors import InternalError
from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.rules.halo import Halo


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One dimension of an operation's iteration space.

    name: for people, unique in its rule.
    size: elements; a mesh axis (or a product of axes) may take the factor only
        if its number of devices divides `size`. Every dimension the factor names
        has this size, or a multiple of it (a reshape that merges or splits).
    operands: per array leaf of all operands in order, the dimension the factor
        splits, or None where that leaf is used whole.
    results: the same, per array leaf of the result.
    reduction: how partial results combine (`add`, `maximum`, `minimum`, `multiply`, `and`, `or`)
        when the factor is contracted; None when every result leaf is exact. `gather`: no all-reduce combines
        them, so every device gathers all partial results and reduces once more.
    may_pad: a mesh axis may take the factor though it does not divide `size`: XLA pads the last shards,
        computes the right result (a contracted factor's padding is masked) and moves nothing for it. Only where
        every dimension that the factor names has `size` elements, so that all shards are cut alike.
    halo: the borders that devices send one another when the factor is split; see `Halo.permutes`.
    """

    name: str
    size: int
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    reduction: str | None = None
    may_pad: bool = False
    halo: tuple[Halo, ...] = ()

    @property
    def contracted(self) -> bool:
        return self.reduction is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """The factors of one instruction; `reason` says why there are none, or what was left out.

    leafwise: the instruction only hands leaves on (tuple, get-tuple-element, while, …), so a mesh axis
        may take one factor per leaf, each leaf choosing for itself. False everywhere else.
    bordered: further factors, as legal as the others, that communicate otherwise than by an all-reduce: neighbours
        exchange borders (`Factor.halo`; a mesh axis may take one where each halo's `permutes` is not None), or
        partial results are gathered.
    """

    factors: tuple[Factor, ...]
    reason: str = ""
    leafwise: bool = False
    exchange_factors: tuple[Factor, ...] = ()


#: Devices up to which a split along borders is looked for: more cut shards that only reach further.
_MAX_PARTS = 16

RuleFunction = Callable[[Instruction], OpRule]

RULES: dict[str, RuleFunction] = {}

#: Opcodes that are only ever replicated, with the reason. Filled by `register_replicated`.
REPLICATED: dict[str, str] = {}


def strategy_rule(*opcodes: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register the rule of one or more opcodes; a second rule for an opcode is refused."""

    def register(function: RuleFunction) -> RuleFunction:
        for opcode in opcodes:
            _refuse_second(opcode)
            RULES[opcode] = function
        return function

    return register


def register_replicated(reason: str, *opcodes: str) -> None:
    """Register opcodes that have no factors, with the one reason they share."""
    for opcode in opcodes:
        _refuse_second(opcode)
        REPLICATED[opcode] = reason


def _refuse_second(opcode: str) -> None:
    if opcode in RULES or opcode in REPLICATED:
        raise InternalError(f"opcode {opcode} has two strategy rules")


def no_factors(reason: str) -> OpRule:
    """The rule of an instruction that may only be computed whole on every device."""
    return OpRule(factors=(), reason=reason)


def operand_leaves(instruction: Instruction) -> tuple[ArrayShape, ...]:
    """Array leaves of all operands, in order: what `Factor.operands` counts over."""
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
) -> Factor | None:
    """The factor that splits dimension `d` of leaf `i` for each `{i: d}`; None where its size is 1 or borders too far.

    Its size is the greatest common divisor of the dimensions it names, and of `parts` where given:
    that many equal, contiguous blocks exist in all of them. may_pad: False where XLA moves data for uneven
    shards; factors over dimensions of different sizes, or with borders, never may.
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
        may_pad=may_pad and not halo and all(each == size for each in sizes),
        halo=halo,
    )


def _reachable(halo: tuple[Halo, ...], size: int) -> bool:
    """Whether direct neighbours hold all borders for any number of parts."""
    counts = (parts for parts in range(2, min(size, _MAX_PARTS) + 1) if size % parts == 0)
    return any(all(each.permutes(parts) is not None for each in halo) for parts in counts)


def rule(factors: Iterable[Factor | None], reason: str = "", *, leafwise: bool = False) -> OpRule:
    """An OpRule of those factors that exist; `reason` says which dimensions were left out and why."""
    found = [each for each in factors if each is not None]
    plain = tuple(each for each in found if not each.halo and each.reduction != "gather")
    return OpRule(
        factors=plain,
        reason=reason,
        leafwise=leafwise,
        exchange_factors=tuple(each for each in found if each not in plain),
    )


def rule_of(instruction: Instruction) -> OpRule:
    """The factors of `instruction`; replicated, with a reason, where no rule is known.

    Never raises: an instruction whose attributes contradict its shapes is replicated too.
    """
    function = RULES.get(instruction.opcode)
    if function is None:
        return no_factors(REPLICATED.get(instruction.opcode, f"no strategy rule for opcode {instruction.opcode}"))
    try:
        found = function(instruction)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        return no_factors(f"its attributes do not fit its shapes ({type(error).__name__}: {error})")
    return _without_dynamic(instruction, found)


def coverage() -> dict[str, str]:
    """Every opcode known here, sorted: `rule`, or the reason why it is only ever replicated."""
    return dict(sorted({**dict.fromkeys(RULES, "rule"), **REPLICATED}.items()))


def _without_dynamic(instruction: Instruction, found: OpRule) -> OpRule:
    """Drop factors over dimensions whose size is only known at run time: no even split exists."""
    inputs, outputs = operand_leaves(instruction), instruction.shape.leaves
    if not any(leaf.dynamic and any(leaf.dynamic) for leaf in (*inputs, *outputs)):
        return found
    kept = [f for f in (*found.factors, *found.exchange_factors) if not _splits_dynamic(f, inputs, outputs)]
    return rule(kept, "a dimension has a size known only at run time", leafwise=found.leafwise)


def _splits_dynamic(found: Factor, inputs: tuple[ArrayShape, ...], outputs: tuple[ArrayShape, ...]) -> bool:
    pairs = [*zip(inputs, found.operands, strict=True), *zip(outputs, found.results, strict=True)]
    return any(dim is not None and leaf.dynamic and leaf.dynamic[dim] for leaf, dim in pairs)
