"""Handles: what they show without reading, what reading gives, and when they are gone."""

from __future__ import annotations

import gc
import pickle
import time
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import shardwright as sw
from tests.client.recorded import open_recorded


@pytest.fixture(scope="module")
def double(session: sw.Session) -> Any:
    """A step that returns its only argument, doubled, in eight shards."""
    return session.parallelize(lambda x: (x * 2, x.sum()), mesh="8", force="data")


def arrays_on_server(session: sw.Session) -> int:
    (mine,) = [each for each in session.status().sessions if session.info.session_id.startswith(each.session_id)]
    return mine.array_count


def count_settled(session: sw.Session) -> int:
    """Arrays on the server once no release is on its way any more."""
    gc.collect()
    count, before = arrays_on_server(session), -1
    while count != before:
        time.sleep(0.4)
        count, before = arrays_on_server(session), count
    return count


def comes_down_to(session: sw.Session, count: int) -> bool:
    """Whether the server holds at most `count` arrays, now or soon."""
    deadline = time.monotonic() + 10
    while arrays_on_server(session) > count and time.monotonic() < deadline:
        time.sleep(0.05)
    return arrays_on_server(session) <= count


def test_a_handle_shows_its_type_and_layout_without_reading(double: Any) -> None:
    handle, total = double(np.ones((16, 3), np.float32))
    assert (handle.shape, handle.dtype, handle.ndim, handle.size, len(handle)) == ((16, 3), np.float32, 2, 48, 16)
    assert "data=8" in handle.sharding
    assert repr(handle) == f"RemoteArray(shape=(16, 3), dtype=float32, {handle.sharding})"
    assert total.shape == ()
    assert handle.block_until_ready() is handle
    assert not handle.is_deleted()


def test_reading_gives_numpy_arrays_and_numbers(double: Any) -> None:
    x = np.arange(48, dtype=np.float32).reshape(16, 3)
    handle, total = double(x)
    np.testing.assert_array_equal(np.asarray(handle), x * 2)
    np.testing.assert_array_equal(np.asarray(handle, dtype=np.int32), (x * 2).astype(np.int32))
    np.testing.assert_array_equal(jax.device_get(handle), x * 2)
    np.testing.assert_array_equal(handle.to_jax(), x * 2)
    assert float(total) == total.item() == x.sum()
    assert int(total) == int(x.sum())
    assert bool(total)
    assert f"{total:.1f}" == f"{x.sum():.1f}"
    assert handle.tolist() == (x * 2).tolist()


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.bool_, np.float16, ml_dtypes.bfloat16, np.complex64])
def test_element_types_pass_both_ways(session: sw.Session, dtype: Any) -> None:
    step = session.parallelize(lambda x: (x, x[:3]))
    x = np.arange(24).reshape(8, 3).astype(dtype)
    same, part = step(x)
    assert same.dtype == dtype
    np.testing.assert_array_equal(np.asarray(same), x)
    np.testing.assert_array_equal(np.asarray(part), x[:3])


def test_large_arrays_stream_both_ways(session: sw.Session) -> None:
    x = np.random.default_rng(0).random((1024, 3072), np.float32)  # 12 MiB, over gRPC's limit of a message
    step = session.parallelize(lambda x: x.T, mesh="8", force="data")
    np.testing.assert_array_equal(np.asarray(step(x)), x.T)


def test_empty_arrays_and_no_arrays_at_all(session: sw.Session) -> None:
    step = session.parallelize(lambda tree: {"empty": tree["empty"], "none": None, "one": jnp.ones(())})
    result = step({"empty": np.zeros((0, 3), np.float32), "none": None})
    assert np.asarray(result["empty"]).shape == (0, 3)
    assert result["none"] is None
    assert float(result["one"]) == 1


def test_a_padded_array_comes_back_without_its_padding(session: sw.Session) -> None:
    step = session.parallelize(lambda x: x + 1, mesh="8", force={"x": {0: "data"}})
    x = np.arange(13, dtype=np.float32)
    np.testing.assert_array_equal(np.asarray(step(x)), x + 1)
    update = session.parallelize(lambda x: (x + 1, x.sum()), donate_argnums=0, mesh="8", force={"x": {0: "data"}})
    state, _ = update(update(x)[0])
    assert update.plan.outputs[0].stored_shape == (16,)
    np.testing.assert_array_equal(np.asarray(state), x + 2)


def test_a_donated_handle_names_the_step_that_took_it(session: sw.Session) -> None:
    def update(state):
        return state + 1

    step = session.parallelize(update, donate_argnums=0)
    first = step(np.zeros(8, np.float32))
    second = step(first)
    assert first.is_deleted()
    assert "donated to update" in repr(first)
    for use in (lambda: np.asarray(first), lambda: float(first), first.block_until_ready, lambda: step(first)):
        with pytest.raises(sw.ArrayError, match=r"donated to update(.|\n)*remedy"):
            use()
    np.testing.assert_array_equal(np.asarray(second), 2)


