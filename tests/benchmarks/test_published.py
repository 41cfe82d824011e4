"""Published runs become the model, machine and forced plan that they were; orders of plans are counted right."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from benchmarks.published.judge import Order, Prediction, plan_row, rank
from benchmarks.published.rows import Measured, PublishedRow, read_rows
from benchmarks.published.steps import Model, make_step
from shardwright.plans.pipeline_plan import PipelinePlan

ROWS = {row.id: row for row in read_rows()}


def test_all_rows_but_those_that_say_too_little_can_be_written_down() -> None:
    missing = [row.why_not for row in ROWS.values() if row.why_not]
    assert len(ROWS) == 243
    assert sorted(set(missing)) == [
        "several kinds of GPU at once, not said on which node",
        "the batch is not printed",
    ]
    assert len(missing) == 11


def test_layouts_are_the_rows() -> None:
    row = ROWS["dgxc-llama3.1-405b-GB200-n128-gbs64-bf16"]
    assert row.options() == {
        "mesh": {"data": 2, "context": 2, "model": 4},
        "force": "axes",
        "micro_batches": 32,
        "remat": "none",
        "stages": 8,
        "schedule": "interleaved-8",
    }
    assert ROWS["megatron21-18b"].mesh() == {"data": 32, "tensor": 8}  # no sequence parallelism in 2021
    assert ROWS["mpt-3b-H100-s2048-n128-mbs8x1"].mesh() == {"zero2": 128}
    assert ROWS["sailor-opt350m-gh200-pp1-dp1-tp4-mbs1-gbs1-N1"].mesh() == {"model": 4}


def test_machines_are_the_rows() -> None:
    racks = ROWS["dgxc-llama3.1-405b-GB200-n128-gbs64-bf16"].cluster()
    assert [node.device_count for node in racks.nodes] == [64, 64]
    link = next(row for row in ROWS.values() if row.inter_node == "roce 1600 Gb/s a node").cluster().inter_node
    assert link is not None
    assert link.bandwidth_bytes_per_s == pytest.approx(25e9)  # eight devices share it


def test_parameters_are_as_many_as_the_models_names_say() -> None:
    """Llama 3 has 8.03 B parameters, MPT-7B 6.65 B, with a tied head."""
    for name, billions in (("titan-llama3-8b-H200-n32-fp8", 8.03), ("mpt-7b-H100-s2048-n512-mbs6x1", 6.65)):
        _, types = make_step(ROWS[name].model())
        count = sum(leaf.size for leaf in jax.tree.leaves(types[0]))
        assert count / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.dear
def test_products_in_8_bits_have_the_gradients_of_products() -> None:
    sizes = {"layers": 1, "width": 16, "heads": 2, "kv_heads": 2, "hidden": 32, "vocabulary": 32, "positions": 8}
    losses = []
    for compute in ("fp8", "bf16"):
        step, types = make_step(Model(batch=2, compute=compute, **sizes))
        params = jax.tree.map(lambda a: 0.3 * jnp.cos(jnp.arange(a.size, dtype=a.dtype)).reshape(a.shape), types[0])
        state = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), types[1])
        tokens = jnp.arange(16, dtype=jnp.int32).reshape(2, 8)
        _, moments, loss = jax.jit(step)(params, state, tokens, tokens)
        losses.append((float(loss), np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(moments[0].mu)])))
    (loss, gradient), (wanted, wanted_gradient) = losses
    assert loss == pytest.approx(wanted, rel=0.05)
    cosine = gradient @ wanted_gradient / np.linalg.norm(gradient) / np.linalg.norm(wanted_gradient)
    assert cosine > 0.95


def test_pairs_that_are_apart_are_counted() -> None:
    def row(number: int, step_s: float) -> PublishedRow:
        given = next(iter(ROWS.values()))
        return replace(given, id=str(number), group="sweep", measured=Measured(step_s=step_s))

    rows = [row(0, 1.0), row(1, 1.1), row(2, 2.0)]  # the first two are not told apart
    predictions = [
        Prediction(id=str(number), group="sweep", step_s=step_s) for number, step_s in enumerate((3.0, 1.0, 2.0))
    ]
    assert rank(rows, predictions) == [Order(group="sweep", right=1, pairs=2)]


@pytest.mark.dear
def test_chunks_of_a_stage_and_a_single_micro_batch() -> None:
    model = Model(
        layers=6, width=32, heads=4, kv_heads=4, hidden=64, vocabulary=128, positions=16, batch=8, compute="fp32"
    )
    step, types = make_step(model)
    text = sw.lower(step, *types, donate_argnums=(0, 1)).as_text()
    options = {"force": "axes", "mesh": {"fsdp": 2, "tensor": 2}, "stages": 2, "cache": False}
    plan = sw.plan(text, 8, micro_batches=2, schedule="interleaved-3", **options)
    assert isinstance(plan, PipelinePlan)
    assert [stage.chunks for stage in plan.stages] == [(0, 2, 4), (1, 3, 5)]
    whole = sw.plan(text, 8, micro_batches=1, schedule="1f1b", **options)
    assert isinstance(whole, PipelinePlan)
    assert [stage.chunks for stage in whole.stages] == [(0,), (1,)]


@pytest.mark.dear
def test_a_row_is_planned_as_it_was_run() -> None:
    plan = plan_row(ROWS["sailor-opt350m-gh200-pp1-dp1-tp4-mbs1-gbs1-N1"])
    assert plan.mesh.sizes == {"model": 4}
    assert 0.01 < plan.cost.step_s < 0.0736  # measured at 0.0736 s, a tenth of the peak
