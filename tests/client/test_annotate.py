"""Annotations reach the HLO text through every transformation, and mean nothing elsewhere."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxlib import _hlo

import shardwright as sw
from shardwright.client.annotate import keep_annotations


def pins_in(fn: Any, *args: Any) -> list[tuple[str, str]]:
    """(shape, pins) of each annotation in the lowered text."""
    with keep_annotations():
        text = jax.jit(fn).lower(*args).as_text("hlo")
    _hlo.hlo_module_from_text(text)
    matches = re.findall(
        r'= \w+\[([\d,]*)\].*custom_call_target="shardwright.annotate".*backend_config="([^"]*)"', text
    )
    return [(shape, pins) for shape, pins in matches]


X = np.ones((2, 3), np.float32)


def test_pins_are_written_in_order_of_dimensions() -> None:
    assert pins_in(lambda x: sw.annotate(x, {-1: ("data", "model"), 0: None}), X) == [("2,3", "0:-,1:data+model")]
    assert pins_in(lambda x: sw.annotate(x, {1: True}), X) == [("2,3", "1:*")]
    assert pins_in(lambda x: sw.annotate(x, {}) + 1, X) == []


def test_it_is_the_identity_outside_a_step() -> None:
    assert (sw.annotate(X, {0: "data"}) == X).all()
    text = jax.jit(lambda x: sw.annotate(x, {0: "data"}) * 2).lower(X).as_text("hlo")
    assert "custom-call" not in text
    np.testing.assert_array_equal(jax.jit(lambda x: sw.annotate(x, {0: "data"}) * 2)(X), 2 * X)


def test_the_cotangent_is_pinned_alike() -> None:
    def loss(x):
        return jnp.sin(sw.annotate(jnp.tanh(x), {0: "data"})).sum()

    assert pins_in(jax.grad(loss), X) == [("2,3", "0:data")] * 2
    np.testing.assert_allclose(jax.grad(loss)(X), jax.grad(lambda x: jnp.sin(jnp.tanh(x)).sum())(X))


@pytest.mark.parametrize(("axis", "pins"), [(0, "1:data,2:-"), (1, "0:data,2:-"), (2, "0:data,1:-")])
def test_vmap_shifts_dimensions(axis: int, pins: str) -> None:
    batched = np.ones((2, 3, 4), np.float32)
    result = pins_in(jax.vmap(lambda x: sw.annotate(x, {0: "data", 1: None}), in_axes=axis, out_axes=axis), batched)
    assert result == [("2,3,4", pins)]


def test_scan_and_remat_keep_it() -> None:
    def loss(x):
        def layer(carry, _):
            return sw.annotate(jnp.tanh(carry * carry), {0: "data"}), None

        return jax.lax.scan(jax.checkpoint(layer), x, None, length=3)[0].sum()

    assert len(pins_in(jax.grad(loss), X)) >= 2


def test_forward_mode_and_hessians_work() -> None:
    def f(x):
        return (sw.annotate(x, {0: "data"}) ** 3).sum()

    np.testing.assert_allclose(jax.hessian(f)(jnp.ones(3)), 6 * np.eye(3))


@pytest.mark.parametrize(
    ("pins", "message"),
    [
        ({2: "data"}, r"dimension 2 .* \[2,3\]"),
        ({"0": "data"}, "dimension '0'"),
        ({True: "data"}, "dimension True"),
        ({0: "data", -2: None}, "dimension 0 .* twice"),
        ({0: "data", 1: "data"}, "axis 'data' is named for two"),
        ({0: ("data", "data")}, "axis 'data' is named for two"),
        ({0: 3}, "dimension 0 .* pinned to 3"),
        ({0: "a b"}, "pinned to 'a b'"),
    ],
)
def test_pins_that_cannot_be_are_refused(pins: Any, message: str) -> None:
    with pytest.raises(sw.AnnotationError, match=message):
        sw.annotate(X, pins)


def test_a_tree_is_refused_with_the_remedy() -> None:
    with pytest.raises(sw.AnnotationError, match=r"jax\.tree\.map"):
        sw.annotate({"a": X}, {0: "data"})
