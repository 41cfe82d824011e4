"""The border of a manual region: one custom call for each array that goes in or comes out.

A region is written for one device of a mesh: arrays inside have a device's part of each dimension that manual axes
split, collectives inside name groups of the mesh's devices. In a program as it is planned a region's instructions stand
among all others, between calls that only hand one array on:

    q.1 = f32[2,8,32] custom-call(q), custom_call_target="shardwright.enter_region", frontend_attributes={…}
    o.1 = f32[2,64,32] custom-call(o), custom_call_target="shardwright.leave_region", frontend_attributes={…}

| frontend attribute | what it says | example |
|---|---|---|
| `shardwright.region` | the region's number, its own in the module | `3` |
| `shardwright.region_parent` | the number of the region around it; absent without one | `1` |
| `shardwright.region_axes` | its manual axes with their sizes, in the mesh's order | `data=2,cp=4` |
| `shardwright.region_mesh` | all axes of the program's mesh, major first | `data=2,model=2,cp=4` |
| `shardwright.region_sharding` | the array's split outside, in Shardy's words | `#sdy.sharding<@mesh, [{}, {"cp"}]>` |

A region without operands has calls of the second kind only. Of the axes in an array's sharding the region's own count;
those that are not manual are left to the plan.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import Instruction
from shardwright.reserved_names import BORDER_TARGETS, ENTER_REGION, LEAVE_REGION

_REGION = "shardwright.region"
_PARENT = "shardwright.region_parent"
_AXES = "shardwright.region_axes"
_MESH = "shardwright.region_mesh"
_SHARDING = "shardwright.region_sharding"

_DIMS = re.compile(r"\[([^\[\]]*)\]")
_DIM = re.compile(r"\{([^{}]*)\}")
_NAME = re.compile(r'"([^"]+)"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Border:
    """One array at the border of a region.

    enters: whether it goes in; otherwise it comes out.
    region, parent: numbers of the region and of the one around it.
    axes: the region's manual axes with their sizes, in the order of `mesh`.
    mesh: all axes of the program's mesh, major first.
    sharding: the array's split outside, in Shardy's words.
    """

    enters: bool
    region: int
    parent: int | None = None
    axes: tuple[tuple[str, int], ...]
    mesh: tuple[tuple[str, int], ...]
    sharding: str

    @property
    def target(self) -> str:
        """The custom call's target."""
        return ENTER_REGION if self.enters else LEAVE_REGION

    @property
    def attributes(self) -> dict[str, str]:
        """The custom call's frontend attributes."""
        parent = {} if self.parent is None else {_PARENT: str(self.parent)}
        return {
            _REGION: str(self.region),
            **parent,
            _AXES: _axes_text(self.axes),
            _MESH: _axes_text(self.mesh),
            _SHARDING: self.sharding,
        }

    @property
    def dims(self) -> tuple[tuple[str, ...], ...]:
        """Per dimension of the array, the manual axes that split it outside, major first."""
        manual = dict(self.axes)
        return tuple(tuple(axis for axis in dim if axis in manual) for dim in dims_of(self.sharding))

    @property
    def parts(self) -> tuple[int, ...]:
        """Per dimension, the number of parts that the manual axes make of it."""
        sizes = dict(self.axes)
        return tuple(prod(sizes[axis] for axis in dim) for dim in self.dims)


def border_of(instruction: Instruction) -> Border | None:
    """What an instruction is at the border of a region; None for any other."""
    if instruction.opcode != "custom-call":
        return None
    return read_border(str(instruction.get("custom_call_target")), instruction.get("frontend_attributes") or {})


def read_border(target: str, attributes: Mapping[str, str]) -> Border | None:
    """What a custom call with this target and these frontend attributes is at the border of a region; None for any
    other. Raises UnsupportedProgramError where it does not say so."""
    if target not in BORDER_TARGETS:
        return None
    try:
        return _read(target, attributes)
    except (KeyError, ValueError) as error:
        raise UnsupportedProgramError(
            f"a custom call to {target!r} does not say which region it is at the border of: {error}",
            where=target,
            remedy="hand over the program as it was before it was planned: this target is the planner's own",
        ) from None


def _read(target: str, attributes: Mapping[str, str]) -> Border:
    parent = attributes.get(_PARENT)
    return Border(
        enters=target == ENTER_REGION,
        region=int(attributes[_REGION]),
        parent=None if parent is None else int(parent),
        axes=_read_axes(attributes[_AXES]),
        mesh=_read_axes(attributes[_MESH]),
        sharding=attributes[_SHARDING],
    )


@lru_cache(maxsize=1024)
def dims_of(sharding: str) -> tuple[tuple[str, ...], ...]:
    """Per dimension, the axes that a sharding in Shardy's words names, major first."""
    dims = _DIMS.search(sharding)
    return tuple(tuple(_NAME.findall(inside)) for inside in _DIM.findall(dims[1])) if dims else ()


def _axes_text(axes: tuple[tuple[str, int], ...]) -> str:
    return ",".join(f"{name}={size}" for name, size in axes)


@lru_cache(maxsize=256)
def _read_axes(text: str) -> tuple[tuple[str, int], ...]:
    pairs = (item.rpartition("=") for item in text.split(",") if item)
    return tuple((name, int(size)) for name, _, size in pairs)
