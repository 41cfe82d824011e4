"""Device groups of collectives, in XLA's three notations."""

from __future__ import annotations

import re
from math import prod

#: More devices than any machine has: a bound on what a short text can expand to.
MAX_DEVICES = 1 << 17

_LISTS = re.compile(r"\{\s*(?:\{[0-9,\s]*\}\s*(?:,\s*\{[0-9,\s]*\}\s*)*+)?\}", re.ASCII)
_IOTA = re.compile(r"\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?", re.ASCII)
_MESH = re.compile(r"(?:@\w+)?mesh\[([^\[\]]*)\](?:,?\s*device_ids=\(([^{}]*?)\))?,?\s*\{([^{}]*)\}", re.ASCII)
_MESH_AXIS = re.compile(r"\s*['\"]([^'\"]+)['\"]\s*=\s*([0-9]{1,7})\s*", re.ASCII)
_AXIS_REF = re.compile(r"\s*['\"]([^'\"]+)['\"]\s*(?::\s*\(([0-9]{1,7})\)([0-9]{1,7})\s*)?", re.ASCII)

Groups = tuple[tuple[int, ...], ...]


def parse_replica_groups(text: str) -> Groups:
    """Groups of device numbers: `{{0,1},{2,3}}`, `[2,4]<=[4,2]T(1,0)` or `mesh['x'=2,'y'=4] {'y'}`.

    Raises ValueError that says what was expected. `{}` (all devices) gives `()`.
    """
    squeezed = text.strip()
    if squeezed.startswith("{"):
        if not _LISTS.fullmatch(squeezed):
            raise ValueError(f"expected groups such as {{{{0,1}},{{2,3}}}}, got {text[:60]!r}")
        return tuple(
            tuple(map(_number, group.split(","))) if group.strip() else ()
            for group in re.findall(r"\{([^{}]*)\}", squeezed[1:-1])
        )
    if match := _IOTA.fullmatch(re.sub(r"\s+", "", squeezed)):
        return _iota_groups(*match.groups())
    if match := _MESH.fullmatch(squeezed):
        return _mesh_groups(*match.groups())
    raise ValueError(
        f"expected groups such as {{{{0,1}},{{2,3}}}}, [2,4]<=[8] or mesh['x'=2,'y'=4] {{'y'}}, got {text[:60]!r}"
    )


def _number(text: str) -> int:
    text = text.strip()
    if not re.fullmatch(r"[0-9]{1,19}", text, re.ASCII):
        raise ValueError(f"expected a device number, got {text[:40]!r}")
    return int(text)


def _numbers(text: str) -> list[int]:
    return [_number(part) for part in text.split(",")]


def transpose_iota(dimensions: list[int], permutation: list[int]) -> list[int]:
    """`arange(prod(dimensions)).reshape(dimensions).transpose(permutation).ravel()`."""
    if sorted(permutation) != list(range(len(dimensions))):
        raise ValueError(f"{permutation} does not permute {len(dimensions)} dimensions")
    if prod(dimensions) > MAX_DEVICES:
        raise ValueError(f"more than {MAX_DEVICES} devices")
    strides = [prod(dimensions[axis + 1 :]) for axis in range(len(dimensions))]
    devices = [0]
    for axis in permutation:
        devices = [device + step * strides[axis] for device in devices for step in range(dimensions[axis])]
    return devices


def _iota_groups(shape_text: str, source_text: str, permutation_text: str | None) -> Groups:
    shape, source = _numbers(shape_text), _numbers(source_text)
    permutation = _numbers(permutation_text) if permutation_text else list(range(len(source)))
    if len(shape) != 2 or prod(shape) != prod(source):
        raise ValueError(f"expected [groups,size] with as many devices as [{source_text}]")
    devices = transpose_iota(source, permutation)
    size = shape[1]
    return tuple(tuple(devices[start : start + size]) for start in range(0, len(devices), size)) if size else ()


def _mesh_groups(axes_text: str, ids_text: str | None, refs_text: str) -> Groups:
    axes: dict[str, int] = {}
    for part in axes_text.split(",") if axes_text.strip() else []:
        match = _MESH_AXIS.fullmatch(part)
        if match is None or match[1] in axes:
            raise ValueError(f"expected a mesh axis such as 'x'=2, got {part[:40]!r}")
        axes[match[1]] = int(match[2])
    total = prod(axes.values())
    if total > MAX_DEVICES:
        raise ValueError(f"more than {MAX_DEVICES} devices")
    dimensions, grouped = _split_axes(axes, refs_text)
    free = [index for index in range(len(dimensions)) if index not in grouped]
    positions = transpose_iota(dimensions, free + grouped)
    devices = _mesh_devices(ids_text, total)
    size = prod(dimensions[index] for index in grouped)
    if not size:
        return ()
    return tuple(tuple(devices[place] for place in positions[start : start + size]) for start in range(0, total, size))


def _split_axes(axes: dict[str, int], refs_text: str) -> tuple[list[int], list[int]]:
    """Mesh dimensions, cut at references to parts of an axis, and the grouped ones among them, in order."""
    refs: list[tuple[str, int, int]] = []
    for part in refs_text.split(",") if refs_text.strip() else []:
        match = _AXIS_REF.fullmatch(part)
        if match is None or match[1] not in axes:
            raise ValueError(f"expected an axis of the mesh, got {part[:40]!r}")
        refs.append((match[1], int(match[2] or 1), int(match[3] or axes[match[1]])))
    dimensions: list[int] = []
    place: dict[tuple[str, int], int] = {}
    for name, size in axes.items():
        before = 1
        for _, pre_size, sub_size in sorted(ref for ref in refs if ref[0] == name):
            if not pre_size or not sub_size or pre_size % before or size % (pre_size * sub_size):
                raise ValueError(f"part ({pre_size}){sub_size} does not fit axis {name!r} of size {size}")
            if pre_size != before:
                dimensions.append(pre_size // before)
            place[name, pre_size] = len(dimensions)
            dimensions.append(sub_size)
            before = pre_size * sub_size
        if before != size:
            dimensions.append(size // before)
    return dimensions, [place[name, pre_size] for name, pre_size, _ in refs]


def _mesh_devices(ids_text: str | None, total: int) -> list[int]:
    if ids_text is None:
        return list(range(total))
    squeezed = re.sub(r"\s+", "", ids_text)
    match = re.fullmatch(r"\[([0-9,]+)\](?:T\(([0-9,]+)\))?", squeezed, re.ASCII)
    if match is not None:
        source = _numbers(match[1])
        devices = transpose_iota(source, _numbers(match[2]) if match[2] else list(range(len(source))))
    else:
        devices = _numbers(squeezed)
    if len(devices) != total:
        raise ValueError(f"the mesh has {total} devices, device_ids lists {len(devices)}")
    return devices
