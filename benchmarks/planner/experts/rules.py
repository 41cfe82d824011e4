"""An expert's plan, written by hand: a mesh, and the mesh axes of each named dimension.

Plain `jax.sharding`: NamedSharding on arguments and results, `with_sharding_constraint` on activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from workloads.cases import Case, Leaf, is_leaf
from workloads.hooks import Axes, constrained_by


class DoesNotApply(Exception):
    """The expert's layout does not fit the model, such as an axis that does not divide the heads."""


#: Dimensions required to divide evenly; others stay whole if they do not.
_REQUIRED = frozenset({"batch", "heads", "mlp", "experts", "length", "residual_length", "channels"})


@dataclass(frozen=True, kw_only=True)
class Expert:
    """mesh: size of each axis, major first. parameters, activations: name of a dimension → mesh axes.

    shard_parameters, shard_state: axes that also split each parameter with its optimizer state, or the state alone,
        over one dimension more: ZeRO-3 and ZeRO-1 (Rajbhandari et al., 2020).
    changes: how this expert writes the model (arguments of `build`), e.g. query, key and value apart.
    """

    mesh: Mapping[str, int]
    activations: Mapping[str, tuple[str, ...]]
    parameters: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shard_parameters: tuple[str, ...] = ()
    shard_state: tuple[str, ...] = ()
    changes: Mapping[str, Any] = field(default_factory=dict)


def lower(case: Case, expert: Expert, devices: Sequence[Any]) -> Any:
    """JAX's lowering of the case under the expert's shardings, for these devices. Raises DoesNotApply."""
    sizes = tuple(expert.mesh.values())
    mesh = Mesh(np.array(devices[: prod(sizes)]).reshape(sizes), tuple(expert.mesh))

    def sharding(parts: list[tuple[str, ...]]) -> NamedSharding:
        return NamedSharding(mesh, PartitionSpec(*parts))

    def shard(tree: Any, extra: tuple[str, ...]) -> Any:
        return jax.tree.map(lambda leaf: sharding(parameter_spec(leaf, expert, extra)), tree, is_leaf=is_leaf)

    def constrain(x: jax.Array, axes: Axes) -> jax.Array:
        spec = spec_of(x.shape, axes, expert.activations, expert.mesh, padded=("vocabulary",))
        return jax.lax.with_sharding_constraint(x, sharding(spec))

    params = shard(case.params, expert.shard_parameters)
    state = shard(case.opt_state, expert.shard_parameters or expert.shard_state)
    batch = jax.tree.map(
        lambda leaf: sharding(spec_of(leaf.shape, leaf.axes, expert.activations, expert.mesh)),
        case.batch,
        is_leaf=is_leaf,
    )
    with constrained_by(constrain):
        return jax.jit(
            case.step,
            in_shardings=(params, state, batch),
            out_shardings=(params, state, sharding([])),
            donate_argnums=(0, 1),
            keep_unused=True,
        ).lower(*case.avals)


def spec_of(
    shape: tuple[int, ...],
    axes: Axes,
    rules: Mapping[str, tuple[str, ...]],
    mesh: Mapping[str, int],
    padded: tuple[str, ...] = (),
) -> list[tuple[str, ...]]:
    """Each dimension's axes: its rule's if they divide it or XLA may pad it (only inside the program), else none.

    Raises DoesNotApply for an uneven required dimension.
    """
    parts: list[tuple[str, ...]] = []
    for size, name in zip(shape, axes, strict=True):
        rule_axes = rules.get(name, ()) if name else ()
        if rule_axes and name not in padded and size % prod(mesh[axis] for axis in rule_axes):
            if name in _REQUIRED:
                raise DoesNotApply(f"{name} of {size} over {rule_axes} of {dict(mesh)}")
            rule_axes = ()
        parts.append(tuple(rule_axes))
    return parts


def parameter_spec(leaf: Leaf, expert: Expert, extra: tuple[str, ...]) -> list[tuple[str, ...]]:
    """A parameter's layout by the rules, plus one more dimension over `extra`: "embed" if even, else the largest."""
    parts = spec_of(leaf.shape, leaf.axes, expert.parameters, expert.mesh)
    used_axes = {axis for part in parts for axis in part}
    extra = tuple(axis for axis in extra if axis not in used_axes)
    count = prod(expert.mesh[axis] for axis in extra)
    free = [
        dim
        for dim, part in enumerate(parts)
        if not part and leaf.axes[dim] != "layers" and leaf.shape[dim] % count == 0
    ]
    if extra and free:
        parts[max(free, key=lambda dim: (leaf.axes[dim] == "embed", leaf.shape[dim]))] = extra
    return parts
