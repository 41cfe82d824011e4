"""Flax NNX modules among the arguments: what a step changes in place comes back, as with `nnx.jit`.

A step such as `def step(model, optimizer, x): …; optimizer.update(model, gradients); return loss` returns nothing
but the loss. Its modules are pytrees, so they travel as arguments like any other; traced, the step changes the
Variables of copies. The new values are outputs besides the results, and are put into the caller's Variables.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

from shardwright.errors import UnsupportedProgramError


class Changes:
    """What a function changes in place, found while it is traced.

    outputs: (leaf of the call, output of the program that it becomes).
    extra: leaves whose outputs are no results; in the order of the outputs.
    """

    def __init__(self) -> None:
        self.outputs: tuple[tuple[int, int], ...] = ()
        self.extra: tuple[int, ...] = ()

    def watched(self, arguments: Any) -> list[tuple[int, Any, list[Any]]]:
        """(first leaf, Variable, leaves) of each Variable among the arguments, before the function runs."""
        return [(start, variable, jax.tree.leaves(variable)) for start, variable in variables_of(arguments)]

    def found(self, watched: list[tuple[int, Any, list[Any]]], result: Any) -> list[Any]:
        """The extra outputs, after the function ran. Raises UnsupportedProgramError for a Variable of another shape."""
        returned = {id(leaf): number for number, leaf in enumerate(jax.tree.leaves(result))}
        count = len(jax.tree.leaves(result))
        extra: dict[int, Any] = {}
        outputs: list[tuple[int, int]] = []
        for start, variable, before in watched:
            after = jax.tree.leaves(variable)
            if len(after) != len(before):
                raise UnsupportedProgramError(
                    f"a step gives a {type(variable).__name__} another structure",
                    remedy="keep the structure of its value",
                )
            for number, (old, new) in enumerate(zip(before, after, strict=True), start):
                if new is old:
                    continue
                if id(new) not in returned:
                    extra[number] = new
                outputs.append((number, returned.get(id(new), count + len(extra) - 1)))
        self.outputs, self.extra = tuple(outputs), tuple(extra)
        return list(extra.values())


def variables_of(arguments: Any) -> list[tuple[int, Any]]:
    """(number of its first leaf, Variable) of each Flax NNX Variable in a pytree."""
    variable = getattr(sys.modules.get("flax.nnx"), "Variable", None)
    if variable is None:
        return []
    found: list[tuple[int, Any]] = []
    start = 0
    for leaf in jax.tree.leaves(arguments, is_leaf=lambda node: isinstance(node, variable)):
        if isinstance(leaf, variable):
            found.append((start, leaf))
            start += len(jax.tree.leaves(leaf))
        else:
            start += 1
    return found


def require_unshared(arguments: Any, names: Callable[[], Sequence[str]]) -> None:
    """Raises UnsupportedProgramError where two of the arguments hold one Variable: traced, it would be two."""
    first: dict[int, int] = {}
    for start, variable in variables_of(arguments):
        if id(variable) in first:
            one, other = names()[first[id(variable)]], names()[start]
            raise UnsupportedProgramError(
                f"{one} and {other} are one {type(variable).__name__}",
                where=other,
                remedy="graph, state = nnx.split((model, ...)); pass state, and nnx.merge(graph, state) in the step",
            )
        first[id(variable)] = start


def write_back(arguments: Any, changes: Sequence[tuple[int, int]], results: Sequence[Any]) -> None:
    """Puts the outputs that the step's changes became into the Variables of `arguments`."""
    if not changes:
        return
    outputs = dict(changes)
    for start, variable in variables_of(arguments):
        leaves, tree = jax.tree.flatten(variable.get_raw_value())
        new = [results[outputs[n]] if n in outputs else leaf for n, leaf in enumerate(leaves, start)]
        if any(a is not b for a, b in zip(new, leaves, strict=True)):
            variable.set_raw_value(jax.tree.unflatten(tree, new))
