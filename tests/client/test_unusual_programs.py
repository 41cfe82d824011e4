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
    step = session.parallelize(lambda x: sw.annotate(x, {0: "data"}) * 2, mesh={"data": 8})
    with pytest.raises(sw.AnnotationError, match=r"test_unusual_programs\.py:\d+.*9 elements, over 8 devices"):
        step(np.ones((9, 8), np.float32))
