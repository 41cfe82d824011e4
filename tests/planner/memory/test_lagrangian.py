"""Prices of memory: what they are of, and how few of them tell that nothing fits."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import jax
import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.errors import MemoryBudgetError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.graph.dataflow import Use
from shardwright.planner.limits import SearchLimits
from shardwright.planner.memory.constraint import MemoryConstraint, Multipliers
from shardwright.planner.memory.ilp_with_memory_rows import solve_with_memory_rows
from shardwright.planner.memory.lagrangian import LagrangianSearch, _PricedPlan
from shardwright.planner.memory.terms import operand_bytes, reshard_bytes
from shardwright.planner.memory.tuning import (
    LOCAL_BOUND_SLACK,
    MAX_MULTIPLIER,
    MIN_MULTIPLIER,
    MULTIPLIER_GAP,
    RISING_MULTIPLIERS,
)
from shardwright.planner.plans.assemble import decide
from shardwright.planner.search.search import Search
from shardwright.planner.search.solutions import CandidatePlan
from shardwright.planner.segments.bound import solve_tied
from shardwright.planner.segments.segment_chain import Chain
from shardwright.planner.segments.variables import Variable
from shardwright.plans.shardings import Mesh
from tests.planner.memory.test_restricted_master import seconds
from tests.planner.programs import PLAIN_A100, gpt2, lower, mlp, scan

CLUSTER = Cluster.local(4)
STEP = lower(gpt2(layers=1, batch=32, length=32))
TWO_LAYERS = lower(gpt2(layers=2, batch=32, length=32))
SCAN = lower(scan(layers=4, batch=256, width=16))
ONE_WAY = {"mesh": {"data": 4}, "remat": "none", "micro_batches": 1}


#: No small program is solved exactly.
BY_PRICES = SearchLimits(max_exact_states=0)


def make_search(text: str, limits: SearchLimits = SearchLimits(), **options: object) -> Search:
    return Search(text, CLUSTER, PlanOptions(**{**ONE_WAY, **options}), limits=limits)  # type: ignore[arg-type]


@functools.cache
def _start(text: str, limits: SearchLimits, options: tuple[tuple[str, object], ...]) -> tuple[Search, CandidatePlan]:
    search = make_search(text, limits, **dict(options))
    outcome = search.search_meshes()
    return search, outcome.evaluate(outcome.fastest)


def start(text: str, limits: SearchLimits = SearchLimits(), **options: object) -> tuple[Search, CandidatePlan]:
    """A search of the caller's own, and its fastest plan, which is looked for once in all tests."""
    search, fastest = _start(text, limits, tuple(sorted(options.items())))
    return copy.copy(search), fastest


def make_search_on_gpus(limits: SearchLimits) -> Search:
    """A step of two layers on four A100."""
    cluster = replace(CLUSTER, hardware=PLAIN_A100)
    return Search(TWO_LAYERS, cluster, PlanOptions(**ONE_WAY), limits=limits)  # type: ignore[arg-type]


@pytest.mark.dear
def test_one_dear_price_tells_that_nothing_fits() -> None:
    search = make_search(STEP, memory_budget=60_000)
    with pytest.raises(MemoryBudgetError):
        search.run()
    outcome = search.search_meshes()
    fitting = LagrangianSearch(search, outcome.evaluate(outcome.fastest), math.inf)
    with pytest.raises(MemoryBudgetError):
        fitting.find_best()
    assert len(fitting.evaluations) == 1
    assert fitting.is_hopeless


@pytest.mark.dear
def test_what_nearly_fits_gets_a_price_that_is_nearly_nothing_first() -> None:
    search, fastest = start(TWO_LAYERS)
    limit = search.bytes_needed(fastest) * 985 // 1000
    assert make_search(TWO_LAYERS, memory_budget=limit).run().cost.step_s <= 1.02 * fastest.cost.step_s
    search.limit_bytes = limit
    fitting = LagrangianSearch(search, fastest, math.inf)
    assert fitting.find_best().cost.step_s <= 1.02 * fastest.cost.step_s
    prices = [evaluation.multiplier for evaluation in fitting.evaluations]
    assert prices[0] == min(prices[:2])


@pytest.mark.dear
@pytest.mark.parametrize("text", [STEP, SCAN])
def test_the_bytes_that_are_priced_are_those_that_a_plan_takes_at_the_peak(text: str) -> None:
    search, candidate = start(text)
    model = search.memory_model(candidate.chain.graph.variables.shared_layouts)
    check_priced(search, candidate, model.constraint_at_peak(candidate.decisions))


