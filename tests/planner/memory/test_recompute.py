"""What is computed again, and in how many parts the batch goes through: the cut against every choice there is, and
whole plans under budgets against XLA's memory."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

import jax
import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.errors import MemoryBudgetError, PlanError
from shardwright.hlo import ArrayShape, Instruction
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.memory.recompute import _SegmentKind, _Value
from shardwright.plans.plan import Plan
from shardwright.plans.plan_json import decode
from shardwright.plans.plan_text import plan_to_json
from shardwright.report.text import explain_plan
from shardwright.user_plans import compile_and_prove
from shardwright.xla import CompileService
from tests.planner.programs import gpt2, lower, scan, volumes
from tests.planner.rewrites.rewrite_programs import deep_scan, run

DEVICES = 4
CLUSTER = Cluster.local(DEVICES)
PROGRAM = gpt2(layers=2, batch=32, length=32)
STEP = lower(PROGRAM)


def make_plan(**options: object) -> Plan:
    return plan(STEP, CLUSTER, PlanOptions(mesh={"data": DEVICES}, **options))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def unlimited() -> Plan:
    return make_plan()


@pytest.fixture(scope="module")
def halved(unlimited: Plan) -> Plan:
    return make_plan(memory_budget=unlimited.memory.peak_bytes // 2, micro_batches=1)


def random_kind(seed: int, count: int = 8) -> _SegmentKind:
    random = np.random.default_rng(seed)
    values = []
    for i in range(count):
        values.append(
            _Value(
                instruction=Instruction(f"v{i}", "add", ArrayShape("f32", ()), ()),
                size_bytes=int(random.integers(0, 50)),
                seconds=None if random.random() < 0.15 else float(random.integers(0, 20)) / 1e3,
                operands=sorted({int(j) for j in random.integers(0, i, 2)}) if i else [],
                is_needed_backward=bool(random.random() < 0.5),
            )
        )
    return _SegmentKind(name="", values=values, repeats=[[f"v{i}" for i in range(count)]])


def price_of(kind: _SegmentKind, again: set[int], price: float) -> float:
    """Seconds and priced bytes of computing `again` again; infinite where it is not allowed."""
    there = {i for i, value in enumerate(kind.values) if value.is_needed_backward}
    there |= {operand for i in again for operand in kind.values[i].operands}
    seconds = [kind.values[i].seconds for i in again]
    if None in seconds:
        return float("inf")
    return sum(filter(None, seconds)) + price * sum(kind.values[i].size_bytes for i in there - again)


@pytest.fixture(scope="module")
def quartered(unlimited: Plan) -> Plan:
    """A plan of the one strategy: a free search of so many variants takes ten times as long."""
    return make_plan(memory_budget=unlimited.memory.peak_bytes // 4, force="data")


def viewed(plan: Plan, arguments: list[np.ndarray]) -> list[np.ndarray]:
    return [np.asarray(a).reshape(v.shape) for a, v in zip(arguments, plan.parameters, strict=True)]


@pytest.mark.parametrize("seed", range(40))
def test_cut_is_the_best_of_all_choices(seed: int) -> None:
    kind = random_kind(seed)
    for price in (1e-5, 3e-4, 1e-3, 1.0):
        everything = range(len(kind.values))
        choices = [set(c) for size in range(len(kind.values) + 1) for c in itertools.combinations(everything, size)]
        best = min(price_of(kind, choice, price) for choice in choices)
        assert price_of(kind, set(kind.cut(price)), price) == pytest.approx(best, rel=1e-9)


@pytest.mark.dear
def test_half_of_the_memory_is_refused_only_where_nothing_may_be_computed_again(unlimited: Plan, halved: Plan) -> None:
    limit = unlimited.memory.peak_bytes // 2
    assert halved.memory.peak_bytes <= limit
    assert halved.recomputed
    assert unlimited.cost.step_s < halved.cost.step_s < 1.6 * unlimited.cost.step_s
    assert halved.cost.lower_bound_s <= halved.cost.step_s
    assert not unlimited.recomputed
    with pytest.raises(MemoryBudgetError, match="no plan over"):
        make_plan(memory_budget=limit, remat="none", micro_batches=1)


@pytest.mark.dear
@pytest.mark.parametrize(("which", "part"), [("halved", 2), ("quartered", 4)])
def test_xla_confirms_memory_and_collectives(
    which: str, part: int, unlimited: Plan, request: pytest.FixtureRequest
) -> None:
    result: Plan = request.getfixturevalue(which)
    with CompileService(DEVICES) as service:
        assert result.hlo_text is not None
        memory = service.compile(result.hlo_text, result, want_executable=False, deadline_s=300).memory
    assert memory is not None
    assert memory.peak_bytes <= unlimited.memory.peak_bytes // part
    assert result.memory.peak_bytes == pytest.approx(memory.peak_bytes, rel=0.15)
    proof = compile_and_prove(result)
    assert proof.holds, proof.explain()


@pytest.mark.dear
def test_numbers_are_those_of_the_program_as_it_was(quartered: Plan) -> None:
    arguments = jax.tree.leaves(PROGRAM[1])
    assert quartered.hlo_text is not None
    found_all = run(quartered.hlo_text, viewed(quartered, arguments))
    for expected, item in zip(run(STEP, arguments), found_all, strict=True):
        np.testing.assert_allclose(item.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.dear
def test_micro_batches_are_a_choice_too(unlimited: Plan, halved: Plan, quartered: Plan) -> None:
    assert quartered.micro_batches > 1
    assert quartered.memory.peak_bytes <= unlimited.memory.peak_bytes // 4
    assert f"{quartered.micro_batches} micro-batches" in quartered.cost.bound_scope
    assert not quartered.portable
    assert (unlimited.micro_batches, halved.micro_batches) == (1, 1)


@pytest.mark.dear
def test_all_that_can_be_is_computed_again_where_that_is_asked_for(unlimited: Plan) -> None:
    full = make_plan(remat="full")
    assert full.memory.temporaries_bytes < 0.5 * unlimited.memory.temporaries_bytes
    assert "Computed again for the backward pass" in explain_plan(full)
    assert decode(plan_to_json(full)) == full
    assert not full.portable
    with pytest.raises(PlanError, match="some values again"):
        full.require_portable()


@pytest.mark.dear
def test_equal_layers_stay_equal_segments(unlimited: Plan, halved: Plan) -> None:
    """Clones belong to the segment that they repeat."""
    assert [segment.kind for segment in halved.segments] == [segment.kind for segment in unlimited.segments]


@pytest.mark.dear
def test_what_a_loop_keeps_for_its_backward_loop_is_computed_again() -> None:
    program = deep_scan(layers=12, batch=256)
    step = lower(program)
    options = PlanOptions(mesh={"data": DEVICES}, micro_batches=1)
    whole = plan(step, CLUSTER, options)
    limit = whole.memory.peak_bytes // 2
    with pytest.raises(MemoryBudgetError, match="no plan over"):
        plan(step, CLUSTER, replace(options, memory_budget=limit, remat="none"))
    step_plan = plan(step, CLUSTER, replace(options, memory_budget=limit))
    assert step_plan.memory.peak_bytes <= limit
    assert any("in its loop" in segment.name and segment.saved_bytes for segment in step_plan.recomputed)
    assert step_plan.hlo_text is not None
    with CompileService(DEVICES) as service:
        memory = service.compile(step_plan.hlo_text, step_plan, want_executable=False, deadline_s=300).memory
    assert memory is not None
    assert memory.peak_bytes <= limit
    assert compile_and_prove(step_plan).holds
    arguments = jax.tree.leaves(program[1])
    for expected, item in zip(run(step, arguments), run(step_plan.hlo_text, viewed(step_plan, arguments)), strict=True):
        np.testing.assert_allclose(item.reshape(expected.shape), expected, rtol=1e-5, atol=1e-6)


def test_what_a_loop_keeps_is_computed_again_beside_branches() -> None:
    """A branch of a conditional may take an empty tuple, which is no value to compute again."""
    step = lower(volumes(layers=8, batch=512))
    options = PlanOptions(mesh={"data": DEVICES}, micro_batches=1)
    limit = plan(step, CLUSTER, options).memory.peak_bytes * 6 // 10
    step_plan = plan(step, CLUSTER, replace(options, memory_budget=limit))
    assert step_plan.memory.peak_bytes <= limit
    assert step_plan.recomputed


@pytest.mark.dear
def test_layers_in_a_loop_are_relieved_by_micro_batches() -> None:
    step = lower(scan(layers=4, batch=256, width=16))
    options = PlanOptions(mesh={"data": DEVICES})
    whole = plan(step, CLUSTER, options)
    limit = whole.memory.peak_bytes * 6 // 10
    step_plan = plan(step, CLUSTER, replace(options, memory_budget=limit, remat="none"))
    assert step_plan.memory.peak_bytes <= limit
    assert step_plan.micro_batches > 1


@pytest.mark.dear
def test_refusal_says_what_takes_most_and_what_would_do() -> None:
    with pytest.raises(MemoryBudgetError) as refused:
        make_plan(memory_budget=60_000, micro_batches=1, remat="none")
    message = str(refused.value)
    assert "kept free for what predictions miss" in message
    assert re.search(r"of what the program computes, [0-9.]+ [KM]iB of programs\.py:\d+", message)
    allowed = re.search(r"allow ([0-9.]+) MiB \(1 % to spare\), make the batch smaller", message)
    assert allowed
    assert make_plan(memory_budget=int(float(allowed[1]) * 2**20), micro_batches=1, remat="none").memory.peak_bytes
