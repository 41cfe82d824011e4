"""Sums that stay partial through programs: the numbers of one device, one reduction where there were several."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.hlo import parse
from shardwright.planner.plans.verify import check_plan
from shardwright.plans.plan import Plan
from shardwright.xla import emit_stablehlo
from tests.xla.deferring import deferred
from tests.xla.hand import Dims, entry, kinds, lower, names_of, plan, run_planned, sharding
from tests.xla.propagated import propagated
from tests.xla.test_emit_control import computation_of

_RANDOM = np.random.default_rng(0)


def normal(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return (_RANDOM.normal(size=shape) / 3).astype(dtype)


# ---- programs ------------------------------------------------------------------


def tied(table: Any, tokens: Any, w: Any, targets: Any) -> Any:
    """An embedding used twice: its gradient is a scatter's half and a product's half."""

    def loss(table: Any) -> Any:
        return (jnp.tanh(table[tokens] @ w) @ table.T * targets).mean()

    return jax.grad(loss)(table)


def projections(x: Any, q: Any, k: Any, v: Any, weights: Any) -> Any:
    """One input of three products: its gradient is a sum of three, each summed over the split columns."""

    def loss(x: Any) -> Any:
        return (jnp.tanh(x @ q) * jnp.tanh(x @ k) * jnp.tanh(x @ v) * weights).sum()

    return jax.grad(loss)(x)


def accumulated(w: Any, xs: Any, ys: Any) -> Any:
    """Gradients of micro-batches added up by a scan, from zero; their mean is used after it."""

    def micro_step(total: Any, batch: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: ((batch[0] @ w - batch[1]) ** 2).sum())(w)
        return (total[0] + loss, total[1] + gradient), None

    (loss, gradient), _ = jax.lax.scan(micro_step, (0.0, jnp.zeros_like(w)), (xs, ys))
    return loss, w - 0.1 * gradient / len(xs)


def stacked_layers(ws: Any, x: Any) -> Any:
    """Equal layers run by a scan: the backward scan writes their gradients into one array."""

    def loss(ws: Any) -> Any:
        return (jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2).sum()

    return ws - 0.1 * jax.grad(loss)(ws)


def mixed_precision(w: Any, x: Any) -> Any:
    """Products in bfloat16 of float32 parameters: the gradient is widened."""
    return w - 0.1 * jax.grad(lambda w: (x @ w.astype(jnp.bfloat16)).astype(jnp.float32).sum())(w)


def move_elements(x: Any, y: Any) -> Any:
    """A sum over the batch, cut, turned, joined, scaled."""
    total = x.T @ y
    joined = jnp.concatenate([total[:16].T.reshape(-1), -total[16:].reshape(-1)])
    return joined.reshape(2, 24, 16).transpose(1, 0, 2) / 3


@dataclass(frozen=True)
class Case:
    """A program, how its arguments and outputs lie, and the collectives of the plan that keeps sums partial.

    collectives: (kind, devices of a group, bytes) → how often; only those that sum.
    """

    program: Callable[..., Any]
    arguments: tuple[Any, ...]
    mesh: Mapping[str, int]
    lies: Mapping[int, Dims]
    collectives: Mapping[tuple[str, int, int], int]
    returned: Mapping[int, Dims] = field(default_factory=dict)
    tolerance: float = 2e-6


TIED = (normal(64, 32), _RANDOM.integers(0, 64, 16).astype(np.int32), normal(32, 32), normal(16, 64))
PROJECTIONS = (normal(16, 32), normal(32, 24), normal(32, 24), normal(32, 24), normal(16, 24))
COLUMNS: dict[int, Dims] = dict.fromkeys(range(1, 5), (None, "x"))
ACCUMULATED = (normal(32, 24), normal(5, 16, 32), normal(5, 16, 24))
BATCHES: dict[int, Dims] = {1: (None, "x", None), 2: (None, "x", None)}
LAYERS = (normal(4, 32, 32), normal(16, 32))
HALVES, EIGHT = {"x": 2, "y": 2}, {"x": 2, "y": 2, "z": 2}

CASES = {
    "tied gradients are added, then reduced": Case(
        tied, TIED, {"x": 4}, {1: ("x",), 3: ("x", None)}, {("all-reduce", 4, 8192): 1}
    ),
    "over two axes at once": Case(
        tied, TIED, HALVES, {1: (("x", "y"),), 3: (("x", "y"), None)}, {("all-reduce", 4, 8192): 1}
    ),
    "reduced straight into parts": Case(
        tied, TIED, HALVES, {1: ("x",), 3: ("x", None)}, {("reduce-scatter", 2, 8192): 1}, {0: ("x", None)}
    ),
    "three products, one sum": Case(projections, PROJECTIONS, {"x": 4}, COLUMNS, {("all-reduce", 4, 2048): 1}),
    "split over another axis, a third one idle": Case(
        projections, PROJECTIONS, EIGHT, COLUMNS | {0: ("y", None), 4: ("y", "x")}, {("all-reduce", 2, 1024): 1},
        {0: ("y", None)},
    ),
    "accumulated in a loop, reduced after it": Case(
        accumulated, ACCUMULATED, {"x": 4}, BATCHES, {("all-reduce", 4, 3072): 1, ("all-reduce", 4, 4): 1}
    ),
    "gradients of scanned layers": Case(
        stacked_layers, LAYERS, HALVES, {1: ("x", None)}, {("all-reduce", 2, 16384): 1}
    ),
    "widened": Case(
        mixed_precision, (normal(32, 24), normal(16, 32, dtype=jnp.bfloat16)), {"x": 4}, {1: ("x", None)},
        {("all-reduce", 4, 3072): 1}, tolerance=4e-3,
    ),
    "moved about": Case(
        move_elements, (normal(16, 32), normal(16, 24)), HALVES, {0: ("x", None), 1: ("x", None)},
        {("reduce-scatter", 2, 3072): 1}, {0: (None, "x", None)},
    ),
}  # fmt: skip


@pytest.mark.dear
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_sums_stay_partial_and_are_exact(case: Case) -> None:
    at_once, late = plans_of(case)
    outputs, observed = run_planned(late, *case.arguments)
    for wanted, got in zip(jax.tree.leaves(jax.jit(case.program)(*case.arguments)), outputs, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=0, atol=case.tolerance * np.abs(wanted).max())
    sums = Counter[tuple[str, int, int]]()
    for each in observed:
        if each.group_size > 1 and each.kind in ("all-reduce", "reduce-scatter"):
            sums[each.kind, each.group_size, each.payload_bytes] += each.count
    assert sums == case.collectives
    assert partial_values(at_once) == 0 < partial_values(late)


def plans_of(case: Case) -> tuple[Plan, Plan]:
    """(a plan that reduces every sum where it is made, the same with sums left partial); both are checked."""
    text = lower(case.program, *case.arguments)
    module = parse(text)
    at_once = replace(propagated(text, case.mesh, case.lies, case.returned), module_name=module.name)
    late = deferred(module, at_once)
    check_plan(module, at_once)
    check_plan(module, late)
    return at_once, late


def partial_values(planned: Plan) -> int:
    return sum(bool(each.unreduced) for entry in planned.instructions for each in entry.result)


# ---- single facts ----------------------------------------------------------------

X, W = normal(16, 32), normal(32, 24)
LHS, RHS = sharding((None, "x")), sharding(("x", None))
SUMMED, WHOLE = sharding((None, None), ("x",)), sharding((None, None))
SIDES: dict[int, Dims] = {0: (None, "x"), 1: ("x", None)}


def test_a_loop_of_partial_scalars() -> None:
    """Scalars need no constraint as a rule; a partial one does, wherever it is handed on."""

    def losses(xs: Any) -> Any:
        return jax.lax.scan(lambda total, x: (total + (x * x).sum(), None), 0.0, xs)[0] / 5

    case = Case(losses, (normal(5, 16, 8),), {"x": 4}, {0: (None, "x", None)}, {})
    _, late = plans_of(case)
    marks = emit_stablehlo(late.require_hlo(), late).count('[], unreduced={"x"}> : tensor<f32>')
    called = jax.version.__version_info__ < (0, 12)  # the body's sum is a function of its own there
    assert marks == 7 + 2 * called  # into the loop, its body and condition, the sum, what they give
    (out,), observed = run_planned(late, *case.arguments)
    np.testing.assert_allclose(out, losses(*case.arguments), rtol=1e-5)
    assert [(c.kind, c.count) for c in observed if c.group_size > 1] == [("all-reduce", 1)]


def test_branches_hand_partial_sums_on() -> None:
    def choose(flag: Any, a: Any, b: Any) -> Any:
        return jax.lax.cond(flag, lambda c: 2 * c, lambda c: -c, a @ b)

    flag = np.array(True)
    text = lower(choose, flag, X, W)
    (dot,), (choice,), (double,), (minus,) = (names_of(text, o) for o in ("dot", "conditional", "multiply", "negate"))
    entries = [
        entry(dot, [LHS, RHS], SUMMED, opcode="dot"),
        entry(choice, [sharding(()), SUMMED, SUMMED], SUMMED),
        entry(double, [SUMMED, WHOLE], SUMMED),
        entry(minus, [SUMMED], SUMMED),
    ]
    planned = plan(text, {"x": 4, "y": 2}, {1: (None, "x"), 2: ("x", None)}, {}, entries)
    (out,), observed = run_planned(planned, flag, X, W)
    np.testing.assert_allclose(out, 2 * X @ W, rtol=2e-5, atol=1e-5)
    assert kinds(observed) == [("all-reduce", 4)]


@pytest.mark.parametrize(("result", "kind"), [(WHOLE, "all-reduce"), (sharding(("x", None)), "reduce-scatter")])
def test_a_linear_instruction_reduces_its_result(result: Any, kind: str) -> None:
    """Summands in, sum out: the mark stands between them, or XLA would reduce both operands."""
    text = lower(lambda a, b, c, d: a @ b - c @ d, X, W, X, W)
    dots, (minus,) = names_of(text, "dot"), names_of(text, "subtract")
    entries = [entry(dot, [LHS, RHS], SUMMED, opcode="dot") for dot in dots]
    entries.append(entry(minus, [SUMMED, SUMMED], result, ("x",)))
    sides = SIDES | {2: (None, "x"), 3: ("x", None)}
    returned: dict[int, Dims] = {0: ("x", None) if kind == "reduce-scatter" else (None, None)}
    planned = plan(text, {"x": 4, "y": 2}, sides, returned, entries)
    (out,), observed = run_planned(planned, X, W, 3 * X, W)
    np.testing.assert_allclose(out, -2 * X @ W, rtol=2e-5, atol=2e-5)
    assert kinds(observed) == [(kind, 4)]


@pytest.mark.parametrize(
    ("source", "used", "expected"),
    [
        ((None, None), (None, "x"), [("reduce-scatter", 4)]),
        (("y", None), ("y", "x"), [("reduce-scatter", 4)]),
        (("y", None), ("x", "y"), [("collective-permute", 6), ("reduce-scatter", 4)]),
        (("y", None), (None, None), [("all-gather", 2), ("all-reduce", 4)]),
    ],
)
def test_a_use_reduces_and_moves(source: Dims, used: Dims, expected: list[tuple[str, int]]) -> None:
    """Partial over x: reduced first, straight into parts where the use is split over x, then moved."""
    text = lower(lambda a, b: jnp.tanh(a @ b), X, W)
    (dot,), (tanh,) = names_of(text, "dot"), names_of(text, "tanh")
    lhs = (source[0], "x")
    entries = [
        entry(dot, [sharding(lhs), RHS], sharding(source, ("x",)), opcode="dot"),
        entry(tanh, [sharding(used)], sharding(used)),
    ]
    planned = plan(text, {"x": 4, "y": 2}, {0: lhs, 1: ("x", None)}, {0: used}, entries)
    (out,), observed = run_planned(planned, X, W)
    np.testing.assert_allclose(out, np.tanh(X @ W), rtol=1e-4, atol=1e-5)
    assert kinds(observed) == expected


BOTH: dict[int, Dims] = {0: ("x", "y", None), 1: ("x", "y", None)}


def weigh(a: Any, b: Any) -> Any:
    """(8, 16, 32), (8, 16, 24) -> (32, 24)"""
    return jnp.einsum("abm,abn->mn", a, b)


@pytest.mark.parametrize("program", [weigh, lambda a, b: (a + 0).sum((0, 1))], ids=["product", "sum"])
def test_a_sum_over_two_dimensions_is_one_all_reduce(program: Any) -> None:
    """XLA reduces over one after the other."""
    arguments = normal(8, 16, 32), normal(8, 16, 24)
    planned = propagated(lower(program, *arguments), {"x": 4, "y": 2}, BOTH, {})
    (out,), observed = run_planned(planned, *arguments)
    np.testing.assert_allclose(out, program(*arguments), rtol=1e-4, atol=1e-4)
    assert kinds(observed) == [("all-reduce", 8)]


def test_a_maximum_over_two_dimensions_has_no_mark() -> None:
    """A mark says that summands are left."""
    numbers = normal(8, 16, 32)
    text = lower(lambda a: a.max((0, 1)), numbers)
    (reduced,) = names_of(text, "reduce")
    result = entry(reduced, [sharding(("x", "y", None)), sharding(())], sharding((None,)), ("x", "y"))
    planned = plan(text, {"x": 4, "y": 2}, {0: ("x", "y", None)}, {}, [result])
    (out,), observed = run_planned(planned, numbers)
    np.testing.assert_allclose(out, numbers.max((0, 1)))
    assert kinds(observed) == [("all-reduce", 2), ("all-reduce", 4)]


def test_a_sum_ends_in_uneven_shards() -> None:
    """15 rows over four devices: whole first, for Shardy aborts at summands of uneven shards."""
    text = lower(lambda a, b: jnp.tanh(a @ b), X[:15], W)
    (dot,), (tanh,) = names_of(text, "dot"), names_of(text, "tanh")
    rows = sharding(("x", None))
    entries = [entry(dot, [LHS, RHS], SUMMED, opcode="dot"), entry(tanh, [rows], rows)]
    planned = plan(text, {"x": 4, "y": 2}, SIDES, {0: ("x", None)}, entries)
    (out,), _ = run_planned(planned, X[:15], W)
    np.testing.assert_allclose(out, np.tanh(X[:15] @ W), rtol=1e-4, atol=1e-5)


def test_a_sum_over_one_axis_becomes_one_over_another() -> None:
    """Whole between: Shardy aborts where one axis is summed and another begins in the same step."""
    text = lower(lambda a, b, c, d: a @ b + c @ d, X, W, X, W)
    (first, second), (add,) = names_of(text, "dot"), names_of(text, "add")
    other = sharding((None, None), ("y",))
    entries = [
        entry(first, [LHS, RHS], SUMMED, opcode="dot"),
        entry(second, [sharding((None, "y")), sharding(("y", None))], other, opcode="dot"),
        entry(add, [other, other], WHOLE, ("y",)),
    ]
    planned = plan(text, {"x": 4, "y": 2}, SIDES | {2: (None, "y"), 3: ("y", None)}, {}, entries)
    (out,), observed = run_planned(planned, X, W, 3 * X, W)
    np.testing.assert_allclose(out, 4 * X @ W, rtol=2e-5, atol=2e-5)
    assert kinds(observed) == [("all-reduce", 2), ("all-reduce", 4)]


def test_rows_that_are_looked_up_and_scattered_over_one_of_their_axes() -> None:
    """XLA reduces a lookup's sum by itself: no mark may stand on the way, or it is summed twice."""
    table, rows = normal(64, 32), np.arange(16, dtype=np.int32) * 3
    text = lower(lambda t, i: jnp.take(t, i, axis=0, mode="clip"), table, rows)
    (gather,) = names_of(text, "gather")
    split, columns = sharding((("x", "y"), None)), sharding((None, "x"))
    home = computation_of(text, gather)
    looked_up = entry(gather, [split, sharding((None, None))], columns, ("x", "y"), computation=home)
    planned = plan(text, {"x": 2, "y": 2}, {0: (("x", "y"), None)}, {0: (None, "x")}, [looked_up])
    (out,), _ = run_planned(planned, table, rows)
    np.testing.assert_allclose(out, table[rows], rtol=1e-6)


