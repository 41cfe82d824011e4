"""Steps of `tf.function`s on servers beside TensorFlow on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import shardwright as sw
import shardwright.tensorflow as swt
from shardwright.errors import ArgumentError, OptionError, PlanError, UnsupportedProgramError


class Regression(tf.Module):  # type: ignore[misc]
    """Two layers, momentum and a counter, written with TensorFlow alone."""

    def __init__(self) -> None:
        super().__init__(name="regression")
        random = np.random.default_rng(0)
        self.first = tf.Variable(random.normal(size=(6, 16)).astype("float32"), name="first")
        self.second = tf.Variable(random.normal(size=(16, 1)).astype("float32"), name="second")
        self.momenta = [tf.Variable(tf.zeros_like(v)) for v in (self.first, self.second)]
        self.rate = tf.Variable(0.01, trainable=False, name="rate")
        self.count = tf.Variable(0, dtype=tf.int64, trainable=False, name="count")

    def predict(self, x: Any) -> Any:
        return tf.tanh(x @ self.first) @ self.second

    def train(self, x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.predict(x) - y) ** 2)
        weights = (self.first, self.second)
        for weight, momentum, gradient in zip(weights, self.momenta, tape.gradient(loss, weights), strict=True):
            momentum.assign(0.9 * momentum + gradient)
            weight.assign_sub(self.rate * momentum)
        self.count.assign_add(1)
        return {"loss": loss, "count": self.count, "nothing": None}


def rows(count: int = 8, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.normal(size=(count, 6)).astype("float32"), random.normal(size=(count, 1)).astype("float32")


def assert_equal_variables(one: tf.Module, other: tf.Module) -> None:
    for mine, theirs in zip(one.variables, other.variables, strict=True):
        distance = np.linalg.norm(mine.numpy() - theirs.numpy())
        assert distance <= 5e-5 * np.linalg.norm(theirs.numpy()), mine.name


def test_five_steps_and_a_smaller_batch(session: sw.Session) -> None:
    plain, model = Regression(), Regression()
    step = swt.parallelize(session, model.train)
    for seed, count in enumerate((8, 8, 8, 8, 6)):
        x, y = rows(count, seed)
        wanted, logs = plain.train(tf.constant(x), tf.constant(y)), step(tf.constant(x), y)
        assert logs.keys() == wanted.keys()
        assert logs["nothing"] is None
        np.testing.assert_allclose(float(logs["loss"]), float(wanted["loss"]), rtol=1e-5)
        assert int(logs["count"]) == seed + 1
    assert int(model.count) == 0  # here, until they are asked for
    step.sync()
    assert_equal_variables(model, plain)
    assert set(step.variables) == {"first", "second", "momenta.0", "momenta.1", "rate", "count"}


def test_assigned_variables_are_sent(session: sw.Session) -> None:
    plain, model = Regression(), Regression()
    step = swt.parallelize(session, tf.function(model.train))
    x, y = rows()
    for rate in (0.01, 0.05, 0.0):
        for each in (plain, model):
            each.rate.assign(rate)
        wanted, logs = plain.train(x, y), step(x, y)
        np.testing.assert_allclose(float(logs["loss"]), float(wanted["loss"]), rtol=1e-5)
    step.sync()
    for each in (plain, model):
        each.first.assign_add(tf.ones_like(each.first))
    np.testing.assert_allclose(float(step(x, y)["loss"]), float(plain.train(x, y)["loss"]), rtol=1e-5)


def test_steps_share_their_variables(session: sw.Session) -> None:
    plain, model = Regression(), Regression()
    train, predict = swt.parallelize(session, model.train), swt.parallelize(session, model.predict)
    x, y = rows()
    for _ in range(2):
        plain.train(x, y)
        train(x, y)
    np.testing.assert_allclose(predict(x).numpy(), plain.predict(x).numpy(), rtol=1e-5, atol=1e-6)


def test_results_are_tensors(session: sw.Session) -> None:
    step = swt.parallelize(session, lambda x: (2.0 * x, {"sum": tf.reduce_sum(x)}))
    doubled, sums = step(tf.constant([1.0, 2.0, 3.0, 4.0]))
    assert doubled.shape == (4,)
    assert doubled.dtype == tf.float32
    assert repr(doubled) == "RemoteTensor(shape=[4], dtype=float32)"
    np.testing.assert_array_equal(tf.concat([doubled, doubled + 1.0], 0).numpy(), [2, 4, 6, 8, 3, 5, 7, 9])
    assert f"{sums['sum']:.1f}" == "10.0"
    assert float(sums["sum"]) < 11
    again, _ = step(doubled)  # without being read
    np.testing.assert_array_equal(again, [4, 8, 12, 16])


def test_python_values_are_part_of_the_program(session: sw.Session) -> None:
    def scale(x: Any, by: float, *, is_negative: bool = False) -> Any:
        if is_negative:
            by = -by
        if tf.reduce_sum(x) > 0:  # autograph's
            return x * by
        return x

    step = swt.parallelize(session, scale)
    x = np.ones(4, "float32")
    np.testing.assert_array_equal(step(x, 2.0), 2 * x)
    np.testing.assert_array_equal(step(x, 3.0, is_negative=True), -3 * x)
    np.testing.assert_array_equal(step(-x, 3.0), -x)


def test_large_constants_travel_once(session: sw.Session) -> None:
    table = tf.constant(np.arange(512, dtype="float32").reshape(128, 4))
    step = swt.parallelize(session, lambda ids: tf.gather(table, ids))
    program = step.lower(tf.TensorSpec((8,), tf.int64))
    assert [kind.name for kind in program.arguments] == ["ids", "constant[0]"]
    np.testing.assert_array_equal(step(np.arange(8)), table[:8])


def test_a_dataset_feeds(session: sw.Session) -> None:
    plain, model = Regression(), Regression()
    x, y = rows(20)
    step = swt.parallelize(session, model.train)
    for batch in tf.data.Dataset.from_tensor_slices((x, y)).batch(8):
        np.testing.assert_allclose(float(step(*batch)["loss"]), float(plain.train(*batch)["loss"]), rtol=1e-5)


def test_names_and_source_lines(session: sw.Session) -> None:
    model = Regression()
    step = swt.parallelize(session, model.train)
    program = step.lower(tf.TensorSpec((8, 6), tf.float32), y=tf.TensorSpec((8, 1), tf.float32))
    names = [kind.name for kind in program.arguments]
    assert names[:2] == ["x", "y"]
    assert {"first", "second", "rate"} < set(names)
    assert {program.arguments[number].name for number in program.aliases.values()} == set(names) - {"x", "y", "rate"}
    assert program.outputs[0].name == "result['count']"
    lines = Path(__file__).read_text().splitlines()
    line = next(number for number, text in enumerate(lines, 1) if "tf.tanh(x @ self.first)" in text)
    assert f'source_file="{__file__}" source_line={line}' in program.hlo_text


def test_a_checkpoint_of_the_variables(session: sw.Session, tmp_path: Path) -> None:
    x, y = rows()
    model = Regression()
    step = swt.parallelize(session, model.train)
    with pytest.raises(PlanError, match="not known"):
        step.restore(tmp_path)
    for _ in range(3):
        step(x, y)
    step.save(tmp_path, step=3).wait()
    expected = float(step(x, y)["loss"])
    other = Regression()
    again = swt.parallelize(session, other.train)
    again.compile(x, y)
    again.restore(tmp_path)
    np.testing.assert_allclose(float(again(x, y)["loss"]), expected, rtol=1e-6)


def test_variables_made_in_the_first_call(session: sw.Session) -> None:
    weights: list[Any] = []

    @tf.function  # type: ignore[untyped-decorator]
    def count(x: Any) -> Any:
        if not weights:
            weights.append(tf.Variable(tf.ones((4,))))
        weights[0].assign_add(x)
        return tf.reduce_sum(weights[0])

    step = swt.parallelize(session, count)
    assert [float(step(np.ones(4, "float32"))) for _ in range(3)] == [8.0, 12.0, 16.0]


# ---- what is refused -----------------------------------------------------------------------------


def test_what_xla_cannot_compile_is_named(session: sw.Session) -> None:
    step = swt.parallelize(session, lambda x: tf.strings.length(tf.strings.as_string(x)))
    with pytest.raises(UnsupportedProgramError) as raised:
        step(np.ones(4, "float32"))
    assert "AsString" in raised.value.message
    assert raised.value.where.startswith(__file__)


def test_sizes_from_outside_are_named(session: sw.Session) -> None:
    shape = tf.constant([2, 2])
    with pytest.raises(UnsupportedProgramError) as raised:
        swt.parallelize(session, lambda x: tf.reshape(x, shape))(np.ones(4, "float32"))
    assert "numpy" in raised.value.remedy


def test_tables_are_refused(session: sw.Session) -> None:
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer([1, 2], [3, 4]), 0)
    with pytest.raises(UnsupportedProgramError, match="no variable"):
        swt.parallelize(session, table.lookup)(np.ones(4, "int32"))


def test_sparse_tensors_and_text_are_refused(session: sw.Session) -> None:
    step = swt.parallelize(session, lambda batch: batch["x"])
    with pytest.raises(ArgumentError, match="SparseTensor") as raised:
        step({"x": tf.sparse.from_dense(tf.eye(3))})
    assert raised.value.where == "batch['x']"
    with pytest.raises(ArgumentError, match="text"):
        step({"x": tf.constant(["a", "b"])})


def test_what_is_no_function_is_refused(session: sw.Session) -> None:
    with pytest.raises(OptionError, match="function"):
        swt.parallelize(session, Regression())
    with pytest.raises(OptionError, match="session"):
        swt.parallelize(object(), lambda x: x)  # type: ignore[arg-type]
