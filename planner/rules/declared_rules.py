"""Rules declared by a program for its own custom calls: Shardy's `sdy.sharding_rule` (`shardwright.kernels.rules`).

JAX writes the rule given to `jax.experimental.custom_partitioning` into the text, in a frontend attribute
`xla.sdy.sharding_rule` of the call. Split along a factor, each device makes the same call on its parts
(`xla/manual_computation.py`). Only these factors count here:

- pass-through ones: nobody would sum over a reduction factor, and factors needing replication stay whole;
- those of an operand and of every result: a result without one depends on all of it. Results do not count that have no
  dimensions, for a rule could not say so of them, or no elements, or one element that nobody reads (the client says
  which). Who hands out a number that depends on a factor says that the factor needs replication;
- the major one of a dimension: its parts are contiguous;
- those with a size divisible by the device count: a kernel knows nothing of padding.

A kernel that comes with programs for its parts (`shardwright.kernels.forms`) is split where there is one for the part,
JAX's kernel of ragged products (`shardwright.kernels.ragged`) where whole blocks of it are left. Their reduction
factors count too: the program around them adds the parts' results up (`xla/kernels.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from math import prod

from shardwright.hlo import Instruction
from shardwright.kernels import KERNEL_TARGET, RULE_ATTRIBUTE, KernelForms, ShardingRule, parse_rule, read_forms
from shardwright.kernels.ragged import RAGGED_TARGET, read_ragged
from shardwright.kernels.rules import read_rule, split_dims
from shardwright.planner.rules.base import Factor, OpRule, factor, no_factors, operand_leaves, rule
from shardwright.plans.shardings import Mesh

#: The frontend attribute that names results which nobody reads, by number, as the client writes it.
UNREAD = "shardwright.unread_results"

#: Calls of kernels compiled for the sizes of their arrays: a part of these is another kernel.
_OF_ONE_SIZE = re.compile(r"tpu_custom_call|.*triton.*|AwsNeuron.*|mosaic_gpu.*", re.IGNORECASE)


def read_declared_rule(instruction: Instruction) -> OpRule | None:
    """The factors of a custom call with a declared rule; None without one."""
    text = instruction.get("frontend_attributes", {}).get(RULE_ATTRIBUTE)
    if text is None:
        return None
    target = instruction.get("custom_call_target", "")
    if _OF_ONE_SIZE.fullmatch(target):
        return no_factors(
            f"custom call {target!r} is compiled for the sizes of its arrays: its rule says no parts of it"
        )
    declared = parse_rule(text)
    forms = read_forms(instruction)
    if declared is None or not _fits(declared, instruction) or (target == KERNEL_TARGET and forms is None):
        return no_factors(f"custom call {target!r} has a sharding rule that does not fit its arrays")
    op_rule = rule(_factors(declared, instruction, forms))
    whole = _whole(op_rule, instruction)
    reason = f"custom call {target!r} takes dimension {whole} whole, as its sharding rule says" if whole else ""
    return rule(op_rule.factors, reason)


def find_missing_part(instruction: Instruction, assignment: Mapping[str, Factor | None], mesh: Mesh) -> str | None:
    """Why a kernel is not computed by the parts that axes' factors cut it into; None where it is.

    assignment: mesh axis → factor.
    """
    forms = read_forms(instruction) if instruction.opcode == "custom-call" else None
    if forms is None:
        return None
    counts: dict[str, int] = {}
    for axis, each in assignment.items():
        if each is not None:
            counts[each.name] = counts.get(each.name, 1) * mesh.sizes[axis]
    declared = read_rule(instruction)
    if not counts or (declared is not None and _has_form(declared, instruction, forms, counts)):
        return None
    return f"there is no program of the kernel for {' · '.join(f'{n} parts of {name}' for name, n in counts.items())}"


def _has_form(declared: ShardingRule, instruction: Instruction, forms: KernelForms, counts: Mapping[str, int]) -> bool:
    return declared.cut([leaf.dimensions for leaf in operand_leaves(instruction)], counts) in forms


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


def _factors(declared: ShardingRule, instruction: Instruction, forms: KernelForms | None) -> Iterable[Factor | None]:
    needed = _results_that_count(instruction)
    is_summed = forms is not None or instruction.get("custom_call_target") == RAGGED_TARGET
    for name in sorted(declared.sizes):
        operands, results = (split_dims(arrays, name) for arrays in (declared.operands, declared.results))
        if not operands or results is None:
            continue
        if forms is None:
            parts = _count_blocks(name, declared, instruction)
        else:
            parts = _count_parts(name, declared, instruction, forms)
        if name not in declared.whole and needed <= results.keys():
            yield factor(instruction, name, operands, results, parts=parts, may_pad=False)
        elif is_summed and name in declared.reduction and not results:
            yield factor(instruction, name, operands, {}, "add", parts=parts, may_pad=False)


def _count_blocks(name: str, declared: ShardingRule, instruction: Instruction) -> int:
    """Into how many parts a factor may be cut: one element each, or one block of a kernel that has blocks."""
    ragged = read_ragged(instruction)
    return declared.sizes[name] // (1 if ragged is None else ragged.blocks.get(name, 1))


def _count_parts(name: str, declared: ShardingRule, instruction: Instruction, forms: KernelForms) -> int:
    """The largest number of parts of a factor that, like all its divisors, there is a program for."""
    array, dim = next(iter((split_dims(declared.operands, name) or {}).items()))
    size = operand_leaves(instruction)[array].dimensions[dim]
    sizes = {shapes[array][dim] for shapes in forms if len(shapes) > array and len(shapes[array]) > dim}
    counts = {size // part for part in sizes if part and size % part == 0}
    counts = {count for count in counts if _has_form(declared, instruction, forms, {name: count})}
    return max(
        (count for count in counts if all(part in counts for part in range(1, count) if count % part == 0)), default=1
    )


def _results_that_count(instruction: Instruction) -> set[int]:
    """Numbers of the results that are to have a factor."""
    unread = instruction.get("frontend_attributes", {}).get(UNREAD, "").split(",")
    return {
        number
        for number, leaf in enumerate(instruction.shape.leaves)
        if leaf.rank and prod(leaf.dimensions) > (1 if str(number) in unread else 0)
    }
