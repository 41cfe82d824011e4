"""A reshape's factors against NumPy: block i of the operand holds the elements of block i of the result."""

from __future__ import annotations

import itertools
from math import prod

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.rules import rule_of

_SIZES = st.lists(st.sampled_from([1, 2, 3, 4, 6]), min_size=0, max_size=4)


@st.composite
def _reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes with equally many elements: prime factors of one dealt out anew."""
    source = tuple(draw(_SIZES))
    primes = [p for size in source for p in {1: [], 2: [2], 3: [3], 4: [2, 2], 6: [2, 3]}[size]]
    dealt = draw(st.permutations(primes))
    cuts = sorted(draw(st.lists(st.integers(0, len(dealt)), max_size=3)))
    bounds = [0, *cuts, len(dealt)]
    target = tuple(prod(dealt[a:b]) for a, b in itertools.pairwise(bounds))
    return source, target


def _blocks_agree(source: tuple[int, ...], target: tuple[int, ...], a: int, b: int, parts: int) -> bool:
    x = np.arange(prod(source)).reshape(source)
    pairs = zip(np.split(x, parts, a), np.split(x.reshape(target), parts, b), strict=True)
    return all(np.array_equal(left.ravel(), right.ravel()) for left, right in pairs)


def _offer(source: tuple[int, ...], target: tuple[int, ...]) -> dict[tuple[int, int], int]:
    """(operand dimension, result dimension) → size of the factor that joins them."""
    operand = Instruction("p", "parameter", ArrayShape("f32", source), index=0)
    rule = rule_of(Instruction("r", "reshape", ArrayShape("f32", target), (operand,)))
    return {(f.operands[0], f.results[0]): f.size for f in rule.factors}  # type: ignore[misc]


@given(_reshapes())
@settings(max_examples=300, deadline=None)
def test_every_factor_is_right_and_none_is_missing(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    source, target = shapes
    offered = _offer(source, target)
    for a, from_size in enumerate(source):
        for b, to_size in enumerate(target):
            for parts in range(2, min(from_size, to_size) + 1):
                if from_size % parts or to_size % parts:
                    continue
                expected = _blocks_agree(source, target, a, b, parts)
                assert (offered.get((a, b), 1) % parts == 0) == expected, (a, b, parts)


def test_fused_heads_keep_the_head_dimension() -> None:
    assert _offer((4, 8, 16), (4, 8, 4, 4)) == {(0, 0): 4, (1, 1): 8, (2, 2): 4}


def test_merging_keeps_the_major_dimension() -> None:
    assert _offer((4, 8, 16), (32, 16)) == {(0, 0): 4, (2, 1): 16}
