"""Reduces of several arrays that have nothing to do with one another: one reduce each, and sums are summed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from shardwright.clusters.cluster import Cluster
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.rewrites.variadic_reduces import split_variadic_reduces
from shardwright.user_plans import compile_and_prove
from tests.planner.programs import lower
from tests.planner.rewrites.rewrite_programs import run

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
COUNTS = np.arange(48, dtype=np.int32).reshape(8, 6) % 11


def sum_and_largest(x: Any, counts: Any) -> Any:
    initial = (np.float32(0), np.int32(-(2**31)))
    return lax.reduce((x, counts), initial, lambda a, b: (a[0] + b[0], lax.max(a[1], b[1])), (0,))


def in_a_loop(x: Any, counts: Any) -> Any:
    def turn(_: Any, x: Any) -> Any:
        total, largest = sum_and_largest(x, counts)
        return (x - total) / largest

    return lax.fori_loop(0, 3, turn, x)


def test_the_same_numbers() -> None:
    for function in (sum_and_largest, in_a_loop):
        text = lower((function, (X, COUNTS), ()))
        module = split_variadic_reduces(parse(text))
        reduces = [each for each in module.instructions() if each.opcode == "reduce"]
        assert [len(each.operands) for each in reduces] == [2, 2]
        for expected, item in zip(run(text, [X, COUNTS]), run(module.to_text(), [X, COUNTS]), strict=True):
            np.testing.assert_array_equal(item, expected)


def test_regions_are_shared_and_none_is_left_behind() -> None:
    def sums(x: Any) -> Any:
        return lax.reduce((x, x * x), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] + b[1]), (0,))

    module = split_variadic_reduces(parse(lower((sums, (X,), ()))))
    assert len(module.computations) == 2
    assert len({each.called["to_apply"] for each in module.instructions() if each.opcode == "reduce"}) == 1


def test_what_belongs_together_stays() -> None:
    module = parse(lower((lambda x: jnp.argmax(x, 0), (X,), ())))
    assert split_variadic_reduces(module) is module


def test_sums_over_the_batch_are_all_reduced_once_they_are_added() -> None:
    """Gathered partial results would be two collectives, and reduced ahead of the sum of both."""

    def sums(x: Any, y: Any) -> Any:
        total, other = lax.reduce((x, y), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] + b[1]), (0,))
        return total + other

    text = lower((sums, (X, X), ()))
    step_plan = plan(text, Cluster.local(4), PlanOptions(mesh={"data": 4}, force={"*": {0: "data"}}))
    assert Counter(each.kind for each in step_plan.collectives) == {"all-reduce": 1}
    assert compile_and_prove(step_plan).holds
