"""Checks of `sharding=` texts: XLA's own reader writes past its arrays when the device counts do not match."""

from __future__ import annotations

import re
from math import prod

from shardwright.hlo.replica_groups import MAX_DEVICES, transpose_iota

_NUMBERS = r"[0-9]{1,9}(?:\s*,\s*[0-9]{1,9})*+"
_TILES = re.compile(
    rf"\bdevices=\s*\[({_NUMBERS})\]\s*(?:<=\s*\[({_NUMBERS})\]\s*(?:T\(({_NUMBERS})\))?|({_NUMBERS}))", re.ASCII
)
_TILES_START = re.compile(r"\bdevices=", re.ASCII)
_MESH = re.compile(
    rf"\bmesh\[([^\[\]]*)\](?:,?\s*device_ids=\((?:\[({_NUMBERS})\](?:T\(({_NUMBERS})\))?|({_NUMBERS}))\))?", re.ASCII
)
_AXIS_SIZE = re.compile(r"=\s*([0-9]{1,9})\s*(?:,|$)", re.ASCII)


def check_sharding(text: str) -> None:
    """Raises ValueError if a sharding's device list and tiles have different device counts."""
    tiles = list(_TILES.finditer(text))
    if len(tiles) != len(_TILES_START.findall(text)):
        raise ValueError("expected devices=[2,4]<=[8], devices=[2,4]<=[4,2]T(1,0) or devices=[2,1]0,1")
    for match in tiles:
        _check_devices(prod(_parse(match[1])), *match.groups()[1:])
    for match in _MESH.finditer(text):
        sizes = [int(size) for size in _AXIS_SIZE.findall(match[1])]
        if match[2] is not None or match[4] is not None:
            _check_devices(prod(sizes), *match.groups()[1:])


def _parse(numbers: str) -> list[int]:
    return [int(number) for number in numbers.split(",")]


def _check_devices(count: int, iota: str | None, permutation: str | None, listed: str | None) -> None:
    if not 0 < count <= MAX_DEVICES:
        raise ValueError(f"expected between 1 and {MAX_DEVICES} devices, got {count}")
    if iota is not None:
        source = _parse(iota)
        order = _parse(permutation) if permutation else list(range(len(source)))
        if prod(source) != count:
            raise ValueError(f"{count} tiles, but [{iota}] counts {prod(source)} devices")
        if len(source) > 1 and not permutation:
            raise ValueError(f"[{iota}] needs a permutation T(…)")
        transpose_iota([1] * len(source), order)  # that it is a permutation
    elif listed is not None and listed.count(",") + 1 != count:
        raise ValueError(f"{count} tiles, but {listed.count(',') + 1} devices")
