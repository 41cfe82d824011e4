"""Strategies that bounds make at once, against those that are made one by one."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.cost import hardware_profile
from shardwright.hlo import parse
from shardwright.planner.costs.prices import Prices
from shardwright.planner.graph.signatures import signature
from shardwright.planner.strategies.expansion import ways_through
from shardwright.planner.strategies.relaxed_strategies import RelaxedStrategyBuilder
from shardwright.planner.strategies.strategy_set import StrategyBuilder, StrategySet
from shardwright.plans.shardings import Mesh
from tests.planner.programs import PROGRAMS, lower
from tests.planner.search.test_meshes import cluster


def said(strategy_set: StrategySet, prices: Prices) -> list[tuple[object, ...]]:
    """What a set says of each strategy, numbers replaced by the shardings they stand for."""
    lies = prices.shardings
    return [
        (strategy.operands, strategy.results, strategy.partial, [lies[i] for i in used], [lies[i] for i in made])
        for strategy, used, made in zip(
            strategy_set.strategies, strategy_set.operand_ids, strategy_set.result_ids, strict=True
        )
    ]


@pytest.mark.dear
@pytest.mark.parametrize("sizes", [(2, 2, 2), (3, 2, 2), (4, 2)])
@pytest.mark.parametrize("program", sorted(PROGRAMS))
def test_all_at_once_are_those_one_by_one(program: str, sizes: tuple[int, ...]) -> None:
    mesh = Mesh.of(dict(zip(("x", "y", "z"), sizes, strict=False)))
    prices = Prices(mesh, cluster(mesh.device_count), hardware_profile("a100"))
    at_once = RelaxedStrategyBuilder(prices, pads=True)
    one_by_one = StrategyBuilder(prices, pads=True, pads_along_several=True)
    module = parse(lower(PROGRAMS[program]()))
    instructions = {signature(i): i for computation in module.computations for i in computation}
    for instruction in instructions.values():
        for linear in {(), ways_through(instruction)}:
            strategies = at_once.of_instruction(instruction, linear)
            wanted = one_by_one.of_instruction(instruction, linear)
            assert said(strategies, prices) == said(wanted, prices), instruction.name
            np.testing.assert_allclose(strategies.time_s, wanted.time_s, rtol=1e-12, err_msg=instruction.name)
            assert strategies.reason == wanted.reason
