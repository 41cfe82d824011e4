"""Conversion between pytrees of a user's state and `shardwright.checkpoints.trees`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from jax.tree_util import tree_flatten_with_path

from shardwright.checkpoints import trees
from shardwright.client.array_specs import ArraySpec, key_impl_name
from shardwright.errors import ArrayError, CheckpointError, ShardwrightError


def structure_of(state: Any, spec_of: Callable[[Any], ArraySpec]) -> tuple[trees.Tree, list[Any]]:
    """(structure, leaves in JAX's order). Raises CheckpointError when two leaves have one name."""
    leaves: list[Any] = []
    tree = _describe(state, (), spec_of, leaves)
    names = [leaf.name for leaf in trees.leaves_of(tree)]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise CheckpointError(f"two arrays of the state are called {twice!r}", remedy="use keys without dots in them")
    return tree, leaves


def _describe(value: Any, path: tuple[str, ...], spec_of: Callable[[Any], ArraySpec], leaves: list[Any]) -> trees.Tree:
    entries, _ = tree_flatten_with_path(value, is_leaf=lambda inner: inner is not value)
    if len(entries) == 1 and not entries[0][0]:
        leaves.append(value)
        spec = _require_spec(value, path, spec_of)
        impl = key_impl_name(spec) if spec.is_key else ""
        return trees.Leaf(name=".".join(path), key_impl=impl, is_weak=spec.weak_type)
    children = []
    for keys, child in entries:
        key = _key_of(keys[0])
        children.append((key, _describe(child, (*path, str(key)), spec_of, leaves)))
    kind = _kind_of(value)
    cls = type(value)
    type_name = f"{cls.__module__}:{cls.__qualname__}" if kind in ("namedtuple", "object") else ""
    return trees.Node(kind=kind, children=tuple(children), type_name=type_name)


def _require_spec(value: Any, path: tuple[str, ...], spec_of: Callable[[Any], ArraySpec]) -> ArraySpec:
    try:
        return spec_of(value)
    except ShardwrightError as error:
        remedy = error.remedy if isinstance(error, ArrayError) else "keep arrays and numbers in the state, nothing else"
        raise type(error)(
            f"the state holds what cannot be saved: {error.message}", where=".".join(path), remedy=remedy
        ) from None


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
