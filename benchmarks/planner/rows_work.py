"""Operations of products in a program's text, and its largest array: what a mixture of experts is held against."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from shardwright.hlo import ArrayShape, Computation, Instruction, parse
from shardwright.xla.inspect import trip_count


def count_product_flops(text: str) -> dict[str, float]:
    """Operations a run of `dot` and of `ragged-dot`, two of a multiplication and an addition; loops by their trips.

    A ragged product has those of its rows: each is multiplied with one matrix.
    """
    flops = {"dot": 0.0, "ragged-dot": 0.0}
    for instruction, runs in _runs(parse(text).entry, 1.0):
        if instruction.opcode in flops:
            flops[instruction.opcode] += runs * _flops(instruction)
    return flops


def largest_array(text: str, *, rows: int) -> ArrayShape:
    """Of a program's results of instructions, tuples aside, and scores of attention, of `rows` × `rows`."""
    arrays = (i.shape for i in parse(text).instructions() if isinstance(i.shape, ArrayShape))
    return max((each for each in arrays if each.dimensions.count(rows) < 2), key=lambda array: array.size_bytes)


def _runs(computation: Computation, runs: float) -> Iterator[tuple[Instruction, float]]:
    """Each instruction, with how often it runs."""
    for instruction in computation.instructions:
        yield instruction, runs
        trips = trip_count(instruction) if instruction.opcode == "while" else 1
        for callees in instruction.called.values():
            for callee in callees:
                yield from _runs(callee, runs * (trips or 1))


def _flops(product: Instruction) -> float:
    lhs, rhs = (operand.shape.leaves[0].dimensions for operand in product.operands[:2])
    contracted = product.get("lhs_contracting_dims", ())
    if product.opcode == "ragged-dot" and not product.get("rhs_group_dims"):  # each row is in one group's sum
        return (
            2.0
            * lhs[contracted[0]]
            * prod(size for dim, size in enumerate(lhs) if dim not in contracted)
            * prod(size for dim, size in enumerate(rhs) if dim not in product.get("rhs_contracting_dims"))
        )
    return 2.0 * prod(product.shape.leaves[0].dimensions) * prod(lhs[dim] for dim in contracted)
