"""One program or a pipeline: what is asked for, what fits, what is faster."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.client.lowering import lower as lower_step
from shardwright.clusters.cluster import Cluster, Link
from shardwright.errors import MemoryBudgetError, MicroBatchError, OptionError
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.limits import SearchLimits
from shardwright.planner.planning import plan_step
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan import Plan
from tests.planner.clocks import just_late
from tests.planner.pipeline import cases
from tests.planner.pipeline.planned import lower_text
from tests.planner.programs import gpt2, lower
from tests.planner.stages.stage_programs import typed_scan

MLP = lower_text(cases.mlp(4))[0]

TWO_NODES = Cluster.from_json(
    '{"master": {"ip": "127.0.0.1", "port": 2222, "devices": 2},'
    ' "workers": [{"ip": "127.0.0.1", "port": 2223, "devices": 2}]}'
)

#: Two nodes that are no farther apart than devices of one: no pipeline is faster there.
TWO_NEAR_NODES = replace(TWO_NODES, inter_node=Link(bandwidth_bytes_per_s=1e12, latency_s=1e-7))


def test_stages_are_made_where_they_are_asked_for():
    plan = sw.plan(MLP, 4, stages=2, micro_batches=4, schedule="gpipe", mesh="2", cache=False)
    assert isinstance(plan, PipelinePlan)
    assert [stage.mesh.sizes for stage in plan.stages] == [{"data": 2}, {"data": 2}]
    assert (plan.micro_batches, plan.schedule) == (4, "gpipe")


def test_one_stage_is_no_pipeline():
    limits = SearchLimits(min_pipeline_step_s=0.0)
    assert isinstance(plan_step(MLP, TWO_NODES, PlanOptions(stages=1), limits=limits), Plan)


def test_nodes_far_apart_become_stages_where_that_is_faster():
    """Short steps are not even tried; without the tasks' price, a pipeline beats gradients over a slow network."""
    assert isinstance(sw.plan(MLP, TWO_NODES, cache=False), Plan)
    with_price = plan_step(MLP, TWO_NODES, limits=SearchLimits(min_pipeline_step_s=0.0))
    assert isinstance(with_price, Plan)
    assert any("pipeline" in note for note in with_price.notes)


def test_on_very_many_devices_short_steps_are_planned_on_every_mesh_and_others_say_that_they_are_not():
    short = plan_step(MLP, TWO_NODES, limits=SearchLimits(huge_device_count=4))
    assert isinstance(short, Plan)
    assert len({str(candidate.mesh) for candidate in short.candidates if candidate.name == "search"}) > 1
    long = plan_step(MLP, TWO_NEAR_NODES, limits=SearchLimits(huge_device_count=4, min_pipeline_step_s=0.0))
    assert isinstance(long, Plan)
    assert any("is planned on data=2 × model=2 only" in note for note in long.notes)


@pytest.mark.dear
@pytest.mark.parametrize(("bandwidth_gb_per_s", "kind"), [(1.0, PipelinePlan), (300.0, Plan)])
def test_a_pipeline_is_chosen_where_nodes_are_far_apart(bandwidth_gb_per_s, kind):
    """Four layers of 4096 × 16384: their gradients take longer over a slow network than activations do."""
    node = {"ip": "127.0.0.1", "gpu_ids": [0, 1]}
    links = {"inter_node": {"bandwidth_gb_per_s": bandwidth_gb_per_s, "latency_us": 30}}
    nodes = {"master": {**node, "port": 1}, "workers": [{**node, "port": 2}], "links": links}
    cluster, text = Cluster.from_json(json.dumps(nodes)), lower(typed_scan(layers=4, width=4096, batch=8192))
    step_plan = sw.plan(text, cluster, cache=False)
    assert isinstance(step_plan, kind)
    alone = sw.plan(text, cluster, stages=1, cache=False)
    pipeline = sw.plan(text, cluster, stages=2, cache=False)
    assert isinstance(alone, Plan)
    assert isinstance(pipeline, PipelinePlan)
    # Whichever it is, it is the faster one by its own simulation, and says so.
    assert (pipeline.step_s < alone.cost.step_s) == (kind is PipelinePlan)
    assert "one program on all devices" in next(note for note in step_plan.notes if "pipeline" in note)


