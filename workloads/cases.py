"""A training step as a case: the function, and shapes and names of dimensions of its arguments.

No array is ever made: everything is `jax.ShapeDtypeStruct`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from workloads.hooks import Axes

Tree = Any


@dataclass(frozen=True)
class Leaf:
    """Shape of an array and a name for each dimension (None: no layout ever splits it)."""

    shape: tuple[int, ...]
    axes: Axes
    dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.axes):
            raise ValueError(f"{len(self.axes)} names for shape {self.shape}")

    @property
    def aval(self) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(self.shape, self.dtype)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A step `(params, opt_state, batch) -> (params, opt_state, loss)` and what it takes.

    params, opt_state, batch: trees of `Leaf`.
    """

    step: Callable[..., Any]
    params: Tree
    opt_state: Tree
    batch: Tree

    @property
    def avals(self) -> tuple[Tree, Tree, Tree]:
        return _avals(self.params), _avals(self.opt_state), _avals(self.batch)

    @property
    def parameter_count(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(_avals(self.params)))

    def lower(self) -> Any:
        """JAX's lowering for one device, as a user of the planner would make it."""
        return jax.jit(self.step, donate_argnums=(0, 1), keep_unused=True).lower(*self.avals)


def training_case(
    loss: Callable[[Tree, Tree], jax.Array],
    params: Tree,
    batch: Tree,
    optimizer: optax.GradientTransformation | None = None,
) -> Case:
    """The usual training step of a loss `loss(params, batch)`; AdamW unless told otherwise."""
    optimizer = optax.adamw(1e-4, weight_decay=0.01) if optimizer is None else optimizer

    def train_step(params: Tree, opt_state: Tree, batch: Tree) -> tuple[Tree, Tree, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    state = jax.eval_shape(optimizer.init, _avals(params))
    opt_state = optax.tree_utils.tree_map_params(
        optimizer,
        lambda aval, leaf: Leaf(aval.shape, leaf.axes, aval.dtype),
        state,
        params,
        transform_non_params=lambda aval: Leaf(aval.shape, (None,) * aval.ndim, aval.dtype),
        is_leaf=is_leaf,
    )
    return Case(step=train_step, params=params, opt_state=opt_state, batch=batch)


def is_leaf(value: Any) -> bool:
    return isinstance(value, Leaf)


def _avals(tree: Tree) -> Tree:
    return jax.tree.map(lambda leaf: leaf.aval, tree, is_leaf=is_leaf)


def stacked(tree: Tree, layers: int) -> Tree:
    """Leaves with a leading dimension of `layers`, as `lax.scan` over layers takes them."""
    return jax.tree.map(
        lambda leaf: Leaf((layers, *leaf.shape), ("layers", *leaf.axes), leaf.dtype), tree, is_leaf=is_leaf
    )
