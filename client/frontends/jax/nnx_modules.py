"""Flax NNX modules among the arguments: a step's in-place changes come back, like with `nnx.jit`.

A step such as `def step(model, optimizer, x): …; optimizer.update(model, gradients); return loss` returns nothing but
the loss. Its modules are pytrees and travel like other arguments; in tracing, the step changes the Variables of copies.
New values absent from its result become additional outputs and are put into the caller's Variables. Results of
`nnx.split` and `nnx.state` are values, and stay unchanged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from shardwright.errors import UnsupportedProgramError


def record_variables(arguments: Any) -> list[tuple[int, Any, list[Any]]]:
    """(first leaf, Variable, leaves) of each Variable among the arguments, before a function runs."""
    return [(start, variable, jax.tree.leaves(variable)) for start, variable in _variables(arguments)]


def find_changes(before: list[tuple[int, Any, list[Any]]], result: Any) -> dict[int, Any]:
    """Leaf of the arguments → its new value, absent from the function's result.

    Raises UnsupportedProgramError on a Variable with a new structure of its value.
    """
    returned = {id(leaf) for leaf in jax.tree.leaves(result)}
    changed: dict[int, Any] = {}
    for start, variable, leaves in before:
        after = jax.tree.leaves(variable)
        if len(after) != len(leaves):
            raise UnsupportedProgramError(
                f"the step gives a Variable ({type(variable).__name__}) a value of another structure",
                remedy="give it all its arrays before the first step",
            )
        pairs = enumerate(zip(leaves, after, strict=True), start)
        changed |= {number: new for number, (old, new) in pairs if new is not old and id(new) not in returned}
    return changed


def require_unshared(arguments: Any, names: Callable[[], Sequence[str]]) -> None:
    """Raises UnsupportedProgramError when two of the arguments hold one Variable: tracing would make two of it."""
    first: dict[int, int] = {}
    for start, variable in _variables(arguments):
        if id(variable) in first:
            one, other = names()[first[id(variable)]], names()[start]
            raise UnsupportedProgramError(
                f"{one} and {other} are one {type(variable).__name__}",
                where=other,
                remedy="graph, state = nnx.split((model, ...)); pass state, and nnx.merge(graph, state) in the step",
            )
        first[id(variable)] = start


def write_back(arguments: Any, new: Mapping[int, Any]) -> None:
    """Puts new values of leaves, by number, into the Variables of `arguments`."""
    if not new:
        return
    for start, variable in _variables(arguments):
        leaves, tree = jax.tree.flatten(variable.get_raw_value())
        numbers = range(start, start + len(leaves))
        if not new.keys().isdisjoint(numbers):
            value = [new.get(number, leaf) for number, leaf in zip(numbers, leaves, strict=True)]
            variable.set_raw_value(jax.tree.unflatten(tree, value))


def _variables(arguments: Any) -> list[tuple[int, Any]]:
    """(number of its first leaf, Variable) of each Variable in a pytree; not of an `nnx.State` outside modules."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return []
    changes: list[tuple[int, Any]] = []
    start = 0
    for node in jax.tree.leaves(arguments, is_leaf=_is(nnx.Pytree | nnx.Variable | nnx.State)):
        parts = [node] if isinstance(node, nnx.State) else jax.tree.leaves(node, is_leaf=_is(nnx.Variable))
        for part in parts:
            if isinstance(part, nnx.Variable):
                changes.append((start, part))
            start += len(jax.tree.leaves(part))
    return changes


def _is(kind: Any) -> Callable[[Any], bool]:
    return lambda node: isinstance(node, kind)