def check_priced(search: Search, candidate: CandidatePlan, peak: MemoryConstraint) -> None:
    """A price of the bytes at a peak adds what the plans that it gives take there."""
    model = search.memory_model(candidate.chain.graph.variables.shared_layouts)
    once, twice = (
        candidate.chain.with_multipliers(Multipliers(constraints=((peak, price),))).solve(search.time_limit_s())
        for price in (1e-3, 2e-3)
    )
    for solved in (once, twice):  # which are the same, but for ties
        taken = model.bytes_at(peak, search.evaluate(candidate.chain, solved, ()).decisions)
        assert twice.value - once.value == pytest.approx(1e-3 * taken, rel=5e-3)  # what no plan decides has no price


NOTHING = MemoryConstraint(values={}, layout_copies=frozenset(), always_live=frozenset(), margin=0.0)


def test_what_products_turn_has_a_price() -> None:
    search, candidate = start(STEP)
    model = search.memory_model(candidate.chain.graph.variables.shared_layouts)
    products = [node.index for node in search.flow.nodes if node.instruction.opcode == "dot"]
    peak = replace(
        NOTHING, transposed_operands=frozenset((node, position) for node in products for position in range(2))
    )
    cheap, dear = (
        candidate.chain.with_multipliers(Multipliers(constraints=((peak, price),))).solve(search.time_limit_s())
        for price in (1e-3, 2e-3)
    )
    taken = [
        model.bytes_at(peak, decide(candidate.chain.graph, states))
        for states in (candidate.solution.states, cheap.states)
    ]
    assert taken[0] > taken[1] > 0
    assert dear.value - cheap.value == pytest.approx(1e-3 * taken[1], rel=5e-3)


def test_what_one_reader_has_brought_to_another_layout_has_a_price() -> None:
    """A plan changed so that one instruction reads a part of what the others read whole, or another part."""
    search, candidate = start(STEP)
    graph = candidate.chain.graph
    model = search.memory_model(graph.variables.shared_layouts)
    tried = 0
    for node in graph.flow.nodes:
        if node.instruction.opcode != "reduce" or graph.is_cheap_to_recompute[node.uses[0].source[0]]:
            continue
        operand, source = (node.index, 0), graph.variables.source(node, node.uses[0])
        bytes_of = reshard_bytes(graph, operand)[candidate.solution.states[source]]
        states = {**candidate.solution.states, (node.index, -1): int(np.argmax(bytes_of))}
        peak = replace(NOTHING, resharded_operands=frozenset({operand}))
        taken = model.bytes_at(peak, decide(graph, states))
        assert taken == bytes_of.max()
        priced = candidate.chain.with_multipliers(Multipliers(constraints=((peak, 1.0),)))
        assert seconds(priced, states) - seconds(candidate.chain, states) == pytest.approx(taken, rel=1e-6)
        tried += taken > 0
    assert tried


def test_what_is_made_anew_takes_what_the_last_of_its_readers_wants() -> None:
    """Each reader has its own, however else the others read it: nothing is stored that all of them could share."""
    search, candidate = start(STEP)
    graph = candidate.chain.graph
    model, states = search.memory_model(graph.variables.shared_layouts), dict(candidate.solution.states)
    tried = 0
    for leaf, (payer, position) in graph.variables.last_consumer.items():
        others = [(n, use) for n in graph.flow.nodes for use in n.uses if use.source == leaf and n.index != payer]
        others = [(node, use) for node, use in others if not graph.is_cheap_to_recompute[node.index]]
        bytes_of = operand_bytes(graph, payer, Use(leaf, position, 1.0, 1))
        for node, use in others:  # as large as they can be
            states[node.index, -1] = int(np.argmax(operand_bytes(graph, node.index, use)))
        states[payer, -1] = int(np.argmin(bytes_of))
        peak = replace(NOTHING, values={leaf: 1})
        taken = model.bytes_at(peak, decide(graph, states))
        assert taken == bytes_of.min()
        tried += any(operand_bytes(graph, node.index, use).max() > taken for node, use in others)
    assert tried


