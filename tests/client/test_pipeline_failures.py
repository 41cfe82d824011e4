"""What goes wrong with a pipeline on two workers: a typed error in seconds, and the session goes on."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.proto.v1 import master_pb2
from tests.client.clusters import Clusters
from tests.client.pipeline_training import SGD
from tests.planner.pipeline import cases
from tests.server.raw_client import ROOT

pytestmark = pytest.mark.cluster

FUNCTION, ARGUMENTS, DONATED = cases.mlp(optimizer=SGD)
LOSS = float(jax.jit(FUNCTION)(*ARGUMENTS)[2])

WEIGHTS = np.ones((64, 64), np.float32)

#: What an error may take: long enough for a busy machine, too short for a wait that nobody ends.
SOON_S = 60.0


@pytest.fixture
def session(two_workers: sw.Session) -> sw.Session:
    return two_workers


@pytest.fixture
def step(session: sw.Session) -> Iterator[sw.Step]:
    """A pipeline that trains before and after the test, whatever happens in it."""
    step = session.parallelize(FUNCTION, stages=2, micro_batches=4, schedule="1f1b")
    assert abs(float(step(*ARGUMENTS)[2]) - LOSS) <= 1e-5
    began_s = time.monotonic()
    yield step
    assert time.monotonic() - began_s < SOON_S
    assert abs(float(step(*ARGUMENTS)[2]) - LOSS) <= 1e-5


def test_a_task_that_raises_ends_the_step_on_all_workers_and_is_named(session: sw.Session, step: sw.Step) -> None:
    program = step._require_program()
    request = master_pb2.RunStepsRequest(executable_id=program.executable_id)
    for source in program.sources:
        layout = source.entry.layout
        if layout.view_of is not None and layout.first_device:  # what stage 1 takes of the batch: of another type
            layout = replace(layout, element_type="s32")
        request.arguments.extend(*session._state.arrays.upload([(np.zeros(layout.user_shape, layout.dtype), layout)]))
    request.outputs.extend(session._state.arrays.new_id() for _ in program.results)
    with pytest.raises(sw.ExecutionError, match=r"takes float32.*not int32") as caught:
        session._state.steps.submit(request, "broken", is_followed=True).wait()
    assert caught.value.where.startswith("stage 1, task ")
    assert "of micro-batch 0" in caught.value.where


def test_a_program_that_runs_out_of_memory_is_named(session: sw.Session, step: sw.Step) -> None:
    """A quarter of a terabyte for each example, which the cluster file says is there."""

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for i in range(2):
            x = sw.annotate(x + jnp.tanh(x @ params[i]["w"]) @ params[i]["v"], {0: "data"})
            wide = jnp.sin(x[:, None, :2] * jnp.arange(1 << 17, dtype=jnp.float32)[:, None])
            products = jnp.einsum("bik,bjk->bij", wide, jnp.cos(wide))
            x = x + 1e-9 * jnp.mean(jnp.sin(products) @ products, (1, 2))[:, None]
        return jnp.mean((x - y) ** 2)

    def train_step(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    params, _, x, y = ARGUMENTS
    large = session.parallelize(train_step, stages=2, micro_batches=2, schedule="1f1b", rewrites="none", remat="none")
    with pytest.raises(sw.ExecutionError, match="Out of memory allocating") as caught:
        float(large(params, x, y)[1])
    assert caught.value.where.startswith("stage 0, task ")
    assert "forward.0 of micro-batch 0" in caught.value.where
    assert "memory_budget" in caught.value.remedy


def test_a_loss_that_is_no_number_is_a_result(step: sw.Step) -> None:
    params, state, *batch = ARGUMENTS
    broken = jax.tree.map(lambda leaf: np.full_like(leaf, np.inf), params)
    assert np.isnan(float(step(broken, state, *batch)[2]))


def test_batches_that_do_not_fit_are_refused(session: sw.Session, step: sw.Step) -> None:
    params, state, x, y = ARGUMENTS
    what = r"4 micro-batches do not divide the batch: batch\[0\] f32\[15,8\] splits into 15 equal parts"
    with pytest.raises(sw.MicroBatchError, match=rf"{what}\n.*drop_remainder.*: 1, 3, 5, 15$"):
        step(params, state, x[:15], y[:15])
    with pytest.raises(sw.MicroBatchError, match="32 micro-batches"):
        session.parallelize(FUNCTION, stages=2, micro_batches=32)(*ARGUMENTS)
    with pytest.raises(TypeError, match="incompatible shapes"):  # as jax.jit says it
        step(params, state, x[:8], y)


def test_more_stages_than_devices_or_parts_are_refused(session: sw.Session, step: sw.Step) -> None:
    with pytest.raises(sw.OptionError, match="8 devices on 2 nodes make no 16 groups"):
        session.parallelize(FUNCTION, stages=16, micro_batches=4)(*ARGUMENTS)
    with pytest.raises(sw.PlanError, match="can be cut into"):
        session.parallelize(FUNCTION, stages=8, micro_batches=4)(*ARGUMENTS)


#: A client that trains until it is killed.
CLIENT = """
import sys
import shardwright as sw
from tests.client.test_pipeline_failures import ARGUMENTS, DONATED, FUNCTION

session = sw.connect(sys.argv[1])
step = session.parallelize(FUNCTION, donate_argnums=DONATED, stages=2, micro_batches=4, schedule="1f1b")
params, state, *batch = ARGUMENTS
while True:
    params, state, loss = step(params, state, *batch)
    print(float(loss), flush=True)
"""


def test_a_client_that_is_killed_between_steps_disturbs_no_other(session: sw.Session, step: sw.Step) -> None:
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, session._state.master.address], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        assert client.stdout is not None
        assert abs(float(client.stdout.readline()) - LOSS) <= 1e-5
        client.send_signal(signal.SIGKILL)
        client.wait()
        assert abs(float(step(*ARGUMENTS)[2]) - LOSS) <= 1e-5
    finally:
        client.kill()
        client.communicate()


def test_a_lost_worker_ends_the_step_by_name_and_a_fresh_state_trains_on(
    clusters: Clusters, session: sw.Session, step: sw.Step
) -> None:
    """In a session of its own, which errors of steps sent ahead end up in; the other one trains on as well."""
    params, state, *batch = ARGUMENTS
    with sw.connect(session._state.master.address) as own:
        mine = own.parallelize(FUNCTION, donate_argnums=DONATED, stages=2, micro_batches=4, schedule="1f1b")
        *result, loss = mine(params, state, *batch)
        assert abs(float(loss) - LOSS) <= 1e-5
        weighed = own.parallelize(lambda x: (x * WEIGHTS).sum())  # a constant on the servers, which is lost
        assert abs(float(weighed(WEIGHTS)) - 4096) <= 1e-2

        def go_on() -> None:
            for _ in range(200):
                *result[:], loss = mine(*result, *batch)
            float(loss)

        (executor,) = clusters.servers[1].executors()
        threading.Timer(0.5, lambda: executor.send_signal(signal.SIGKILL)).start()
        with pytest.raises(sw.WorkerLostError, match=r"node 1 was lost.*; it computed stage 1 of step \d+"):
            go_on()
        for _ in range(5):  # errors of steps that were sent ahead come first
            with contextlib.suppress(sw.WorkerLostError, sw.ArrayError):
                *_, loss = mine(params, state, *batch)
                break
        assert abs(float(loss) - LOSS) <= 1e-5
        for _ in range(5):
            with contextlib.suppress(sw.WorkerLostError):
                total = float(weighed(WEIGHTS))
                break
        assert abs(total - 4096) <= 1e-2
