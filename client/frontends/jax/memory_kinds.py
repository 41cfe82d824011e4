"""Memory kinds that the user gave a step's arguments and results: on the host, or not.

JAX keeps them outside of the program's text: of an argument in its type, of a `jax.jit` in its `in_shardings` and
`out_shardings`. They are written into the text, as `S(5)` in the layouts of its entry.
"""

from __future__ import annotations

import functools
from typing import Any

import jax

from shardwright.client.arrays import RemoteArray
from shardwright.placements import HOST_KINDS


def lies_on_host(leaf: Any) -> bool:
    """Whether an argument's type, or an array, says that it lies in the memory of the host."""
    kind: Any = type(leaf)
    return _has_sharding(kind) and _is_of_host(leaf.sharding)


def find_boundary_on_host(jaxpr: Any) -> tuple[frozenset[int], frozenset[int]]:
    """Numbers of a function's arguments and results that a `jax.jit` called by it puts on the host."""
    arguments = {variable: number for number, variable in enumerate(jaxpr.jaxpr.invars)}
    on_host: set[int] = set()
    made_on_host: set[Any] = set()
    for equation in jaxpr.jaxpr.eqns:
        for variable, sharding in zip(equation.invars, equation.params.get("in_shardings", ()), strict=False):
            if _is_of_host(sharding) and not hasattr(variable, "val") and variable in arguments:
                on_host.add(arguments[variable])
        for variable, sharding in zip(equation.outvars, equation.params.get("out_shardings", ()), strict=False):
            if _is_of_host(sharding):
                made_on_host.add(variable)
    results = {n for n, out in enumerate(jaxpr.jaxpr.outvars) if not hasattr(out, "val") and out in made_on_host}
    return frozenset(on_host), frozenset(results)


def _is_of_host(sharding: Any) -> bool:
    return getattr(sharding, "memory_kind", None) in HOST_KINDS


@functools.cache
def _has_sharding(kind: type) -> bool:
    return issubclass(kind, jax.ShapeDtypeStruct | jax.Array) and kind is not RemoteArray