def test_zeros_that_a_lookups_gradient_is_added_to_have_a_price() -> None:
    search, candidate = start(STEP)
    flow = search.program.flow
    scatter = next(node for node in flow.nodes if node.instruction.opcode == "scatter")
    zeros = scatter.uses[0].source
    assert candidate.chain.graph.is_cheap_to_recompute[zeros[0]], "this step no longer shows what is tested"
    model = search.memory_model(candidate.chain.graph.variables.shared_layouts)
    peak = MemoryConstraint(values={zeros: 1}, layout_copies=frozenset(), always_live=frozenset(), margin=0.0)
    once, twice = (
        candidate.chain.with_multipliers(Multipliers(constraints=((peak, price),))).solve(search.time_limit_s())
        for price in (1.0, 2.0)
    )
    taken = model.bytes_at(peak, search.evaluate(candidate.chain, once, ()).decisions)
    assert taken == math.ceil(flow.nodes[zeros[0]].shapes[0].size_bytes / CLUSTER.device_count)
    assert twice.value - once.value == pytest.approx(taken, rel=1e-3)


def test_the_exact_program_counts_zeros_that_a_lookups_gradient_is_added_to() -> None:
    table, indices = jax.ShapeDtypeStruct((64, 32), "float32"), jax.ShapeDtypeStruct((16,), "int32")
    text = jax.jit(jax.grad(lambda t, i: (t[i] ** 2).sum())).lower(table, indices).as_text("hlo")
    search = make_search(text)
    result = search.search_meshes().fastest
    scatter = next(node for node in search.flow.nodes if node.instruction.opcode == "scatter")
    zeros = scatter.uses[0].source
    peak = MemoryConstraint(values={zeros: 1}, layout_copies=frozenset(), always_live=frozenset(), margin=0.0)
    least = math.ceil(search.flow.nodes[zeros[0]].shapes[0].size_bytes / CLUSTER.device_count)

    def taken(limit: int) -> float | None:
        best = solve_with_memory_rows(result.chain, limit, [peak], lambda states: (True, peak), 10.0)
        model = search.memory_model(result.chain.graph.variables.shared_layouts)
        return model.bytes_at(peak, search.evaluate(result.chain, best, ()).decisions) if best is not None else None

    assert taken(least) == least
    assert taken(least - 1) is None


@pytest.mark.parametrize("text", [STEP, SCAN])
def test_the_buffers_at_the_peak_of_a_plan_are_nearly_all_that_it_needs(text: str) -> None:
    search, candidate = start(text)
    assert sum(buffer.size_bytes for buffer in candidate.live_buffers) == pytest.approx(
        candidate.memory.temporaries_bytes, rel=0.05
    )
    model = search.memory_model(candidate.chain.graph.variables.shared_layouts)
    peak = model.constraint_of_buffers(candidate.live_buffers, candidate.decisions)
    assert model.bytes_at(peak, candidate.decisions) == pytest.approx(search.bytes_needed(candidate), rel=0.1)


@pytest.mark.parametrize("text", [STEP, SCAN])
def test_copies_are_paid_for_whether_hubs_make_them_or_their_readers(text: str) -> None:
    """Else weights stay split, and each reader gathers them: of T5 at a quarter of the memory (8 A100) that was 0.16 of
    0.65 GB, and no price found a plan in two micro-batches that fits."""
    search, candidate = start(text, force="fsdp")
    model = search.memory_model(candidate.chain.graph.variables.shared_layouts)
    weights = frozenset((node, 0) for node in search.program.state)
    of_hubs = MemoryConstraint(values={}, layout_copies=weights, always_live=frozenset(), margin=0.0)
    of_all = replace(of_hubs, reader_copies=dict.fromkeys(weights, 1.0))

    def priced(peak: MemoryConstraint, price: float) -> tuple[CandidatePlan, float]:
        solved = candidate.chain.with_multipliers(Multipliers(constraints=((peak, price),))).solve(
            search.time_limit_s()
        )
        return search.evaluate(candidate.chain, solved, ()), solved.value

    evading, _ = priced(of_hubs, 1.0)
    (honest, once_s), (_, twice_s) = priced(of_all, 1.0), priced(of_all, 2.0)
    assert model.bytes_at(of_hubs, evading.decisions) == 0 < model.bytes_at(of_all, evading.decisions)
    assert model.bytes_at(of_all, honest.decisions) < model.bytes_at(of_all, evading.decisions)
    assert twice_s - once_s == pytest.approx(model.bytes_at(of_all, honest.decisions), rel=1e-3)
    peak = model.constraint_of_buffers(evading.live_buffers, evading.decisions)
    assert weights & peak.reader_copies.keys()
    assert not model.constraint_at_peak(
        evading.decisions
    ).reader_copies  # which bounds: another plan's readers need not make copies


