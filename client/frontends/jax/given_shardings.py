"""Shardings that the user gave the arguments of a step, and the mesh that it is traced under."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.extend.source_info_util import register_exclusion
from jax.sharding import AbstractMesh, NamedSharding

from shardwright.client.arrays import RemoteArray
from shardwright.client.frontends.jax.explicit_axes import (
    TypesRead,
    auto_sharding,
    has_explicit_axes,
    trace_under_auto_axes,
)
from shardwright.errors import ShardwrightError
from shardwright.placements import HOST_KINDS
from shardwright.reserved_names import TYPES_NEED

register_exclusion(__file__)  # source lines in programs are the user's

_LINE_END, _ATTRIBUTES = "\n", "frontend_attributes={"

T = TypeVar("T")


def given_sharding(leaf: Any) -> NamedSharding | None:
    """The sharding that a leaf was given; None: it may lie anyhow.

    A type (`jax.ShapeDtypeStruct`) has what it names. An array that lies here has what its type says: its layout over
    Explicit axes. Whole arrays have that type by default, and so do the results of `jax.eval_shape`.
    """
    kind: Any = type(leaf)
    if not _has_sharding(kind):
        return None
    is_type = issubclass(kind, jax.ShapeDtypeStruct)
    sharding = leaf.sharding
    if not isinstance(sharding, NamedSharding) or sharding.mesh.size <= 1:
        return None
    is_split = any(axes is not None for axes in sharding.spec)
    if is_type:
        return sharding if is_split or not isinstance(sharding.mesh, AbstractMesh) else None
    return sharding if is_split and has_explicit_axes(sharding.mesh) else None


@functools.cache
def _has_sharding(kind: type) -> bool:
    return issubclass(kind, jax.ShapeDtypeStruct | jax.Array) and kind is not RemoteArray


def with_sharding(aval: jax.ShapeDtypeStruct, sharding: NamedSharding | None) -> jax.ShapeDtypeStruct:
    """The type with a sharding, over a mesh without devices: this machine may not have them."""
    if sharding is None:
        return aval
    kind = sharding.memory_kind if sharding.memory_kind in HOST_KINDS else None
    over_abstract = NamedSharding(sharding.mesh.abstract_mesh, sharding.spec, memory_kind=kind)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=over_abstract)  # type: ignore[no-untyped-call]


def lower_planned(
    lower: Callable[[Sequence[jax.ShapeDtypeStruct]], T], types: Sequence[jax.ShapeDtypeStruct]
) -> tuple[T, str]:
    """(`lower(types)`, why it has shardings in its types): under Auto axes where the mesh has Explicit ones; as it is
    where the step needs its types. "": it has none.

    Errors of `lower` come through.
    """
    mesh = _explicit_mesh(types)
    if mesh is None:
        return lower(types), ""
    try:
        with trace_under_auto_axes(mesh):
            return lower([_over_auto_axes(each) for each in types]), ""
    except ShardwrightError:
        raise
    except TypesRead as read:
        need = str(read)
    except Exception as error:  # of the user's function, or of what JAX makes of it
        need = f"under Auto axes tracing raises {type(error).__name__}: {str(error).partition(_LINE_END)[0]}"
    return lower(types), need


def note_need(text: str, need: str) -> str:
    """HLO text that says in its header why it has shardings in its types; see `planner/constraints/typed_values.py`."""
    if not need:
        return text
    attribute = f"{TYPES_NEED}={json.dumps(need, ensure_ascii=False)}"
    header, end, rest = text.partition(_LINE_END)
    before, key, after = header.partition(_ATTRIBUTES)
    header = f"{before}{key}{attribute},{after}" if key else f"{header}, {_ATTRIBUTES}{attribute}}}"
    return header + end + rest


def _explicit_mesh(types: Sequence[jax.ShapeDtypeStruct]) -> AbstractMesh | None:
    """The mesh with Explicit axes: the one in the context; where there is none, that of an argument."""
    context: Any = jax.sharding.get_abstract_mesh()
    meshes = [context] if not context.empty else [each.sharding.mesh for each in types if each.sharding is not None]
    return next((mesh for mesh in meshes if has_explicit_axes(mesh)), None)


def _over_auto_axes(each: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    sharding = each.sharding
    return each if sharding is None else with_sharding(each, auto_sharding(sharding))
