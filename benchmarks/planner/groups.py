"""Device groups of collectives, in XLA's three notations of replica groups, and pairs of permutes."""

from __future__ import annotations

import re
from functools import cache
from math import prod

import numpy as np

from benchmarks.planner.partitioned_text import CountingError, Instruction

Groups = tuple[tuple[int, ...], ...]

_LISTED = re.compile(r"replica_groups=\{((?:\{[0-9,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[([0-9,]+)\]<=\[([0-9,]+)\](?:T\(([0-9,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([0-9,]+)\](?:T\(([0-9,]+)\))?\))? \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{[0-9]+,[0-9]+\},?)*)\}")
_SIZE = re.compile(r"'?([\w.]+)'?=(\d+)")
_AXIS = re.compile(r"'?([\w.]+)'?(?::\((\d+)\)(\d+))?")


def parse_collective_groups(instruction: Instruction, device_count: int) -> Groups:
    """Groups of device positions; (source, target) pairs of a permute. Raises CountingError for unknown notations."""
    return _parse_groups(_find_groups_text(instruction.attributes), device_count, instruction.name)


def _find_groups_text(attributes: str) -> str:
    for pattern in (_PAIRS, _LISTED, _IOTA, _MESH):
        match = pattern.search(attributes)
        if match:
            return match[0]
    return "replica_groups" if "replica_groups=" in attributes else ""


@cache
def _parse_groups(text: str, device_count: int, name: str) -> Groups:
    if match := _PAIRS.fullmatch(text):
        return _parse_braces(match[1])
    if match := _LISTED.fullmatch(text):
        return _parse_braces(match[1]) or (tuple(range(device_count)),)
    if match := _IOTA.fullmatch(text):
        return _expand_iota(_parse_ints(match[1]), _parse_ints(match[2]), _parse_ints(match[3] or ""))
    if match := _MESH.fullmatch(text):
        groups = _expand_mesh(match[1], match[4])
        if not match[2]:
            return groups
        (devices,) = _expand_iota((device_count,), _parse_ints(match[2]), _parse_ints(match[3] or ""))
        return tuple(tuple(devices[position] for position in group) for group in groups)
    if text:
        raise CountingError(f"{name}: unknown notation of replica groups")
    return (tuple(range(device_count)),)


def _parse_braces(text: str) -> Groups:
    return tuple(_parse_ints(group) for group in re.findall(r"\{([0-9,]*)\}", text))


def _parse_ints(text: str) -> tuple[int, ...]:
    return tuple(int(n) for n in text.split(",") if n)


def _expand_iota(shape: tuple[int, ...], sizes: tuple[int, ...], order: tuple[int, ...]) -> Groups:
    """`[2,4]<=[4,2]T(1,0)`: iota over `sizes`, transposed by `order`, reshaped to rows of `shape`."""
    numbers = np.arange(prod(sizes)).reshape(sizes)
    return _to_groups(numbers.transpose(order or range(len(sizes))).reshape(-1, shape[-1]))


def _expand_mesh(axes_text: str, used_text: str) -> Groups:
    """`mesh['a'=2,'b'=4] {'b'}`, and `{'b':(1)2}` for the part of size 2 of an axis, after a part of size 1."""
    sizes = {name: int(size) for name, size in _SIZE.findall(axes_text)}
    used = [(name, int(before or 1), int(size or sizes[name])) for name, before, size in _AXIS.findall(used_text)]
    # Every axis becomes (before, used part, after) for each used part.
    parts: list[int] = []
    positions: dict[tuple[str, int], int] = {}
    for name, size in sizes.items():
        remaining = size
        for _, before, part in sorted(entry for entry in used if entry[0] == name):
            gap = remaining * before // size
            positions[name, before] = len(parts) + 1
            parts += [gap, part]
            remaining //= gap * part
        parts.append(remaining)
    members = [positions[name, before] for name, before, _ in used]
    others = [position for position in range(len(parts)) if position not in members]
    numbers = np.arange(prod(parts)).reshape(parts).transpose(others + members)
    return _to_groups(numbers.reshape(-1, prod(part for _, _, part in used)))


def _to_groups(numbers: np.ndarray) -> Groups:
    return tuple(tuple(int(device) for device in row) for row in numbers)
