"""Arguments and results of a function: their leaves and types, refused ones named by their path."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax

from shardwright.client.refusals import OUT_OF_STEP, kind_name
from shardwright.errors import ShardwrightError, UnsupportedProgramError

_Spec = TypeVar("_Spec")

_EQUINOX = (
    "split the Equinox module: params, static = eqx.partition(model, eqx.is_array); pass params, "
    "and call eqx.combine(params, static) in the step"
)


def flatten_arguments(dynamic: Any, name: str) -> tuple[list[Any], Any]:
    """Leaves and structure of the arguments of `name`. Raises UnsupportedProgramError on unorderable dicts."""
    try:
        return jax.tree.flatten(dynamic)
    except (TypeError, ValueError) as error:
        raise UnsupportedProgramError(
            f"the arguments of {name} have no order of their leaves: {error}",
            remedy="use dict keys of one type, such as strings",
        ) from None


def specs_of(
    leaves: Sequence[Any], spec: Callable[[Any], _Spec], dynamic: Any, names: Callable[[], Sequence[str]]
) -> tuple[_Spec, ...]:
    """`spec` of each leaf. Raises `refusal` of the first leaf without one; `names` are computed only then."""
    try:
        return tuple([spec(leaf) for leaf in leaves])
    except ShardwrightError:
        pass
    for leaf, name in zip(leaves, names(), strict=True):
        try:
            spec(leaf)
        except ShardwrightError as error:
            remedy = _EQUINOX if _is_non_array(leaf) and _holds_equinox(dynamic) else _remedy_at(name, error)
            raise type(error)(error.message, where=name, remedy=remedy) from None
    raise AssertionError("a leaf had no type, and then had one")


def result_refusal(leaf: Any, name: str) -> ShardwrightError:
    """The error of a result other than an array."""
    remedy = f"{OUT_OF_STEP}: return arrays and numbers only"
    if _is_non_array(leaf) and "equinox" in sys.modules:
        remedy += "; of an Equinox module eqx.filter(model, eqx.is_array)"
    return UnsupportedProgramError(f"{kind_name(leaf)} is no result of a program", where=name, remedy=remedy)


def _remedy_at(name: str, error: ShardwrightError) -> str:
    """Names the argument in a general remedy."""
    argument, bracket, _ = name.replace(".", "[", 1).partition("[")
    whole = f"name it in static_argnames={argument!r} (or static_argnums)"
    inside = f"take it out of {argument}, or make it an argument of its own in static_argnames (or static_argnums)"
    return error.remedy.replace(OUT_OF_STEP, inside if bracket else whole)


def _is_non_array(leaf: Any) -> bool:
    """Whether a leaf is a non-array of an Equinox module."""
    return callable(leaf) or isinstance(leaf, str | bytes)


def _holds_equinox(dynamic: Any) -> bool:
    equinox = sys.modules.get("equinox")
    if equinox is None:
        return False
    return any(
        isinstance(node, equinox.Module)
        for node in jax.tree.leaves(dynamic, is_leaf=lambda node: isinstance(node, equinox.Module))
    )
