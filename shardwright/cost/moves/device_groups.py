"""Device groups of collectives: devices that differ only along some mesh axes, or parts of axes.

A mesh numbers its devices row-major over its axes, major first, and each axis over its prime factors (`Atom`): a
device's number has one digit per atom. XLA splits and joins axes to fit tiles, and a group may span half of one axis
and all of another; the digits alone determine its devices.
"""

from __future__ import annotations

from functools import cache, lru_cache
from math import prod

import numpy as np
from numpy.typing import NDArray

from shardwright.cost.moves.tilings import Atom, AtomOrder, along, factors
from shardwright.plans.shardings import Mesh

IntArray = NDArray[np.int64]

#: Members of one group per node, the most first.
Spread = tuple[int, ...]


def device_groups(axes: tuple[str, ...], mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Positions of devices that differ only along `axes`, one tuple a group."""
    return groups_along(along(axes, mesh), mesh)


@cache
def groups_along(atoms: AtomOrder, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Positions of devices that differ only in `atoms`, one tuple a group."""
    groups: dict[int, list[int]] = {}
    for device, group in enumerate(_group_of_devices(atoms, mesh).tolist()):
        groups.setdefault(group, []).append(device)
    return tuple(tuple(group) for group in groups.values())


@lru_cache(maxsize=1 << 14)
def node_spreads(atoms: AtomOrder, mesh: Mesh, devices_per_node: tuple[int, ...]) -> tuple[Spread, ...]:
    """Distinct distributions over nodes of the groups along `atoms`; devices beyond the last node count in one more
    node.
    """
    groups = _group_of_devices(atoms, mesh)
    nodes = np.searchsorted(np.cumsum(devices_per_node), np.arange(mesh.device_count), side="right")
    members = np.zeros((groups.max() + 1, len(devices_per_node) + 1), np.int64)
    np.add.at(members, (groups, nodes), 1)
    members[:, ::-1].sort(axis=1)
    counts = dict.fromkeys(map(tuple, members[np.unique(groups)].tolist()))
    return tuple(tuple(count for count in spread if count) for spread in counts)


def _group_of_devices(atoms: AtomOrder, mesh: Mesh) -> IntArray:
    """A group number per device: its digits in the atoms common to the group."""
    digits = _digits(mesh)
    for atom in atoms:
        _refine_digits(digits, atom)
    number = np.zeros(mesh.device_count, np.int64)
    for atom, digit in digits.items():
        if atom not in atoms:
            number = number * atom.size + digit
    return number


def _digits(mesh: Mesh) -> dict[Atom, IntArray]:
    """The digits of all devices in each prime factor of the mesh axes."""
    atoms = along(tuple(mesh.sizes), mesh)
    numbers = np.unravel_index(np.arange(mesh.device_count), tuple(atom.size for atom in atoms) or (1,))
    return dict(zip(atoms, numbers, strict=False))


def _refine_digits(digits: dict[Atom, IntArray], piece: Atom) -> None:
    """Replace digits by those of the cut that `piece` came from, unless they are present."""
    if piece in digits or piece.cut is None:
        return
    before, sizes = piece.cut
    for atom in before:
        _refine_digits(digits, atom)
    number = sum(
        digits.pop(atom) * prod(later.size for later in before[place + 1 :]) for place, atom in enumerate(before)
    )
    after = factors(before, sizes)
    digits.update(zip(after, np.unravel_index(number, tuple(atom.size for atom in after)), strict=True))