def test_a_donated_handle_must_stand_once(session: sw.Session) -> None:
    step = session.parallelize(lambda a, b: (a + 1, b + 1), donate_argnums=0)
    a, b = step(np.zeros(8, np.float32), np.zeros(8, np.float32))
    with pytest.raises(sw.ArrayError, match=r"donated array a is passed to <lambda> twice"):
        step(a, a)
    a, b = step(a, b)
    assert float(np.asarray(a).sum() + np.asarray(b).sum()) == 32


def test_the_same_handle_may_stand_twice_when_it_is_not_donated(session: sw.Session, double: Any) -> None:
    handle, _ = double(np.ones((16, 3), np.float32))
    step = session.parallelize(
        lambda a, b: a @ b.T, mesh="8", force={"a": {0: "data", 1: None}, "b": {0: None, 1: None}}
    )
    np.testing.assert_array_equal(np.asarray(step(handle, handle)), np.full((16, 16), 12))


def test_dropped_handles_free_their_memory(session: sw.Session, double: Any) -> None:
    before = count_settled(session)
    x = np.ones((16, 3), np.float32)
    results = [double(x) for _ in range(5)]
    for handle, _ in results:
        handle.block_until_ready()
    assert arrays_on_server(session) >= before + 10
    del results, handle, _
    assert comes_down_to(session, before)


def test_an_array_that_was_moved_leaves_no_copy_behind(session: sw.Session) -> None:
    split = session.parallelize(lambda x: (sw.annotate(x * 2, {0: "data"}), x.sum()), mesh="8")
    whole = session.parallelize(lambda a: a.sum(), mesh="8", force={"a": {0: None, 1: None}})
    handle, total = split(np.ones((16, 3), np.float32))
    assert (handle.sharding, float(total)) == ("[data, -] on data=8", 48)
    before = count_settled(session)
    assert float(whole(handle)) == 96
    assert handle.sharding == "[-, -] on data=8"
    assert comes_down_to(session, before)


def test_a_donated_array_that_no_result_reuses_is_freed(session: sw.Session, double: Any) -> None:
    handle, total = double(np.ones((16, 3), np.float32))
    assert float(total) == 48
    before = count_settled(session)
    assert float(session.parallelize(lambda a: a.sum(), donate_argnums=0)(handle)) == 96
    assert comes_down_to(session, before - 1)


def test_large_arguments_travel_straight_to_the_nodes_and_small_ones_with_their_step(session: sw.Session) -> None:
    own, calls = open_recorded(session)
    with own:
        step = own.parallelize(lambda small, large: small + large.sum())
        assert float(step(np.float32(1), np.zeros(1 << 16, np.float32))) == 1
        assert calls.count("PutArrays") == 1
        assert calls.content_bytes == 1 << 18


def test_memory_does_not_grow_while_training(session: sw.Session) -> None:
    step = session.parallelize(lambda s, x: (s + x.sum(), s.sum()), donate_argnums=0)
    state, _ = step(np.zeros(8, np.float32), np.ones(8, np.float32))
    state.block_until_ready()
    before = arrays_on_server(session)
    for _ in range(50):
        state, loss = step(state, np.ones(8, np.float32))
    float(loss)
    assert arrays_on_server(session) <= before + 12  # what the steps under way still hold


def test_handles_are_not_pickled(double: Any) -> None:
    handle, _ = double(np.ones((16, 3), np.float32))
    with pytest.raises(sw.ArrayError, match="cannot be pickled"):
        pickle.dumps(handle)


def test_reading_an_initialized_array_before_any_step(session: sw.Session) -> None:
    step = session.parallelize(lambda p: p["a"].sum(), mesh="8", force="fsdp")
    params = step.init(lambda key: {"a": jax.random.normal(key, (16, 8)), "b": jnp.arange(3)}, jax.random.key(1))
    assert params["a"].sharding == "not placed yet"
    assert params["a"].shape == (16, 8)
    expected = jax.random.normal(jax.random.key(1), (16, 8))
    np.testing.assert_allclose(np.asarray(params["a"]), expected, rtol=1e-6)
    assert float(step(params)) == pytest.approx(float(expected.sum()), rel=1e-5)


def test_results_that_nobody_kept_of_an_initializer(session: sw.Session) -> None:
    step = session.parallelize(lambda a: a.sum())
    a, _ = step.init(lambda: (jnp.ones((8, 8)), jnp.ones((8, 8))))
    del _
    assert float(step(a)) == 64
