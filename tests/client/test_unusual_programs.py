"""Programs at the edge: without results, with LAPACK calls, of odd shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw


def test_functions_without_results(session: sw.Session) -> None:
    x = np.ones((8, 8), np.float32)
    assert session.parallelize(lambda x: None)(x) is None
    assert session.parallelize(lambda x: ())(x) == ()
    assert session.parallelize(dict)() == {}


def test_linear_algebra_calls_lapack_on_the_servers(session: sw.Session) -> None:
    """A process that never lowered such a call has no LAPACK until it asks for it."""

    def step(x):
        gram = x @ x.T + 8 * jnp.eye(16)
        return jnp.linalg.cholesky(gram), jnp.linalg.eigh(gram)[0], jnp.abs(jnp.linalg.qr(x)[1])

    x = np.random.default_rng(0).standard_normal((16, 24)).astype(np.float32)
    for ours, expected in zip(session.parallelize(step)(x), jax.jit(step)(x), strict=True):
        np.testing.assert_allclose(np.asarray(ours), expected, rtol=1e-4, atol=1e-4)


def test_pins_that_cannot_hold_name_the_users_line(session: sw.Session) -> None:
    step = session.parallelize(lambda x: sw.annotate(x, {0: "rows"}) * 2, mesh={"data": 8})
    with pytest.raises(sw.AnnotationError, match=r"test_unusual_programs\.py:\d+.*axis 'rows'"):
        step(np.ones((9, 8), np.float32))


def test_a_program_that_fits_no_device_names_the_users_line(session: sw.Session) -> None:
    def step(x):
        wide = jnp.sin(x[:, None] + jnp.arange(1 << 20, dtype=jnp.float32))  # 512 GiB
        return jnp.sort(wide, axis=0).sum()

    with pytest.raises(sw.MemoryBudgetError, match=r"GiB of test_unusual_programs\.py:\d+") as refused:
        session.parallelize(step, force="replicated")(np.ones(1 << 17, np.float32))
    assert refused.value.remedy
    assert float(session.parallelize(lambda x: x * 2)(2.0)) == 4.0, "others go on"


def test_one_bare_array_moves_to_another_layout(session: sw.Session) -> None:
    """A root that is an argument: nothing is computed between the two layouts."""
    x = np.arange(256, dtype=np.float32).reshape(16, 16)
    by_rows = session.parallelize(lambda x: sw.annotate(x * 2, {0: "data"}), mesh={"data": 8})
    by_columns = session.parallelize(lambda x: x + 1, force={"x": {1: "data"}}, mesh={"data": 8})
    np.testing.assert_array_equal(np.asarray(by_columns(by_rows(x))), 2 * x + 1)


def test_state_that_is_not_donated_is_moved_where_a_forced_strategy_forbids_its_layout(session: sw.Session) -> None:
    def step(weights, x):
        return jax.tree.map(lambda w: w - 0.1 * jax.grad(lambda w: ((x @ w) ** 2).mean())(w), weights), x.sum()

    generator = np.random.default_rng(0)
    weights = expected = {"a": generator.standard_normal((8, 32), dtype=np.float32)}
    x = generator.standard_normal((16, 8), dtype=np.float32)
    remote = session.parallelize(step, force="mixed", mesh="2x4")
    for _ in range(3):
        weights, _ = remote(weights, x)
        expected, _ = jax.jit(step)(expected, x)
    np.testing.assert_allclose(np.asarray(weights["a"]), expected["a"], rtol=1e-5, atol=1e-6)
