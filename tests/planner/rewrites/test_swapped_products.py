"""Products that are only read transposed: one product of the operands in the other order."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.hlo import parse
from shardwright.planner.rewrites.swapped_products import swap_products
from tests.planner.programs import lower
from tests.planner.rewrites.rewrite_programs import run

X = np.random.default_rng(0).normal(size=(4, 3, 6)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(6, 5)).astype(np.float32)


def step(w: Any, x: Any) -> Any:
    return jax.grad(lambda w: jnp.sum(jnp.sin(x @ w)))(w)


def in_a_loop(w: Any, x: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda _, w: w - 0.1 * step(w, x), w)


def test_the_gradient_of_a_weight_is_one_product_of_the_same_numbers() -> None:
    for function in (lambda w, x: w - 0.1 * step(w, x), in_a_loop):
        text = lower((function, (W, X), ()))
        before, after = parse(text), swap_products(parse(text))
        opcodes, swapped = (Counter(each.opcode for each in module.instructions()) for module in (before, after))
        assert swapped == opcodes - Counter(["transpose"])
        for expected, item in zip(run(text, [W, X]), run(after.to_text(), [W, X]), strict=True):
            np.testing.assert_allclose(item, expected, rtol=1e-4, atol=1e-6)


def test_a_product_that_is_read_as_it_lies_stays() -> None:
    def both(w: Any, x: Any) -> Any:
        y = x[0] @ w
        return y.T + jnp.sin(y).sum(), y * 2

    module = parse(lower((both, (W, X), ())))
    assert swap_products(module) is module


def test_an_order_that_no_product_has_stays() -> None:
    """`[b, l, d]` × `[d, h]` makes `[h, b, l]` in the other order, not `[l, b, h]`."""
    module = parse(lower((lambda w, x: jnp.transpose(x @ w, (1, 0, 2)) * 2, (W, X), ())))
    assert swap_products(module) is module
    turned = swap_products(parse(lower((lambda w, x: jnp.transpose(x @ w, (2, 0, 1)) * 2, (W, X), ()))))
    assert not any(each.opcode == "transpose" for each in turned.instructions())