def test_what_a_plan_that_fits_does_not_store_bounds_no_plan_that_fits() -> None:
    search, candidate = start(STEP, memory_budget=1 << 30)
    fitting = LagrangianSearch(search, candidate, step_limit_s=1.0)
    model = search.memory_model(candidate.chain.graph.variables.shared_layouts)
    stored = model.constraint_at_peak(candidate.decisions)
    nodes = [(node.index, leaf) for node in candidate.chain.graph.flow.nodes for leaf in range(len(node.shapes))]
    all_at_once = replace(stored, values=Counter(nodes))
    fitting.universal_constraints = [stored, all_at_once]
    search.limit_bytes = max(search.bytes_needed(candidate), math.ceil(model.bytes_at(stored, candidate.decisions)))
    assert model.bytes_at(all_at_once, candidate.decisions) > search.limit_bytes
    assert fitting.bounding_constraints([candidate]) == [stored]
    assert fitting.bounding_constraints() == [stored, all_at_once]  # nothing that fits is known
    products = [node for node in candidate.chain.graph.flow.nodes if node.instruction.opcode == "dot"]
    turning = replace(
        stored, transposed_operands=frozenset((node.index, position) for node in products for position in range(2))
    )
    fitting.universal_constraints = [turning]
    assert model.bytes_at(turning, candidate.decisions) > search.limit_bytes
    assert fitting.bounding_constraints([candidate]) == [
        replace(stored, transposed_operands=frozenset())
    ]  # what is not turned is stored


def test_what_a_plan_that_fits_fuses_is_left_out_of_what_bounds() -> None:
    """Where more than there is would be counted with it; the rest still bounds."""
    search, candidate = start(STEP, memory_budget=1 << 30)
    fitting = LagrangianSearch(search, candidate, step_limit_s=1.0)
    model = search.memory_model(candidate.chain.graph.variables.shared_layouts)
    stored = model.constraint_at_peak(candidate.decisions)
    nodes = [node for node in search.flow.nodes if not node.is_value and node.shapes[0].rank > 1]
    fused = {(node.index, 0): 9 for node in nodes if (node.instruction.name, 0) not in candidate.stored_leaves}
    fitting.universal_constraints = [replace(stored, values={**stored.values, **fused})]
    search.limit_bytes = max(search.bytes_needed(candidate), math.ceil(model.bytes_at(stored, candidate.decisions)))
    assert model.bytes_at(fitting.universal_constraints[0], candidate.decisions) > search.limit_bytes
    (left,) = fitting.bounding_constraints([candidate])
    assert left.values.keys() == stored.values.keys() - fused.keys()
    assert model.bytes_at(left, candidate.decisions) > 0.8 * model.bytes_at(stored, candidate.decisions)


def test_weights_that_are_gathered_for_a_loop_are_copies_at_the_peak() -> None:
    search, candidate = start(SCAN, force="fsdp")
    model = search.memory_model(candidate.chain.graph.variables.shared_layouts)
    weights = {(node, 0) for node in search.program.state if search.flow.nodes[node].shapes[0].rank == 3}
    assert weights & model.constraint_of_buffers(candidate.live_buffers, candidate.decisions).layout_copies
    assert not weights & model.constraint_at_peak(candidate.decisions).layout_copies


@dataclass(slots=True, eq=False)
class _RecordingFit(LagrangianSearch):
    """merges: the plans of each, the best one that fits, and what comes out."""

    merges: list[tuple[list[CandidatePlan], CandidatePlan, CandidatePlan]] = field(default_factory=list)

    def merge_plans(self, plans: Sequence[CandidatePlan], best: CandidatePlan) -> CandidatePlan:
        merged = LagrangianSearch.merge_plans(self, plans, best)
        self.merges.append((list(plans), best, merged))
        return merged


@pytest.fixture(scope="module")
def fitted() -> tuple[_RecordingFit, CandidatePlan]:
    """Where seven tenths of the memory are left: the prices that were tried, and the best plan that fits."""
    search = make_search_on_gpus(BY_PRICES)
    outcome = search.search_meshes()
    fastest = outcome.evaluate(outcome.fastest)
    search.limit_bytes = search.bytes_needed(fastest) * 7 // 10
    fitting = _RecordingFit(search, fastest, math.inf)
    return fitting, fitting.find_best()


