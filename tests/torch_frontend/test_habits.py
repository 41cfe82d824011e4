"""Habits of users between the calls of a step, beside eager PyTorch: the same values, or one typed sentence."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import shardwright as sw
import shardwright.torch as swt
from tests.torch_frontend import habits_of_python, habits_of_state
from tests.torch_frontend.habits_of_state import HABITS

#: They fill the table.
MODULES = (habits_of_state, habits_of_python)

#: Those in the quick tests.
QUICK = (
    "hooks_of_modules_later", "hooks_of_parameters_later", "pruned", "loaded_by_assignment", "gradients_switched_off",
    "seeds_in_a_fork",
)  # fmt: skip

#: Those that are refused, with what is said.
REFUSED = {
    "generators_in_the_step": "takes an element of numbers, a generator",
    "iterators_in_the_step": "takes an element of numbers, a count",
    "two_optimizers": "makes 'momentum_buffer' of model.0.weight after its first step",
}


def run_eagerly(model: Any, optimizer: Any, function: Any) -> Any:
    is_whole = list(inspect.signature(function).parameters)[1:2] in (["optimizer"], ["optimizers"])

    def step(*batch: Any) -> Any:
        if is_whole:
            return function(model, optimizer, *batch)
        optimizer.zero_grad()
        loss = function(model, *batch)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK or name in REFUSED else pytest.mark.dear) for name in HABITS]
)
def test_a_habit_counts_as_eagerly(name: str, session: sw.Session) -> None:
    def parallelize(model: Any, optimizer: Any, function: Any) -> Any:
        return swt.parallelize(session, model, optimizer, function, effort="fast")

    expected = [float(value) for value in HABITS[name](run_eagerly)]
    if name in REFUSED:
        with pytest.raises(sw.ShardwrightError, match=REFUSED[name]) as caught:
            list(HABITS[name](parallelize))
        assert caught.value.remedy
        return
    assert [float(value) for value in HABITS[name](parallelize)] == pytest.approx(expected, rel=1e-5, abs=1e-6)
