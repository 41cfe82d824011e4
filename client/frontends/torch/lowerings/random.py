"""Random numbers: those of a key that the step carries, not PyTorch's generator.

The draws of one step are numbered while it is traced; each has the step's key, folded with its number.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from shardwright.client.frontends.torch.lowerings.registry import Call, lowers

_FLOATS = ("float32", "float64")


def _real(call: Call) -> Any:
    """The type to draw in: numbers of 16 bits are rounded ones of 32."""
    return call.dtype if str(call.dtype) in _FLOATS else jnp.dtype("float32")


@lowers("rand", "rand_like")
def _rand(call: Call, *_: Any, **__: Any) -> Any:
    return jax.random.uniform(call.draw(), call.shape, _real(call))


@lowers("randn", "randn_like")
def _randn(call: Call, *_: Any, **__: Any) -> Any:
    return jax.random.normal(call.draw(), call.shape, _real(call))


@lowers("randint", "randint_like")
def _randint(call: Call, *args: Any, **_: Any) -> Any:
    numbers = [arg for arg in args if isinstance(arg, int) and not isinstance(arg, bool)]
    low, high = numbers if len(numbers) == 2 else (0, numbers[0])
    return jax.random.randint(call.draw(), call.shape, low, high, jnp.int64)


@lowers("randperm")
def _randperm(call: Call, count: int, **_: Any) -> Any:
    return jax.random.permutation(call.draw(), count)


@lowers("uniform")
def _uniform(call: Call, x: Any, low: Any = 0.0, high: Any = 1.0, **named: Any) -> Any:
    del x
    low, high = named.get("from", low), named.get("to", high)
    return jax.random.uniform(call.draw(), call.shape, _real(call)) * (high - low) + low


@lowers("normal")
def _normal(call: Call, mean: Any, std: Any = 1.0, *_: Any, **__: Any) -> Any:
    return jax.random.normal(call.draw(), call.shape, _real(call)) * std + mean


@lowers("normal_", "normal_functional")
def _normal_like(call: Call, x: Any, mean: Any = 0.0, std: Any = 1.0, **_: Any) -> Any:
    del x
    return jax.random.normal(call.draw(), call.shape, _real(call)) * std + mean


@lowers("bernoulli")
def _bernoulli(call: Call, x: Any, p: Any = None, **_: Any) -> Any:
    return jax.random.uniform(call.draw(), call.shape, jnp.float32) < (x if p is None else p)


@lowers("bernoulli_")
def _bernoulli_in_place(call: Call, x: Any, p: Any = 0.5, **_: Any) -> Any:
    del x
    return jax.random.uniform(call.draw(), call.shape, jnp.float32) < p


@lowers("exponential")
def _exponential(call: Call, x: Any, rate: Any = 1.0, **_: Any) -> Any:
    del x
    return jax.random.exponential(call.draw(), call.shape, _real(call)) / rate


@lowers("geometric")
def _geometric(call: Call, x: Any, p: Any, **_: Any) -> Any:
    del x
    return jax.random.geometric(call.draw(), p, call.shape)


@lowers("random")
def _random(call: Call, x: Any, *limits: Any, **named: Any) -> Any:
    del x
    numbers = [n for n in (*limits, named.get("from"), named.get("to")) if n is not None]
    low, high = (0, 1 << 24) if not numbers else (0, numbers[0]) if len(numbers) == 1 else numbers
    return jax.random.randint(call.draw(), call.shape, low, high, jnp.int64)


@lowers("native_dropout")
def _native_dropout(call: Call, x: Any, p: float, train: Any = True) -> Any:
    """(kept elements, scaled up; which they are)."""
    shape = tuple(call.result[0].shape)
    if not train or p == 0:
        return x, jnp.ones(shape, jnp.bool_)
    is_kept = jax.random.uniform(call.draw(), shape, jnp.float32) >= p
    scale = 0.0 if p == 1 else 1 / (1 - p)
    return jnp.where(is_kept, x * jnp.asarray(scale, x.dtype), jnp.zeros((), x.dtype)), is_kept


@lowers("rrelu_with_noise")
def _rrelu(
    call: Call, x: Any, noise: Any, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, *_: Any
) -> Any:
    slope: Any = (lower + upper) / 2
    del noise
    if training:
        slope = jax.random.uniform(call.draw(), x.shape, _real(call), lower, upper)
    return jnp.where(x <= 0, x * slope, x)


@lowers("multinomial")
def _multinomial(call: Call, weights: Any, count: int, replacement: bool = False, **_: Any) -> Any:
    """By Gumbel noise: the largest of log weights with it; of several the largest few, or as many draws."""
    logits = jnp.log(weights.astype(jnp.float32))
    if replacement:
        shape = (count, *weights.shape[:-1])
        return jnp.moveaxis(jax.random.categorical(call.draw(), logits, axis=-1, shape=shape), 0, -1)
    noise = jax.random.gumbel(call.draw(), weights.shape)
    return lax.top_k(logits + noise, count)[1]
