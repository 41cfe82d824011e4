"""Shardings imported with a program, over meshes of its own: JAX's constraints and `in_shardings`, GSPMD's tiles.

Two notations are equivalent. Shardy's names axes of a mesh defined in the module's header:

    #sdy.sharding<@mesh, [{"dp"}, {"tp":(1)2}, {?}], replicated={"sp"}>

GSPMD's lists devices in tile order: `{devices=[2,1,4]<=[8] last_tile_dim_replicate}` is 2 tiles on dimension 0, one on
dimension 1, each replicated on 4 devices. Both are parsed into parts of the device order: a dimension is split over
`size` devices, `stride` apart. On the planner's mesh a part becomes the axes matching its axes of the program's mesh
(`program_mesh`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import prod

import numpy as np

from shardwright.hlo import Attribute, Instruction, Module
from shardwright.hlo.lexical import value_end
from shardwright.planner.graph.program_mesh import (
    DevicePart,
    ProgramMesh,
    axes_of_devices,
    axes_of_part,
    parts_of_mesh,
    sub_axes,
)
from shardwright.planner.rewrites.edit import attribute
from shardwright.plans.shardings import Mesh

#: Attributes that hold shardings: GSPMD's, and among JAX's own, by key `SHARDY`, Shardy's.
SHARDING_ATTRIBUTES = frozenset({"sharding", "frontend_attributes"})
SHARDY = "xla.sdy.sharding"


class ImportedShardingError(ValueError):
    """A sharding that cannot be a pin: the message gives the reason, `remedy` the way out."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