def test_uses_that_agree_share_their_constraint() -> None:
    def thrice(a: Any, b: Any) -> Any:
        total = a @ b
        return jnp.tanh(total), jnp.sin(total), jnp.cos(total)

    text = lower(thrice, X, W)
    (dot,) = names_of(text, "dot")
    entries = [entry(dot, [LHS, RHS], SUMMED, opcode="dot")]
    entries += [entry(names_of(text, opcode)[0], [WHOLE], WHOLE) for opcode in ("tanh", "sine", "cosine")]
    planned = plan(text, {"x": 4}, SIDES, {}, entries)
    assert emit_stablehlo(text, planned).count("sdy.sharding_constraint") == 5  # four results, one for all uses
    outputs, observed = run_planned(planned, X, W)
    np.testing.assert_allclose(outputs[2], np.cos(X @ W), rtol=1e-4, atol=1e-5)
    assert kinds(observed) == [("all-reduce", 4)]


@pytest.mark.parametrize("mesh", [{"x": 4}, {"y": 2, "x": 2}, {"x": 2, "y": 2, "z": 2}], ids=str)
def test_a_whole_value_is_added_to_a_partial_sum(mesh: dict[str, int]) -> None:
    """XLA keeps the whole value on one device of the axis; nothing is sent for that."""
    text = lower(lambda a, b, c: jnp.tanh(a @ b + c), X, W, X @ W)
    (dot,), (add,), (tanh,) = names_of(text, "dot"), names_of(text, "add"), names_of(text, "tanh")
    rows = ("y", None) if "y" in mesh else (None, None)
    part, full = sharding(rows, ("x",)), sharding(rows)
    lhs = sharding((rows[0], "x"))
    entries = [entry(dot, [lhs, RHS], part, opcode="dot"), entry(add, [part, part], part), entry(tanh, [full], full)]
    planned = plan(text, mesh, {0: (rows[0], "x"), 1: ("x", None), 2: rows}, {0: rows}, entries)
    (out,), observed = run_planned(planned, X, W, X @ W)
    np.testing.assert_allclose(out, np.tanh(2 * X @ W), rtol=1e-4, atol=1e-5)
    assert kinds(observed) == [("all-reduce", mesh["x"])]


def test_partial_where_it_is_not_linear_is_wrong() -> None:
    """What the checker is for: XLA believes every mark."""
    text = lower(lambda a, b: jnp.abs(a @ b), X, W)
    (dot,), (absolute,) = names_of(text, "dot"), names_of(text, "abs")
    wrong = [entry(dot, [LHS, RHS], SUMMED, opcode="dot"), entry(absolute, [SUMMED], SUMMED)]
    (out,), _ = run_planned(plan(text, {"x": 4}, SIDES, {}, wrong), X, W)
    assert not np.allclose(out, np.abs(X @ W), rtol=1e-2)
