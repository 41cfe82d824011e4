"""Tile assignments: device of each tile of an array, covering all arrangements of mesh axes.

XLA stores a sharding in an array of device numbers, shaped by the tiles of each dimension and, last, by the devices
with the same tile. All such arrays of one mesh are the mesh's own numbering, reshaped and transposed. Here they are a
shape and an order of *atoms*, the prime factors of the mesh axes, major first. Splitting and joining dimensions means
cutting the order in other places.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Sequence
from functools import cache, lru_cache
from math import prod
from typing import NamedTuple

from shardwright.plans.shardings import Mesh


class Atom(NamedTuple):
    """One prime factor of the mesh: `place` numbers them, major first, over all axes.

    A factor across several axes (made by `cut`) has their names, a place of its own, and its origin: atoms in order,
    and the sizes of their run's cut.
    """

    place: tuple[int, ...]
    size: int
    axes: tuple[str, ...]
    cut: tuple[tuple[Atom, ...], tuple[int, ...]] | None = None


AtomOrder = tuple[Atom, ...]


class Tiling:
    """Tiles per dimension, devices that share a tile, and the atoms in order: those of dimensions, then the shared.

    sizes: tiles, then devices that share. is_partial: whether some devices, but not all, share a tile. Both are stored:
        read more often than tilings are made.
    """

    __slots__ = ("_parts", "is_partial", "is_replicated", "order", "shared", "sizes", "tiles")

    def __init__(self, tiles: tuple[int, ...], shared: int, order: AtomOrder) -> None:
        self.tiles = tiles
        self.shared = shared
        self.order = order
        self.sizes = (*tiles, shared)
        self.is_replicated = tiles.count(1) == len(tiles)
        self.is_partial = shared > 1 and not self.is_replicated
        self._parts: tuple[AtomOrder, ...] | None = None

    @property
    def parts(self) -> tuple[AtomOrder, ...]:
        """The atoms of each dimension, and of the devices that share."""
        if self._parts is None:
            self._parts = cut(self.order, self.sizes)
        return self._parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Tiling) and self.sizes == other.sizes and self.order == other.order

    def __hash__(self) -> int:
        return hash((self.sizes, self.order))

    def __repr__(self) -> str:
        return f"Tiling({self.tiles}, {self.shared}, {self.order})"


def make_tiling(parts: Sequence[AtomOrder], shared: AtomOrder) -> Tiling:
    """The tiling with these atoms per dimension; the order of sharing devices is irrelevant in XLA."""
    atoms = [atom for part in parts for atom in part]
    return Tiling(tuple(map(count, parts)), count(shared), (*atoms, *sorted(shared)))


def reshape_tiling(tiling: Tiling, tiles: Sequence[int]) -> Tiling:
    """The same order of devices under other tile counts; remaining devices share."""
    split = prod(tiles)
    shared = count(tiling.order) // split
    if shared == tiling.shared:
        return Tiling(tuple(tiles), shared, tiling.order)
    held, rest = cut(tiling.order, (split, shared))
    return Tiling(tuple(tiles), shared, (*held, *sorted(rest)))


def count(atoms: Sequence[Atom]) -> int:
    total = 1
    for atom in atoms:
        total *= atom.size
    return total


@lru_cache(maxsize=1 << 14)
def cut(atoms: AtomOrder, sizes: tuple[int, ...]) -> tuple[AtomOrder, ...]:
    """Consecutive runs of atoms with products `sizes`; the product of `sizes` equals that of the atoms.

    A cut inside an atom (2·3 devices in the form 3·2) replaces the atoms around it.
    """
    parts: list[AtomOrder] = []
    first = k = 0
    while k < len(sizes):
        run, needed, product, last = [sizes[k]], sizes[k], 1, first
        while product != needed:
            if product < needed:
                product *= atoms[last].size
                last += 1
            else:
                k += 1
                run.append(sizes[k])
                needed *= sizes[k]
        parts += [atoms[first:last]] if len(run) == 1 else _recut(atoms[first:last], run)
        first, k = last, k + 1
    return tuple(parts)


def _recut(atoms: AtomOrder, sizes: Sequence[int]) -> list[AtomOrder]:
    rest = iter(factors(atoms, tuple(sizes)))
    return [tuple(itertools.islice(rest, len(_primes(size)))) for size in sizes]


def factors(atoms: AtomOrder, sizes: tuple[int, ...]) -> AtomOrder:
    """The factors of a run of atoms cut into `sizes`, with no size ending between two atoms."""
    axes = tuple(dict.fromkeys(axis for atom in atoms for axis in atom.axes))
    places = tuple(number for atom in atoms for number in atom.place)
    primes = [prime for size in sizes for prime in _primes(size)]
    return tuple(Atom((*places, *sizes, i), prime, axes, (atoms, sizes)) for i, prime in enumerate(primes))


@cache
def tiling_of(dims: tuple[tuple[str, ...], ...], mesh: Mesh) -> Tiling:
    """Shardy's tiling of a sharding, handed to XLA's partitioner: idle axes share, in mesh order."""
    atoms = _atoms(mesh)
    used = {axis for axes in dims for axis in axes}
    parts = [tuple(atom for axis in axes for atom in atoms[axis]) for axes in dims]
    return make_tiling(parts, tuple(atom for axis in mesh.axes if axis.name not in used for atom in atoms[axis.name]))


def along(axes: Container[str], mesh: Mesh) -> AtomOrder:
    """The atoms of some axes of a mesh, in its order."""
    return tuple(atom for axis in mesh.axes if axis.name in axes for atom in _atoms(mesh)[axis.name])


@cache
def _atoms(mesh: Mesh) -> dict[str, AtomOrder]:
    numbers = itertools.count()
    return {
        axis.name: tuple(Atom((next(numbers),), prime, (axis.name,)) for prime in _primes(axis.size))
        for axis in mesh.axes
    }


def _primes(number: int) -> list[int]:
    primes, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            primes.append(divisor)
            number //= divisor
        divisor += 1
    return primes
