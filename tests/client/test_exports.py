"""`step.export`: the step as StableHLO, run by plain JAX in a process without this package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import shardwright as sw

RUN = """
import sys
import jax, numpy as np
exported = jax.export.deserialize(bytearray(open(sys.argv[1], "rb").read()))
arguments = dict(np.load(sys.argv[2]))
for name, kind in zip(arguments, exported.in_avals):
    if "key<" in str(kind.dtype):
        arguments[name] = jax.random.wrap_key_data(arguments[name])
results = exported.call(arguments)
words = {name: jax.random.key_data(value) if "key<" in str(value.dtype) else value for name, value in results.items()}
np.savez(sys.argv[3], **words)
assert "shardwright" not in sys.modules
"""


def run_plainly(exported: Path, arguments: dict[str, Any]) -> dict[str, np.ndarray]:
    """Results by name, from a process of its own."""
    inputs, results = exported.with_suffix(".in.npz"), exported.with_suffix(".out.npz")
    np.savez(inputs, **{name: arguments[name] for name in sorted(arguments)})
    command = [sys.executable, "-c", RUN, str(exported), str(inputs), str(results)]
    subprocess.run(command, check=True, cwd=exported.parent)
    return dict(np.load(results))


@pytest.mark.dear
def test_a_training_step_runs_without_this_package(session: sw.Session, tmp_path: Path) -> None:
    optimizer = optax.adam(1e-2)
    scale = session.parallelize(lambda: jnp.full((16, 8), 2.0))()  # a handle that the step closes over

    def step(activation: str, state: Any, batch: Any, *, key: Any) -> Any:
        def loss_of(params: Any) -> Any:
            noise = jax.random.normal(key, batch["x"].shape)
            hidden = getattr(jnp, activation)(sw.annotate(batch["x"] + noise, {0: "data"}) @ params["w"])
            return jnp.square(hidden * jnp.sum(scale) - batch["y"]).mean()

        params, moments = state
        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, moments = optimizer.update(gradients, moments, params)
        return (optax.apply_updates(params, updates), moments), jax.random.split(key)[0], loss

    params = {"w": jnp.linspace(-1.0, 1.0, 4 * 8).reshape(4, 8)}
    state = (params, optimizer.init(params))
    batch = {"x": np.ones((8, 4), np.float32), "y": np.zeros((8, 8), np.float32)}
    key = jax.random.key(3)
    parallel = session.parallelize(step, static_argnums=0, donate_argnums=1)
    path = tmp_path / "step.stablehlo"
    types = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
    parallel.export(path, "tanh", types, batch, key=key)

    lowered = parallel.lower("tanh", types, batch, key=key)
    words = [*map(np.asarray, jax.tree.leaves((state, batch))), np.asarray(jax.random.key_data(key))]
    names = [name for number, name in enumerate(lowered.argument_names) if number not in lowered.captured]
    results = run_plainly(path, dict(zip(names, words, strict=True)))
    expected = jax.jit(step, static_argnums=0)("tanh", state, batch, key=key)
    assert list(results) == sorted(lowered.output_names)
    for name, leaf in zip(lowered.output_names, jax.tree.leaves(expected), strict=True):
        is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        np.testing.assert_allclose(results[name], jax.random.key_data(leaf) if is_key else leaf, rtol=2e-5)


@pytest.mark.dear
def test_variables_that_a_step_changes_in_place_are_results(session: sw.Session, tmp_path: Path) -> None:
    model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
    kernel = np.asarray(model.kernel[...])

    def step(model: nnx.Linear, x: Any) -> Any:
        model.kernel[...] = model.kernel[...] - 0.1 * x.sum()
        return model(x).sum()

    parallel = session.parallelize(step)
    x = np.ones((8, 4), np.float32)
    parallel.export(tmp_path / "step.stablehlo", model, x)
    names = parallel.lower(model, x).argument_names
    values = [np.asarray(leaf) for leaf in jax.tree.leaves((model, x))]
    results = run_plainly(tmp_path / "step.stablehlo", dict(zip(names, values, strict=True)))
    (changed,) = [name for name in results if "kernel" in name]
    np.testing.assert_allclose(results[changed], kernel - 0.1 * x.sum(), rtol=1e-6)


def test_what_cannot_be_exported_is_named(session: sw.Session, tmp_path: Path) -> None:
    step = session.parallelize(lambda x: x + 1)
    with pytest.raises(sw.OptionError, match="cannot be written"):
        step.export(tmp_path / "missing" / "step.stablehlo", np.ones(3, np.float32))
    text = step.lower(np.ones(3, np.float32)).hlo_text
    with pytest.raises(sw.UnsupportedProgramError, match=r"step\.lower"):
        session.program(text).export(tmp_path / "step.stablehlo", np.ones(3, np.float32))
