"""Batches that an embedded server reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from tests.datasets import sources
from tests.datasets.training import BATCH, BATCHES, MODULE, assert_close, expected, loss_of, run, train_step
from tests.server.raw_client import wait_until


@pytest.fixture(scope="module")
def session() -> Iterator[sw.Session]:
    with sw.connect(devices=4, dataset_modules=MODULE) as session:
        yield session


def test_training_equals_one_device_and_reads_each_batch_once(session: sw.Session, tmp_path: Path) -> None:
    data = session.dataset(BATCHES, batch=BATCH, seed=3, log=str(tmp_path))
    assert data.element_spec["x"].shape == (BATCH, sources.WIDTH)
    assert data.element_spec["label"].dtype == np.int32  # as jnp.asarray takes int64
    losses = run(session, data, 12, force="data")
    assert_close(losses, expected(12, seed=3))
    assert data.position == 12
    ((_, read),) = sources.events(tmp_path, "read").items()
    of_all_rows = [line["number"] for line in read if len(line["rows"]) == BATCH]
    assert of_all_rows == list(range(len(of_all_rows)))
    assert 12 <= len(of_all_rows) <= 12 + 3


def test_one_program_whatever_the_number_of_calls_and_the_plan_charges_no_inputs(session: sw.Session) -> None:
    data = session.dataset(BATCHES, batch=BATCH)
    step = session.parallelize(train_step, donate_argnums=0, force="data")
    compiled = session.parallelize(train_step, donate_argnums=0, force="data")
    sent = session.parallelize(train_step, donate_argnums=0, force="data")
    w = np.zeros((sources.WIDTH, 1), np.float32)
    other = w
    for number in range(3):
        w, loss = step(w, next(data))
        other, other_loss = sent(other, sources.whole_batch(number, BATCH, 0))
        assert float(loss) == float(other_loss)
    assert [len(programs) for programs in step._programs.plans.programs.values()] == [1]
    assert step.plan.cost.communication_s < sent.plan.cost.communication_s
    moved_s = sum(collective.time_s for collective in step.plan.collectives)
    assert step.plan.cost.communication_s == pytest.approx(moved_s)
    types = compiled.compile(jax.ShapeDtypeStruct((sources.WIDTH, 1), np.float32), data.element_spec)
    assert types.cost.communication_s == pytest.approx(moved_s)
    changed = step.replan(force="replicated")
    assert changed.cost.communication_s == 0
    w, loss = step(w, next(data))
    assert np.isfinite(float(loss))


def test_the_end_ends_the_loop_and_seek_goes_on(session: sw.Session) -> None:
    with session.dataset(BATCHES, batch=BATCH, count=5) as data:
        evaluate = session.parallelize(loss_of)
        w = np.ones((sources.WIDTH, 1), np.float32)
        first = [float(evaluate(w, batch)) for batch in data]
        assert len(first) == data.position == 5
        with pytest.raises(StopIteration):
            next(data)
        data.seek(2)
        assert [float(evaluate(w, batch)) for batch in data] == first[2:]
        data.seek(7)
        assert list(data) == []
        data.seek(4)
        assert float(evaluate(w, next(data))) == first[4]
    with pytest.raises(sw.DatasetError, match="closed"):
        next(data)


def test_a_smaller_last_batch_is_left_out(session: sw.Session) -> None:
    data = session.dataset(BATCHES, batch=BATCH, count=3, last_rows=BATCH - 1)
    double = session.parallelize(lambda batch: batch["x"] * 2)
    found = [np.asarray(double(batch)) for batch in data]
    assert len(found) == 3
    np.testing.assert_array_equal(found[2], sources.whole_batch(2, BATCH, 0)["x"] * 2)


def test_handles_are_arrays_like_any_other(session: sw.Session) -> None:
    data = session.dataset(BATCHES, batch=BATCH, seed=5)
    first, second, third = (next(data) for _ in range(3))
    for number, batch in ((1, second), (0, first), (2, third)):
        whole = sources.whole_batch(number, BATCH, 5)
        np.testing.assert_array_equal(batch["label"], whole["label"])
        np.testing.assert_array_equal(batch["x"], whole["x"])
        assert float(jnp.sum(batch["y"])) == pytest.approx(float(whole["y"].sum()), rel=1e-5)
    total = session.parallelize(lambda a, b: a["x"].sum() + b["x"].sum())
    wanted = sum(sources.whole_batch(number, BATCH, 5)["x"].sum() for number in (0, 2))
    assert float(total(first, third)) == pytest.approx(float(wanted), rel=1e-4)


def test_steps_share_a_dataset_and_a_batch(session: sw.Session) -> None:
    data = session.dataset(BATCHES, batch=BATCH)
    train = session.parallelize(train_step, donate_argnums=0, force="data")
    evaluate = session.parallelize(loss_of, force="replicated")
    step, alone = jax.jit(train_step), np.zeros((sources.WIDTH, 1), np.float32)
    w: Any = alone
    for number in range(0, 8, 2):
        batch = next(data)
        before = evaluate(w, batch)
        w, loss = train(w, batch)
        after = evaluate(w, next(data))
        whole, following = (sources.whole_batch(n, BATCH, 0) for n in (number, number + 1))
        assert_close([float(before)], [float(loss_of(alone, whole))])
        alone, alone_loss = step(alone, whole)
        assert_close([float(loss), float(after)], [float(alone_loss), float(loss_of(alone, following))])


def test_only_needed_arrays_are_made(session: sw.Session, tmp_path: Path) -> None:
    data = session.dataset(f"{MODULE}:lazy", batch=BATCH, log=str(tmp_path))
    twice = session.parallelize(lambda x: 2 * x)
    for number in range(4):
        np.testing.assert_array_equal(twice(next(data)["x"]), 2 * sources.whole_batch(number, BATCH, 0)["x"])
    ((_, made),) = sources.events(tmp_path, "y").items()
    assert all(len(line["rows"]) == 1 for line in made)  # what tells the structure


def test_containers_are_those_of_the_function(session: sw.Session) -> None:
    data = session.dataset(f"{MODULE}:pairs", batch=BATCH)
    step = session.parallelize(lambda batch: batch[0].x * 2 + batch[0].y[0])
    for number in range(2):
        batch = next(data)
        assert isinstance(batch[0], sources.Pair)
        assert batch[1] is None
        whole = sources.whole_batch(number, BATCH, 0)
        np.testing.assert_allclose(step(batch), whole["x"] * 2 + whole["y"], rtol=1e-6)


def test_memory_may_be_used_again(session: sw.Session) -> None:
    data = session.dataset(f"{MODULE}:reused", batch=BATCH, prefetch=3)
    keep = [next(data) for _ in range(4)]
    twice = session.parallelize(lambda batch: 2 * batch["x"])
    results = [twice(batch) for batch in keep]
    for number, result in enumerate(results):
        np.testing.assert_array_equal(result, 2 * sources.whole_batch(number, BATCH, 0)["x"])


def test_a_function_that_raises_is_met_before_the_step_and_may_be_tried_again(
    session: sw.Session, tmp_path: Path
) -> None:
    trouble = tmp_path / "trouble"
    trouble.touch()
    data = session.dataset(BATCHES, batch=BATCH, fails_at=3, fails_while=str(trouble))
    step = session.parallelize(train_step, donate_argnums=0)
    w: Any = np.zeros((sources.WIDTH, 1), np.float32)
    for _ in range(3):
        w, _ = step(w, next(data))
    for _ in range(2):
        with pytest.raises(
            sw.DatasetError, match=r"(?s)batch 3 cannot be read: FileNotFoundError: no shard 3.*raise File"
        ):
            next(data)
    trouble.unlink()
    w, _ = step(w, next(data))  # the state is as it was
    assert data.position == 4


def test_closing_ends_the_reading(session: sw.Session, tmp_path: Path) -> None:
    data = session.dataset(BATCHES, batch=BATCH, log=str(tmp_path))
    np.asarray(next(data)["x"])
    data.close()
    wait_until(lambda: _are_all_closed(tmp_path))


def test_two_sessions_read_at_once(session: sw.Session, tmp_path: Path) -> None:
    with sw.connect(session._state.master.address, token=session._state.server.token) as other:  # type: ignore[union-attr]
        mine = session.dataset(BATCHES, batch=BATCH, seed=1)
        others = other.dataset(BATCHES, batch=BATCH, seed=2, log=str(tmp_path))
        for number in range(4):
            x, y = next(mine)["x"], next(others)["x"]
            np.testing.assert_array_equal(x, sources.whole_batch(number, BATCH, 1)["x"])
            np.testing.assert_array_equal(y, sources.whole_batch(number, BATCH, 2)["x"])
    wait_until(lambda: _are_all_closed(tmp_path))  # with its session
    assert next(mine)["x"].shape == (BATCH, sources.WIDTH)


def test_batches_that_are_held_are_bounded(session: sw.Session) -> None:
    data = session.dataset(BATCHES, batch=2)
    for _ in range(100):
        batch = next(data)  # and none is read
    np.testing.assert_array_equal(batch["x"], sources.whole_batch(99, 2, 0)["x"])
    with pytest.raises(sw.DatasetError, match="64 batches were taken and no step has read them"):
        list(zip(range(100), data, strict=False))
    data.seek(0)
    np.testing.assert_array_equal(next(data)["x"], sources.whole_batch(0, 2, 0)["x"])


def _are_all_closed(log: Path) -> bool:
    opened, closed = (sum(map(len, sources.events(log, event).values())) for event in ("opened", "closed"))
    return opened == closed > 0


# ---- what is refused -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("os:system", "does not allow datasets of module 'os'; they allow tests.datasets.sources"),
        ("tests.datasets:sources", "does not allow datasets of module 'tests.datasets'"),
        ("tests.datasets.sources_2:batches", "does not allow"),
        (f"{MODULE}:dumps", "does not allow datasets of module 'json'"),
        (f"{MODULE}:missing", "has no function 'missing'"),
        (f"{MODULE}:WIDTH", "has no function 'WIDTH'"),
        (f"{MODULE}:_hidden", "names no function"),
        (f"{MODULE}.batches", "names no function"),
        (f"{MODULE}:objects", "is <U1"),
        (f"{MODULE}:too_many_rows", "has 16 rows, asked for were 1"),
        (f"{MODULE}:nothing", "not a single batch"),
    ],
)
def test_functions_that_are_none(session: sw.Session, function: str, message: str) -> None:
    with pytest.raises(sw.DatasetError, match=message):
        session.dataset(function, batch=BATCH)


def test_the_option_is_named(session: sw.Session) -> None:
    with pytest.raises(sw.DatasetError, match="--dataset-modules os"):
        session.dataset("os:system", batch=BATCH)


def test_wrong_arguments_of_the_function_are_told(session: sw.Session) -> None:
    with pytest.raises(sw.DatasetError, match="unexpected keyword argument 'color'"):
        session.dataset(BATCHES, batch=BATCH, color="red")


@pytest.mark.parametrize(
    "options",
    [
        {"batch": 0},
        {"batch": 2.0},
        {"batch": BATCH, "prefetch": -1},
        {"batch": BATCH, "rows": 3},
        {"batch": BATCH, "seed": np.int64(3)},
        {"batch": BATCH, "seed": (1, 2)},
        {"batch": BATCH, "seed": {"a": [1, {2: 3}]}},
        {"batch": BATCH, "seed": float("nan")},
        {"batch": BATCH, "seed": object()},
        {"batch": BATCH, "log": "x" * (65 << 10)},
    ],
)
def test_options_are_json_values(session: sw.Session, options: dict[str, Any]) -> None:
    with pytest.raises(sw.OptionError):
        session.dataset(BATCHES, **options)


def test_modules_of_other_servers_are_not_the_clients_to_allow() -> None:
    with pytest.raises(sw.OptionError, match="--dataset-modules"):
        sw.connect("127.0.0.1:1", dataset_modules=MODULE)
    with pytest.raises(sw.OptionError, match="no name of a module"):
        sw.connect(dataset_modules="my-data")
