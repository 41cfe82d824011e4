"""docs/foreign-programs.md: two exported programs, and data."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import export


def loss_of(w, b, x, y):
    return jnp.square(x @ w + b - y).mean()


def step(w, b, x, y):
    loss, (dw, db) = jax.value_and_grad(loss_of, argnums=(0, 1))(w, b, x, y)
    return w - 0.1 * dw, b - 0.1 * db, loss


_types = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((16, 4), (4,), (64, 16), (64, 4))]
for _name, _function in (("train", step), ("score", loss_of)):
    Path(f"{_name}.mlirbc").write_bytes(export.export(jax.jit(_function))(*_types).mlir_module_serialized)
_random = np.random.default_rng(0)
data = [(_random.normal(size=(64, 16)), _random.normal(size=(64, 4))) for _ in range(3)]
