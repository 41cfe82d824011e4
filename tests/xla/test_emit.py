"""Plans written by hand come out as the collectives that were meant, with the numbers of one device."""

from __future__ import annotations

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.errors import PlanError, UnsupportedProgramError
from shardwright.reserved_names import MESH_NAME
from shardwright.xla import emit_stablehlo
from tests.xla.hand import entry, kinds, lower, names_of, plan, run_planned, sharding

X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(32, 24)).astype(np.float32)
MESH = {"x": 4, "y": 2}
WHOLE = sharding((None, None))


def matmul(a, b):
    return a @ b


HLO = lower(matmul, X, W)
(DOT,) = names_of(HLO, "dot")


@pytest.mark.parametrize(
    ("lhs", "rhs", "result", "partial", "expected"),
    [
        ((None, "x"), ("x", None), (None, None), ("x",), [("all-reduce", 4)]),
        ((None, "x"), ("x", None), ("x", None), ("x",), [("reduce-scatter", 4)]),
        (("x", "y"), ("y", None), ("x", None), ("y",), [("all-reduce", 2)]),
        (("x", None), (None, "y"), ("x", "y"), (), []),
        ((None, ("x", "y")), (("x", "y"), None), (None, None), ("x", "y"), [("all-reduce", 8)]),
    ],
)
def test_a_dot_costs_what_its_plan_says(lhs, rhs, result, partial, expected):
    lies = [sharding(lhs), sharding(rhs)]
    planned = plan(
        HLO, MESH, {0: lhs, 1: rhs}, {0: result}, [entry(DOT, lies, sharding(result), partial, opcode="dot")]
    )
    (out,), observed = run_planned(planned, X, W)
    np.testing.assert_allclose(out, X @ W, rtol=2e-5, atol=1e-5)
    assert kinds(observed) == expected
    assert {c.op_name for c in observed} <= {DOT}


def test_the_sharding_as_used_decides_not_the_sharding_as_stored():
    """lhs lies split on its contracted dimension, rhs whole: used as a contraction, rhs is sliced for free."""
    lhs, rhs = (None, "x"), (None, None)
    uses = [sharding(lhs), sharding(("x", None))]
    planned = plan(HLO, MESH, {0: lhs, 1: rhs}, {}, [entry(DOT, uses, WHOLE, ("x",), opcode="dot")])
    _, observed = run_planned(planned, X, W)
    assert kinds(observed) == [("all-reduce", 4)]


def test_without_the_use_xla_gathers_instead():
    """The fact that makes use constraints necessary."""
    planned = plan(HLO, MESH, {0: (None, "x")}, {}, [entry(DOT, [], WHOLE, opcode="dot")])
    _, observed = run_planned(planned, X, W)
    assert kinds(observed) == [("all-gather", 4)]


def test_what_is_full_of_one_number_is_made_again_for_readers_that_want_it_otherwise():
    """Of 30 columns over 4, XLA would pad and store the whole of what lies whole before it cuts each part."""

    def filled(a):
        return jnp.sin(a) + jnp.full((16, 30), 3.0)

    x = X[:, :30]
    text = lower(filled, x)
    (sine,), (full,), (add,) = (names_of(text, opcode) for opcode in ("sine", "broadcast", "add"))
    columns = sharding((None, "x"))
    entries = [
        entry(sine, [WHOLE], WHOLE),
        entry(full, [sharding(())], WHOLE, opcode="broadcast"),
        entry(add, [columns, columns], columns),
    ]
    planned = plan(text, MESH, {}, {}, entries)
    emitted = emit_stablehlo(text, planned)
    assert len(re.findall(r"= stablehlo.broadcast_in_dim", emitted)) == 2
    (out,), observed = run_planned(planned, x)
    np.testing.assert_allclose(out, np.sin(x) + 3, rtol=1e-6)
    assert {kind for kind, _ in kinds(observed)} == {"all-gather"}  # of the result alone


