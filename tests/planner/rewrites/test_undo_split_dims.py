"""A plan that splits nothing within pieces is one of the program as it was written."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.hlo import Module, parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.plans.verify import check_plan
from shardwright.planner.search.program import Program
from shardwright.plans.plan import Plan
from tests.planner.programs import lower
from tests.planner.rewrites.rewrite_programs import REWRITTEN
from tests.planner.test_numbers import run_planned


def make_plan(name: str, force: str, mesh: dict[str, int]) -> tuple[Plan, Module, Module]:
    """(a plan, the program with its dimensions written as two, the same before that)."""
    text = lower(REWRITTEN[name]())
    options = PlanOptions(mesh=mesh, force=force, remat="none", micro_batches=1)
    program = Program(text, options)
    return plan(text, Cluster.local(8), options), program.module, program.unsplit


@pytest.mark.dear
@pytest.mark.parametrize("force", ["data", "zero1", "fsdp"])
@pytest.mark.parametrize("name", ["glu", "lstm", "stacked", "nested"])
def test_plans_that_split_the_batch_need_no_pieces(name: str, force: str) -> None:
    result, split, written = make_plan(name, force, {"data": 8})
    assert result.portable
    assert result.require_hlo() == written.to_text() != split.to_text()
    check_plan(parse(result.require_hlo()), result)
    step, arguments, _ = program = REWRITTEN[name]()
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(step)(*arguments))]
    for e, f in zip(expected, run_planned(program, result)[0], strict=True):
        np.testing.assert_allclose(f, e, rtol=1e-5, atol=1e-6)


def test_a_plan_that_splits_pieces_keeps_them() -> None:
    result, split, _ = make_plan("glu", "tensor", {"data": 1, "model": 8})
    assert result.require_hlo() == split.to_text()
