"""Broadcasts along dimensions of one element, which HLO spells as three instructions, are emitted as one operation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan as search
from shardwright.xla import CompileService, emit_stablehlo
from tests.xla.hand import entry, kinds, lower, names_of, plan, run_planned, sharding

X = np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
C = np.random.default_rng(1).normal(size=(8, 1)).astype(np.float32)
MESH = {"x": 2, "y": 4}
ROWS, ROW, COLUMNS = sharding(("x", None)), sharding(("x",)), sharding((None, "x"))
WHOLE, WHOLE_ROW = sharding((None, None)), sharding((None,))


def added(x, c):
    return x + c


HLO = lower(added, X, C)
FIRST, LAST = names_of(HLO, "broadcast")
(RESHAPE,) = names_of(HLO, "reshape")
(ADD,) = names_of(HLO, "add")


def by_hand(*, short_used, last_used):
    """The sum by rows; what is added is used by the reshape and by the last broadcast as given."""
    entries = [
        entry(FIRST, [ROWS], ROWS, opcode="broadcast"),
        entry(RESHAPE, [short_used], last_used if short_used == WHOLE else ROW, opcode="reshape"),
        entry(LAST, [last_used], ROWS if last_used == ROW else WHOLE, opcode="broadcast"),
        entry(ADD, [ROWS, ROWS], ROWS, opcode="add"),
    ]
    return plan(HLO, MESH, {0: ("x", None), 1: ("x", None)}, {0: ("x", None)}, entries)


def test_the_three_are_one_operation():
    planned = by_hand(short_used=ROWS, last_used=ROW)
    emitted = emit_stablehlo(HLO, planned)
    assert emitted.count("stablehlo.broadcast_in_dim") == 1
    assert "stablehlo.reshape" not in emitted
    (out,), observed = run_planned(planned, X, C)
    np.testing.assert_allclose(out, X + C, rtol=1e-6)
    assert not observed


@pytest.mark.parametrize(("short_used", "last_used"), [(WHOLE, WHOLE_ROW), (ROWS, WHOLE_ROW)])
def test_what_is_moved_between_them_stays_apart(short_used, last_used):
    planned = by_hand(short_used=short_used, last_used=last_used)
    assert emit_stablehlo(HLO, planned).count("stablehlo.broadcast_in_dim") == 2
    (out,), observed = run_planned(planned, X, C)
    np.testing.assert_allclose(out, X + C, rtol=1e-6)
    assert kinds(observed) == [("all-gather", 2)]


def test_xla_does_not_store_the_divisor_of_a_softmax():
    """The exponentials and the gradient of the scores are live at once; the divisor, spread, would be as large."""

    def step(q, k, v):
        def loss(q, k, v):
            weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k))
            return jnp.sum(jnp.sin(jnp.einsum("bqk,bkd->bqd", weights, v)))

        return jax.grad(loss, (0, 1, 2))(q, k, v)

    text = lower(step, *[np.zeros((16, 512, 64), np.float32)] * 3)
    planned = search(text, Cluster.local(2), PlanOptions(mesh={"data": 2}, force="replicated"))
    with CompileService(2) as service:
        result = service.compile(text, planned, want_executable=False).memory
    assert result is not None
    scores_bytes = 16 * 512 * 512 * 4
    assert result.temporary_bytes < 2.5 * scores_bytes
