"""Lookups by counted indices: the same numbers, and splitting the batch moves no rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.hlo import Module, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.rewrites.batched_lookups import batch_lookups
from tests.planner.programs import lower
from tests.planner.rewrites.rewrite_programs import run

X = np.arange(4 * 3 * 5, dtype=np.float32).reshape(4, 3, 5)
Y = np.array([2, 0, 1, 1], np.int32)


def texts(function: Any, *arguments: Any) -> tuple[str, Module]:
    module = parse(lower((function, arguments, ())))
    return module.to_text(), batch_lookups(module)


def own(module: Module) -> list[tuple[int, ...]]:
    """Batching dimensions of the arrays that gathers and scatters look into."""
    names = {"gather": "operand_batching_dims", "scatter": "input_batching_dims"}
    return [i.get(names[i.opcode], ()) for i in module.instructions() if i.opcode in names]


def picked(x: Any, y: Any) -> Any:
    return x[jnp.arange(4), y]


def last_picked(x: Any, y: Any) -> Any:
    return jnp.moveaxis(x, 0, 2)[y, :, jnp.arange(4)]


def middle_counted(x: Any, y: Any) -> Any:
    return jnp.moveaxis(x, 0, 1)[y, jnp.arange(4), y]


def set_to_one(x: Any, y: Any) -> Any:
    return x.at[jnp.arange(4), y].set(1.0)


def in_a_loop(x: Any, y: Any) -> Any:
    return jax.lax.fori_loop(0, 2, lambda _, x: x.at[jnp.arange(4), y].add(1.0), x)


@pytest.mark.parametrize(
    ("function", "dims"),
    [(picked, (0,)), (last_picked, (2,)), (middle_counted, (1,)), (set_to_one, (0,)), (in_a_loop, (0,))],
)
def test_counted_columns_become_batching_dimensions(function: Any, dims: tuple[int, ...]) -> None:
    before, after = texts(function, X, Y)
    assert own(after) == [dims]
    for expected, item in zip(run(before, [X, Y]), run(after.to_text(), [X, Y]), strict=True):
        np.testing.assert_array_equal(item, expected)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: x[jnp.arange(3), y[:3]],  # of four rows
        lambda x, y: x[jnp.arange(4)[::-1], y],
        lambda x, y: x[y, jnp.arange(4) % 3],
    ],
    ids=["some rows", "backwards", "modulo"],
)
def test_other_indices_stay(function: Any) -> None:
    module = parse(lower((function, (X, Y), ())))
    assert batch_lookups(module) is module


def test_rows_stay_where_they_are() -> None:
    text = lower((lambda x, y: jnp.tanh(picked(x, y)), (X, Y), ()))
    planned = plan(text, Cluster.local(4), PlanOptions(mesh={"data": 4}, force={"*": {0: "data"}}))
    assert not planned.collectives