def test_a_value_used_in_two_ways_gets_one_constraint_for_each():
    def two(a):
        b = jnp.tanh(a)
        return jnp.sin(b), jnp.cos(b)

    text = lower(two, X)
    (tanh,), (sine,), (cosine,) = (names_of(text, opcode) for opcode in ("tanh", "sine", "cosine"))
    split, columns = sharding(("x", None)), sharding((None, "x"))
    planned = plan(
        text,
        MESH,
        {0: ("x", None)},
        {0: (None, "x"), 1: ("x", None)},
        [entry(tanh, [split], split), entry(sine, [columns], columns), entry(cosine, [split], split)],
    )
    emitted = emit_stablehlo(text, planned)
    assert emitted.count("sdy.sharding_constraint") == 4  # three results, one use that differs
    outputs, observed = run_planned(planned, X)
    assert kinds(observed) == [("all-to-all", 4)]
    np.testing.assert_allclose(outputs[1], np.cos(np.tanh(X)), rtol=1e-5)


def test_partial_sums_are_added_before_they_are_reduced():
    """Two partial products, one all-reduce: `unreduced` keeps a value partial."""

    def tied(a, b, c, d):
        return a @ b + c @ d

    text = lower(tied, X, W, X, W)
    dots, (add,) = names_of(text, "dot"), names_of(text, "add")
    lhs, rhs, partial = sharding((None, "x")), sharding(("x", None)), sharding((None, None), ("x",))
    entries = [
        *(entry(dot, [lhs, rhs], partial, opcode="dot") for dot in dots),
        entry(add, [partial, partial], partial),
    ]
    sides = {0: (None, "x"), 1: ("x", None), 2: (None, "x"), 3: ("x", None)}
    planned = plan(text, MESH, sides, {}, entries)
    (out,), observed = run_planned(planned, X, W, 2 * X, W)
    np.testing.assert_allclose(out, 3 * X @ W, rtol=2e-5, atol=2e-5)
    assert kinds(observed) == [("all-reduce", 4)]


def test_everything_is_named_after_the_instruction():
    emitted = emit_stablehlo(HLO, plan(HLO, MESH, {}, {}, [entry(DOT, [WHOLE, WHOLE], WHOLE, opcode="dot")]))
    label = re.search(rf'(#loc\d+) = loc\("{re.escape(DOT)}"\)', emitted).group(1)
    assert len(re.findall(rf"loc\({label}\)", emitted)) == 2  # the operation and its constraint


def test_one_mesh_and_a_sharding_on_every_argument_and_output():
    emitted = emit_stablehlo(HLO, plan(HLO, MESH, {0: ("x", None)}, {0: (("x", "y"), None)}))
    assert f'sdy.mesh @{MESH_NAME} = <["x"=4, "y"=2]>' in emitted
    signature = next(line for line in emitted.splitlines() if "func.func @main" in line)
    assert signature.count("sdy.sharding = ") == 3
    assert f'<@{MESH_NAME}, [{{"x", "y"}}, {{}}]>' in signature


def test_several_results_of_one_instruction():
    def ordered(a):
        return jax.lax.sort((a, -a), dimension=1, num_keys=1)

    text = lower(ordered, X)
    (sort,) = names_of(text, "sort")
    rows = sharding(("x", None))
    planned = plan(
        text, MESH, {0: ("x", None)}, {0: ("x", None), 1: ("x", None)}, [entry(sort, [rows, rows], [rows, rows])]
    )
    outputs, observed = run_planned(planned, X)
    assert kinds(observed) == []
    np.testing.assert_array_equal(outputs[0], np.sort(X, axis=1))


def test_an_instruction_the_program_lacks_is_named():
    with pytest.raises(PlanError, match=r"main/dot\.99: dot of the plan is not in the program"):
        emit_stablehlo(HLO, plan(HLO, MESH, {}, {}, [entry("dot.99", [WHOLE, WHOLE], WHOLE)]))


def test_a_plan_of_another_program_is_refused():
    other = lower(lambda a: a + 1, X)
    with pytest.raises(PlanError, match="2 arguments, the program 1"):
        emit_stablehlo(other, plan(HLO, MESH))
    planned = plan(HLO, MESH)
    wrong = dataclasses.replace(planned.parameters[0], shape=(16, 16), stored_shape=(16, 16))
    with pytest.raises(PlanError, match="argument 0 is tensor<16x32xf32>"):
        emit_stablehlo(HLO, dataclasses.replace(planned, parameters=(wrong, planned.parameters[1])))


def test_shard_map_is_refused():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    mapped = jax.shard_map(jnp.tanh, mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    text = lower(mapped, X)
    with pytest.raises(UnsupportedProgramError, match="shard_map"):
        emit_stablehlo(text, plan(text, {"x": 8}))
