"""Devices of a manual region, by their numbers in the program's mesh and in a plan's.

A region's collectives name devices of the program's mesh, row-major over its axes. A plan puts each manual axis on a
run of axes of its own mesh and has others beside them: one group of the program is as many there as there are places
along the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from shardwright.errors import UnsupportedProgramError


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionDevices:
    """The devices that one region is written for.

    program: axes of the program's mesh with their sizes, major first. manual: those that are manual in the region, and
    in the regions around it. plan: axes of the plan's mesh. runs: manual axis → its axes of the plan's mesh.
    """

    program: Mapping[str, int]
    manual: tuple[str, ...]
    plan: Mapping[str, int]
    runs: Mapping[str, tuple[str, ...]]

    def groups_in_plan(self, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        """Groups, or pairs, of the plan's devices that do what these of the program's devices do.

        No groups: all devices are one. Raises UnsupportedProgramError: a group reaches along an axis that is not manual
        in the region, or groups differ along one.
        """
        groups = groups or [range(prod(self.program.values()))]
        alike: dict[int, list[tuple[int, ...]]] = {}
        for group in groups:
            members = [device for device in group if device >= 0]
            places = {self._place_beside(device) for device in members}
            if len(places) > 1:
                self._refuse("reaches along", members)
            alike.setdefault(places.pop(), []).append(tuple(self._first_device(device) for device in members))
        first, *others = alike.values()
        for other in others:
            if set(other) != set(first):
                self._refuse("is another along", first[0])
        return tuple(tuple(device + place for device in group) for place in self._places_in_plan() for group in first)

    def numbers_along(self, axes: Sequence[str]) -> list[int]:
        """What places along some of the manual axes, major first, add to a device's number in the program."""
        strides = _strides(self.program)
        places = product(*(range(self.program[axis]) for axis in axes))
        return [sum(place * strides[axis] for axis, place in zip(axes, each, strict=True)) for each in places]

    def _place_beside(self, device: int) -> int:
        """A device's place along the program's other axes."""
        coordinates = _coordinates(device, self.program)
        strides = _strides(self.program)
        return sum(coordinates[axis] * strides[axis] for axis in self.program if axis not in self.manual)

    def _first_device(self, device: int) -> int:
        """The plan's device with the same place along manual axes, and the first along all others."""
        coordinates, strides = _coordinates(device, self.program), _strides(self.plan)
        number = 0
        for axis in self.manual:
            inside = _coordinates(coordinates[axis], {name: self.plan[name] for name in self.runs[axis]})
            number += sum(place * strides[name] for name, place in inside.items())
        return number

    def _places_in_plan(self) -> list[int]:
        """What each place along the plan's other axes adds to a device's number."""
        beside = set(self.plan).difference(*(self.runs[axis] for axis in self.manual))
        strides = _strides(self.plan)
        steps = [[place * strides[name] for place in range(size)] for name, size in self.plan.items() if name in beside]
        return [sum(each) for each in product(*steps)]

    def _refuse(self, what: str, group: Sequence[int]) -> None:
        beside = ", ".join(axis for axis, size in self.program.items() if axis not in self.manual and size > 1)
        raise UnsupportedProgramError(
            f"a collective in a manual region over {', '.join(self.manual)} {what} {beside}, which is not manual "
            f"there: devices {', '.join(map(str, group))}",
            remedy="name that axis in the axis_names of the shard_map, too",
        )


def _strides(sizes: Mapping[str, int]) -> dict[str, int]:
    """How far devices next to each other along an axis are apart."""
    strides, stride = dict[str, int](), 1
    for axis, size in reversed(list(sizes.items())):
        strides[axis] = stride
        stride *= size
    return strides


def _coordinates(device: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """A device's place along each axis."""
    return {axis: device // stride % sizes[axis] for axis, stride in _strides(sizes).items()}