@pytest.mark.dear
def test_parts_of_all_plans_that_prices_gave_make_one(fitted: tuple[_RecordingFit, CandidatePlan]) -> None:
    """BERT on 8 devices at a quarter of the memory: 20.44 instead of 20.84 ms."""
    fitting, best = fitted
    search, fastest = fitting.search, fitting.start_plan
    ((others, at_prices, mixture),) = fitting.merges
    of_prices = [each.candidate for each in fitting.evaluations][: len(others) - 1]
    assert [id(plan) for plan in others] == [id(plan) for plan in (fastest, *of_prices)]
    assert len(others) > 3
    assert search.bytes_needed(mixture) <= search.limit_bytes
    assert mixture.cost.step_s < 0.999 * at_prices.cost.step_s
    assert best.cost.step_s == mixture.cost.step_s
    decided = {
        variable: {plan.solution.states[variable] for plan in (*others, at_prices)}
        for variable in mixture.solution.states
    }
    assert all(state in decided[variable] for variable, state in mixture.solution.states.items())


@pytest.mark.dear
def test_a_faster_plan_that_is_known_to_fit_is_merged_with_those_of_prices(
    fitted: tuple[_RecordingFit, CandidatePlan],
) -> None:
    """A mixture of 8 experts on 16 devices at half of the memory: 30.73 instead of 30.81 ms."""
    first, candidate = fitted
    search, fastest = first.search, first.start_plan
    again = _RecordingFit(search, fastest, math.inf, incumbent=candidate)
    best = again.find_best()
    ((_, merged, mixture),) = again.merges
    fitting = [
        each.candidate for each in again.evaluations if search.bytes_needed(each.candidate) <= search.limit_bytes
    ]
    assert merged is candidate
    assert candidate.cost.step_s < min(plan.cost.step_s for plan in fitting)
    assert mixture.cost.step_s <= candidate.cost.step_s
    assert best is not candidate


@pytest.fixture(scope="module")
def fitted_among_all() -> tuple[LagrangianSearch, CandidatePlan]:
    """Where six tenths of the memory are left: prices over all strategies, and the best plan that fits."""
    search = make_search_on_gpus(BY_PRICES)
    chain = search.build_bounding_chain(Mesh.of(ONE_WAY["mesh"]), even_rank=9, uneven_rank=9).untie()
    fastest = search.evaluate(chain, solve_tied(chain), ())
    search.limit_bytes = search.bytes_needed(fastest) * 6 // 10
    fitting = LagrangianSearch(search, fastest, math.inf)
    return fitting, fitting.find_best()


@pytest.mark.dear
@pytest.mark.parametrize("is_enough", [True, False])
def test_among_all_strategies_plans_are_merged_with_one_another_before_the_known_one(
    is_enough: bool, fitted_among_all: tuple[LagrangianSearch, CandidatePlan]
) -> None:
    """The LSTM on 64 devices at half of the memory: 45.11 instead of 45.17 ms."""
    first_fit, candidate = fitted_among_all
    search, fastest = first_fit.search, first_fit.start_plan
    limit_s = math.inf if is_enough else 0.999 * candidate.cost.step_s
    fitting = _RecordingFit(search, fastest, limit_s, incumbent=candidate)
    fitting.find_best()
    first, *more = (merged for _, merged, _ in fitting.merges)
    assert first is not candidate
    assert more == ([] if is_enough else [candidate])


def test_a_plan_is_worked_out_once() -> None:
    outcome = make_search(STEP).search_meshes()
    assert outcome.evaluate(outcome.fastest) is outcome.evaluate(outcome.fastest)


def test_plans_that_peak_at_the_same_place_give_one_constraint() -> None:
    peaks = []
    for force in (None, "data", "fsdp"):
        search, candidate = start(STEP, force=force)
        peaks.append(
            search.memory_model(candidate.chain.graph.variables.shared_layouts).constraint_at_peak(candidate.decisions)
        )
    assert all(peak == peaks[0] for peak in peaks)


