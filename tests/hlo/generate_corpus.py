"""Writes the part of the corpus that JAX prints: `python tests/hlo/generate_corpus.py`.

Each program gives up to two files in `tests/hlo/corpus/`: `jax_NAME.hlo`, as lowered, with source
lines, and `compiled_NAME.hlo`, as XLA:CPU compiled it for eight devices (partitioned, fused,
scheduled). The other files of that folder were written by hand: printing styles of other front ends,
and opcodes that neither JAX nor XLA:CPU emits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

CORPUS = Path(__file__).parent / "corpus"
ROOT = Path(__file__).resolve().parents[2]

F32 = jnp.float32


def shape(*dimensions: int, dtype: Any = F32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dimensions, dtype)


def elementwise(x: Any, y: Any) -> Any:
    unary = [
        jnp.abs, jnp.arccos, jnp.arccosh, jnp.arcsin, jnp.arcsinh, jnp.arctanh, jnp.cbrt, jnp.ceil, jnp.cos, jnp.cosh,
        jnp.exp, jnp.expm1, jnp.floor, jnp.log, jnp.log1p, jax.nn.sigmoid, jnp.negative, jnp.sign, jnp.sin, jnp.sinh,
        jnp.sqrt, lax.rsqrt, jnp.tan, jnp.tanh, lax.erf, lax.erf_inv, lax.lgamma, lax.digamma, jnp.round,
    ]  # fmt: skip
    binary = [jnp.add, jnp.subtract, jnp.multiply, jnp.divide, jnp.maximum, jnp.minimum, jnp.power, lax.rem, lax.atan2]
    tail = lax.round(x, lax.RoundingMethod.AWAY_FROM_ZERO) + lax.clamp(-1.0, x, 1.0) + lax.nextafter(x, y)
    result = jnp.where(jnp.isfinite(x) & (x < y), x, jnp.nan)
    return sum(f(x) for f in unary), sum(f(x, y) for f in binary), tail, result


def integers(x: Any, y: Any) -> Any:
    bits = lax.population_count(x) + lax.clz(x) + (x & y) + (x | y) + (x ^ y) + ~x
    shifts = lax.shift_left(x, y) + lax.shift_right_logical(x, y) + lax.shift_right_arithmetic(x, y)
    return (
        bits,
        shifts,
        lax.bitcast_convert_type(x, F32),
        x.astype(jnp.int8),
        lax.mulhi(x, y) if hasattr(lax, "mulhi") else x,
    )


def complexes(x: Any, y: Any) -> Any:
    z = lax.complex(x, y) * (1 + 2j) + jnp.array([1 - 1j, jnp.inf + 0j], jnp.complex64)
    return z.real, z.imag, jnp.fft.fft(z), jnp.fft.irfft(jnp.fft.rfft(x))


def movement(x: Any) -> Any:
    padded = lax.pad(x, 0.5, ((1, -1, 0), (0, 2, 1)))
    return padded, x.T.reshape(4, 2, 3)[:, ::-1, 1:3], jnp.concatenate([x, x[::2]], 0), lax.iota(jnp.int32, 7)


def indexing(x: Any, i: Any) -> Any:
    taken = x[i] + jnp.take_along_axis(x, i[:, None] % 3, 1)
    placed = x.at[i].add(1.0).at[i, 0].max(2.0)
    start = i[0]
    moved = lax.dynamic_update_slice(x, lax.dynamic_slice(x, (start, 0), (2, 3)), (0, start))
    return taken, placed, moved, lax.top_k(x, 2), jnp.sort(x, 0), jnp.argsort(x, 1), jnp.argmax(x, 1)


def windows(image: Any, kernel: Any) -> Any:
    def loss(image: Any, kernel: Any) -> Any:
        y = lax.conv_general_dilated(
            image, kernel, (2, 1), "SAME", rhs_dilation=(1, 2), dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        y = lax.reduce_window(y, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return (y + jnp.cumsum(y, 1)).sum()

    return jax.value_and_grad(loss, (0, 1))(image, kernel)


def linear_algebra(a: Any) -> Any:
    spd = a @ a.T + 4 * jnp.eye(4)
    factor = lax.linalg.cholesky(spd)
    return factor, lax.linalg.triangular_solve(factor, a, left_side=True, lower=True), jnp.linalg.det(spd)


def control(x: Any, n: Any) -> Any:
    x = lax.cond(n > 2, lambda v: v * 2, lambda v: v + 1, x)
    x = lax.switch(n, [jnp.sin, jnp.cos, lambda v: v - 1], x)
    x = lax.while_loop(lambda s: s[0] < n, lambda s: (s[0] + 1, s[1] * 1.5), (0, x))[1]
    return lax.scan(lambda c, v: (c + v, c * v), x[0], x), lax.fori_loop(0, 3, lambda _, v: v @ v, x)


def randomness(key: Any) -> Any:
    bits = lax.rng_bit_generator(jnp.zeros(4, jnp.uint32), (5,))
    return jax.random.uniform(key, (3, 4)), bits, lax.rng_uniform(0.0, 1.0, (3,))


def precision(x: Any) -> Any:
    small = [x.astype(t).astype(F32) for t in (jnp.bfloat16, jnp.float16, jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.int4)]
    exact = lax.dot(x, x, precision=(lax.Precision.HIGHEST, lax.Precision.DEFAULT))
    return sum(small), lax.reduce_precision(x, 5, 10), exact, lax.optimization_barrier(x), jnp.exp(x)


def reductions(x: Any) -> Any:
    pair = lax.reduce((x, x), (0.0, 1.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (1,))
    return x.sum(), x.prod(0), x.min(), jnp.any(x > 0), jnp.argmin(x, 0), pair, jnp.var(x, 1)


def constants(x: Any) -> Any:
    tables = [
        np.array([[1.5, -0.0], [np.nan, np.inf]], np.float32), np.array([-np.inf, 1e-45, 3.4e38], np.float32),
        np.array([[[1, 2], [3, 4]], [[5, 6], [-7, 8]]], np.int8), np.array([True, False]), np.zeros((0, 3), np.float32),
        np.array([2**63 - 1, -(2**63)], np.int64), np.array(2**32 - 1, np.uint32), np.array([1.5, 2.5], jnp.bfloat16),
    ]  # fmt: skip
    return [x.sum()] + [jnp.asarray(table) for table in tables]


def ragged(x: Any, w: Any, sizes: Any) -> Any:
    return lax.ragged_dot(x, w, sizes)


def training_step(p: Any, state: Any, x: Any, y: Any) -> Any:
    def loss(p: Any) -> Any:
        for w, b in p[:-1]:
            x1 = jax.nn.relu(x @ w + b)
        return jnp.mean((x1 @ p[-1][0] + p[-1][1] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(p)
    updates, state = optax.adam(1e-3).update(grads, state, p)
    return optax.apply_updates(p, updates), state, value


def collectives(x: Any) -> Any:
    a = lax.psum(x, "x") + lax.pmax(x, ("x", "y"))
    gathered = lax.all_gather(x, "y", tiled=True)
    scattered = lax.psum_scatter(gathered, "y", tiled=True)
    shifted = lax.ppermute(x, "x", [(0, 1), (1, 0)])
    turned = lax.all_to_all(jnp.concatenate([x] * 4), "y", 0, 0, tiled=True)
    return a + scattered + shifted + turned[: x.shape[0]] + lax.axis_index("x")


def ragged_exchange(x: Any, out: Any, a: Any, b: Any, c: Any, d: Any) -> Any:
    return lax.ragged_all_to_all(x, out, a, b, c, d, axis_name="x")


def _mapped(function: Callable[..., Any], mesh: Any, ins: Any, out: Any) -> Callable[..., Any]:
    return jax.shard_map(function, mesh=mesh, in_specs=ins, out_specs=out, check_vma=False)


def programs() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]:
    """Name → function, argument shapes, options of `jax.jit`."""
    two = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    one = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    layers = [(shape(8, 16), shape(16)), (shape(16, 4), shape(4))]
    state = jax.eval_shape(optax.adam(1e-3).init, layers)

    def sharded(x: Any, w: Any) -> Any:
        h = lax.with_sharding_constraint(x @ w, NamedSharding(two, P("x", "y")))
        return jnp.tanh(h).sum(), h.T

    ints = shape(8, dtype=jnp.int32)
    exchange = _mapped(ragged_exchange, one, (P("x"),) * 6, P("x"))
    rows, specs = NamedSharding(two, P("x")), NamedSharding(two, P(None, "y"))
    return {
        "elementwise": (elementwise, (shape(4), shape(4)), {}),
        "integers": (integers, (shape(4, dtype=jnp.int32), shape(4, dtype=jnp.int32)), {}),
        "complexes": (complexes, (shape(2), shape(2)), {}),
        "movement": (movement, (shape(6, 4),), {}),
        "indexing": (indexing, (shape(4, 3), shape(4, dtype=jnp.int32)), {}),
        "windows": (windows, (shape(2, 8, 8, 3), shape(3, 3, 3, 4)), {}),
        "linear_algebra": (linear_algebra, (shape(4, 4),), {}),
        "control": (control, (shape(3, 3), shape(dtype=jnp.int32)), {}),
        "randomness": (randomness, (shape(2, dtype=jnp.uint32),), {}),
        "precision": (precision, (shape(4, 4),), {}),
        "reductions": (reductions, (shape(3, 4),), {}),
        "constants": (constants, (shape(2),), {}),
        "ragged": (ragged, (shape(6, 4), shape(2, 4, 5), shape(2, dtype=jnp.int32)), {}),
        "training_step": (training_step, (layers, state, shape(4, 8), shape(4, 4)), {"donate_argnums": (0, 1)}),
        "collectives": (_mapped(collectives, two, P("x", "y"), P("x", "y")), (shape(8, 8),), {}),
        "ragged_exchange": (exchange, (shape(64), shape(64), *[shape(64, dtype=jnp.int32)] * 4), {}),
        "sharded": (sharded, (shape(8, 16), shape(16, 8)), {"in_shardings": (rows, specs)}),
        "small": (lambda x, i: x.at[i].set(0), (shape(8), ints), {"keep_unused": True}),
    }


def texts() -> dict[str, str]:
    """File name → HLO text."""
    from jaxlib import _hlo

    full = _hlo.HloPrintOptions()
    full.print_large_constants = True
    result: dict[str, str] = {}
    for name, (function, arguments, options) in programs().items():
        lowered = jax.jit(function, **options).lower(*arguments)
        result[f"jax_{name}.hlo"] = lowered.as_text("hlo", debug_info=True)
        try:
            executable = lowered.compile().runtime_executable()
        except Exception as error:  # XLA:CPU has no ragged collectives
            print(f"{name}: lowered only, {str(error).splitlines()[0][:80]}")
            continue
        result[f"compiled_{name}.hlo"] = executable.hlo_modules()[0].to_string(full)
    return {name: text.replace(f"{ROOT}/", "") for name, text in result.items()}


def main() -> None:
    for name, text in texts().items():
        (CORPUS / name).write_text(text.rstrip() + "\n")
        print(f"{name}: {len(text)} bytes")


if __name__ == "__main__":
    main()
