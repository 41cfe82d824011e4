"""A bitcast's steps move elements as reading the same memory in another layout does."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.hlo import ArrayShape
from shardwright.planner.graph.bitcasts import bitcast_steps


def _in_memory(value: np.ndarray, shape: ArrayShape) -> np.ndarray:
    """The elements in the order in which they lie."""
    return value.transpose(_major_to_minor(shape)).reshape(-1)


def _read(memory: np.ndarray, shape: ArrayShape) -> np.ndarray:
    order = _major_to_minor(shape)
    lying = memory.reshape([shape.dimensions[dim] for dim in order])
    return lying.transpose(np.argsort(order).astype(int)) if order else lying


def _major_to_minor(shape: ArrayShape) -> list[int]:
    assert shape.layout is not None
    return [int(number) for number in reversed(shape.layout.split(","))] if shape.layout else []


@st.composite
def _shapes(draw: st.DrawFn) -> tuple[ArrayShape, ArrayShape]:
    factors = draw(st.lists(st.sampled_from([1, 2, 3, 4]), max_size=5))

    def side() -> ArrayShape:
        cuts = sorted(draw(st.lists(st.integers(0, len(factors)), max_size=4)))
        bounds = [0, *cuts, len(factors)]
        mixed = draw(st.permutations(factors))
        dims = tuple(int(np.prod(mixed[a:b], initial=1)) for a, b in pairwise(bounds))
        layout = draw(st.permutations(range(len(dims))))
        return ArrayShape("f32", dims, layout=",".join(map(str, layout)))

    return side(), side()


@given(_shapes())
def test_steps_read_the_same_memory(shapes: tuple[ArrayShape, ArrayShape]) -> None:
    before, after = shapes
    value = np.arange(np.prod(before.dimensions, dtype=int)).reshape(before.dimensions)
    expected = _read(_in_memory(value, before), after)
    steps = bitcast_steps(before, after)
    assert steps
    for step in steps:
        value = value.transpose(step.dimensions) if step.opcode == "transpose" else value.reshape(step.shape.dimensions)
        assert value.shape == step.shape.dimensions
    np.testing.assert_array_equal(value, expected)


@pytest.mark.parametrize(
    ("before", "after", "opcodes"),
    [
        (("2,3", "1,0"), ("6", "0"), ["reshape"]),
        (("2,3", "1,0"), ("2,3", "1,0"), ["reshape"]),
        (("2,3", "1,0"), ("3,2", "0,1"), ["transpose"]),
        (("1,3", "0,1"), ("3", "0"), ["reshape"]),
        (("2,3", None), ("2,1,3", None), ["reshape"]),
        (("4,8,128", "2,1,0:T(8,128)"), ("2,2,8,128", "3,2,1,0:T(8,128)"), ["reshape"]),
        (("1,6144", "1,0:T(2,128)(2,1)"), ("1,1,6144", "2,1,0:T(2,128)(2,1)"), ["reshape"]),
        (("2,256", "1,0:T(1,128)"), ("512", "0:T(512)"), ["reshape"]),
        (("4,8,128", "2,1,0:T(8,128)S(1)"), ("8,128,4", "1,0,2:T(8,128)"), ["transpose"]),
    ],
)
def test_as_few_steps_as_do(before: tuple[str, str | None], after: tuple[str, str | None], opcodes: list[str]) -> None:
    steps = bitcast_steps(_shape("f32", *before), _shape("f32", *after))
    assert steps is not None
    assert [step.opcode for step in steps] == opcodes


def _shape(kind: str, dims: str, layout: str | None) -> ArrayShape:
    return ArrayShape(kind, tuple(map(int, dims.split(","))), layout=layout)


def test_types_of_one_width_are_converted_bit_by_bit() -> None:
    steps = bitcast_steps(_shape("f32", "2,3", "1,0"), _shape("s32", "6", "0"))
    assert steps is not None
    assert [(step.opcode, step.shape.element_type) for step in steps] == [
        ("bitcast-convert", "s32"),
        ("reshape", "s32"),
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (_shape("f32", "16,256", "1,0:T(8,128)"), _shape("f32", "4096", "0:T(1024)")),
        (_shape("bf16", "2,128", "1,0:T(8,128)(2,1)"), _shape("bf16", "256", "0:T(256)(128)(2,1)")),
        (_shape("f32", "16,256", "1,0:T(8,128)"), _shape("f32", "256,16", "1,0:T(8,128)")),
        (_shape("f32", "2,3", "1,0"), _shape("bf16", "2,6", "1,0")),
        (_shape("f32", "2,3", "1,0"), _shape("f32", "2,4", "1,0")),
        (ArrayShape("f32", (2, 3), (True, False)), _shape("f32", "6", "0")),
    ],
    ids=["tiles", "rows in pairs", "tiles turned", "width", "size", "dynamic"],
)
def test_what_layouts_do_not_say_is_not_guessed(before: ArrayShape, after: ArrayShape) -> None:
    assert bitcast_steps(before, after) is None
