"""Attention calls: the batch, heads, and rows of q are split; keys and widths stay whole.

    q: b n t d, k: b k s d, v: b k s e, bias: b n t s -> out: b n t e, statistics: b n t

Query heads share key heads (`attention.call`). Devices take key heads with the query heads that read them; where there
are fewer key heads than devices, query heads alone, and each device finds its key heads in whole k and v. Rows of q
need all of k and v. What a split makes a sum of, of the backward call's results, is added up inside the call
(`Factor.summed`): the gradients of k and v that devices share, and of a bias that they do. Of the largest magnitudes
that calls in 8-bit floats hand out, the largest of all parts is taken; gradients in 8-bit floats are not added up.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.attention import AttentionCall
from shardwright.hlo import Instruction
from shardwright.planner.rules.base import Factor, OpRule, factor, operand_leaves, rule


def attention_rule(instruction: Instruction, call: AttentionCall) -> OpRule:
    """The factors of a call. Dropout keeps rows and heads as they are; lengths count rows from the first."""
    return rule(_factors(instruction, call), "attention takes keys and widths whole")


def _factors(instruction: Instruction, call: AttentionCall) -> Iterable[Factor | None]:
    grouped = call.kv_heads < call.heads
    yield _factor(instruction, call, "batch", "b", may_pad=not (call.has_lengths or call.is_f8))
    yield _factor(instruction, call, "heads", "nk", may_pad=not (grouped or call.is_f8))
    if call.is_f8:
        return
    if grouped:
        yield _factor(instruction, call, "query heads", "n", may_pad=True)
    if not call.has_lengths:
        yield _factor(instruction, call, "rows", "t", may_pad=False)


def _factor(instruction: Instruction, call: AttentionCall, name: str, letters: str, *, may_pad: bool) -> Factor | None:
    """The factor of the dimensions with these letters. Rows are split into even parts of even size: cuDNN takes no odd
    number of them beside a bias."""
    sizes = operand_leaves(instruction), instruction.shape.leaves
    operands, results = (
        {
            number: place
            for number, dims in enumerate(arrays)
            for place, letter in enumerate(dims)
            if letter in letters and leaves[number].dimensions[place] > 1
        }
        for arrays, leaves in zip((call.operand_dims, call.result_dims), sizes, strict=True)
    )
    summed = [
        number
        for number, role in enumerate(call.results)
        if (role in ("dk", "dv", "dbias") and number not in results) or role.startswith("amax")
    ]
    parts = call.rows // 2 if letters == "t" else 0
    return factor(instruction, name, operands, results, parts=parts, may_pad=may_pad, summed=summed)
