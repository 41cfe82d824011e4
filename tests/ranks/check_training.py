"""Run as every rank: training on the ranks' shares equals one process on the whole batch."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import shardwright.horovod as hvd
from shardwright import ranks
from shardwright.errors import OptionError

SHARE = 8


def init_params(seed: int):
    a, b = jax.random.split(jax.random.key(seed))
    return {"a": jax.random.normal(a, (16, 64)) / 4, "b": jax.random.normal(b, (64, 4)) / 8}


def loss_of(params, batch):
    return ((jnp.tanh(batch[:, :16] @ params["a"]) @ params["b"] - batch[:, 16:]) ** 2).mean()


gradient_of = jax.jit(jax.grad(loss_of))


def batches(size: int, steps: int = 10) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(steps, SHARE * size, 20)).astype("f")


def whole_batch(optimizer, size: int, steps: int = 10):
    params = init_params(0)
    state = optimizer.init(params)
    for batch in batches(size, steps):
        updates, state = optimizer.update(gradient_of(params, batch), state, params)
        params = optax.apply_updates(params, updates)
    return params


def share_of(batch: np.ndarray) -> np.ndarray:
    return batch[ranks.rank() * SHARE :][:SHARE]


def train(optimizer, size: int, steps: int = 10):
    params = ranks.broadcast_parameters(init_params(ranks.rank()), 0)
    state = ranks.broadcast_optimizer_state(optimizer.init(params), 0)
    for batch in batches(size, steps):
        updates, state = optimizer.update(gradient_of(params, share_of(batch)), state, params)
        params = optax.apply_updates(params, updates)
    return params


def difference(first, second) -> float:
    return max(
        float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    )


def identical(params) -> None:
    everyone = ranks.allgather_object(jax.device_get(params))
    assert all(np.array_equal(other[name], everyone[0][name]) for other in everyone for name in params)


def check_adam(size: int) -> None:
    found = train(hvd.DistributedOptimizer(optax.adam(1e-2)), size)
    identical(found)
    assert difference(found, whole_batch(optax.adam(1e-2), size)) < 1e-5
    found = train(ranks.DistributedOptimizer(optax.adam(1e-2), gradient_predivide_factor=size), size)
    assert difference(found, whole_batch(optax.adam(1e-2), size)) < 1e-5


def check_adam_in_jit(size: int) -> None:
    optimizer = ranks.DistributedOptimizer(optax.adam(1e-2))

    @partial(ranks.jit, donate_argnums=(0, 1))
    def step(params, state, batch):
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, ranks.allreduce(loss)

    params = ranks.broadcast_parameters(init_params(ranks.rank()))
    state = optimizer.init(params)
    for batch in batches(size):
        params, state, loss = step(params, state, share_of(batch))
    assert np.isfinite(loss)
    identical(params)
    assert difference(params, whole_batch(optax.adam(1e-2), size)) < 1e-5


def check_backward_passes(size: int) -> None:
    """Two passes of a rank are one step with both halves."""
    for average in (False, True):
        optimizer = ranks.DistributedOptimizer(
            optax.sgd(0.1), backward_passes_per_step=2, average_aggregated_gradients=average
        )
        oracle = init_params(0)
        for first, second in batches(size).reshape(5, 2, SHARE * size, 20):
            grads = jax.tree.map(jnp.add, gradient_of(oracle, first), gradient_of(oracle, second))
            oracle = jax.tree.map(lambda p, g: p - 0.1 * g * (0.5 if average else 1.0), oracle, grads)  # noqa: B023
        assert difference(train(optimizer, size), oracle) < 1e-5

        @ranks.jit
        def step(params, state, batch, optimizer=optimizer):
            updates, state = optimizer.update(jax.grad(loss_of)(params, batch), state, params)
            return optax.apply_updates(params, updates), state

        params = ranks.broadcast_parameters(init_params(0))
        state = optimizer.init(params)
        for batch in batches(size):
            params, state = step(params, state, share_of(batch))
        assert difference(params, oracle) < 1e-5


def check_compression(size: int) -> None:
    plain = whole_batch(optax.sgd(0.1), size)
    for compression, tolerance in [(hvd.Compression.fp16, 1e-3), (hvd.Compression.bf16, 1e-2),
                                   (hvd.Compression.top_k(1.0), 1e-5)]:  # fmt: skip
        found = train(ranks.DistributedOptimizer(optax.sgd(0.1), compression=compression), size)
        identical(found)
        assert difference(found, plain) < tolerance, compression
    start, whole = (float(loss_of(params, batches(size)[0])) for params in (init_params(0), train_long(size, None)))
    for compression in (hvd.Compression.top_k(0.1), hvd.Compression.power_sgd(2)):
        found = train_long(size, compression)
        identical(found)
        reached = float(loss_of(found, batches(size)[0]))
        assert reached < start - 0.6 * (start - whole), (compression, start, whole, reached)


def train_long(size: int, compression):
    optimizer = ranks.DistributedOptimizer(optax.sgd(0.1), compression=compression)

    @ranks.jit
    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(loss_of)(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params = ranks.broadcast_parameters(init_params(0))
    state = optimizer.init(params)
    for _ in range(60):
        params, state = step(params, state, share_of(batches(size)[0]))
    return params


def check_compression_error_feedback(size: int) -> None:
    """What a step leaves out comes later: sums of updates approach sums of gradients, eagerly and traced."""
    gradient = {
        "m": jnp.outer(jnp.arange(1.0, 9), jnp.arange(1.0, 7)) + jnp.eye(8, 6) * (1 + ranks.rank()),
        "v": jnp.ones(3),
    }
    mean = jax.tree.map(ranks.allreduce, gradient)
    for compression in (hvd.Compression.top_k(0.25), hvd.Compression.power_sgd(2)):
        optimizer = ranks.DistributedOptimizer(optax.sgd(1.0), compression=compression)
        for update in (optimizer.update, ranks.jit(optimizer.update)):
            state, total = optimizer.init(gradient), jax.tree.map(jnp.zeros_like, gradient)
            for _ in range(12):
                updates, state = update(gradient, state)
                total = jax.tree.map(jnp.subtract, total, updates)
            assert difference(jax.tree.map(lambda leaf: leaf / 12, total), mean) < 8, compression
            assert difference(total["v"] / 12, mean["v"]) < 0.4


def check_sparse(size: int) -> None:
    table = jax.random.normal(jax.random.key(0), (50, 4))
    ids = np.random.default_rng(1).integers(0, 50, (size, 6))
    grad = jax.grad(lambda table, ids: (table[ids] ** 2).mean())
    optimizer = ranks.DistributedOptimizer(optax.sgd(1.0))
    wanted = -grad(table, ids.reshape(-1))
    mine = ids[ranks.rank()].astype(np.int32)
    sparse = ranks.SparseRows.of(grad(table, mine), mine)
    for options in ({}, {"sparse_as_dense": True}, {"op": "sum"}):
        optimizer = ranks.DistributedOptimizer(optax.sgd(1.0), **options)
        updates, _ = optimizer.update({"t": sparse}, optimizer.init({"t": table}))
        factor = size if options.get("op") else 1
        assert difference(updates["t"], wanted * factor) < 1e-5

    @ranks.jit
    def update(table, ids):
        optimizer = ranks.DistributedOptimizer(optax.sgd(1.0))
        return optimizer.update(ranks.SparseRows.of(grad(table, ids), ids), optimizer.init(table))[0]

    assert difference(update(table, mine), wanted) < 1e-5


def check_batch_norm(size: int) -> None:
    x = np.random.default_rng(2).normal(3, 2, (size * 5, 7)).astype("f")
    mine = x[ranks.rank() * 5 :][:5]
    wanted = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5)
    for function in (ranks.batch_norm, ranks.jit(ranks.batch_norm)):
        y, mean, variance = function(mine)
        assert np.allclose(y, wanted[ranks.rank() * 5 :][:5], atol=1e-4)
        assert np.allclose(mean, x.mean(0), atol=1e-5)
        assert np.allclose(variance, x.var(0), atol=1e-4)

    def loss(x, weights):
        return (ranks.batch_norm(x)[0] * weights).sum()

    weights = np.random.default_rng(3).normal(size=x.shape).astype("f")
    whole = jax.grad(lambda x: (((x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5)) * weights).sum())(x)
    found = ranks.jit(jax.grad(loss))(mine, weights[ranks.rank() * 5 :][:5])
    assert np.allclose(found, whole[ranks.rank() * 5 :][:5], atol=1e-4)


def check_metrics(size: int) -> None:
    found = ranks.average_metrics({"loss": jnp.float32(ranks.rank()), "steps": ranks.rank()}, weight=1 + ranks.rank())
    weights = np.arange(1, size + 1)
    wanted = float((np.arange(size) * weights).sum() / weights.sum())
    assert found == {"loss": wanted, "steps": wanted}
    for options in ({"op": "min"}, {"backward_passes_per_step": 0}, {"compression": "fp16"}):
        with pytest.raises(OptionError) as caught:
            ranks.DistributedOptimizer(optax.sgd(1.0), **options)
        assert caught.value.where in options


CHECKS = [
    check_adam, check_adam_in_jit, check_backward_passes, check_compression, check_compression_error_feedback,
    check_sparse, check_batch_norm, check_metrics,
]  # fmt: skip


def main() -> None:
    hvd.init(timeout_s=60)
    for check in CHECKS:
        check(hvd.size())
        hvd.barrier()
        print("ok", check.__name__, flush=True)
    hvd.shutdown()


if __name__ == "__main__":
    main()
