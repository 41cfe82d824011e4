"""Integers through every collective, exact or refused; here over one rank, in `check_integers` over more."""

from __future__ import annotations

import functools

import jax
import numpy as np
import pytest

import shardwright as sw
from shardwright import ranks
from shardwright.ranks import operations
from tests.ranks.check_integers import CHECKS
from tests.ranks.processes import assert_passed, run_ranks


@pytest.fixture(autouse=True)
def alone():
    """A job of one process."""
    ranks.init()
    yield
    ranks.shutdown()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_one_rank(check) -> None:
    check(0, 1)


@pytest.mark.cluster
@pytest.mark.parametrize("size", [2, 3])
def test_several_ranks(size: int) -> None:
    assert_passed(run_ranks("tests.ranks.check_integers", size, timeout_s=240))


def test_without_64_bits_nothing_is_cut_in_a_jitted_function() -> None:
    with jax.enable_x64(True):
        wide = jax.numpy.asarray(np.int64([2**62 + 1]))
    constant = np.int64([2**40])
    for given in (wide, constant, np.int64(1), 2**40, np.complex128([1])):
        with pytest.raises(sw.CollectiveError, match="jax_enable_x64"):
            ranks.jit(lambda x: x)(given)
    for call in (ranks.allreduce, ranks.allgather, ranks.broadcast, ranks.reducescatter):
        with pytest.raises(sw.CollectiveError, match="int64"):
            ranks.jit(lambda x, call=call: call([x, constant]))(np.float32([1]))


def _scaled(x):
    half = np.float64(0.5)
    return [
        call(x, "sum", prescale_factor=half, postscale_factor=half) for call in (ranks.allreduce, ranks.reducescatter)
    ]


def test_factors_keep_the_type_of_floats() -> None:
    for dtype in ("float16", "bfloat16", "float32", "complex64"):
        x = np.ones(5, jax.numpy.dtype(dtype))
        for found in (*_scaled(x), *(ranks.jit(_scaled)(x) if dtype == "bfloat16" else ())):
            assert found.dtype == x.dtype
            assert np.all(np.asarray(found) == 0.25)


def test_factors_of_integers_are_refused() -> None:
    for call in (ranks.allreduce, ranks.reducescatter):
        for factor in ("prescale_factor", "postscale_factor"):
            scaled = functools.partial(call, op="sum", **{factor: 0.5})
            for function in (scaled, ranks.jit(lambda x, scaled=scaled: scaled(x))):
                with pytest.raises(sw.CollectiveError, match="would round"):
                    function(np.int32([3]))


@pytest.mark.parametrize(
    ("values", "op", "fits"),
    [
        ([2**62, 2**62], "sum", False),
        ([2**62, 2**62 - 1], "sum", True),
        ([-(2**62), -(2**62)], "sum", True),
        ([2**32, 2**31], "product", False),
        ([2**32, -(2**31)], "product", True),
        ([2**62, 2**62], "max", True),
    ],
)
def test_sums_of_pythons_integers_that_leave_64_bits_are_refused(values, op: str, fits: bool) -> None:
    def check() -> None:
        operations.check_number(values, operations.to_op(op), "allreduce")

    if fits:
        check()
        return
    with pytest.raises(sw.CollectiveError, match="64 bits"):
        check()
    with pytest.raises(sw.CollectiveError, match="64 bits"):
        operations.check_bounds(values, operations.to_op(op), "allreduce")
