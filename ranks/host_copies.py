"""Copies of values in host memory, which outlive devices, and the values again.

Leaves of trees are copied by kind. Arrays of JAX and PyTorch become numpy's and come back on the default device of
their kind. Random keys keep their implementation. An object with `state_dict` and `load_state_dict` (modules,
optimizers, samplers) is copied by the one and loaded in place by the other, a model or optimizer of Keras by its
variables. Anything else is deep-copied.
"""

from __future__ import annotations

import contextlib
import copy
import sys
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright import object_codec
from shardwright.errors import CollectiveError, ObjectTypeError
from shardwright.ranks import keras_state


@dataclass(frozen=True, slots=True)
class _Leaf:
    """One leaf. kind: `jax`, `key:` and its implementation, `torch`, `torch:bfloat16`, `plain`. value: on the host."""

    kind: str
    value: Any


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A value's copy. in_place: it is loaded into the existing object."""

    leaves: tuple[_Leaf, ...]
    tree: Any
    in_place: bool = False


def has_state_dict(value: Any) -> bool:
    """Whether a value is copied by its `state_dict`."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict") and not isinstance(value, type)


def copy_to_host(value: Any) -> HostCopy:
    """Copy a value leaf by leaf; nothing is shared. Raises ObjectTypeError where it is no tree of JAX."""
    is_keras = keras_state.is_keras(value)
    in_place = is_keras or has_state_dict(value)
    try:
        leaves, tree = jax.tree.flatten(
            keras_state.read(value) if is_keras else value.state_dict() if in_place else value
        )
    except ValueError:
        raise ObjectTypeError(
            "a dict whose keys cannot be sorted", where="State", remedy="give all its keys one type"
        ) from None
    return HostCopy(tuple(_copy(leaf) for leaf in leaves), tree, in_place)


def restore(saved: HostCopy, current: Any) -> Any:
    """Build the value of a copy; the copy stays intact. current: the object to load it into (`in_place`)."""
    value = jax.tree.unflatten(saved.tree, [_restore(leaf) for leaf in saved.leaves])
    if not saved.in_place:
        return value
    if keras_state.is_keras(current):
        keras_state.write(current, value)
    else:
        current.load_state_dict(value)
    return current


def _copy(leaf: Any) -> _Leaf:
    if isinstance(leaf, jax.Array):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return _Leaf(f"key:{jax.random.key_impl(leaf)}", np.array(jax.random.key_data(leaf)))
        return _Leaf("jax", np.array(leaf))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(leaf, torch.Tensor):
        local = leaf.detach().cpu()
        if local.dtype is torch.bfloat16:
            return _Leaf("torch:bfloat16", local.view(torch.int16).numpy().copy())
        return _Leaf("torch", local.numpy().copy())
    return _Leaf("plain", copy.deepcopy(leaf))


def _restore(leaf: _Leaf) -> Any:
    kind, _, detail = leaf.kind.partition(":")
    if kind == "jax":
        with jax.enable_x64(True) if leaf.value.dtype.itemsize >= 8 else contextlib.nullcontext():
            return jax.device_put(leaf.value.copy())  # jnp.array compiles a program for each shape
    if kind == "key":
        return jax.random.wrap_key_data(jax.device_put(leaf.value.copy()), impl=detail)
    if kind == "torch":
        import torch

        tensor = torch.from_numpy(leaf.value.copy())
        return tensor.view(torch.bfloat16) if detail else tensor
    return copy.deepcopy(leaf.value)


# ---- on the wire -----------------------------------------------------------------
def pack(saved: HostCopy, where: str) -> dict[str, Any]:
    """Turn a copy into an object to send. where: its name. Raises ObjectTypeError where a leaf cannot be sent.

    A tree of lists, tuples and dicts alone goes with its structure, and may differ from the receiver's.
    """
    message: dict[str, Any] = {
        "kinds": [leaf.kind for leaf in saved.leaves],
        "values": [leaf.value for leaf in saved.leaves],
        "tree": str(saved.tree),
        "shape": None,
    }
    with contextlib.suppress(ObjectTypeError):
        structure = jax.tree.unflatten(saved.tree, list(range(len(saved.leaves))))
        object_codec.dumps(structure)
        message["shape"] = structure if _is_plain(structure) else None
    try:
        object_codec.dumps([leaf.value for leaf in saved.leaves if leaf.kind == "plain"])
    except ObjectTypeError as error:
        raise ObjectTypeError(error.message, where=where, remedy=f"keep it out of the state. {error.remedy}") from None
    return message


def _is_plain(structure: Any) -> bool:
    """Whether a tree is of lists, tuples and dicts alone; one with classes of its own has to be alike at all ranks."""
    if type(structure) is dict:
        return all(map(_is_plain, structure.values()))
    if type(structure) in (list, tuple):
        return all(map(_is_plain, structure))
    return structure is None or type(structure) is int


def unpack(message: dict[str, Any], own: HostCopy, where: str) -> HostCopy:
    """The copy of a message. own: the receiver's copy of the same value; its tree replaces one that was not sent."""
    leaves = tuple(_Leaf(kind, value) for kind, value in zip(message["kinds"], message["values"], strict=True))
    if message["shape"] is not None:
        return HostCopy(leaves, jax.tree.structure(message["shape"]), own.in_place)
    if str(own.tree) != message["tree"]:
        raise CollectiveError(
            f"the ranks' values differ in structure: {own.tree} here, {message['tree']} at the others",
            where=where,
            remedy="build it the same way at every rank before sw.ranks.elastic.run",
        )
    return HostCopy(leaves, own.tree, own.in_place)
