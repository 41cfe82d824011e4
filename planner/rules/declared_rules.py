"""Rules declared by a program for its own custom calls: Shardy's `sdy.sharding_rule`.

JAX writes the rule given to `jax.experimental.custom_partitioning` into the text, in a frontend attribute
`xla.sdy.sharding_rule` of the call:

    #sdy.op_sharding_rule<([i, j], [j, k])->([i, k]) {i=8, j=4, k=6} reduction={j} need_replication={k}, custom>

A list of factors per dimension, major first, of each operand and result; their sizes; and those with a special kind,
not plain pass-through (https://openxla.org/shardy/sharding_representation). Split along a factor, each device makes the
same call on its parts (`xla/manual_computation.py`). Only these factors count here:

- pass-through ones: nobody would sum over a reduction factor, and factors needing replication stay whole;
- those of an operand and of every result: a result without one depends on all of it;
- the major one of a dimension: its parts are contiguous;
- those with a size divisible by the device count: a kernel knows nothing of padding.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from shardwright.hlo import Instruction
from shardwright.planner.rules.base import Factor, OpRule, factor, no_factors, operand_leaves, rule

#: The frontend attribute that holds a rule, as Shardy exports it.
ATTRIBUTE = "xla.sdy.sharding_rule"

#: Calls of kernels compiled for the sizes of their arrays: a part of these is another kernel.
_OF_ONE_SIZE = re.compile(r"tpu_custom_call|.*triton.*|AwsNeuron.*|mosaic_gpu.*", re.IGNORECASE)

_FACTOR = re.compile(r"[a-z](?:_\d+)?")
_RULE = re.compile(
    r"#sdy\.op_sharding_rule<\s*\((?P<operands>[^()]*)\)\s*->\s*\((?P<results>[^()]*)\)\s*"
    r"(?:\{(?P<sizes>[^{}]*)\})?(?P<rest>[^<>]*)>"
)
_ARRAY = re.compile(r"\[([^\[\]]*)\]")
_KIND = re.compile(r"(?:reduction|need_replication|permutation|blocked_propagation)\s*=\s*\{([^{}]*)\}")
_SIZE = re.compile(r"([a-z](?:_\d+)?)\s*=\s*(\d{1,18})")


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRule:
    """A parsed rule.

    operands / results: per array and dimension, its factors, major first.
    sizes: of each factor.
    whole: factors that stay whole.
    """

    operands: tuple[tuple[tuple[str, ...], ...], ...]
    results: tuple[tuple[tuple[str, ...], ...], ...]
    sizes: dict[str, int]
    whole: frozenset[str]


def parse_rule(text: str) -> ShardingRule | None:
    """The rule in Shardy's notation `text`; None when it is not one."""
    match = _RULE.fullmatch(text.strip())
    if match is None:
        return None

    def arrays(group: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
        return tuple(
            tuple(tuple(_FACTOR.findall(dim)) for dim in array.split(",") if dim.strip())
            for array in _ARRAY.findall(match[group])
        )

    whole = (name for kind in _KIND.findall(match["rest"]) for name in _FACTOR.findall(kind))
    return ShardingRule(
        operands=arrays("operands"),
        results=arrays("results"),
        sizes={name: int(size) for name, size in _SIZE.findall(match["sizes"] or "")},
        whole=frozenset(whole),
    )


def read_declared_rule(instruction: Instruction) -> OpRule | None:
    """The factors of a custom call with a declared rule; None without one."""
    text = instruction.get("frontend_attributes", {}).get(ATTRIBUTE)
    if text is None:
        return None
    target = instruction.get("custom_call_target", "")
    if _OF_ONE_SIZE.fullmatch(target):
        return no_factors(
            f"custom call {target!r} is compiled for the sizes of its arrays: its rule says no parts of it"
        )
    declared = parse_rule(text)
    if declared is None or not _fits(declared, instruction):
        return no_factors(f"custom call {target!r} has a sharding rule that does not fit its arrays")
    op_rule = rule(_factors(declared, instruction))
    whole = _whole(op_rule, instruction)
    reason = f"custom call {target!r} takes dimension {whole} whole, as its sharding rule says" if whole else ""
    return rule(op_rule.factors, reason)


def _whole(op_rule: OpRule, instruction: Instruction) -> str:
    """`1, 2 of operand 0`: the operands' dimensions split by no factor."""
    arrays = []
    for array, leaf in enumerate(operand_leaves(instruction)):
        split = {one.operands[array] for one in op_rule.factors}
        dims = [str(dim) for dim, size in enumerate(leaf.dimensions) if size > 1 and dim not in split]
        arrays += [f"{', '.join(dims)} of operand {array}"] if dims else []
    return "; ".join(arrays)


def _fits(declared: ShardingRule, instruction: Instruction) -> bool:
    leaves = (*operand_leaves(instruction), *instruction.shape.leaves)
    dims = (*declared.operands, *declared.results)
    return len(declared.operands) == len(operand_leaves(instruction)) and [len(array) for array in dims] == [
        leaf.rank for leaf in leaves
    ]


def _factors(declared: ShardingRule, instruction: Instruction) -> Iterable[Factor | None]:
    for name in sorted(declared.sizes):
        operands, results = (_split(arrays, name) for arrays in (declared.operands, declared.results))
        if name not in declared.whole and operands and results and len(results) == len(declared.results):
            yield factor(instruction, name, operands, results, parts=declared.sizes[name], may_pad=False)


def _split(arrays: tuple[tuple[tuple[str, ...], ...], ...], name: str) -> dict[int, int] | None:
    """The dimension of each array split by a factor; None when it is a minor one, or splits two of one array."""
    split_dims: dict[int, int] = {}
    for array, dims in enumerate(arrays):
        for dim, factors in enumerate(dims):
            if name in factors:
                if factors[0] != name or array in split_dims:
                    return None
                split_dims[array] = dim
    return split_dims
