"""Batched computations, split along the batch: matrix decompositions, Fourier transforms, top-k and library calls.

XLA's partitioner has no case for Fourier transforms and top-k: `xla/manual_computation.py` emits manual computations.
"""

from __future__ import annotations

from collections.abc import Iterable

from shardwright.attention import read_call
from shardwright.hlo import Instruction
from shardwright.planner.rules.attention import attention_rule
from shardwright.planner.rules.base import Factor, OpRule, factor, no_factors, operand_leaves, rule, strategy_rule
from shardwright.planner.rules.declared_rules import read_declared_rule
from shardwright.reserved_names import IDENTITY_TARGETS, PLACEMENT_TARGET

#: Calls whose result is their operand. A placement takes no partial sums through: each device would move a whole term.
HANDED_ON = IDENTITY_TARGETS | {PLACEMENT_TARGET}


@strategy_rule("cholesky", "triangular-solve")
def decomposition(instruction: Instruction) -> OpRule:
    """`b i j -> b i j`: the dimensions before the matrices; each matrix stays whole."""
    rank = instruction.shape.leaves[0].rank
    return rule(_batch(instruction, range(rank - 2)), "XLA gathers the matrices, also what could be solved apart")


@strategy_rule("fft")
def fourier_transform(instruction: Instruction) -> OpRule:
    """`b i -> b j`: the dimensions before those that are transformed."""
    rank = instruction.shape.leaves[0].rank
    batch = range(rank - len(instruction.get("fft_length")))
    return rule(_batch(instruction, batch), "a Fourier transform takes its dimensions whole")


@strategy_rule("topk")
def top_k(instruction: Instruction) -> OpRule:
    """`b i -> b k, b k`: all dimensions but the searched one."""
    searched = instruction.shape.leaves[0].rank - 1
    return rule(
        _batch(instruction, range(searched)),
        f"dimension {searched} is searched; up to 8 elements are searched in rounds",
    )


@strategy_rule("custom-call")
def custom_call(instruction: Instruction) -> OpRule:
    """Attention's own rule, or what a call declares: its sharding rule, or its batch; sharding annotations and moves
    between memories are the identity; no more is known.

    JAX writes `num_batch_dims` into the frontend attributes of calls (LAPACK's, cuSOLVER's). Their targets are
    registered with XLA as partitionable along that many leading dimensions of every operand and result.
    """
    target = instruction.get("custom_call_target", "")
    leaves = operand_leaves(instruction)
    if target in HANDED_ON and len(leaves) == 1 == len(instruction.shape.leaves):
        return rule(factor(instruction, f"d{dim}", {0: dim}, {0: dim}) for dim in range(leaves[0].rank))
    call = read_call(instruction)
    if call is not None:
        return attention_rule(instruction, call)
    declared = read_declared_rule(instruction)
    if declared is not None:
        return declared
    count = int(instruction.get("frontend_attributes", {}).get("num_batch_dims", 0))
    if count:
        return rule(_batch(instruction, range(count)), f"custom call {target!r} computes each element of a batch whole")
    return no_factors(f"custom call {target!r} is opaque: it runs whole on every device")


def _batch(instruction: Instruction, dims: Iterable[int]) -> Iterable[Factor | None]:
    """One factor per leading dimension shared by all operands and results."""
    operands, results = range(len(operand_leaves(instruction))), range(len(instruction.shape.leaves))
    for dim in dims:
        shared = dict.fromkeys(operands, dim), dict.fromkeys(results, dim)
        yield factor(instruction, f"b{dim}", *shared)
