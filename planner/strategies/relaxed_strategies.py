"""Strategy sets for bounds: all strategies of an instruction at once, as arrays.

On three axes an instruction has hundreds of strategies. A bound only needs their layouts and times. This module
computes the result of `enumerate_strategies` for all of them at once; tests compare the two. An array's sharding is a
*code* (`_Layouts`); seconds are computed once for equal shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeVar

import numpy as np
import numpy.ma  # by np.unique, when it is first called: a tenth of a second of the first plan
from numpy.typing import NDArray

from shardwright.cost import compute_time_s
from shardwright.hlo import Instruction
from shardwright.kernels import read_forms
from shardwright.planner.costs.prices import FloatArray, IntArray, Prices
from shardwright.planner.rules import Factor, OpRule
from shardwright.planner.rules.linear import why_not_partial
from shardwright.planner.rules.xla_bugs import XLA_BUG_OPCODES
from shardwright.planner.strategies.axis_order import may_rotate_all
from shardwright.planner.strategies.expansion import AxisChoice, Restriction, Strategy, splits
from shardwright.planner.strategies.rule_cache import RuleCache
from shardwright.planner.strategies.strategy_set import StrategyBuilder, StrategySet
from shardwright.plans.shardings import TensorSharding

BoolArray = NDArray[np.bool_]
T = TypeVar("T")

#: Maximum row number: exact, with room for one more column.
_MAX_CODE = 1 << 62

#: The use of an axis by an array, a digit of its code; `_FIRST` + d: it splits dimension d.
_IDLE, _SUM, _FIRST = 0, 1, 2


class RelaxedStrategyBuilder(StrategyBuilder):
    """Strategy sets on one mesh, for bounds: dimensions may be padded over any axes, as in refined plans."""

    def __init__(self, prices: Prices, *, pads: bool, rules: RuleCache | None = None) -> None:
        super().__init__(prices, pads=pads, pads_along_several=True, rules=rules)
        self._sizes = [axis.size for axis in prices.mesh.axes]
        self._layouts: dict[tuple[int, ...], _Layouts] = {}

    def _build(
        self,
        instruction: Instruction,
        rule: OpRule,
        linear: tuple[frozenset[int], ...],
        near: Restriction | None = None,
    ) -> StrategySet:
        leaves = [leaf for value in (*instruction.operands, instruction) for leaf in value.shape.leaves]
        is_plain = rule.manual is None and _is_plain(instruction, rule)
        if near is not None or not is_plain or may_rotate_all(leaves, (), self.prices.mesh):
            return super()._build(instruction, rule, linear, near)
        choices = [
            AxisChoice(),
            *(AxisChoice(factor=f) for f in rule.factors),
            *(AxisChoice(linear=way) for way in linear),
        ]
        inputs = [
            self._layouts_of(leaf.dimensions) for operand in instruction.operands for leaf in operand.shape.leaves
        ]
        outputs = [self._layouts_of(leaf.dimensions) for leaf in instruction.shape.leaves]
        combined = self._combine(choices, inputs, outputs)
        operands, results, local = (
            [layouts.ids(code) for layouts, code in zip(leaves, codes, strict=True)]
            for leaves, codes in ((inputs, combined.operands), (outputs, combined.results), (outputs, combined.local))
        )
        compute_s = self._compute_s(instruction, inputs, outputs, combined)
        return StrategySet(
            strategies=self._strategies(operands, results, combined),
            operand_ids=_columns(operands, combined.count),
            result_ids=_columns(results, combined.count),
            time_s=compute_s + self._reduce_seconds(instruction, local, results),
            compute_s=compute_s,
            reason=rule.reason if combined.count == 1 else "",
        )

    def _layouts_of(self, dims: tuple[int, ...]) -> _Layouts:
        layouts = self._layouts.get(dims)
        if layouts is None:
            layouts = self._layouts[dims] = _Layouts(dims, self.prices)
        return layouts

    def _combine(
        self, choices: Sequence[AxisChoice], inputs: Sequence[_Layouts], outputs: Sequence[_Layouts]
    ) -> _StrategyCodes:
        """Every distinct strategy from one choice per mesh axis, in the order of `enumerate_strategies`."""
        axes = len(self._sizes)
        tuples = np.indices((len(choices),) * axes).reshape(axes, -1)
        factors = [choice.factor for choice in choices]
        through = np.array([choice.linear is not None for choice in choices])
        contracted = np.array([factor is not None and factor.contracted for factor in factors])
        adds = through | np.array([factor is not None and factor.reduction == "add" for factor in factors])
        used = [np.array([_operand_digit(choice, i) for choice in choices]) for i in range(len(inputs))]
        given = [np.array([_result_digit(choice, i) for choice in choices]) for i in range(len(outputs))]
        legal = self._divides(factors, tuples)
        for digits in (*used, *given):
            legal &= ~_meet(digits, tuples)
        is_through = through[tuples].any(axis=0)
        legal &= ~(is_through & (contracted & ~adds)[tuples].any(axis=0))  # a maximum over partial sums is none
        operands = [layouts.code(digits[tuples]) for layouts, digits in zip(inputs, used, strict=True)]
        results, local = (
            [
                layouts.code(np.where(summed, _SUM, digits)[tuples])
                for layouts, digits in zip(outputs, given, strict=True)
            ]
            for summed in (adds, adds | contracted)
        )
        for layouts, code in (*zip(inputs, operands, strict=True), *zip(outputs, results, strict=True)):
            legal &= ~is_through | layouts.may_be_partial[code]
        over = _bits(contracted[tuples])
        rows = np.flatnonzero(legal)
        numbers = _number_rows([code[rows] for code in (*operands, *results, over)], len(rows))
        rows = rows[np.sort(np.unique(numbers, return_index=True)[1])]
        return _StrategyCodes(
            operands=[code[rows] for code in operands],
            results=[code[rows] for code in results],
            local=[code[rows] for code in local],
            partial=over[rows],
            choices=[tuple(choices[number] for number in row) for row in tuples[:, rows].T.tolist()],
        )

    def _divides(self, factors: Sequence[Factor | None], assignment: IntArray) -> BoolArray:
        """Per combination, whether every factor may be split over its axes."""
        legal = np.ones(assignment.shape[1], np.bool_)
        for number, factor in enumerate(factors):
            if factor is not None:
                may = [splits(factor, axes, self.may_split()) for axes in _subsets(self._sizes)]
                legal &= np.array(may)[_bits(assignment == number)]
        return legal

    def _strategies(
        self, operands: Sequence[IntArray], results: Sequence[IntArray], codes: _StrategyCodes
    ) -> tuple[Strategy, ...]:
        interned = self.prices.shardings
        partial = _subsets([axis.name for axis in self.prices.mesh.axes])
        used, given = _columns(operands, codes.count).tolist(), _columns(results, codes.count).tolist()
        return tuple(
            Strategy(
                operands=tuple(interned[i] for i in a),
                results=tuple(interned[i] for i in b),
                partial=tuple(partial[bits]),
                choices=choices,
            )
            for a, b, bits, choices in zip(used, given, codes.partial.tolist(), codes.choices, strict=True)
        )

    def _compute_s(
        self, instruction: Instruction, inputs: Sequence[_Layouts], outputs: Sequence[_Layouts], codes: _StrategyCodes
    ) -> FloatArray:
        """Seconds of compute, once for equal shards."""
        leaves = [*zip(inputs, codes.operands, strict=True), *zip(outputs, codes.local, strict=True)]
        shard_keys = _number_rows([layouts.shard_number[code] for layouts, code in leaves], codes.count)
        _, rows, number = np.unique(shard_keys, return_index=True, return_inverse=True)
        shards = [layouts.shards[code[rows]].tolist() for layouts, code in leaves]
        count, profile = len(inputs), self.prices.profile
        seconds = [
            compute_time_s(instruction, [tuple(s) for s in shapes[:count]], [tuple(s) for s in shapes[count:]], profile)
            for shapes in zip(*shards, strict=True)
        ]
        compute_s: FloatArray = np.array(seconds)[number]
        return compute_s

    def _reduce_seconds(
        self, instruction: Instruction, local: Sequence[IntArray], results: Sequence[IntArray]
    ) -> FloatArray:
        """Seconds of the reductions of results that cannot stay partial."""
        seconds = np.zeros(len(results[0]))
        shardings = self.prices.shardings
        for leaf, before, after in zip(instruction.shape.leaves, local, results, strict=True):
            for row in np.flatnonzero(before != after):
                seconds[row] += self.prices.reshard_s(leaf, shardings[before[row]], shardings[after[row]])
        return seconds


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _StrategyCodes:
    """Strategies as codes, per array leaf.

    operands, results: as in `Strategy`.
    local: results before any reduction.
    partial: axes with an all-reduce of partial results, as bits.
    choices: of each axis.
    """

    operands: list[IntArray]
    results: list[IntArray]
    local: list[IntArray]
    partial: IntArray
    choices: list[tuple[AxisChoice, ...]]

    @property
    def count(self) -> int:
        return len(self.partial)


class _Layouts:
    """The shardings of arrays of given dimensions, by code: one digit per mesh axis, its use.

    shards: [codes, dimensions], shape of one device's shard. shard_number: [codes], equal for equal shards.
    may_be_partial: [codes], whether nothing is partial or shards are even.
    """

    def __init__(self, dims: tuple[int, ...], prices: Prices) -> None:
        self._prices = prices
        self._names = [axis.name for axis in prices.mesh.axes]
        sizes = np.array([axis.size for axis in prices.mesh.axes])
        self._weights = (_FIRST + len(dims)) ** np.arange(len(sizes))
        codes = np.arange((_FIRST + len(dims)) ** len(sizes))
        self._digits = codes[:, None] // self._weights % (_FIRST + len(dims))
        parts = np.where(self._digits[:, None, :] == _FIRST + np.arange(len(dims))[:, None], sizes, 1).prod(axis=2)
        self.shards = -(-np.array(dims, np.int64) // parts)
        self.shard_number = np.unique(self.shards, axis=0, return_inverse=True)[1].ravel() if dims else 0 * codes
        is_even = (np.array(dims, np.int64) % parts == 0).all(axis=1)
        self.may_be_partial = is_even | ~(self._digits == _SUM).any(axis=1)
        self._ids = np.full(len(codes), -1)

    def code(self, digits: IntArray) -> IntArray:
        """Codes of digits [axes, combinations]."""
        codes: IntArray = self._weights @ digits
        return codes

    def ids(self, codes: IntArray) -> IntArray:
        """The interned shardings."""
        for code in set(codes[self._ids[codes] < 0].tolist()):
            self._ids[code] = self._prices.identify(self._sharding(self._digits[code].tolist()))
        return self._ids[codes]

    def _sharding(self, digits: Sequence[int]) -> TensorSharding:
        def doing(what: int) -> tuple[str, ...]:
            return tuple(name for name, digit in zip(self._names, digits, strict=True) if digit == what)

        return TensorSharding(tuple(doing(_FIRST + dim) for dim in range(self.shards.shape[1])), doing(_SUM))


def _is_plain(instruction: Instruction, rule: OpRule) -> bool:
    """Whether this module covers an instruction.

    Not covered: borders, gathers, immediate reductions by XLA, XLA bugs, kernels that some parts lack a program of, and
    summed factors that split a result.
    """
    return not (
        rule.leafwise
        or rule.exchange_factors
        or instruction.opcode in XLA_BUG_OPCODES
        or read_forms(instruction) is not None
        or why_not_partial(instruction)
        or any(f.halo or f.reduction == "gather" or (f.contracted and set(f.results) != {None}) for f in rule.factors)
    )


def _operand_digit(choice: AxisChoice, leaf: int) -> int:
    if choice.linear is not None:
        return _SUM if leaf in choice.linear else _IDLE
    dim = choice.factor.operands[leaf] if choice.factor else None
    return _IDLE if dim is None else _FIRST + dim


def _result_digit(choice: AxisChoice, leaf: int) -> int:
    dim = choice.factor.results[leaf] if choice.factor else None
    return _IDLE if dim is None else _FIRST + dim


def _meet(digits: IntArray, choices: IntArray) -> BoolArray:
    """Per combination, whether two factors meet on one dimension of a leaf, given each choice's digit."""
    does = digits[choices]
    meets = np.zeros(choices.shape[1], np.bool_)
    for a, b in combinations(range(len(choices)), 2):
        meets |= (does[a] == does[b]) & (does[a] >= _FIRST) & (choices[a] != choices[b])
    return meets


def _number_rows(columns: Sequence[IntArray], count: int) -> IntArray:
    """A number per row of some columns, equal for equal rows."""
    numbers, most = np.zeros(count, np.int64), 1
    for column in columns:
        size = int(column.max(initial=0)) + 1
        if most * size > _MAX_CODE:
            numbers = np.unique(numbers, return_inverse=True)[1].ravel()
            most = count
        numbers, most = numbers * size + column, most * size
    return numbers


def _bits(membership: BoolArray) -> IntArray:
    """[axes, combinations] as sets of axes."""
    sets: IntArray = (1 << np.arange(len(membership))) @ membership
    return sets


def _subsets(of_axes: Sequence[T]) -> list[list[T]]:
    """The items of every set of axes."""
    return [[item for i, item in enumerate(of_axes) if bits >> i & 1] for bits in range(1 << len(of_axes))]


def _columns(leaves: Sequence[IntArray], count: int) -> IntArray:
    return np.stack(leaves, axis=1) if leaves else np.empty((count, 0), np.int64)
