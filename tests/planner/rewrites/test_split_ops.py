"""Every opcode that carries a split: the program is cut behind it, and computes the same when rewritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.hlo import parse
from shardwright.planner.rewrites import rewrite
from tests.planner.rewrites.rewrite_programs import run
from tests.tables import list_failing_rows

ROWS, COLUMNS = 6, 24
INDICES = jnp.array([[4], [0], [5]], jnp.int32)

Op = Callable[[Any], Any]


def _window(x: Any) -> Any:
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (3, 1), (1, 1), ((1, 1), (0, 0)))


def _gather(x: Any) -> Any:
    numbers = jax.lax.GatherDimensionNumbers(offset_dims=(1,), collapsed_slice_dims=(0,), start_index_map=(0,))
    return jax.lax.gather(x, INDICES, numbers, (1, COLUMNS))


def _scatter(x: Any) -> Any:
    numbers = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0,)
    )
    return jax.lax.scatter_add(x, INDICES, x[:3] * 2, numbers)


def _index(x: Any) -> Any:
    return jnp.abs(jnp.sum(x)).astype(int)


def _while(x: Any) -> Any:
    return jax.lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 1.5), (0, x))[1]


def _cond(x: Any) -> Any:
    return jax.lax.cond(jnp.sum(x) > 0, jnp.sin, lambda y: y + jnp.sum(y), x)


def _call(x: Any) -> Any:
    inner = jax.jit(lambda y: jnp.cos(y) + 1, inline=False)
    return inner(x) + inner(2 * x)


def _sort(x: Any) -> Any:
    keys, values = jax.lax.sort((x, -x), dimension=0, num_keys=1)
    return keys + 2 * values


def _scan(x: Any) -> Any:
    return jax.lax.scan(lambda carry, row: (carry + row, carry * row), jnp.zeros(COLUMNS), x)[1]


OPS: dict[str, Op] = {
    "elementwise": lambda x: jnp.where(x > 0, jnp.exp(x), jnp.clip(x, -1.0, 0.5)),
    "constant": lambda x: x * np.linspace(0, 1, COLUMNS, dtype=np.float32),
    "iota along": lambda x: x * jax.lax.iota(np.float32, COLUMNS),
    "iota across": lambda x: x * jax.lax.broadcasted_iota(np.float32, (ROWS, COLUMNS), 0),
    "dot free": lambda x: jnp.ones((4, ROWS)) @ x,
    "dot contracted": lambda x: (x @ jnp.sin(x).T) @ x,
    "dot batch": lambda x: jax.lax.dot_general(x, x, (((0,), (0,)), ((1,), (1,))))[None] + x,
    "transpose": lambda x: jnp.sin(x).T.T,
    "reverse along": lambda x: jnp.flip(x, 1),
    "reverse across": lambda x: jnp.flip(x, 0),
    "reduce kept": lambda x: x + jnp.max(x, 0),
    "reduce away": lambda x: x / jnp.sum(x, 1, keepdims=True),
    "reduce several": lambda x: x + jnp.argmax(x, 0).astype(np.float32),
    "reduce-window": _window,
    "sort": _sort,
    "dynamic-slice": lambda x: jax.lax.dynamic_slice(x, (_index(x), _index(x)), (2, COLUMNS)),
    "dynamic-update-slice": lambda x: jax.lax.dynamic_update_slice(x, x[:2] * 3, (_index(x), 0)),
    "gather": _gather,
    "scatter": _scatter,
    "reshape beside": lambda x: jnp.sin(x.reshape(2, 3, COLUMNS)).reshape(ROWS, COLUMNS),
    "reshape apart": lambda x: x + jnp.sin(x.reshape(ROWS, 4, 6)).reshape(ROWS, COLUMNS),
    "pad": lambda x: x + jnp.pad(x[:, 8:16], ((0, 0), (8, 8))),
    "pad rows": lambda x: jnp.pad(x, ((1, 2), (0, 0))),
    "concatenate rows": lambda x: jnp.concatenate([x, x * 2]),
    "concatenate along": lambda x: jnp.concatenate([x[:, 16:], x[:, :16]], 1),
    "slice rows": lambda x: x[1:5:2],
    "while": _while,
    "scan": _scan,
    "conditional": _cond,
    "call": _call,
    "opt-barrier": lambda x: jax.lax.optimization_barrier((x, 2 * x))[1],
}  # fmt: skip


@pytest.mark.dear
def test_opcodes_carry_a_split() -> None:
    assert list_failing_rows(check_split_is_carried, OPS.items()) == []


def check_split_is_carried(_: str, op: Op) -> None:
    def program(x: Any) -> Any:
        parts = jnp.split(op(x), 3, axis=-1)
        return tuple(jnp.tanh(part) for part in parts)

    x = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
    text = str(jax.jit(program).lower(x).as_text("hlo"))
    rewritten_module = rewrite(parse(text))
    assert rewritten_module.parameters == {0: (ROWS, 3, COLUMNS // 3)}, rewritten_module.notes
    expected = run(text, [x])
    result = run(rewritten_module.module.to_text(), [x.reshape(ROWS, 3, COLUMNS // 3)])
    for e, f in zip(expected, result, strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-5)


REFUSING: dict[str, Op] = {
    "cumsum": lambda x: jax.lax.cumsum(x, 1),
    "convolution": lambda x: jax.lax.conv_general_dilated(x[None], jnp.ones((3, COLUMNS, COLUMNS)), (1,), "SAME",
                                                          dimension_numbers=("NWC", "WIO", "NWC"))[0],
    "sort along": lambda x: jnp.sort(x, 1),
    "strided slice": lambda x: x + jnp.repeat(x[:, ::2], 2, 1),
    "dynamic-slice along": lambda x: x + jnp.tile(jax.lax.dynamic_slice(x, (0, _index(x)), (ROWS, 12)), 2),
    "dynamic-update-slice along": lambda x: jax.lax.dynamic_update_slice(x, jnp.ones((ROWS, 12)), (0, _index(x))),
    "scatter along": lambda x: x.at[:, INDICES[:, 0]].add(1.0),
    "window along": lambda x: jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 3), (1, 1), "SAME"),
    "indexed": lambda x: x + x[:, x[0].astype(int) % COLUMNS],
}  # fmt: skip


def test_whole_class_stays_where_one_opcode_refuses() -> None:
    assert list_failing_rows(check_class_stays_whole, REFUSING.items()) == []


def check_class_stays_whole(_: str, op: Op) -> None:
    def program(x: Any) -> Any:
        return tuple(jnp.split(op(x), 3, axis=-1)), jnp.split(x, 3, axis=-1)

    x = np.ones((ROWS, COLUMNS), np.float32)
    module = parse(str(jax.jit(program).lower(x).as_text("hlo")))
    rewritten_module = rewrite(module)
    assert rewritten_module.module is module
    assert any("stays whole" in note for note in rewritten_module.notes)
