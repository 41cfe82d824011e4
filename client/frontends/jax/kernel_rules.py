"""The rule of a partitioned kernel, on its arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from jax.experimental.custom_partitioning import SdyShardingRule

from shardwright.client.frontends.jax.custom_partitioning import Dims, expand_dims, rule_text
from shardwright.client.limits import MAX_KERNEL_FORMS, MAX_KERNEL_PARTS
from shardwright.errors import OptionError
from shardwright.kernels import ShardingRule, parse_rule
from shardwright.kernels.rules import split_dims

#: How the factors are called that `jax.vmap` adds.
_MAPPED = "?mapped_"


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRule:
    """operands, results: per array and dimension, the factors, major first.

    sizes: of each factor. whole: factors that stay whole. reduction: factors whose parts give terms of a sum. parts:
    the numbers of parts that a factor may be cut into; empty: powers of two.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: tuple[tuple[str, int], ...]
    whole: tuple[str, ...]
    reduction: tuple[str, ...]
    parts: tuple[int, ...]

    def map(self, batched: Sequence[bool], size: int) -> KernelRule:
        """The rule under `vmap`: one factor more in front of these operands, and of all results."""
        name = f"{_MAPPED}{len(self.sizes)}"
        return replace(
            self,
            operands=tuple(((name,), *dims) if has else dims for dims, has in zip(self.operands, batched, strict=True)),
            results=tuple(((name,), *dims) for dims in self.results),
            sizes=(*self.sizes, (name, size)),
        )

    def to_text(self) -> str:
        """In Shardy's notation."""
        return rule_text(self.operands, self.results, dict(self.sizes), {*self.whole}, self.reduction)

    def cuts(self) -> Iterator[tuple[ShardingRule, dict[str, int]]]:
        """Numbers of parts by factor, in the notation of the rule's text; the whole first."""
        rule = parse_rule(self.to_text())
        assert rule is not None, "it is written to be read"
        names = [name for name in sorted(rule.sizes) if _is_split(rule, name)]
        sizes = [rule.sizes[name] for name in names]
        for counts in _chosen(sizes, self.parts) if self.parts else _powers_of_two(sizes):
            yield rule, dict(zip(names, counts, strict=True))


def _chosen(sizes: Sequence[int], parts: Sequence[int]) -> list[tuple[int, ...]]:
    """Every way to cut factors of these sizes into numbers of parts, no more together than the largest number."""
    counts = sorted({1, *parts})
    ways = product(*([count for count in counts if size % count == 0] for size in sizes))
    return [way for way in ways if prod(way) <= counts[-1]]


def _powers_of_two(sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The same for powers of two, up to the largest one for which there are not too many ways."""
    most = MAX_KERNEL_PARTS
    while len(ways := _chosen(sizes, [1 << power for power in range(most.bit_length())])) > MAX_KERNEL_FORMS:
        most //= 2
    return ways


def _is_split(rule: ShardingRule, name: str) -> bool:
    """Whether a factor is split: the major one of an operand's dimension, and in every result or summed."""
    operands, results = split_dims(rule.operands, name), split_dims(rule.results, name)
    if not operands or results is None:
        return False
    is_passed_on = name not in rule.whole and len(results) == len(rule.results)
    return is_passed_on or (name in rule.reduction and not results)


def bind_rule(
    rule: SdyShardingRule, operands: Sequence[Any], results: Sequence[Any], *, parts: tuple[int, ...], where: str
) -> KernelRule:
    """`rule` on arrays of these types. Raises OptionError where it does not fit them."""
    sizes = dict(rule.factor_sizes)
    sides = []
    for side, mappings, arrays in (
        ("argument", rule.operand_mappings, operands), ("result", rule.result_mappings, results)
    ):  # fmt: skip
        if len(mappings) != len(arrays):
            raise _misfit(f"it has {len(mappings)} {side}s, the kernel {len(arrays)}", where)
        dims_of_arrays = []
        for number, (mapping, array) in enumerate(zip(mappings, arrays, strict=True)):
            dims = expand_dims(mapping, array.shape)
            if len(dims) != len(array.shape):
                raise _misfit(f"{side} {number} is {list(array.shape)}, of {len(dims)} dimensions in the rule", where)
            _read_sizes(dims, array.shape, sizes, f"{side} {number}", where)
            dims_of_arrays.append(dims)
        sides.append(tuple(dims_of_arrays))
    for dims, array in zip((*sides[0], *sides[1]), (*operands, *results), strict=True):
        for factors, size in zip(dims, array.shape, strict=True):
            if prod(sizes[name] for name in factors) != size:
                raise _misfit(f"{' · '.join(factors)} are {[sizes[name] for name in factors]}, not {size}", where)
    passed_on = {factor for dims in sides[1] for factors in dims for factor in factors}
    for name in rule.reduction_factors:
        if name in passed_on:
            raise _misfit(f"{name} is a reduction, and a dimension of a result", where)
    return KernelRule(
        operands=sides[0],
        results=sides[1],
        sizes=tuple(sizes.items()),
        whole=(*rule.need_replication_factors, *rule.permutation_factors),
        reduction=tuple(rule.reduction_factors),
        parts=parts,
    )


def _read_sizes(dims: Dims, shape: Sequence[int], sizes: dict[str, int], array: str, where: str) -> None:
    """Adds the sizes of factors that are a dimension by themselves."""
    for dim, (factors, size) in enumerate(zip(dims, shape, strict=True)):
        if len(factors) == 1 and sizes.setdefault(factors[0], size) != size:
            raise _misfit(f"{factors[0]} is {sizes[factors[0]]}, and {size} in dimension {dim} of {array}", where)


def _misfit(problem: str, where: str) -> OptionError:
    return OptionError(
        f"the rule of a partitioned kernel does not fit its arrays: {problem}",
        where=where,
        remedy="name every dimension of every argument and result once, equal ones by equal names",
    )