@pytest.mark.dear
@pytest.mark.parametrize(("most_work", "count"), [(0, 2), (2 * 10**6, 5)])
def test_few_plans_that_do_not_fit_are_judged_where_the_program_is_not_small(most_work: int, count: int) -> None:
    search = make_search(lower(mlp()))
    outcome = search.search_meshes()
    candidate = outcome.evaluate(outcome.fastest)
    peak = search.memory_model(candidate.chain.graph.variables.shared_layouts).constraint_at_peak(candidate.decisions)
    judged = []

    def refuse(states: Mapping[Variable, int]) -> tuple[int, MemoryConstraint]:
        judged.append(states)
        return (1 << 40) + 1, peak

    limits = SearchLimits(max_exact_plans=3, max_exact_work=most_work)
    assert solve_with_memory_rows(candidate.chain, 1 << 40, (), refuse, 10.0, limits) is None
    assert len(judged) == count


@dataclass(slots=True, eq=False)
class _ScriptedFit(LagrangianSearch):
    """Its prices give other plans than they would.

    plan_at: the plan of the first, second, … price; or the error.
    asked: the prices.
    bound_s: what `universal_constraints` promise at any price, recomputation included; None: as they do.
    """

    plan_at: Callable[[int], CandidatePlan] | None = None
    asked: list[float] = field(default_factory=list)
    bound_s: float | None = None

    def _evaluate(self, price: float, close: float = MULTIPLIER_GAP) -> _PricedPlan:
        if self.plan_at is None:
            return LagrangianSearch._evaluate(self, price, close)
        self.asked.append(price)
        return _PricedPlan(price, self.plan_at(len(self.asked)))

    def _universal_bound_s(self, chain: Chain, price: float) -> float:
        if self.bound_s is None:
            return LagrangianSearch._universal_bound_s(self, chain, price)
        return self.bound_s - chain.graph.min_recompute_s()


def end_of_test(number: int) -> CandidatePlan:
    raise MemoryBudgetError("as far as this test goes")


class _SizedSearch(Search):
    """Plans need what they are said to need. size_of: bytes of a plan, as a part of what there is."""

    size_of: Callable[[CandidatePlan], float]

    def bytes_needed(self, candidate: CandidatePlan) -> int:
        return round(self.size_of(candidate) * self.limit_bytes)


def test_prices_rise_no_further_where_what_still_does_not_fit_takes_too_long() -> None:
    """Plans that take less memory take longer than one that is known: twice the time at each price but the first
    three, and as much memory."""
    search, fastest = start(STEP, BY_PRICES)
    search.limit_bytes = round(search.bytes_needed(fastest) / 1.1)

    def plan_at(number: int) -> CandidatePlan:
        cost = replace(fastest.cost, compute_s=fastest.cost.compute_s + (number > 3) * fastest.cost.step_s)
        return replace(fastest, cost=cost)

    fitting = _ScriptedFit(search, fastest, 1.5 * fastest.cost.step_s, plan_at=plan_at)
    with pytest.raises(MemoryBudgetError):
        fitting.find_best()
    unit = fastest.cost.step_s / fastest.memory.peak_bytes
    assert fitting.asked == pytest.approx(
        [part * unit for part in (MIN_MULTIPLIER, RISING_MULTIPLIERS[0], MAX_MULTIPLIER, RISING_MULTIPLIERS[1])]
    )


@pytest.mark.parametrize(
    ("descends", "over", "gives_up"),
    [
        (False, 0.5 * LOCAL_BOUND_SLACK, True),
        (True, 0.5 * LOCAL_BOUND_SLACK, False),
        (True, 2 * LOCAL_BOUND_SLACK, True),
    ],
)
def test_what_prices_promise_of_plans_that_are_descended_to_is_no_bound(
    descends: bool, over: float, gives_up: bool
) -> None:
    """BERT on 16 devices at a quarter of the memory: 36.31 instead of 36.91 ms."""
    search = make_search(STEP)
    outcome = search.search_meshes()
    fastest = outcome.evaluate(outcome.fastest)
    if descends:
        coarse = replace(outcome.fastest, mesh=Mesh.of({"x": 2, "y": 2}))
        fastest = replace(fastest, coarse_solution=coarse)
    below_s = fastest.cost.step_s
    fitting = _ScriptedFit(search, fastest, below_s, bound_s=below_s * (1 + over))
    fitting._add_constraint(fastest)
    fitting.dual_bound_s = below_s
    price = 1e-3 * fastest.cost.step_s / fastest.memory.peak_bytes
    with pytest.raises(MemoryBudgetError) if gives_up else nullcontext():
        fitting._evaluate(price)
    assert len(fitting.evaluations) == (not gives_up)


