"""`Step.replan`: other options for a step that runs; the state goes along, on the servers."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

import shardwright as sw
from tests.replan.training import Run, batch, init, loss_of, train
from tests.two_nodes import Running


def kinds(step: Any) -> list[str]:
    return [change.kind for change in step.plan_changes]


def test_state_moves_to_the_new_plan_and_training_goes_on(session: sw.Session) -> None:
    run = Run(session.parallelize(train, donate_argnums=0, force="data"))
    run.go(2)
    held, contents = run.params, [np.asarray(weight) for weight in run.params]
    before = [str(weight.sharding) for weight in held]

    plan = run.step.replan(force="fsdp")

    assert plan is run.step.plan
    assert plan.origin == "forced: fsdp"
    assert [str(weight.sharding) for weight in held] != before, "the user's own handles lie as the new plan has them"
    for weight, was in zip(held, contents, strict=True):
        np.testing.assert_array_equal(np.asarray(weight), was)
    run.go(2)
    assert kinds(run.step) == ["replanned"]
    assert "before call 3: data=8" in run.step.report
    run.check_state()


def test_a_step_without_a_plan_has_none_to_replace(session: sw.Session) -> None:
    step = session.parallelize(train, donate_argnums=0)
    with pytest.raises(sw.PlanError, match="has no plan yet"):
        step.replan(force="fsdp")
    with pytest.raises(TypeError, match="did you mean 'force'"):
        step.replan(forse="fsdp")


def test_after_an_error_the_plan_before_goes_on(session: sw.Session) -> None:
    run = Run(session.parallelize(train, donate_argnums=0, force="data"))
    run.go()
    plan, lies = run.step.plan, str(run.params[0].sharding)
    for options, error in (
        ({"mesh": "3x7"}, sw.OptionError),
        ({"rest": "data"}, sw.OptionError),  # contradicts force="data", which stays
        ({"memory_budget": 1000}, sw.MemoryBudgetError),
        ({"force": {"params[0]": {0: "nowhere"}}}, sw.ShardwrightError),
    ):
        with pytest.raises(error):
            run.step.replan(**options)
        assert run.step.plan is plan
        assert str(run.params[0].sharding) == lies
    run.go()
    assert kinds(run.step) == []


@pytest.mark.dear
def test_from_one_program_to_a_pipeline_and_back(session: sw.Session) -> None:
    run = Run(session.parallelize(train, donate_argnums=0, mesh="8"))
    run.go(2)
    pipeline = run.step.replan(stages=2, mesh=None)
    assert len(pipeline.stages) == 2
    run.go(2)
    assert run.step.replan(stages=None, mesh="2x4", force="tensor").mesh.sizes == {"data": 2, "model": 4}
    run.go(2)
    run.check_state()


@pytest.mark.dear
def test_options_that_are_not_given_stay(session: sw.Session) -> None:
    run = Run(session.parallelize(train, donate_argnums=0, mesh="2x4", force="mixed"))
    run.go()
    assert run.step.replan(force="tensor").mesh.sizes == {"data": 2, "model": 4}
    run.go()
    assert run.step.replan(mesh=None, force=None, stages=1).origin == "search"
    run.go()
    run.check_state()


@pytest.mark.dear
def test_all_programs_of_the_step_are_planned_again(session: sw.Session) -> None:
    run = Run(session.parallelize(train, donate_argnums=0, force="data"))
    run.go(2)
    run.go(1, size=16)  # the last batch of an epoch
    run.step.replan(force="fsdp")
    lies = [str(weight.sharding) for weight in run.params]
    run.go(2)
    run.go(1, size=16)
    run.go(1)
    assert [str(weight.sharding) for weight in run.params] == lies
    run.check_state()


@pytest.mark.dear
def test_another_step_over_the_state_goes_on(session: sw.Session) -> None:
    run = Run(session.parallelize(train, donate_argnums=0, force="data"))
    evaluate = session.parallelize(loss_of)

    def check() -> None:
        loss = evaluate(run.params, *batch(99))
        assert abs(float(loss) - float(jax.jit(loss_of)(run.expected, *batch(99)))) <= 1e-5

    run.go()
    check()
    for options in ({"force": "fsdp"}, {"force": "tensor"}, {"force": "data"}, {"force": None, "stages": 2}):
        run.step.replan(**options)
        lies = [str(weight.sharding) for weight in run.params]
        check()
        assert [str(weight.sharding) for weight in run.params] == lies, "reading moves nothing"
        run.go()
    run.check_state()


@pytest.mark.dear
def test_state_that_is_not_donated_moves_as_it_is_used(session: sw.Session) -> None:
    run = Run(session.parallelize(train, force="data"))
    run.go(2)
    older = run.params
    contents = [np.asarray(weight) for weight in older]
    run.step.replan(force="fsdp")
    run.go(2)
    for weight, was in zip(older, contents, strict=True):
        np.testing.assert_array_equal(np.asarray(weight), was)
    run.check_state()


@pytest.mark.dear
def test_a_step_that_only_reads_may_be_planned_again(session: sw.Session) -> None:
    run = Run(session.parallelize(train, donate_argnums=0, force="fsdp"))
    run.go()
    evaluate = session.parallelize(loss_of)
    evaluate(run.params, *batch(0))
    lies = [str(weight.sharding) for weight in run.params]
    evaluate.replan(effort="fast")
    loss = evaluate(run.params, *batch(0))
    assert abs(float(loss) - float(jax.jit(loss_of)(run.expected, *batch(0)))) <= 1e-5
    assert [str(weight.sharding) for weight in run.params] == lies
    run.go()


@pytest.mark.dear
def test_state_that_was_not_made_yet_is_made_in_the_new_layouts(session: sw.Session) -> None:
    run = Run(session.parallelize(train, donate_argnums=0, force="data"))
    run.step.compile(run.params, *batch(0))
    run.step.replan(force="fsdp")
    run.go(2)
    assert "data" in run.params[0].sharding
    run.check_state()


@pytest.mark.cluster
def test_views_of_fused_weights_move_between_meshes(session: sw.Session) -> None:
    def gated(params: Any, x: Any, y: Any) -> Any:
        def loss(p: Any) -> Any:
            gate, value = jax.numpy.split(x @ p["w"], 2, axis=-1)
            return jax.numpy.mean(((jax.nn.silu(gate) * value) @ p["v"] - y) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients), value

    random = np.random.default_rng(0)
    start = {
        "w": 0.3 * random.normal(size=(16, 64)).astype(np.float32),
        "v": 0.3 * random.normal(size=(32, 16)).astype(np.float32),
    }
    x, y = (random.normal(size=(8, 16)).astype(np.float32) for _ in range(2))
    step = session.parallelize(gated, donate_argnums=0, force="tensor", mesh="1x8")
    params, expected = step.init(lambda: jax.tree.map(jax.numpy.asarray, start)), start
    for options in ({}, {"force": "data", "mesh": "8"}, {"force": "tensor", "mesh": "1x8"}, {"mesh": "2x4"}):
        if options:
            contents = jax.tree.map(np.asarray, params)
            step.replan(**options)
            jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, params), contents)
        for _ in range(2):
            params, loss = step(params, x, y)
            expected, wanted = jax.jit(gated)(expected, x, y)
            assert abs(float(loss) - float(wanted)) <= 1e-5
    assert any(variable.view_of for variable in step.plan.parameters), "a fused weight lies in another view"


@pytest.mark.dear
def test_init_and_checkpoints_follow_the_new_plan(session: sw.Session, tmp_path: Any) -> None:
    run = Run(session.parallelize(train, donate_argnums=0, force="data"))
    run.go(2)
    run.step.save(run.params, str(tmp_path / "saved"), step=2).wait()
    run.step.replan(force="fsdp")
    run.params = run.step.restore(str(tmp_path / "saved"), like=jax.eval_shape(init, jax.random.key(0)))
    run.go(2)
    run.check_state()


@pytest.mark.cluster
def test_state_moves_between_workers(healed: Running) -> None:
    run = Run(healed[1].parallelize(train, donate_argnums=0, force="data"))
    run.go()
    run.step.replan(force="fsdp")
    run.go()
    run.step.replan(force=None, stages=2)
    run.go()
    run.check_state()