def test_a_step_that_needs_the_whole_batch_is_refused():
    def program():
        import jax.numpy as jnp

        return cases.training(
            lambda p, x: jnp.mean(((x - x.mean(0)) @ p["w"]) ** 2), {"w": cases.normal(0, 8, 8)}, cases.normal(1, 16, 8)
        )

    with pytest.raises(MicroBatchError):
        sw.plan(lower_text(program())[0], 4, stages=2, micro_batches=4, cache=False)


def test_stages_that_the_devices_do_not_give():
    with pytest.raises(OptionError, match="stages"):
        sw.plan(MLP, 4, stages=3, cache=False)


def test_where_nothing_fits_the_error_is_that_of_one_program():
    with pytest.raises(MemoryBudgetError, match=r"the state alone .*\n  remedy: .* make the batch smaller$"):
        sw.plan(MLP, 4, memory_budget=100, cache=False)


#: One variant of the program, and the first plan that fits.
ONE_WAY = {"remat": "none", "micro_batches": 1, "stages": 1, "effort": "fast", "cache": False}


@pytest.mark.dear
def test_as_many_devices_as_the_error_names_do():
    options = {**ONE_WAY, "memory_budget": 12_000}
    with pytest.raises(MemoryBudgetError) as refused:
        sw.plan(MLP, 1, **options)
    enough = re.search(r"or use (\d+) devices \(\1 nodes\), where a fully sharded plan needs", str(refused.value))
    assert enough
    assert int(enough[1]) > 2, "two would do if all that 20 KiB hold were shared out"
    assert sw.plan(MLP, int(enough[1]), **options).memory.peak_bytes <= 12_000


@pytest.fixture(scope="module")
def of_threes() -> str:
    """Widths that three devices divide."""
    return lower(gpt2(layers=2, width=48, vocabulary=48, batch=24, length=4))


@pytest.mark.dear
def test_fewer_devices_than_the_next_power_of_two_are_named_where_they_do(of_threes: str) -> None:
    options = {**ONE_WAY, "memory_budget": 950_000}
    with pytest.raises(MemoryBudgetError, match=r"or use 3 devices \(3 nodes\), where a fully sharded plan needs"):
        sw.plan(of_threes, 1, **options)
    assert sw.plan(of_threes, 3, **options).memory.peak_bytes <= 950_000


@pytest.mark.dear
def test_a_deadline_leaves_no_time_to_say_how_many_devices_would_do(of_threes: str) -> None:
    options = PlanOptions(memory_budget=950_000, remat="none", micro_batches=1, deadline_s=1e-9)
    with pytest.raises(MemoryBudgetError, match=r"or use more devices$"):
        plan_step(of_threes, Cluster.local(1), options, clock=just_late())


# ---- what a TPU gives programs -----------------------------------------------------


def _v5e(gib: float) -> Plan | PipelinePlan:
    """A state of so much on each of four v5e, in a cluster file that names the chip's 16 GiB."""
    rows = int(gib * 2**30 / 8192) // 8 * 8 * 4
    state, batch = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 2048), (32, 128)))
    text = lower_step(lambda w, x: (w * 0.99 + x.mean(), jnp.sum(w * w)), state, batch, donate_argnums=(0,)).hlo_text
    master = {"ip": "10.0.0.1", "port": 2222, "devices": 4}
    cluster = {"name": "t", "platform": "tpu", "hardware": "tpu-v5e", "insecure": True, "memory_gib": 16, "workers": []}
    return plan_step(text, Cluster.from_json(json.dumps(cluster | {"master": master})), PlanOptions(effort="fast"))


def test_the_named_memory_of_a_tpu_is_not_planned_with() -> None:
    """The TPU compiler (libtpu 0.0.42.1) gives programs 15.75 GiB of it."""
    assert "memory_gib of the cluster file says 16.00 GiB; the compiler of tpu-v5e gives programs 15.75 GiB" in "".join(
        _v5e(15.7).notes
    )
    with pytest.raises(MemoryBudgetError, match=r"15\.8 GiB on each of 4") as caught:
        _v5e(15.85)
    assert "allow" not in (caught.value.remedy or "")