def test_where_a_plan_is_known_to_fit_prices_begin_low() -> None:
    search, fastest = start(STEP, BY_PRICES)
    search.limit_bytes = search.bytes_needed(fastest) // 2
    asked: list[float] = []
    for item in (None, fastest):
        fitting = _ScriptedFit(search, fastest, math.inf, (), item, plan_at=end_of_test)
        with pytest.raises(MemoryBudgetError):
            fitting.find_best()
        asked += fitting.asked
    unit = fastest.cost.step_s / fastest.memory.peak_bytes
    assert asked == pytest.approx([MAX_MULTIPLIER * unit, RISING_MULTIPLIERS[0] * unit])


@pytest.mark.parametrize(("ratio", "below", "count"), [(2.0, 1.45, 0), (2.0, 1.55, 1), (4.0, 1.45, 1)])
def test_between_near_prices_nothing_is_looked_for_that_takes_too_long(ratio: float, below: float, count: int) -> None:
    """Halfway between a plan that needs too much and one of twice its time that fits, the memory ends."""
    search = _SizedSearch(STEP, CLUSTER, PlanOptions(**ONE_WAY))  # type: ignore[arg-type]
    search.size_of = lambda candidate: 0.9 if candidate is fits else 1.1
    _, over = start(STEP)
    fits = replace(over, cost=replace(over.cost, compute_s=over.cost.compute_s + over.cost.step_s))
    fitting = _ScriptedFit(search, over, below * over.cost.step_s, plan_at=end_of_test)
    fitting._add_constraint(over)
    fitting.evaluations = [_PricedPlan(1.0, replace(over)), _PricedPlan(ratio, fits)]
    with contextlib.suppress(MemoryBudgetError):
        assert fitting._search_multipliers(fitting.evaluations[-1]) is fits
    assert len(fitting.asked) == count


class _FastestAlone(LagrangianSearch):
    """No price gives a plan that fits; one gave the start plan."""

    def _find_feasible(self) -> _PricedPlan | None:
        self.evaluations.append(_PricedPlan(0.0, self.start_plan))
        return None


def test_where_no_price_fits_a_plan_that_does_is_made_faster() -> None:
    """Of parts of it and of one that a price gave; without one that is known there is none."""
    search = make_search(lower(gpt2(layers=3, batch=32, length=32)), BY_PRICES)
    outcome = search.search_meshes()
    fast = outcome.evaluate(outcome.fastest)
    peak = search.memory_model(fast.chain.graph.variables.shared_layouts).constraint_of_buffers(
        fast.live_buffers, fast.decisions
    )
    price = Multipliers(constraints=((peak, fast.cost.step_s / fast.memory.peak_bytes),))
    thrifty = search.evaluate(fast.chain, fast.chain.with_multipliers(price).solve(search.time_limit_s()), ())
    search.limit_bytes = (search.bytes_needed(fast) + search.bytes_needed(thrifty)) // 2

    def fit(incumbent: CandidatePlan | None) -> CandidatePlan:
        return _FastestAlone(search, fast, math.inf, (), incumbent).find_best()

    with pytest.raises(MemoryBudgetError):
        fit(None)
    result = fit(thrifty)
    assert fast.cost.step_s < result.cost.step_s < thrifty.cost.step_s
    assert search.bytes_needed(result) <= search.limit_bytes
    search.limit_bytes = search.bytes_needed(thrifty)
    with pytest.raises(MemoryBudgetError):
        fit(replace(thrifty, cost=fast.cost))


@pytest.mark.parametrize(("saved", "count"), [(0.02, 2), (0.06, 4)])
def test_prices_rise_no_further_where_each_saves_too_little(saved: float, count: int) -> None:
    """Plans need a fifth more than there is, and at each price so much less: two more that save twice that are enough,
    or not."""
    search = _SizedSearch(STEP, CLUSTER, PlanOptions(**ONE_WAY), limits=BY_PRICES)  # type: ignore[arg-type]
    search.size_of = lambda candidate: 1.2 - saved * max(numbers.get(id(candidate), 0) - 2, 0)
    _, fastest = start(STEP, BY_PRICES)
    numbers: dict[int, int] = {}

    def plan_at(number: int) -> CandidatePlan:
        plan = replace(fastest)
        numbers[id(plan)] = number - 1
        return plan

    fitting = _ScriptedFit(search, fastest, math.inf, plan_at=plan_at)
    with pytest.raises(MemoryBudgetError):
        fitting.find_best()
    assert len(fitting.asked) == 2 + count
