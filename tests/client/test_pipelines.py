"""Pipelines on real servers: two workers, stages on devices of their own, numbers as of one device."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.client.placement import RowParts
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.xla import canonical_hlo, private
from tests.client.pipeline_training import BAR, MODELS, SGD, distance, train
from tests.client.recorded import CallRecorder, open_recorded
from tests.planner.pipeline import cases
from tests.planner.stages.losses import classifier
from tests.report.trace_format import require_valid

pytestmark = pytest.mark.cluster


@pytest.fixture
def session(two_workers: sw.Session) -> sw.Session:
    return two_workers


def test_steps_agree_with_one_device(session: sw.Session, tmp_path: Path) -> None:
    """One case of the grid of `make check-pipelines`."""
    step, loss, tensor = train(session, MODELS["gpt2, tied, dropout"](2), stages=2, micro_batches=4, schedule="1f1b")
    assert loss <= BAR
    assert tensor <= BAR
    assert "2 stages" in repr(step)
    assert "stage 1" in step.report
    assert_dumps_what_runs(step, tmp_path / "dump")


def assert_dumps_what_runs(step: sw.Step, folder: Path) -> None:
    """The programs of every stage, which XLA and MLIR read, with the collectives of the report; and the task graph."""
    files = {path.name: path.read_text() for path in step.dump(folder)}
    assert sorted(files) == sorted(path.name for path in folder.iterdir())
    names = [program.name for program in step.plan.programs]
    assert set(files) == {f"{name}.{form}" for name in names for form in ("mlir", "hlo")} | {"tasks.dot"}
    for part in step._require_program().load.parts:
        canonical = canonical_hlo(files[f"{part.name}.hlo"])
        for collective in part.result.collectives:
            assert collective.instruction in canonical
        with private.mlir_context():
            module = private.parse_module(files[f"{part.name}.mlir"])
            assert "sdy.mesh" in str(module)
    assert all(str(task) in files["tasks.dot"] for tasks in step.plan.tasks.stages for task in tasks)


def test_metrics_stand_ahead_of_the_loss(session: sw.Session) -> None:
    """JAX sorts the keys of a dict: accuracy and the norm of the gradients come before the loss."""
    function, arguments, donated = classifier("optax", "many", layers=2)
    step = session.parallelize(function, donate_argnums=donated, stages=2, micro_batches=2, schedule="1f1b")
    *_, ours = step(*arguments)
    *_, theirs = jax.jit(function)(*arguments)
    assert {name: float(value) for name, value in ours.items()} == pytest.approx(jax.tree.map(float, theirs), rel=1e-5)


def test_variables_are_made_where_they_live_and_read_by_other_steps(session: sw.Session) -> None:
    """An initializer, steps, an evaluation of the same state, a smaller batch."""

    def init(key: jax.Array) -> Any:
        keys = jax.random.split(key, 4)
        return [
            {"w": 0.3 * jax.random.normal(keys[2 * i], (8, 16)), "v": 0.3 * jax.random.normal(keys[2 * i + 1], (16, 8))}
            for i in range(2)
        ]

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for i, p in enumerate(params):
            with jax.named_scope(f"chunk{i}"):
                x = sw.annotate(x + jnp.tanh(x @ p["w"]) @ p["v"], {0: "data"})
        with jax.named_scope("chunk1"):
            return jnp.mean((x - y) ** 2)

    def train_step(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    step = session.parallelize(train_step, donate_argnums=0, stages=2, micro_batches=4, schedule="1f1b")
    evaluate = session.parallelize(loss_of, stages=1, micro_batches=1)
    key = jax.random.key(3)
    x, y = cases.normal(0, 16, 8, scale=1.0), cases.normal(1, 16, 8, scale=1.0)
    params, expected = step.init(init, key), jax.jit(init)(key)
    step.compile(params, x, y)
    for number, rows in enumerate((16, 16, 8)):
        params, loss = step(params, x[:rows], y[:rows])
        expected, expected_loss = jax.jit(train_step)(expected, x[:rows], y[:rows])
        assert abs(float(loss) - float(expected_loss)) <= 1e-5
        if number == 0:
            stages = {
                leaf._place.first_device for leaf in jax.tree.leaves(params) if not isinstance(leaf._place, RowParts)
            }
            assert stages == {0, 4}, "each variable is on the stage that updates it"
        assert abs(float(evaluate(params, x, y)) - float(loss_of(expected, x, y))) <= 1e-5
    assert distance(params, expected) <= 1e-5


def test_stacked_layers_lie_in_rows_on_the_stages(recorded: tuple[sw.Session, CallRecorder]) -> None:
    session, calls = recorded

    def init(key: jax.Array) -> Any:
        first, second = jax.random.split(key)
        return {"w": 0.3 * jax.random.normal(first, (4, 8, 16)), "v": 0.3 * jax.random.normal(second, (4, 16, 8))}

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        x, _ = jax.lax.scan(lambda x, p: (x + jnp.tanh(x @ p["w"]) @ p["v"], None), x, params)
        return jnp.mean((x - y) ** 2)

    def train_step(params: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(params, x, y)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), loss

    step = session.parallelize(train_step, donate_argnums=0, stages=2, micro_batches=2, schedule="1f1b")
    key = jax.random.key(5)
    x, y = cases.normal(0, 16, 8, scale=1.0), cases.normal(1, 16, 8, scale=1.0)
    params, expected = step.init(init, key), jax.jit(init)(key)
    for _ in range(2):
        params, loss = step(params, x, y)
        expected, expected_loss = jax.jit(train_step)(expected, x, y)
        assert abs(float(loss) - float(expected_loss)) <= 1e-5
    assert [type(leaf._place) for leaf in jax.tree.leaves(params)] == [RowParts, RowParts]
    assert distance(params, expected) <= 1e-5
    evaluate = session.parallelize(loss_of, stages=1, micro_batches=1)
    with nothing_fetched(calls):
        candidate = evaluate(params, x, y)  # from rows on the stages to the whole cluster
    assert abs(float(candidate) - float(loss_of(expected, x, y))) <= 1e-5
    again = session.parallelize(train_step, stages=2, micro_batches=2, schedule="gpipe")
    with nothing_fetched(calls):
        params, loss = again(params, x, y)  # and back into rows
    assert abs(float(loss) - float(candidate)) <= 1e-5
    assert [type(leaf._place) for leaf in jax.tree.leaves(params)] == [RowParts, RowParts]
    assert distance(params, jax.jit(train_step)(expected, x, y)[0]) <= 1e-5


@pytest.fixture
def recorded(two_workers: sw.Session) -> Iterator[tuple[sw.Session, CallRecorder]]:
    """A session of its own, and the record of its calls."""
    own, calls = open_recorded(two_workers)
    with own:
        yield own, calls


@contextlib.contextmanager
def nothing_fetched(calls: CallRecorder) -> Iterator[None]:
    """Whatever moves meanwhile goes from worker to worker."""
    before = calls.count("FetchArrays")
    yield
    assert calls.count("FetchArrays") == before, "an array came to the client"


def test_a_handle_is_handed_to_every_stage_that_reads_it(recorded: tuple[sw.Session, CallRecorder]) -> None:
    """Tokens that come as a handle, made by another step: the first stage looks them up, the last compares them."""
    session, calls = recorded
    function, (params, state, tokens, key), donated = cases.gpt2(optimizer=SGD)
    step = session.parallelize(function, donate_argnums=donated, stages=2, micro_batches=4, schedule="1f1b")
    (on_servers,) = session.parallelize(lambda tokens: (tokens + 0,), stages=1, micro_batches=1)(tokens)
    expected = jax.jit(function)(params, state, tokens, key)
    for _ in range(2):
        with nothing_fetched(calls):
            result = step(params, state, on_servers, key)
        assert abs(float(result[2]) - float(expected[2])) <= 1e-5
        assert distance(result[0], expected[0]) <= 1e-5
    program = step._require_program()
    number = len(jax.tree.leaves((params, state)))
    assert {s.entry.layout.first_device for s in program.sources if s.entry.number == number} == {0, 4}


def test_rows_that_two_stages_read_are_copied_to_both(session: sw.Session) -> None:
    """Not donated, a result's rows lie where they were updated; the first stage reads all of them."""

    def train_step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        def loss_of(w: jax.Array) -> tuple[jax.Array, jax.Array]:
            h, sums = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), w.sum()), x, w)
            return jnp.mean((h - x) ** 2), sums

        (_, sums), gradient = jax.value_and_grad(loss_of, has_aux=True)(w)
        return w - 0.1 * gradient, sums

    w, x = 0.1 * cases.normal(0, 4, 16, 16, scale=1.0), cases.normal(1, 16, 16, scale=1.0)
    step = session.parallelize(train_step, stages=2, micro_batches=4)
    ours, theirs = w, w
    for _ in range(3):
        (ours, sums), (theirs, expected) = step(ours, x), jax.jit(train_step)(theirs, x)
        np.testing.assert_allclose(np.asarray(sums), expected, rtol=1e-5, atol=1e-6)
    assert distance(ours, theirs) <= 1e-5


