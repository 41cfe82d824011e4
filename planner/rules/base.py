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

from collections.abc import Callable
from dataclasses import dataclass

from shardwright.errors import InternalError
from shardwright.hlo import Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class Factor:
    """One dimension of an operation's iteration space.

    name: for people, unique in its rule.
    size: elements; a mesh axis (or a product of axes) may take the factor only
        if its number of devices divides `size`.
    operands: per array leaf of all operands in order, the dimension the factor
        splits, or None where that leaf is used whole.
    results: the same, per array leaf of the result.
    reduction: how partial results combine (`add`, `maximum`, `minimum`, `multiply`, `and`, `or`)
        when the factor is contracted; None when every result leaf is exact.
    """

    name: str
    size: int
    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    reduction: str | None = None

    @property
    def contracted(self) -> bool:
        return self.reduction is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """The factors of one instruction; `reason` says why there are none, or what was left out."""

    factors: tuple[Factor, ...]
    reason: str = ""


RuleFunction = Callable[[Instruction], OpRule]

RULES: dict[str, RuleFunction] = {}


def strategy_rule(*opcodes: str) -> Callable[[RuleFunction], RuleFunction]:
    """Register the rule of one or more opcodes; a second rule for an opcode is refused."""

    def register(function: RuleFunction) -> RuleFunction:
        for opcode in opcodes:
            if opcode in RULES:
                raise InternalError(f"opcode {opcode} has two strategy rules")
            RULES[opcode] = function
        return function

    return register


def replicated(reason: str) -> OpRule:
    """The rule of an instruction that may only be computed whole on every device."""
    return OpRule(factors=(), reason=reason)


def rule_of(instruction: Instruction) -> OpRule:
    """The factors of `instruction`; replicated, with a reason, where no rule is known."""
    function = RULES.get(instruction.opcode)
    if function is None:
        return replicated(f"no strategy rule for opcode {instruction.opcode}")
    return function(instruction)