class OneDeviceError(ImportedShardingError):
    """A sharding that puts the whole array on one device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedDim:
    """The parts splitting one dimension, major first. is_open: it may be split further."""

    parts: tuple[DevicePart, ...] = ()
    is_open: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedDim:
    """One dimension's sharding on the planner's mesh.

    axes: the mesh axes; None when no axes are the same devices.
    count: number of parts; None: any, on a mesh of another device count.
    is_open: it may be split further.
    """

    axes: tuple[str, ...] | None
    count: int | None
    is_open: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportedSharding:
    """One array's sharding over the program's own mesh.

    text: its source.
    dims: only the specified dimensions.
    whole: parts that must split nothing.
    sizes: axes of the program's mesh; empty with tiles.
    device_count: 0 when unknown.
    program_mesh: the common mesh of all the program's shardings, this one in its axes; None: not yet known, or none.
    """

    text: str
    dims: Mapping[int, ImportedDim]
    whole: tuple[DevicePart, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    device_count: int = 0
    program_mesh: ProgramMesh | None = None

    @property
    def axis_names(self) -> tuple[str, ...]:
        """The mesh axes it names."""
        return tuple(dict.fromkeys(part.axis for dim in self.dims.values() for part in dim.parts if part.axis))

    @property
    def is_split(self) -> bool:
        """Whether it splits a dimension, or leaves one open."""
        return any(dim.parts or dim.is_open for dim in self.dims.values())

    @property
    def parts(self) -> tuple[DevicePart, ...]:
        """All its parts, split or whole."""
        return (*(part for dim in self.dims.values() for part in dim.parts), *self.whole)

    def over(self, own: ProgramMesh) -> ImportedSharding:
        """The same in axes of `own`."""
        if self.sizes == own.sizes:
            return replace(self, program_mesh=own)
        return replace(
            self,
            dims={number: replace(dim, parts=_over(own, dim.parts)) for number, dim in self.dims.items()},
            whole=_over(own, self.whole),
            sizes=own.sizes,
            program_mesh=own,
        )

    def on(self, mesh: Mesh) -> dict[int, ResolvedDim]:
        """The same over axes of `mesh`."""
        mapping = self._axis_mapping(mesh)
        is_scaled = self.device_count != mesh.device_count
        return {
            number: ResolvedDim(
                axes=self._axes(dim.parts, mapping, mesh),
                count=None if is_scaled else prod(part.size for part in dim.parts),
                is_open=dim.is_open,
            )
            for number, dim in self.dims.items()
        }

    def whole_axes(self, mesh: Mesh) -> tuple[str, ...]:
        """Axes of `mesh` that must split nothing."""
        return self._axes(self.whole, self._axis_mapping(mesh), mesh) or ()

    def _axis_mapping(self, mesh: Mesh) -> dict[str, tuple[str, ...]]:
        return (self.program_mesh or ProgramMesh(sizes=self.sizes)).on(mesh)

    def _axes(
        self, parts: Iterable[DevicePart], mapping: Mapping[str, tuple[str, ...]], mesh: Mesh
    ) -> tuple[str, ...] | None:
        axes_of_parts: list[str] = []
        for part in parts:
            if part.axis and not self.sizes:  # a mesh that the header does not define: assumed to be ours
                axes_of_parts.append(part.axis)
                continue
            axes = None
            if part.axis in mapping:
                is_all = part.major_size == 1 and part.size == self.sizes[part.axis]
                axes = mapping[part.axis] if is_all else sub_axes(mapping[part.axis], part, mesh)
            elif not part.axis and self.device_count == mesh.device_count:
                axes = axes_of_devices(mesh, part)
            if axes is None:
                return None
            axes_of_parts += axes
        return tuple(axes_of_parts)


def _over(own: ProgramMesh, parts: Iterable[DevicePart]) -> tuple[DevicePart, ...]:
    return tuple(run for part in parts for run in axes_of_part(own, part))


# ---- reading -----------------------------------------------------------------------

_MESH = re.compile(r"([\w.\-]+)\s*=\s*#sdy\.mesh<\[([^\]]*)\](?:,\s*device_ids=\[([\d,\s]*)\])?>")
_AXIS = re.compile(r"""["']([^"']+)["']\s*=\s*(\d+)""")
_SHARDY = re.compile(
    r"""(?:@"?([\w.\-]+)"?|mesh[<\[]([^>\]]*\]?)[>\]])(?:,\s*device_ids=[^,]*)?,?\s*\[([^\[\]<>]*)\]([^<>]*)"""
)
_DIM = re.compile(r"\{([^{}]*)\}(?:p\d+)?")
_AXIS_USE = re.compile(r"""["']([^"']+)["'](?::\((\d+)\)(\d+))?""")
_UNSPECIFIED = re.compile(r"unspecified_dims=\[([\d,]+)\]")
_TILES = re.compile(r"devices=\[([\d,]+)\](?:<=\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))?")


def read_meshes(module: Module) -> dict[str, dict[str, int]]:
    """Meshes defined in the module's header: name → axis sizes. Single-device meshes are left out."""
    attribute = module.header.get("frontend_attributes")
    if attribute is None:
        return {}
    meshes = {}
    for name, axes, _ in _MESH.findall(attribute.text.replace('\\"', '"')):
        sizes = {axis: int(size) for axis, size in _AXIS.findall(axes)}
        if sizes:
            meshes[name] = sizes
    return meshes


def read_sharding(
    instruction: Instruction, meshes: Mapping[str, Mapping[str, int]], rank: int, leaf: int = 0
) -> ImportedSharding | None:
    """The sharding in an instruction's attributes of array leaf `leaf` of its result; None without one.

    Raises ImportedShardingError when no pin can express it.
    """
    carried = read_sharding_attributes(instruction, leaf)
    if carried is None:
        return None
    if carried.shardy:
        return _read_shardy(carried.shardy, meshes)
    sharding = _read_gspmd(carried.gspmd, rank)
    free = _UNSPECIFIED.search(str(instruction.get("backend_config") or ""))
    if sharding is None or free is None:
        return sharding
    left_out = set(_numbers(free[1]))
    return replace(sharding, dims={dim: split for dim, split in sharding.dims.items() if dim not in left_out})


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingAttributes:
    """The sharding texts of one array leaf; either may be empty. Shardy's takes precedence: it says more."""

    gspmd: str = ""
    shardy: str = ""

    @property
    def is_trivial_for_scalars(self) -> bool:
        return bool(re.search(r"\[\s*\]", self.shardy)) if self.shardy else self.gspmd == "{replicated}"

    @property
    def attributes(self) -> dict[str, Attribute]:
        """The texts as instruction attributes."""
        attributes = {}
        if self.gspmd:
            attributes["sharding"] = attribute("sharding", self.gspmd)
        if self.shardy:
            attributes["frontend_attributes"] = frontend_attributes({SHARDY: self.shardy})
        return attributes


