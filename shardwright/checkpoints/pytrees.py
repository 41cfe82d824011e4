"""From pytrees of JAX to `shardwright.checkpoints.trees`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.tree_util import tree_flatten_with_path

from shardwright.checkpoints import trees


def describe(value: Any, leaf: Callable[[Any, tuple[str, ...]], trees.Leaf], path: tuple[str, ...] = ()) -> trees.Tree:
    """The structure of a pytree. leaf: describes a leaf, given its path; called in JAX's order."""
    entries, _ = tree_flatten_with_path(value, is_leaf=lambda inner: inner is not value)
    if len(entries) == 1 and not entries[0][0]:
        return leaf(value, path)
    children = []
    for keys, child in entries:
        key = _key_of(keys[0])
        children.append((key, describe(child, leaf, (*path, str(key)))))
    kind = _kind_of(value)
    cls = type(value)
    type_name = f"{cls.__module__}:{cls.__qualname__}" if kind in ("namedtuple", "object") else ""
    return trees.Node(kind=kind, children=tuple(children), type_name=type_name)


def _kind_of(value: Any) -> str:
    kinds: dict[type, str] = {dict: "dict", list: "list", tuple: "tuple", type(None): "none"}
    if type(value) in kinds:
        return kinds[type(value)]
    return "namedtuple" if isinstance(value, tuple) and hasattr(value, "_fields") else "object"


def _key_of(entry: Any) -> trees.Key:
    """Of JAX's key of a child: a dict's key, an index, or an attribute's name."""
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            key = getattr(entry, attribute)
            return key if isinstance(key, str | int) else str(key)
    return str(entry)
