"""A second layout that a value is brought to once, for readers that want it otherwise than it lies."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.client.annotate import annotate, keep_annotations
from shardwright.clusters.cluster import Cluster
from shardwright.errors import PlanCheckError
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan as search
from shardwright.planner.plans.verify import check_plan
from shardwright.plans.plan import Plan
from shardwright.plans.plan_json import decode
from shardwright.plans.plan_text import plan_to_json
from shardwright.user_plans import compile_and_prove
from tests.xla.hand import entry, kinds, lower, names_of, plan, run_planned, sharding

MESH = {"x": 2, "y": 4}
COLUMNS, ROWS, FINE_ROWS = sharding((None, "x")), sharding(("x", None)), sharding((("x", "y"), None))


def three_readers(a, b):
    total = a + b
    return jnp.exp(total), jnp.tanh(total), jnp.sin(total)


def by_hand(shared: bool) -> tuple[Plan, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 16, 8), np.float32)
    text = lower(three_readers, a, b)
    result = entry(names_of(text, "add")[0], [COLUMNS, COLUMNS], COLUMNS)
    readers = [
        entry(names_of(text, opcode)[0], [used], used)
        for opcode, used in (("exponential", ROWS), ("tanh", ROWS), ("sine", FINE_ROWS))
    ]
    result = replace(result, shared=(ROWS,)) if shared else result
    lies = {0: (None, "x"), 1: (None, "x")}
    outputs = {0: ("x", None), 1: ("x", None), 2: (("x", "y"), None)}
    return plan(text, MESH, lies, outputs, [result, *readers]), a, b


@pytest.mark.parametrize(("shared", "moves"), [(True, 1), (False, 2)])
def test_readers_share_the_move(shared, moves):
    planned, a, b = by_hand(shared)
    outputs, collectives = run_planned(planned, a, b)
    for item, expected in zip(outputs, three_readers(a, b), strict=True):
        np.testing.assert_allclose(item, expected, rtol=1e-5, atol=1e-6)
    assert [kind for kind, _ in kinds(collectives)].count("all-to-all") == moves


@pytest.fixture(scope="module")
def searched() -> Plan:
    def step(a, u, v, w):
        total = annotate(jnp.exp(a), {0: None, 1: "x"})
        rows = [annotate(total @ each, {0: "x", 1: None}) for each in (u, v)]
        return (*rows, annotate(total @ w, {0: ("x", "y"), 1: None}))

    a, u, v, w = np.zeros((4096, 512), np.float32), *np.zeros((3, 512, 2048), np.float32)
    with keep_annotations():
        text = lower(step, a, u, v, w)
    return search(text, Cluster.local(8), PlanOptions(mesh=MESH))


def test_the_search_shares_moves_and_prices_what_xla_does(searched):
    (result,) = [each for each in searched.instructions if each.shared]
    assert result.result == (COLUMNS,)
    assert result.shared == (ROWS,)
    assert [each.kind for each in searched.collectives].count("all-to-all") == 1
    assert compile_and_prove(searched).holds
    assert decode(plan_to_json(searched), hlo_text=searched.hlo_text) == searched


@pytest.mark.parametrize("wrong", [sharding(("z", None)), sharding(("x",)), sharding((None, None), ("x",))])
def test_the_checker_looks_at_it(searched, wrong):
    broken = [replace(each, shared=(wrong,)) if each.shared else each for each in searched.instructions]
    with pytest.raises(PlanCheckError, match="for readers it"):
        check_plan(parse(searched.require_hlo()), replace(searched, instructions=tuple(broken)))