def frontend_attributes(values: Mapping[str, str]) -> Attribute:
    """`frontend_attributes={name="value",…}`"""
    quoted = (f'{name}="{text.translate(_ESCAPES)}"' for name, text in values.items())
    return attribute("frontend_attributes", f"{{{','.join(quoted)}}}")


_ESCAPES = str.maketrans({'"': '\\"', "\\": "\\\\"})


def read_sharding_attributes(instruction: Instruction, leaf: int) -> ShardingAttributes | None:
    """The sharding texts of array leaf `leaf` of an instruction's result; None without any."""
    attributes = instruction.get("frontend_attributes") or {}
    shardy = shardy_leaves(attributes.get(SHARDY, ""))
    gspmd = _gspmd_leaves(str(instruction.get("sharding") or ""))
    if not shardy and not gspmd:
        return None
    return ShardingAttributes(gspmd=_of_leaf(gspmd, leaf), shardy=_of_leaf(shardy, leaf))


def _of_leaf(texts: Sequence[str], leaf: int) -> str:
    """The text of one leaf; a single one applies to all."""
    return texts[leaf if len(texts) > 1 else 0] if texts else ""


@lru_cache(maxsize=1024)
def shardy_leaves(text: str) -> tuple[str, ...]:
    """One text per leaf of a list of Shardy's shardings, or of a single one."""
    text = text.replace('\\"', '"')
    return tuple(f"#sdy.sharding<{match[0].strip()}>" for match in _SHARDY.finditer(text)) or ((text,) if text else ())


