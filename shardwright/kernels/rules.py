"""The sharding rule of a custom call, in Shardy's notation.

    #sdy.op_sharding_rule<([i, j], [j, k])->([i, k]) {i=8, j=4, k=6} reduction={j} need_replication={k}, custom>

A list of factors per dimension, major first, of each operand and result; their sizes; and those with a special kind,
not plain pass-through (https://openxla.org/shardy/sharding_representation).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardwright.hlo import Instruction

#: The frontend attribute that holds a rule, as Shardy exports it.
RULE_ATTRIBUTE = "xla.sdy.sharding_rule"

_FACTOR = re.compile(r"[a-z](?:_\d+)?")
_RULE = re.compile(
    r"#sdy\.op_sharding_rule<\s*\((?P<operands>[^()]*)\)\s*->\s*\((?P<results>[^()]*)\)\s*"
    r"(?:\{(?P<sizes>[^{}]*)\})?(?P<rest>[^<>]*)>"
)
_ARRAY = re.compile(r"\[([^\[\]]*)\]")
_KIND = re.compile(r"(reduction|need_replication|permutation|blocked_propagation)\s*=\s*\{([^{}]*)\}")
_SIZE = re.compile(r"([a-z](?:_\d+)?)\s*=\s*(\d{1,18})")

#: Per array and dimension, its factors, major first.
ArrayFactors = tuple[tuple[tuple[str, ...], ...], ...]

#: Dimensions of each array.
Shapes = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """A parsed rule.

    operands / results: per array and dimension, its factors, major first.
    sizes: of each factor.
    whole: factors that stay whole, unless their parts are summed.
    reduction: those of them whose parts are summed.
    """

    operands: ArrayFactors
    results: ArrayFactors
    sizes: Mapping[str, int]
    whole: frozenset[str]
    reduction: frozenset[str] = frozenset()

    def cut(self, operands: Sequence[Sequence[int]], parts: Mapping[str, int]) -> Shapes | None:
        """Dimensions of the operands' parts; None where they do not divide. parts: their number, by factor."""
        return _cut(self.operands, operands, parts)

    def cut_results(self, results: Sequence[Sequence[int]], parts: Mapping[str, int]) -> Shapes | None:
        """The same for the results: whole along factors that they do not have."""
        return _cut(self.results, results, parts)

    def count_parts(self, operands: Sequence[Sequence[int]], local: Sequence[Sequence[int]]) -> float:
        """How many parts of these operands make up the call. local: dimensions of one device's."""
        counts: dict[str, float] = {}
        for dims, whole, part in zip(self.operands, operands, local, strict=False):
            for factors, size, part_size in zip(dims, whole, part, strict=False):
                if factors and part_size:
                    counts[factors[0]] = max(counts.get(factors[0], 1.0), size / part_size)
        return prod(counts.values())


def split_dims(arrays: ArrayFactors, name: str) -> dict[int, int] | None:
    """The dimension of each array that a factor splits; None when it is a minor one, or splits two of one array."""
    dims_by_array: dict[int, int] = {}
    for array, dims in enumerate(arrays):
        for dim, factors in enumerate(dims):
            if name in factors:
                if factors[0] != name or array in dims_by_array:
                    return None
                dims_by_array[array] = dim
    return dims_by_array


@lru_cache(maxsize=1 << 10)
def parse_rule(text: str) -> ShardingRule | None:
    """The rule in Shardy's notation `text`; None when it is not one."""
    match = _RULE.fullmatch(text.strip())
    if match is None:
        return None

    def arrays(group: str) -> ArrayFactors:
        return tuple(
            tuple(tuple(_FACTOR.findall(dim)) for dim in array.split(",") if dim.strip())
            for array in _ARRAY.findall(match[group])
        )

    kinds = [(kind, name) for kind, names in _KIND.findall(match["rest"]) for name in _FACTOR.findall(names)]
    return ShardingRule(
        operands=arrays("operands"),
        results=arrays("results"),
        sizes={name: int(size) for name, size in _SIZE.findall(match["sizes"] or "")},
        whole=frozenset(name for _, name in kinds),
        reduction=frozenset(name for kind, name in kinds if kind == "reduction"),
    )


def read_rule(instruction: Instruction) -> ShardingRule | None:
    """The rule that a call declares; None without one that can be read."""
    text = instruction.get("frontend_attributes", {}).get(RULE_ATTRIBUTE)
    return None if text is None else parse_rule(text)


def _cut(arrays: ArrayFactors, shapes: Sequence[Sequence[int]], parts: Mapping[str, int]) -> Shapes | None:
    shapes_of_parts = []
    for dims, shape in zip(arrays, shapes, strict=True):
        counts = [prod(parts.get(name, 1) for name in factors) for factors in dims]
        if len(counts) != len(shape) or any(size % count for size, count in zip(shape, counts, strict=True)):
            return None
        shapes_of_parts.append(tuple(size // count for size, count in zip(shape, counts, strict=True)))
    return tuple(shapes_of_parts)
