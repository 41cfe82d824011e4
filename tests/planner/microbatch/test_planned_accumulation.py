"""Steps cut into micro-batches, planned like any other; `tests/planner/test_numbers.py` runs them."""

from __future__ import annotations

from typing import Any

import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.errors import MicroBatchError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.plans.plan import Plan
from shardwright.user_plans import compile_and_prove
from tests.planner.microbatch.microbatch_programs import small_gpt2
from tests.planner.programs import Program, lower

EIGHT = Cluster.local(8)


def cut(program: Program, micro_batches: int, **options: Any) -> Plan:
    return plan(lower(program), EIGHT, PlanOptions(micro_batches=micro_batches, **options))


def gradient_wire_bytes(planned: Plan) -> dict[str, int]:
    """By gradient: the bytes that one device puts on the wire for it in a step."""
    return {
        each.cause: each.wire_bytes * each.count for each in planned.collectives if each.cause.startswith("gradient")
    }


@pytest.mark.dear
def test_gradients_are_reduced_once_however_many_micro_batches() -> None:
    text = lower(small_gpt2())
    mesh = {"data": 4}
    plans = [
        plan(text, Cluster.local(4), PlanOptions(mesh=mesh, force="data", micro_batches=count)) for count in (1, 2, 4)
    ]
    once, twice, four_times = (gradient_wire_bytes(planned) for planned in plans)
    assert once == twice == four_times
    assert len(once) == 16  # every parameter's
    proof = compile_and_prove(plans[2])
    assert proof.holds, proof.explain()
    assert not proof.differences, proof.explain()


def test_the_batch_is_split_within_each_micro_batch() -> None:
    (tokens,) = [v for v in cut(small_gpt2(), 2, force="data").parameters if v.alias is None]
    assert tokens.shape == (2, 8, 7)
    assert tokens.view_of == (16, 7)
    assert [dim for dim, axes in enumerate(tokens.sharding.dims) if axes] == [1]


def test_pins_of_the_batch_count_dimensions_as_the_user_does() -> None:
    pins = {"batch*": {0: "data", 1: None}}
    (tokens,) = [v for v in cut(small_gpt2(), 2, mesh={"data": 8}, force=pins).parameters if v.alias is None]
    assert tokens.shape == (2, 8, 7)
    assert tokens.sharding.dims[1] == ("data",)


def test_a_number_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(MicroBatchError, match=r"3 micro-batches do not divide the batch.*16 equal parts"):
        cut(small_gpt2(), 3)
