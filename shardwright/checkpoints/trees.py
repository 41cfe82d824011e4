"""The structure of a pytree without its leaves, in data form: a checkpoint's description of its state.

Containers of plain Python (dict, list, tuple, None, named tuple) can be rebuilt from it; of any other registered node
only the keys of its children are known.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

#: What a node may be; "object" is any other registered pytree node.
KINDS = ("dict", "list", "tuple", "none", "namedtuple", "object")

#: Of a child in its node: a dict's key, an index, an attribute.
Key = str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """An array of the tree.

    name: keys from the root, joined by "."; unique in a tree.
    key_impl: of a PRNG key ("fry", …), whose array is its `uint32` words; else "".
    is_weak: whether its type is weak (a Python number's).
    """

    name: str
    key_impl: str = ""
    is_weak: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A container; `type_name` is "module:class" of a named tuple and of an object."""

    kind: str
    children: tuple[tuple[Key, Tree], ...] = ()
    type_name: str = ""


Tree = Leaf | Node


def leaves_of(tree: Tree) -> Iterator[Leaf]:
    """Depth first, in the order of the children."""
    if isinstance(tree, Leaf):
        yield tree
    else:
        for _, child in tree.children:
            yield from leaves_of(child)


def nodes_of(tree: Tree) -> Iterator[Node]:
    """Containers, each before what it holds."""
    if isinstance(tree, Node):
        yield tree
        for _, child in tree.children:
            yield from nodes_of(child)


def build(tree: Tree, leaf: Callable[[Leaf], Any], node: Callable[[Node, list[Any]], Any]) -> Any:
    """`node(node, built children)` of the root, leaves made by `leaf`."""
    if isinstance(tree, Leaf):
        return leaf(tree)
    return node(tree, [build(child, leaf, node) for _, child in tree.children])


def plain(node: Node, children: list[Any]) -> Any:
    """`build`'s node of dicts, lists and None only: what files know."""
    keys = [key for key, _ in node.children]
    if node.kind in ("list", "tuple"):
        return children
    if node.kind == "none" or (not children and node.kind != "dict"):
        return None
    if node.kind == "object" and keys == list(range(len(keys))):
        return children
    return {str(key): child for key, child in zip(keys, children, strict=True)}


def to_json(tree: Tree) -> Any:
    """JSON values; `from_json` reads them back."""
    if isinstance(tree, Leaf):
        return {"leaf": tree.name, "key": tree.key_impl, "weak": tree.is_weak}
    children = [[key, to_json(child)] for key, child in tree.children]
    return {"node": tree.kind, "type": tree.type_name, "children": children}


def from_json(value: Any) -> Tree:
    """Raises KeyError, TypeError or ValueError unless `value` has `to_json`'s form."""
    if "leaf" in value:
        return Leaf(name=str(value["leaf"]), key_impl=str(value["key"]), is_weak=bool(value["weak"]))
    if value["node"] not in KINDS:
        raise ValueError(f"no kind of node: {value['node']!r}")
    children = tuple((_key(key), from_json(child)) for key, child in value["children"])
    return Node(kind=value["node"], type_name=str(value["type"]), children=children)


def to_text(tree: Tree) -> str:
    return json.dumps(to_json(tree), separators=(",", ":"))


def from_text(text: str) -> Tree:
    """Raises ValueError, KeyError or TypeError unless the text has `to_text`'s form."""
    return from_json(json.loads(text))


def _key(value: Any) -> Key:
    if isinstance(value, str | int):
        return value
    raise TypeError(f"no key of a tree: {value!r}")
