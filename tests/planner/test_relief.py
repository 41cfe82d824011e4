"""What is tried where memory binds: parts of the batch, values computed again."""

import shardwright as sw
from benchmarks.truth_models import gpt2

#: Two heads over eight devices: each computes both, and two parts of the batch take less time than the whole.
OPTIONS = {"force": "tensor", "mesh": "8", "stages": 1, "cache": False}


def test_where_parts_of_the_batch_take_less_than_the_whole_more_parts_are_still_searched():
    text = gpt2(heads=2, width=64, layers=1, batch=64, context=128, vocabulary=64)
    whole = sw.plan(text, 8, **OPTIONS)
    budget = round(0.4 * whole.memory.peak_bytes)
    parts = sw.plan(text, 8, memory_budget=budget, **OPTIONS)
    assert parts.micro_batches > 1
    assert parts.memory.peak_bytes <= budget
    assert parts.cost.step_s < whole.cost.step_s, "this step no longer shows what is tested"
