"""Sums over several axes of which some scatter the result: bytes on the wire, and numbers."""

from __future__ import annotations

import numpy as np
import pytest

from tests.xla.hand import entry, kinds, lower, names_of, plan, run_planned, sharding

MESH = {"x": 2, "y": 2, "z": 2}


@pytest.mark.parametrize(
    ("summed", "result", "expected"),
    [
        (("x", "y"), ("x", None), [("all-reduce", 2), ("reduce-scatter", 2)]),
        (("x", "y"), (None, "y"), [("all-reduce", 2), ("reduce-scatter", 2)]),
        (("x", "z"), ("z", "y"), [("all-reduce", 2), ("reduce-scatter", 2)]),
        (("x", "y", "z"), ("x", None), [("all-reduce", 4), ("reduce-scatter", 2)]),
        (("x", "y"), (("x", "y"), None), [("reduce-scatter", 4)]),
    ],
)
def test_a_sum_is_scattered_before_it_is_reduced_over_other_axes(summed, result, expected):
    """At once, XLA reduces the whole array over all axes, then slices; one mesh axis is idle or splits rows."""
    rng = np.random.default_rng(0)
    lhs, rhs = rng.standard_normal((16, 32), np.float32), rng.standard_normal((32, 8), np.float32)
    text = lower(lambda a, b: a @ b, lhs, rhs)
    idle = tuple("y" if axis == "y" and "y" not in summed else None for axis in result)
    used = [sharding((None, summed)), sharding((summed, idle[1]))]
    dot = entry(names_of(text, "dot")[0], used, sharding(result), summed)
    planned = plan(text, MESH, {0: (None, summed), 1: (summed, idle[1])}, {0: result}, [dot])
    outputs, collectives = run_planned(planned, lhs, rhs)
    np.testing.assert_allclose(outputs[0], lhs @ rhs, rtol=1e-5, atol=1e-5)
    assert kinds(collectives) == expected


@pytest.mark.parametrize(("target", "expected"), [("x", [("all-reduce", 2), ("reduce-scatter", 2)])])
def test_a_partial_value_is_scattered_where_a_use_splits_it(target, expected):
    """The dot leaves its sum partial over two axes; the negation takes it split over one of them."""
    rng = np.random.default_rng(1)
    lhs, rhs = rng.standard_normal((16, 32), np.float32), rng.standard_normal((32, 8), np.float32)
    text = lower(lambda a, b: -(a @ b), lhs, rhs)
    summed, rows = ("x", "y"), sharding((target, None))
    entries = [
        entry(
            names_of(text, "dot")[0],
            [sharding((None, summed)), sharding((summed, None))],
            sharding((None, None), summed),
            summed,
        ),
        entry(names_of(text, "negate")[0], [rows], rows),
    ]
    planned = plan(text, MESH, {0: (None, summed), 1: (summed, None)}, {0: (target, None)}, entries)
    outputs, collectives = run_planned(planned, lhs, rhs)
    np.testing.assert_allclose(outputs[0], -(lhs @ rhs), rtol=1e-5, atol=1e-5)
    assert kinds(collectives) == expected
