"""What a step says by `jax.debug`: each call of one device once, in order, in the client's process."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardwright as sw
from shardwright.client.debug_calls import make_calls
from shardwright.client.frontends.jax.jaxprs import hoist_constants
from shardwright.client.limits import DEBUG_TRIPS
from shardwright.client.lowering import lower

ROW = np.linspace(0.1, 0.7, 4, dtype=np.float32)


def say(text: str, *values: Any) -> None:
    jax.debug.print(text, *values, ordered=True)


def loops_and_branches(x):
    def negate(x):
        say("negated {}", x)
        return -x

    def trip(number, x):
        say("trip {}", number)
        return lax.cond(x.sum() > 0, negate, lambda x: x, x)

    x = lax.fori_loop(0, 3, trip, x)
    return lax.switch(x[0].astype(int), [lambda x: x, negate], x)


def recomputed_for_a_gradient(x):
    @jax.checkpoint
    def layer(h, number):
        h = jnp.tanh(h * number)
        say("layer {} gives {:.3f}", number, h.sum())
        return h, None

    return jax.grad(lambda x: lax.scan(layer, x, jnp.arange(1.0, 4.0), reverse=True)[0].sum())(x)


def loops_without_a_number(x):
    def go_on(state):
        say("is {} small?", state[0])
        return state[0] < 4

    def body(state):
        number, x = state
        say("body {} {}", number, x)
        x = lax.while_loop(lambda x: x[0] < number, lambda x: (say("more"), x + 1)[1], x)
        return number + 1, x

    return lax.while_loop(go_on, body, (x[0].astype(int), x))[1]


def functions_with_gradients_of_their_own(x):
    @jax.custom_vjp
    def double(x):
        return 2 * x

    double.defvjp(lambda x: (say("forward {}", x), (2 * x, x))[1], lambda x, g: (say("backward {}", g), (2 * g,))[1])
    return jax.grad(lambda x: jax.jit(double)(x).sum())(x)


def values_of_many_types(x):
    say("constants {}, {:.2f}", 3, 0.125)
    say("{} {} {}", x.astype(jnp.bfloat16)[1], x > 0.5, x.sum().astype(jnp.float16))
    say("no value")
    return lax.fori_loop(0, 2, lambda _, key: (say("{}", key), jax.random.split(key)[0])[1], jax.random.key(0))


def test_calls_are_those_of_one_device(capfd: pytest.CaptureFixture[str]) -> None:
    for function in (
        loops_and_branches,
        recomputed_for_a_gradient,
        loops_without_a_number,
        functions_with_gradients_of_their_own,
        values_of_many_types,
    ):
        jax.block_until_ready(jax.jit(function)(ROW))
        jax.effects_barrier()
        expected = [f"step 7: {line}" for line in capfd.readouterr().out.splitlines()]
        run_here(function, ROW)
        assert (function, capfd.readouterr().out.splitlines()) == (function, expected)


def run_here(function: Callable[..., Any], *args: Any) -> list[Any]:
    """Makes the calls of a function whose arrays are computed here; returns those arrays."""
    closed = jax.make_jaxpr(function)(*args)
    rewritten = hoist_constants(closed, "cpu")
    assert rewritten is not None
    outputs = jax.jit(rewritten.evaluate)(rewritten.constants, args)
    arrays = outputs[len(closed.out_avals) :]
    assert [(array.shape, array.dtype) for array in arrays] == [(t.shape, t.dtype) for t in rewritten.debug.types]
    assert not list(make_calls(rewritten.debug, list(map(np.asarray, arrays)), 7))
    return arrays


def test_a_batch_under_vmap_is_one_array(capfd: pytest.CaptureFixture[str]) -> None:
    def function(x):
        return jax.vmap(jax.vmap(lambda v: (jax.debug.print("{} {}", v, 2 * v), v)[1]))(x)

    arrays = run_here(function, np.arange(6, dtype=np.int32).reshape(2, 3))
    assert [array.shape for array in arrays] == [(2, 3), (2, 3)]
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == [f"step 7: {number} {2 * number}" for number in range(6)]


@pytest.mark.parametrize("is_checked", [True, False])
def test_parts_of_a_region_say_what_they_have(is_checked: bool, capfd: pytest.CaptureFixture[str]) -> None:
    def part(x):
        number = lax.axis_index("d")

        def body(x, trip):
            jax.debug.print("{} {} {}", number, trip, x)
            lax.cond(x.sum() > 20, lambda x: jax.debug.print("{} is large", number), lambda x: None, x)
            return x + 1, lax.psum(x, "d")

        x, sums = lax.scan(body, x, jnp.arange(2))
        x = lax.while_loop(lambda x: x[0, 0] < 4, lambda x: (jax.debug.print("more {}", number), x + 1)[1], x)
        return x, sums[0]

    mesh = jax.make_mesh((4, 2), ("d", "m"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    spec = jax.sharding.PartitionSpec
    specs = {"in_specs": spec("d", "m"), "out_specs": (spec("d", "m"), spec(None, "m"))}
    function = jax.shard_map(part, mesh=mesh, check_vma=is_checked, **specs)
    x = np.arange(8, dtype=np.int32).reshape(4, 2)
    jax.block_until_ready(jax.jit(function)(x))
    jax.effects_barrier()
    expected = [f"step 7: {line}" for line in capfd.readouterr().out.splitlines()]
    run_here(function, x)
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == sorted(expected)
    assert [line.split()[2] for line in lines if "more" not in line] == sorted(
        str(n) for n in range(4) for _ in range(4)
    )


def test_of_a_long_loop_the_first_trips_and_the_last_one_are_kept(capfd: pytest.CaptureFixture[str]) -> None:
    count = DEBUG_TRIPS + 5
    run_here(lambda x: lax.while_loop(lambda x: x < count, lambda x: (say("{}", x), x + 1)[1], x), np.int32(0))
    lines = capfd.readouterr().out.splitlines()
    assert lines[: DEBUG_TRIPS - 1] == [f"step 7: {number}" for number in range(DEBUG_TRIPS - 1)]
    assert re.match(r"step 7: … 5 trips of the loop at \S*test_debug_calls.py:\d+", lines[DEBUG_TRIPS - 1])
    assert lines[DEBUG_TRIPS:] == [f"step 7: {count - 1}"]


def test_donated_arguments_are_paired_with_results_alone() -> None:
    def step(a, b):
        jax.debug.print("{}", 2 * b)
        return 3 * a

    program = lower(step, np.ones((4, 4)), np.ones((2, 2)), donate_argnums=(0, 1))
    assert program.aliases == {0: 0}
    assert (program.result_count, len(program.outputs)) == (1, 2)
    header = program.hlo_text.partition("\n")[0]
    assert "{0}: (0," in header
    assert not re.search(r"\(1, \{\}", header)


def test_calls_in_functions_that_stay_as_they_are_are_refused_by_line() -> None:
    def solve(_, b):
        jax.debug.print("{}", b)
        return b

    def step(b):
        return lax.custom_linear_solve(lambda x: x, b, solve, symmetric=True)

    with pytest.raises(sw.UnsupportedProgramError, match=r"jax.debug.breakpoint at \S+:\d+"):
        lower(lambda x: (jax.debug.breakpoint(num_frames=1), x)[1], ROW)
    with pytest.raises(sw.UnsupportedProgramError, match=r"visualize_array_sharding at \S+:\d+"):
        lower(lambda x: (jax.debug.visualize_array_sharding(x), x)[1], ROW)
    with pytest.raises(sw.UnsupportedProgramError, match=r"jax.debug.print in a custom_linear_solve at \S+:\d+"):
        lower(step, ROW)


# ---- on servers --------------------------------------------------------------------


def tell_shape(value):
    number = sw.debug_step()
    print(f"{'' if number is None else f'step {number}: '}callback {value.shape}")


def train(w, x, number):
    def loss(w):
        @jax.checkpoint
        def layer(h, n):
            h = jnp.tanh(h @ w)
            jax.debug.print("layer {n} gives {mean:.4f}", n=n, mean=h.mean())
            return h, h

        h, every = lax.scan(layer, x, jnp.arange(3))
        lax.cond(number % 2 == 1, lambda h: jax.debug.print("odd {:.4f}", h.max()), lambda h: None, h)
        return (h**2).mean(), every

    (loss, every), gradient = jax.value_and_grad(loss, has_aux=True)(w)
    jax.debug.callback(tell_shape, every[-1][:, :2])
    jax.vmap(lambda v: jax.debug.print("row {:.4f}", v.sum()))(x[:2])
    return w - gradient, loss


@pytest.mark.dear
def test_a_step_says_each_line_once_in_order(session: sw.Session, capfd: pytest.CaptureFixture[str]) -> None:
    w, x = 0.5 * np.eye(16, dtype=np.float32), np.ones((32, 16), np.float32)
    state, loss, expected = w, 0.0, []
    for number in range(6):
        state, loss = jax.jit(train)(state, x, number)
        jax.effects_barrier()
        expected.append(sorted(capfd.readouterr().out.splitlines()))  # JAX orders them as it likes

    step = session.parallelize(train, donate_argnums=0)
    state, result = step.init(lambda: (jax.debug.print("init"), 0.5 * jnp.eye(16))[1]), None
    for number in range(6):
        state, result = step(state, x, np.int32(number))
    assert float(result) == pytest.approx(float(loss), rel=1e-4)
    lines = [re.match(r"step (\d+): (.*)", line).groups() for line in capfd.readouterr().out.splitlines()]
    numbers = [int(number) for number, _ in lines]
    assert numbers == sorted(numbers)
    first, *steps = [[text for number, text in lines if int(number) == each] for each in sorted(set(numbers))]
    assert first == ["init"]
    assert [sorted(texts) for texts in steps] == expected
    assert [text.split()[0] for text in steps[1]] == [*["layer"] * 3, "odd", *["layer"] * 3, "callback", "row", "row"]


@pytest.mark.dear
def test_a_callback_that_raises_is_told_once(session: sw.Session, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(value):
        raise KeyError("gone")

    def leave(value):
        raise SystemExit(3)

    def function(x):
        jax.debug.callback(fail, x)
        jax.debug.callback(leave, x)
        jax.debug.print("sum {}", x.sum())
        return 2 * x

    step = session.parallelize(function)
    result = step(ROW)
    with pytest.raises(sw.DebugCallbackError, match="KeyError: 'gone'") as caught:
        jax.effects_barrier()
    assert isinstance(caught.value.__cause__, KeyError)
    assert re.match(r"\S*test_debug_calls.py:\d+", caught.value.where)
    np.testing.assert_array_equal(result, 2 * ROW)
    np.testing.assert_array_equal(step(ROW), 2 * ROW)
    jax.effects_barrier()
    assert len(re.findall("sum ", capfd.readouterr().out)) == 2