@lru_cache(maxsize=1024)
def _gspmd_leaves(text: str) -> tuple[str, ...]:
    """One text per leaf of `{{…}, {…}}`."""
    text = _without_metadata(text)
    if not text.startswith("{{"):
        return (text,) if text else ()
    return tuple(re.findall(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}", text[1:-1]))


def _without_metadata(text: str) -> str:
    """The sharding without its `metadata=`: those words are no sharding's."""
    while (start := text.find("metadata=")) >= 0:
        text = text[:start].rstrip() + text[value_end(text, start + len("metadata=")) :]
    return text


def _read_shardy(text: str, meshes: Mapping[str, Mapping[str, int]]) -> ImportedSharding:
    match = _SHARDY.search(text)
    if match is None:
        raise ImportedShardingError(f"sharding {text!r} cannot be read", "use whole axes by name")
    name, inline, dims, rest = match.groups()
    sizes = {axis: int(size) for axis, size in _AXIS.findall(inline or "")} or dict(meshes.get(name or "", {}))
    if name and "maximal" in name and not sizes:
        raise OneDeviceError(
            f"sharding {text!r} puts the whole array on one device", "leave it out: the planner splits over all devices"
        )
    if "unreduced={" in rest:
        raise ImportedShardingError(
            f"sharding {text!r} asks for a partial sum", "the planner keeps sums partial itself"
        )
    whole = re.search(r"replicated=\{([^{}]*)\}", rest)
    return ImportedSharding(
        text=text,
        dims={
            number: ImportedDim(parts=_parse_axes(inside, sizes, text), is_open="?" in inside)
            for number, inside in enumerate(_DIM.findall(dims))
            if inside.strip() != "?"
        },
        whole=_parse_axes(whole[1], sizes, text) if whole else (),
        sizes=sizes,
        device_count=prod(sizes.values()) if sizes else 0,
    )


def _parse_axes(inside: str, sizes: Mapping[str, int], text: str) -> tuple[DevicePart, ...]:
    whole = {part.axis: part for part in parts_of_mesh(sizes)}
    parts = []
    for axis, before, size in _AXIS_USE.findall(inside):
        if axis not in whole:
            if sizes or size:
                raise ImportedShardingError(
                    f"sharding {text!r} names axis {axis!r}, which its mesh lacks", "name another"
                )
            parts.append(DevicePart(size=1, stride=None, axis=axis))
        elif not size:
            parts.append(whole[axis])
        else:
            stride = (whole[axis].stride or 1) * whole[axis].size // (int(before) * int(size))
            parts.append(DevicePart(size=int(size), stride=stride, axis=axis, major_size=int(before)))
    return tuple(parts)


#: Words of a GSPMD sharding that no pin can say, and what they say.
_REFUSED = {
    "manual": "is written for one device (shard_map)",
    "unreduced": "asks for a partial sum",
    "shard_as": "ties two arrays together",
    "shard_like": "ties two arrays together",
}


def _read_gspmd(text: str, rank: int) -> ImportedSharding | None:
    if "maximal" in text:
        raise OneDeviceError(
            f"sharding {text!r} puts the whole array on one device", "leave it out, or name axes instead"
        )
    for word, what in _REFUSED.items():
        if word in text:
            raise ImportedShardingError(f"sharding {text!r} {what}", "leave it out, or name axes instead")
    if "mesh[" in text:
        return _read_shardy(text, {})
    if "devices=" not in text:
        if "unknown" in text:
            return None
        if "replicated" in text:
            return ImportedSharding(text=text, dims={dim: ImportedDim() for dim in range(rank)})
        raise ImportedShardingError(f"sharding {text!r} cannot be read", "name axes instead")
    match = _TILES.search(text)
    tiles = _numbers(match[1]) if match else []
    if match is None or len(tiles) < rank:
        raise ImportedShardingError(
            f"sharding {text!r} cannot be read for an array of rank {rank}", "name axes instead"
        )
    parts = _tile_parts(tiles, match[2], match[3], match[4])
    return ImportedSharding(
        text=text, dims={dim: ImportedDim(parts=parts[dim]) for dim in range(rank)}, device_count=prod(tiles)
    )


def _tile_parts(
    tiles: Sequence[int], iota: str | None, permutation: str | None, listed: str | None
) -> list[tuple[DevicePart, ...]]:
    """Per tile dimension, its parts of the device order."""
    if listed:
        return _parts_of_device_list(tiles, _numbers(listed))
    sizes = _numbers(iota) if iota else [prod(tiles)]
    strides = [prod(sizes[place + 1 :]) for place in range(len(sizes))]
    order = _numbers(permutation) if permutation else list(range(len(sizes)))
    remaining = [(sizes[place], strides[place]) for place in order if sizes[place] > 1]
    return [_take(remaining, size) for size in tiles]


def _parts_of_device_list(tiles: Sequence[int], devices: Sequence[int]) -> list[tuple[DevicePart, ...]]:
    """Per tile dimension, its parts of the device order in an explicit device list; stride None without a regular
    pattern."""
    if len(devices) == prod(tiles) and not devices[0]:
        order = np.array(devices).reshape(tiles)
        along = [np.moveaxis(order, dim, 0).reshape(size, -1)[:, 0] for dim, size in enumerate(tiles)]
        if np.array_equal(order, sum(np.ix_(*along))):
            return [_runs(line.tolist()) for line in along]
    return [(DevicePart(size=size, stride=None),) if size > 1 else () for size in tiles]


def _runs(devices: Sequence[int]) -> tuple[DevicePart, ...]:
    """0, s, 2s, … repeated at larger strides, as parts, major first."""
    parts: list[DevicePart] = []
    while len(devices) > 1:
        stride = devices[1]
        size = next((i for i, device in enumerate(devices) if device != i * stride), len(devices))
        firsts = devices[::size]
        if len(devices) % size or any(d != firsts[i // size] + i % size * stride for i, d in enumerate(devices)):
            return (DevicePart(size=prod(part.size for part in parts) * len(devices), stride=None),)
        parts.insert(0, DevicePart(size=size, stride=stride))
        devices = firsts
    return tuple(parts)


def _take(axes: list[tuple[int, int]], size: int) -> tuple[DevicePart, ...]:
    """Remove parts of `size` devices in total from the front of `axes`, (size, stride) pairs; adjacent ones are
    merged."""
    wanted, pairs = size, list[tuple[int, int]]()
    while size > 1 and axes:
        have, stride = axes.pop(0)
        if size % have == 0:
            size //= have
        elif have % size == 0:
            axes.insert(0, (have // size, stride))
            have, stride, size = size, stride * (have // size), 1
        else:
            return (DevicePart(size=wanted, stride=None),)
        if pairs and pairs[-1][1] == have * stride:
            have *= pairs.pop()[0]
        pairs.append((have, stride))
    return tuple(DevicePart(size=have, stride=stride) for have, stride in pairs)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]
