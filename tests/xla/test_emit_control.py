"""Loops, conditionals, called functions, and the marks that users leave in their programs."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.reserved_names import ANNOTATION_TARGET
from shardwright.xla import emit_stablehlo, private
from tests.xla.hand import entry, kinds, lower, names_of, plan, run_planned, sharding

X = np.random.default_rng(0).normal(size=(16, 32)).astype(np.float32)
W = (np.random.default_rng(1).normal(size=(32, 32)) / 8).astype(np.float32)
MESH = {"x": 4, "y": 2}
ROWS, COLUMNS, WHOLE, SCALAR = sharding(("x", None)), sharding((None, "x")), sharding((None, None)), sharding(())


def scan(x, w):
    return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=5)[0]


def computation_of(hlo: str, name: str) -> str:
    """The name of the computation that holds an instruction."""
    before = hlo[: hlo.index(f" {name} = ")]
    return re.findall(r"^(?:ENTRY )?(\S+) .*\{$", before, re.MULTILINE)[-1]


def test_a_loop_body_is_planned_and_counted_by_its_trips():
    text = lower(scan, X, W)
    (loop,), (dot,) = names_of(text, "while"), names_of(text, "dot")
    carried = [SCALAR, COLUMNS, sharding(("x", None))]
    entries = [
        entry(loop, [carried], carried),
        entry(dot, [COLUMNS, ROWS], COLUMNS, ("x",), opcode="dot", computation=computation_of(text, dot)),
    ]
    planned = plan(text, MESH, {0: (None, "x"), 1: ("x", None)}, {0: (None, "x")}, entries)
    (out,), observed = run_planned(planned, X, W)
    np.testing.assert_allclose(out, scan(X, W), rtol=1e-3, atol=1e-4)
    (collective,) = (c for c in observed if c.group_size > 1)
    assert (collective.kind, collective.group_size, collective.group_count) == ("reduce-scatter", 4, 2)
    assert (collective.count, collective.trip_counts_known, collective.op_name) == (5, True, dot)


def test_a_loop_that_accumulates_partial_sums_reduces_once():
    def gradient(xs, gs):
        def body(total, pair):
            return total + pair[0].T @ pair[1], None

        return jax.lax.scan(body, jnp.zeros((32, 32)), (xs, gs))[0]

    xs = np.random.default_rng(2).normal(size=(5, 16, 32)).astype(np.float32)
    text = lower(gradient, xs, xs)
    (loop,), (dot,) = names_of(text, "while"), names_of(text, "dot")
    body = computation_of(text, dot)
    add = next(name for name in names_of(text, "add") if f"{name} = f32" in text)
    transpose = names_of(text, "transpose")
    total, batch = sharding((None, None), ("x",)), sharding((None, "x", None))
    carried = [SCALAR, total, batch, batch]
    entries = [
        entry(loop, [carried], carried),
        entry(add, [total, total], total, computation=body),
    ]
    if transpose:
        entries.append(entry(transpose[0], [ROWS], COLUMNS, computation=body))
        entries.append(entry(dot, [COLUMNS, ROWS], total, opcode="dot", computation=body))
    else:
        entries.append(entry(dot, [ROWS, ROWS], total, opcode="dot", computation=body))
    # The zeros that the loop starts from are partial too: zero on every device.
    entries += [entry(name, [SCALAR], total) for name in names_of(text, "broadcast") if f"{name} = f32[32,32]" in text]
    planned = plan(text, {"x": 8}, {0: (None, "x", None), 1: (None, "x", None)}, {}, entries)
    (out,), observed = run_planned(planned, xs, xs)
    np.testing.assert_allclose(out, np.einsum("sbi,sbj->ij", xs, xs), rtol=1e-4, atol=1e-4)
    assert [(c.kind, c.count) for c in observed if c.payload_bytes > 64] == [("all-reduce", 1)]


def test_a_called_function_is_planned_inside():
    @jax.jit
    def layer(x, w):
        return jnp.tanh(x @ w)

    text = lower(lambda x, w: layer(layer(x, w), w), X, W)
    (dot,), calls = names_of(text, "dot"), names_of(text, "call")
    assert len(calls) == 2
    inside = computation_of(text, dot)
    entries = [
        *(entry(call, [COLUMNS, ROWS], COLUMNS) for call in calls),
        entry(dot, [COLUMNS, ROWS], WHOLE, ("x",), opcode="dot", computation=inside),
        entry(names_of(text, "tanh")[0], [WHOLE], WHOLE, computation=inside),
    ]
    planned = plan(text, MESH, {0: (None, "x"), 1: ("x", None)}, {0: (None, "x")}, entries)
    (out,), observed = run_planned(planned, X, W)
    np.testing.assert_allclose(out, np.tanh(np.tanh(X @ W) @ W), rtol=1e-3, atol=1e-4)
    assert kinds(observed) == [("all-reduce", 4), ("all-reduce", 4)]


def test_branches_of_a_conditional():
    def choose(p, x):
        return jax.lax.cond(p, lambda a: a * 2, lambda a: a - 1, x)

    flag = np.array(True)
    text = lower(choose, flag, X)
    (conditional,) = names_of(text, "conditional")
    (double,), (minus,) = names_of(text, "multiply"), names_of(text, "subtract")
    inner = [
        entry(double, [COLUMNS, COLUMNS], COLUMNS, computation=computation_of(text, double)),
        entry(minus, [COLUMNS, COLUMNS], COLUMNS, computation=computation_of(text, minus)),
    ]
    entries = [entry(conditional, [SCALAR, ROWS, ROWS], COLUMNS), *inner]
    planned = plan(text, MESH, {1: ("x", None)}, {0: (None, "x")}, entries)
    (out,), observed = run_planned(planned, flag, X)
    np.testing.assert_array_equal(out, X * 2)
    assert {kind for kind, _ in kinds(observed)} == {"all-to-all"}


def test_a_users_own_constraint_is_taken_out():
    """Left in, its unknown mesh and axis would abort XLA."""
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    where = jax.NamedSharding(mesh, jax.P("d", None))
    text = lower(lambda x: jnp.tanh(jax.lax.with_sharding_constraint(jnp.sin(x), where)), X)
    assert 'custom_call_target="Sharding"' in text
    (mark,) = names_of(text, "custom-call")
    for entries in ([], [entry(mark, [WHOLE], ROWS)]):
        planned = plan(text, MESH, {}, {0: ("x", None)}, entries)
        emitted = emit_stablehlo(text, planned)
        assert "custom_call" not in emitted
        assert '"d"' not in emitted
        (out,), _ = run_planned(planned, X)
        np.testing.assert_allclose(out, np.tanh(np.sin(X)), rtol=1e-5)


def test_shardings_that_a_printer_wrote_on_instructions_are_taken_out():
    """XLA would ignore them; whoever reads the emitted module must not take them for the plan's."""
    text = (
        "HloModule m, entry_computation_layout={(f32[16,32]{1,0})->f32[16,32]{1,0}}\n\n"
        "ENTRY main {\n"
        "  x = f32[16,32]{1,0} parameter(0), sharding={devices=[8,1]<=[8]}\n"
        "  ROOT y = f32[16,32]{1,0} sine(x), sharding={devices=[1,8]<=[8]}\n}\n"
    )
    planned = plan(text, MESH, {0: ("x", None)}, {0: ("x", None)}, [entry("y", [ROWS], ROWS, opcode="sine")])
    assert "mhlo.sharding" in private.stablehlo_of(text)
    assert "mhlo.sharding" not in emit_stablehlo(text, planned)


@pytest.mark.parametrize("planned_too", [False, True])
def test_an_annotation_of_ours_is_its_operand(planned_too):
    text = (
        "HloModule m, entry_computation_layout={(f32[16,32]{1,0})->f32[16,32]{1,0}}\n\n"
        "ENTRY main {\n"
        "  x = f32[16,32]{1,0} parameter(0)\n"
        f'  mark = f32[16,32]{{1,0}} custom-call(x), custom_call_target="{ANNOTATION_TARGET}", backend_config="0:x"\n'
        "  ROOT y = f32[16,32]{1,0} sine(mark)\n}\n"
    )
    entries = [entry("y", [COLUMNS], COLUMNS, opcode="sine")]
    if planned_too:
        entries.append(entry("mark", [ROWS], ROWS, opcode="custom-call"))
    planned = plan(text, MESH, {0: ("x", None)}, {0: (None, "x")}, entries)
    assert "custom_call" not in emit_stablehlo(text, planned)
    (out,), observed = run_planned(planned, X)
    np.testing.assert_allclose(out, np.sin(X), rtol=1e-6)
    assert kinds(observed) == [("all-to-all", 4)]
