"""Conversion between pytrees of a user's state and `shardwright.checkpoints.trees`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from shardwright.checkpoints import pytrees, trees
from shardwright.client.array_specs import ArraySpec, key_impl_name
from shardwright.errors import ArrayError, CheckpointError, ShardwrightError


def structure_of(state: Any, spec_of: Callable[[Any], ArraySpec]) -> tuple[trees.Tree, list[Any]]:
    """(structure, leaves in JAX's order). Raises CheckpointError when two leaves have one name."""
    leaves: list[Any] = []

    def leaf(value: Any, path: tuple[str, ...]) -> trees.Leaf:
        leaves.append(value)
        spec = _require_spec(value, path, spec_of)
        impl = key_impl_name(spec) if spec.is_key else ""
        return trees.Leaf(name=".".join(path), key_impl=impl, is_weak=spec.weak_type)

    tree = pytrees.describe(state, leaf)
    names = [leaf.name for leaf in trees.leaves_of(tree)]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"two arrays of the state are called {twice!r}", remedy="use keys without dots in them")
    return tree, leaves


def _require_spec(value: Any, path: tuple[str, ...], spec_of: Callable[[Any], ArraySpec]) -> ArraySpec:
    try:
        return spec_of(value)
    except ShardwrightError as error:
        remedy = error.remedy if isinstance(error, ArrayError) else "keep arrays and numbers in the state, nothing else"
        raise type(error)(
            f"the state holds what cannot be saved: {error.message}", where=".".join(path), remedy=remedy
        ) from None


def rebuild(tree: trees.Tree, leaf: Callable[[trees.Leaf], Any]) -> Any:
    """The pytree of a structure. Raises CheckpointError on nodes only the program itself can make."""
    return trees.build(tree, leaf, _node)


def _node(node: trees.Node, children: list[Any]) -> Any:
    keys = [key for key, _ in node.children]
    if node.kind == "dict":
        return dict(zip(keys, children, strict=True))
    if node.kind == "list":
        return children
    if node.kind == "tuple":
        return tuple(children)
    if node.kind == "none":
        return None
    cls = _find_named_tuple(node.type_name, tuple(keys)) if node.kind == "namedtuple" else None
    if cls is None:
        raise CheckpointError(
            f"the checkpoint holds a {node.type_name.replace(':', '.')}, which cannot be made from its name alone",
            remedy="pass like=..., a pytree of the same structure, e.g. what step.init returns",
        )
    return cls(*children)


def _find_named_tuple(type_name: str, fields: tuple[trees.Key, ...]) -> Any:
    """The class with this name and fields, from the modules imported so far; nothing is imported."""
    module, _, qualified = type_name.partition(":")
    candidate: Any = sys.modules.get(module)
    for part in qualified.split("."):
        candidate = getattr(candidate, part, None)
    is_same = (
        isinstance(candidate, type) and issubclass(candidate, tuple) and getattr(candidate, "_fields", None) == fields
    )
    return candidate if is_same else None
