"""Arguments and outputs: padding that XLA would not do, aliases that must hold, shardings compared."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.errors import CompilationError, PlanError
from shardwright.xla import BoundaryArray, emit_stablehlo, load_program, to_named_shardings
from shardwright.xla.compiling import compile_planned
from tests.xla.hand import entry, kinds, lower, names_of, plan, run_planned, sharding

WHOLE = sharding((None, None))


@pytest.mark.parametrize("length", [30, 29, 3])
def test_a_length_the_axis_does_not_divide_is_padded(length):
    """29 and 30 over 4 come as 32, 3 as 4; what the padding holds reaches no number."""
    x = np.random.default_rng(0).normal(size=(16, length)).astype(np.float32)
    w = np.random.default_rng(1).normal(size=(length, 10)).astype(np.float32)

    def step(x, w):
        return x @ w, w - 0.1, w.sum()

    text = lower(step, x, w, donate=(1,))
    (dot,) = names_of(text, "dot")
    split = [sharding((None, "x")), sharding(("x", None))]
    planned = plan(
        text,
        {"x": 4, "y": 2},
        {0: (None, "x"), 1: ("x", None)},
        {1: ("x", None)},
        [entry(dot, split, WHOLE, ("x",), opcode="dot")],
        aliases={1: 1},
    )
    assert planned.parameters[0].stored_shape == (16, -(-length // 4) * 4)
    outputs, _ = run_planned(planned, x, w)
    np.testing.assert_allclose(outputs[0], x @ w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(outputs[1], w - np.float32(0.1), rtol=1e-6)
    np.testing.assert_allclose(outputs[2], w.sum(), rtol=1e-4, atol=1e-4)


def test_padding_costs_no_collective():
    x = np.arange(30 * 8, dtype=np.float32).reshape(30, 8)
    text = lower(lambda x: x * 2 + 1, x)
    rows = sharding(("x", None))
    entries = [entry(name, [rows, rows], rows) for name in names_of(text, "multiply") + names_of(text, "add")]
    planned = plan(text, {"x": 4, "y": 2}, {0: ("x", None)}, {0: ("x", None)}, entries)
    (out,), observed = run_planned(planned, x)
    np.testing.assert_array_equal(out, x * 2 + 1)
    assert kinds(observed) == []


@pytest.mark.parametrize("dtype", ["int32", "uint32", "bool", "bfloat16", "complex64", "float16"])
def test_padding_of_every_kind_of_number(dtype):
    x = np.arange(7).astype(jnp.dtype(dtype))
    text = lower(lambda x: x, x)
    planned = plan(text, {"x": 4}, {0: ("x",)}, {0: ("x",)})
    outputs, _ = run_planned(planned, x)
    np.testing.assert_array_equal(outputs[0], x)
    emitted = emit_stablehlo(text, planned)
    assert "stablehlo.pad" in emitted
    assert "stablehlo.slice" in emitted


def test_xla_silently_changes_a_boundary_that_does_not_divide():
    """The fact that makes explicit padding and the comparison at every load necessary."""
    text = """
    sdy.mesh @shardwright_mesh = <["x"=4]>
    func.func @main(%a: tensor<30xf32> {sdy.sharding = #sdy.sharding<@shardwright_mesh, [{"x"}]>})
        -> (tensor<30xf32> {sdy.sharding = #sdy.sharding<@shardwright_mesh, [{"x"}]>}) {
      %0 = stablehlo.tanh %a : tensor<30xf32>
      return %0 : tensor<30xf32>
    }"""
    planned = plan(lower(jnp.tanh, np.zeros(30, np.float32)), {"x": 4}, {0: ("x",)}, {0: ("x",)})
    boundary = [BoundaryArray.of(planned.parameters[0])]
    with pytest.raises(CompilationError, match="argument 0 was loaded with its shards at"):
        load_program(text.encode(), is_serialized=False, mesh=planned.mesh, arguments=boundary, outputs=boundary)


def test_what_was_loaded_is_compared_with_the_plan():
    x = np.zeros((8, 8), np.float32)
    text = lower(lambda x: x + 1, x)
    rows = plan(text, {"x": 4, "y": 2}, {0: ("x", None)}, {0: ("x", None)})
    program = compile_planned(text, rows, want_executable=True)
    for other, where in (
        (plan(text, {"x": 4, "y": 2}, {0: ("x", "y")}, {0: ("x", None)}), "argument 0"),
        (plan(text, {"x": 4, "y": 2}, {0: ("x", None)}, {}), "output 0"),
        (plan(text, {"y": 2, "x": 4}, {0: ("x", None)}, {0: ("x", None)}), "argument 0"),
    ):
        with pytest.raises(CompilationError) as raised:
            load_program(
                program.serialized,
                is_serialized=True,
                mesh=other.mesh,
                arguments=[BoundaryArray.of(v) for v in other.parameters],
                outputs=[BoundaryArray.of(v) for v in other.outputs],
            )
        assert raised.value.where == where


def test_donated_arguments_are_updated_in_place():
    p = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    text = lower(lambda p, g: p - 0.5 * g, p, p, donate=(0,))
    planned = plan(text, {"x": 8}, {0: ("x", None), 1: ("x", None)}, {0: ("x", None)}, aliases={0: 0})
    program = compile_planned(text, planned, want_executable=True)
    assert program.memory.alias_bytes == 16 * 8 * 4 // 8
    loaded = load_program(
        program.serialized,
        is_serialized=True,
        mesh=planned.mesh,
        arguments=[BoundaryArray.of(v) for v in planned.parameters],
        outputs=[BoundaryArray.of(v) for v in planned.outputs],
        donated=[0],
    )
    # Computed on the devices: a buffer that jax borrowed from numpy could not be reused.
    state, gradient = (jax.jit(lambda: jnp.asarray(p) * 1, out_shardings=s)() for s in loaded.argument_shardings)
    before = [shard.data.unsafe_buffer_pointer() for shard in state.addressable_shards]
    (after,) = loaded.run([state, gradient])
    assert [shard.data.unsafe_buffer_pointer() for shard in after.addressable_shards] == before
    assert state.is_deleted()
    assert not gradient.is_deleted()
    np.testing.assert_allclose(np.asarray(after), 0.5 * p)


def test_the_plans_aliases_are_the_modules():
    """Two of three outputs reuse arguments, whatever the program's own header said."""
    a = np.zeros((8, 4), np.float32)
    text = lower(lambda a, b: (a + b, a - b, a * b), a, a)
    assert "input_output_alias" not in text
    planned = plan(text, {"x": 8}, {0: ("x", None)}, {2: ("x", None)}, aliases={1: 1, 2: 0})
    program = compile_planned(text, planned, want_executable=False)
    matches = re.findall(r"parameter_number = (\d+) : i64\}, output_index = array<i64: (\d+)>", program.stablehlo)
    assert sorted(matches) == [("0", "2"), ("1", "1")]
    assert program.memory.alias_bytes == 8 * 4 * 4 // 8 + 8 * 4 * 4


def test_an_alias_of_two_shardings_is_refused_by_name():
    x = np.zeros((8, 8), np.float32)
    text = lower(lambda x: x + 1, x, donate=(0,))
    planned = plan(text, {"x": 8}, {0: ("x", None)}, {0: (None, "x")}, aliases={0: 0})
    with pytest.raises(PlanError, match=r"output 0 .* cannot reuse the buffer of argument 0"):
        emit_stablehlo(text, planned)


def test_an_argument_that_is_not_reused_is_named():
    x = np.zeros((8, 8), np.float32)
    text = lower(lambda x: x + 1, x)
    planned = plan(text, {"x": 8}, {0: ("x", None)}, {0: ("x", None)})
    program = compile_planned(text, planned, want_executable=True)
    boundary = [BoundaryArray.of(planned.parameters[0])]
    with pytest.raises(CompilationError, match=r"does not reuse the buffers of its donated arguments \[0\]"):
        load_program(
            program.serialized,
            is_serialized=True,
            mesh=planned.mesh,
            arguments=boundary,
            outputs=boundary,
            donated=[0],
        )


def test_shardings_serve_the_users_own_jit():
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    planned = plan(lower(lambda x: x @ x, x), {"x": 4, "y": 2}, {0: ("x", "y")}, {0: (("y", "x"), None)})
    arguments, outputs = to_named_shardings(planned)
    out = jax.jit(lambda x: x @ x, in_shardings=arguments, out_shardings=outputs[0])(x)
    assert out.sharding.is_equivalent_to(outputs[0], 2)
    np.testing.assert_allclose(np.asarray(out), x @ x)
