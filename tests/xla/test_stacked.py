"""Partial sums that go from one program to the next: stored as stacks of their terms, moved by nothing."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.errors import PlanCheckError, PlanError
from shardwright.hlo import parse
from shardwright.planner.plans.verify import check_plan
from shardwright.plans.layouts import Layout, shard_slices
from shardwright.plans.plan import Plan
from shardwright.plans.plan_json import decode
from shardwright.plans.plan_text import plan_to_json
from shardwright.plans.shardings import Mesh
from shardwright.xla import emit_stablehlo
from tests.xla.hand import entry, kinds, lower, names_of, plan, run_planned, sharding

_RANDOM = np.random.default_rng(0)
A = _RANDOM.normal(size=(8, 4)).astype(np.float32)
B = _RANDOM.normal(size=(8, 6)).astype(np.float32)


def accumulate(total, a, b):
    """One micro-batch's gradient of a weight, added to those before it."""
    return total + a.T @ b


def accumulating(mesh: dict[str, int], over: tuple[str, ...], columns: str | None) -> Plan:
    """`accumulate` with rows of a and b split over `over`, columns of b and of the sum over `columns`."""
    text = lower(accumulate, np.zeros((4, 6), np.float32), A, B, donate=(0,))
    (transpose,), (dot,), (add,) = (names_of(text, opcode) for opcode in ("transpose", "dot", "add"))
    rows, across = sharding((over, None)), sharding((None, over))
    term = sharding((None, columns), over)
    entries = [
        entry(transpose, [rows], across),
        entry(dot, [across, sharding((over, columns))], term, opcode="dot"),
        entry(add, [term, term], term),
    ]
    return plan(text, mesh, {0: term, 1: rows, 2: sharding((over, columns))}, {0: term}, entries, {0: 0})


@pytest.mark.parametrize(
    ("mesh", "over", "columns"),
    [
        ({"x": 4}, ("x",), None),
        ({"x": 4, "y": 2}, ("x",), "y"),
        ({"x": 4, "y": 2}, ("x",), None),
        ({"x": 2, "y": 2}, ("y",), "x"),
        ({"x": 2, "y": 2, "z": 2}, ("x", "z"), "y"),
    ],
)
def test_terms_are_added_where_they_are(mesh, over, columns):
    planned = accumulating(mesh, over, columns)
    count = planned.mesh.size(over)
    assert planned.parameters[0].stored_shape == planned.outputs[0].stored_shape == (count, 4, 6)
    terms = _RANDOM.normal(size=(count, 4, 6)).astype(np.float32)
    (out,), observed = run_planned(planned, terms, A, B)
    assert kinds(observed) == []
    parts = zip(np.split(A, count), np.split(B, count), strict=True)
    np.testing.assert_allclose(out, terms + np.stack([a.T @ b for a, b in parts]), rtol=1e-5, atol=1e-5)


def test_one_reduction_ends_it():
    """A later program takes the stack, and reduces it once where it is used whole."""
    mesh = {"x": 4, "y": 2}
    text = lower(lambda total, w: w - 0.1 * total, np.zeros((4, 6), np.float32), np.zeros((4, 6), np.float32))
    term = sharding((None, "y"), ("x",))
    whole = sharding((None, "y"))
    names = {opcode: names_of(text, opcode) for opcode in ("multiply", "subtract")}
    entries = [
        entry(names["multiply"][0], [whole, whole], whole),
        entry(names["subtract"][0], [whole, whole], whole),
    ]
    planned = plan(text, mesh, {0: term, 1: whole}, {0: whole}, entries)
    terms, w = _RANDOM.normal(size=(4, 4, 6)).astype(np.float32), B[:4]
    (out,), observed = run_planned(planned, terms, w)
    np.testing.assert_allclose(out, w - 0.1 * terms.sum(0), rtol=1e-5, atol=1e-6)
    assert kinds(observed) == [("all-reduce", 4)]


def test_zeros_start_it():
    text = lower(lambda: jnp.zeros((4, 6)))
    (broadcast,) = names_of(text, "broadcast")
    term = sharding((None, None), ("x",))
    planned = plan(text, {"x": 4}, {}, {0: term}, [entry(broadcast, [sharding(())], term)])
    (out,), observed = run_planned(planned)
    assert out.shape == (4, 4, 6)
    assert not out.any()
    assert kinds(observed) == []


def test_the_layout_is_an_ordinary_one():
    """Servers store, send and release the stack like any array: device i of the axis holds term i."""
    mesh = Mesh.of({"x": 2, "y": 2})
    variable = accumulating({"x": 2, "y": 2}, ("x",), "y").parameters[0]
    layout = Layout.of(variable, mesh)
    assert layout.shape == layout.stored_shape == layout.user_shape == (2, 4, 6)
    assert layout.sharding == sharding(("x", None, "y"))
    assert shard_slices(layout, 3) == (slice(1, 2), slice(0, 4), slice(3, 6))


def test_it_survives_json():
    planned = accumulating({"x": 4}, ("x",), None)
    assert decode(plan_to_json(planned), hlo_text=planned.hlo_text) == planned


def test_only_a_piece_of_a_step_may_hand_one_on():
    planned = accumulating({"x": 4}, ("x",), None)
    module = parse(planned.require_hlo())
    with pytest.raises(PlanCheckError, match="partial: nothing reduces it"):
        check_plan(module, planned)


def test_an_uneven_one_is_refused():
    text = lower(accumulate, np.zeros((3, 6), np.float32), A[:, :3], B)
    term = sharding(("y", None), ("x",))
    planned = plan(text, {"x": 4, "y": 2}, {0: term}, {0: term})
    with pytest.raises(PlanError, match="uneven"):
        emit_stablehlo(text, planned)


@pytest.mark.parametrize("dim", [0, 1])
def test_a_stored_sum_is_scattered_before_it_is_reduced_over_another_axis(dim):
    """At once, XLA would reduce whole arrays over both axes."""
    text = lower(lambda total: -total, np.zeros((4, 6), np.float32))
    used = sharding(tuple("y" if dim == at else None for at in range(2)))
    (negate,) = names_of(text, "negate")
    stored = sharding((None, None), ("x", "y"))
    planned = plan(text, {"x": 2, "y": 2}, {0: stored}, {0: used}, [entry(negate, [used], used)])
    terms = _RANDOM.normal(size=(4, 4, 6)).astype(np.float32)
    (out,), observed = run_planned(planned, terms)
    np.testing.assert_allclose(out, -terms.sum(0), rtol=1e-5, atol=1e-5)
    assert kinds(observed) == [("all-reduce", 2), ("reduce-scatter", 2)]
