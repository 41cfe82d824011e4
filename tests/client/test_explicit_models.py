"""Ten models under Explicit axes are the programs that they are under Auto axes, with their author's pins alone."""

from __future__ import annotations

import pytest
from jax.sharding import AxisType

from benchmarks.planner.explicit_models import SHARDING_CALL, lower, without_lines
from workloads.explicit_models import MODELS

pytestmark = pytest.mark.dear


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_the_same_program_under_explicit_axes(name: str) -> None:
    program = lower(name, AxisType.Explicit, "")
    assert program.count(SHARDING_CALL) == 0
    assert without_lines(program) == without_lines(lower(name, AxisType.Auto, ""))


@pytest.mark.parametrize("name", MODELS)
def test_what_its_author_wrote_is_pinned_and_nothing_else(name: str) -> None:
    program = lower(name, AxisType.Explicit, "explicit")
    assert program.count(SHARDING_CALL) > 0
    assert without_lines(program) == without_lines(lower(name, AxisType.Auto, "auto"))
