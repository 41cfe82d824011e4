"""Bounds on three axes against what plans take by the ledger, which counts once what several readers move alike."""

from __future__ import annotations

import random
import re

import numpy as np
import pytest

from shardwright.options.plan_options import PlanOptions
from shardwright.planner.constraints.forced import ForcedStrategy
from shardwright.planner.plans.assemble import decide
from shardwright.planner.plans.collectives import communication, total_own_times_s
from shardwright.planner.search.search import Search
from shardwright.planner.segments.bound import lower_bound, solve_tied
from shardwright.planner.segments.cost_graph import CostGraph
from shardwright.planner.segments.segment_chain import Chain
from shardwright.planner.segments.variables import Variable
from tests.planner.segments.test_descent import EIGHT, FINE
from tests.planner.test_exact import random_instruction, seconds_of, text_of

SIZES = (1024, 2048, 4096)
ROUNDING = 1e-9

States = dict[Variable, int]


def wide_program(seed: int, instructions: int = 8) -> str:
    """Products, sums and transposes of two matrices, many of them read several times; all unread ones are returned."""
    rng = random.Random(seed)
    values = [(f"p{number}", (rng.choice(SIZES), rng.choice(SIZES))) for number in range(2)]
    lines = [f"  {name} = {text_of(shape)} parameter({number})" for number, (name, shape) in enumerate(values)]
    for number in range(instructions):
        line, shape = random_instruction(rng, f"v{number}", values)
        lines.append(line)
        values.append((f"v{number}", shape))
    text = "\n".join(lines)
    unread = [(name, shape) for name, shape in values[2:] if not re.search(rf"[(, ]{name}[),]", text)]
    shapes, names = ", ".join(text_of(shape) for _, shape in unread), ", ".join(name for name, _ in unread)
    return f"HloModule wide\n\nENTRY main {{\n{text}\n  ROOT out = ({shapes}) tuple({names})\n}}\n"


def step_s_of(graph: CostGraph, states: States) -> float:
    """Seconds of a plan by the ledger."""
    decisions = decide(graph, states)
    return sum(total_own_times_s(decisions)) + communication(decisions).exposed_s


def improve_plan(fine: Chain, states: States) -> States:
    """A plan that no other strategy of one variable makes faster by the ledger."""
    graph, best_s = fine.graph, step_s_of(fine.graph, states)
    improves = True
    while improves:
        improves = False
        for variable in states:
            for state in range(len(graph.set_of(variable))):
                other = {**states, variable: state}
                if state == states[variable] or not np.isfinite(seconds_of(graph, other)):
                    continue
                other_s = step_s_of(graph, other)
                if other_s < best_s * (1 - ROUNDING):
                    states, best_s, improves = other, other_s, True
    return states


def bound_and_plan(seed: int) -> tuple[float, CostGraph, States]:
    """The bound of all plans on three axes, every move followed, and a plan that is as fast as is found."""
    search = Search(wide_program(seed), EIGHT, PlanOptions())
    fine = search.build_chain(FINE, ForcedStrategy(), frozenset())
    bounding = search.build_bounding_chain(FINE, even_rank=search.max_rank, uneven_rank=search.max_rank)
    bound_s = max(lower_bound(bounding, 20.0), solve_tied(bounding.untie()).tied_bound)
    return bound_s, fine.graph, improve_plan(fine, fine.solve(20.0).states)


@pytest.mark.dear
@pytest.mark.parametrize("seed", range(16))
def test_no_plan_takes_less(seed: int) -> None:
    bound_s, graph, states = bound_and_plan(seed)
    apart_s, together_s = seconds_of(graph, states), step_s_of(graph, states)
    assert together_s <= apart_s * (1 + ROUNDING)
    assert bound_s <= together_s * (1 + ROUNDING)


def test_a_third_layout_that_several_readers_share_may_take_less() -> None:
    """What the bound leaves out: a matrix is gathered in two steps for three products, of which the second is paid by
    each."""
    bound_s, graph, states = bound_and_plan(23)
    assert step_s_of(graph, states) < bound_s < 1.02 * step_s_of(graph, states)
    assert seconds_of(graph, states) > bound_s