def test_initial_values_are_bit_for_bit_those_of_one_device(session: sw.Session) -> None:
    """Uniform ones, which have no product whose rounding LLVM may leave out where it is added to something."""
    function, (params, state, *batch), _ = cases.mlp(optimizer=SGD)
    shapes = jax.tree.map(lambda leaf: leaf.shape, params)

    def init(key: jax.Array) -> Any:
        leaves, tree = jax.tree.flatten(shapes, is_leaf=lambda node: isinstance(node, tuple))
        keys = jax.random.split(key, len(leaves))
        results = [jax.random.uniform(k, shape, jnp.float32) for k, shape in zip(keys, leaves, strict=True)]
        return jax.tree.unflatten(tree, results)

    # Nothing is donated: what went in can be read.
    step = session.parallelize(function, stages=2, micro_batches=4, schedule="1f1b")
    handles = step.init(init, jax.random.key(1))
    step(handles, state, *batch)
    places = [handle._place for handle in jax.tree.leaves(handles)]
    assert {place.first_device for place in places} == {0, 4}
    for item, expected in zip(jax.tree.leaves(handles), jax.tree.leaves(jax.jit(init)(jax.random.key(1))), strict=True):
        np.testing.assert_array_equal(np.asarray(item), np.asarray(expected))


def test_the_first_stage_of_1f1b_holds_as_many_micro_batches_as_there_are_stages(
    session: sw.Session, tmp_path: Path
) -> None:
    function, args, _ = cases.mlp(optimizer=SGD)
    step = session.parallelize(function, stages=2, micro_batches=8, schedule="1f1b")
    _, measured = step.measure(*args)
    (first,) = [live for live in measured.live if live.stage == 0]
    assert first.micro_batches == 2
    assert len(measured.tasks) == sum(map(len, step.plan.tasks.stages))
    assert all(task.begin_s <= task.end_s for task in measured.tasks)
    step.trace(tmp_path / "step.json", *args)
    assert_shows_what_ran(json.loads((tmp_path / "step.json").read_text()), step.plan)


def assert_shows_what_ran(trace: dict[str, Any], plan: PipelinePlan) -> None:
    """Every device has the tasks of its stage, predicted and measured, in the order of the list, with their arrows."""
    require_valid(trace)
    arrows = Counter(event["cat"] for event in trace["traceEvents"] if event["ph"] == "s")
    assert arrows["measured transfer"] >= arrows["transfer"] > 0
    processes = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    entries: dict[tuple[str, int], list[tuple[float, str]]] = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            entries.setdefault((processes[event["pid"]], event["tid"]), []).append((event["ts"], event["name"]))
    for stage in plan.stages:
        names = [str(task) for task in plan.tasks.stages[stage.number] if task.is_compute]
        for device in stage.devices:
            for which in ("predicted: devices", "measured: devices"):
                assert [name for _, name in sorted(entries[which, device], key=lambda entry: entry[0])] == names
