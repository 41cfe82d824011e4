"""Split on request although it needs the whole batch: each micro-batch is then a small batch of its own."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from shardwright.errors import MicroBatchError
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.microbatch import accumulate_step, split_step
from tests.planner.microbatch.microbatch_programs import BATCH_NORM
from tests.planner.microbatch.test_refused import contrastive, expert_capacity, inside_a_loop, largest_logit
from tests.planner.microbatch.test_whole_batch import arguments_of, assert_equal, run_accumulated
from tests.planner.programs import Program, lower

INEXACT = PlanOptions(micro_batch_inexact=True)
PARTS = 2


def mean_of_small_batches(program: Program, batch: int) -> list[np.ndarray]:
    """Outputs of the step on each part of the batch by itself, averaged. batch: number of batch arguments."""
    step, arguments, _ = program
    state, whole = arguments[:-batch], arguments[-batch:]
    parts = zip(*[np.split(np.asarray(each), PARTS) for each in whole], strict=True)
    results = [jax.tree.leaves(jax.jit(step)(*state, *part)) for part in parts]
    return [np.mean([np.asarray(value) for value in values], axis=0) for values in zip(*results, strict=True)]


@pytest.mark.dear
@pytest.mark.parametrize(
    ("program", "batch", "note"),
    [
        (lambda: BATCH_NORM(batch=8, size=8, channels=4), 2, "sums over each micro-batch"),
        (expert_capacity, 1, "runs through each micro-batch"),
        (largest_logit, 1, "sums over each micro-batch"),
    ],
    ids=["batch norm", "expert capacity", "maximum"],
)
def test_every_micro_batch_is_a_batch_of_its_own(program: Any, batch: int, note: str) -> None:
    result = program()
    split = split_step(parse(lower(result)), INEXACT)
    assert_equal(
        mean_of_small_batches(result, batch), run_accumulated(accumulate_step(split, PARTS), arguments_of(result))
    )
    assert split.notes
    assert all(each.startswith("inexact: ") for each in split.notes)
    assert any(note in each for each in split.notes)


@pytest.mark.parametrize(
    ("program", "named"),
    [(contrastive, "dot"), (inside_a_loop, "reduce")],
    ids=["examples compared", "statistics that a loop keeps for its backward pass"],
)
def test_what_no_small_batch_has_of_its_own_stays_refused(program: Any, named: str) -> None:
    with pytest.raises(MicroBatchError, match=f"{named} .* needs the whole batch"):
        split_step(parse(lower(program())), INEXACT)
