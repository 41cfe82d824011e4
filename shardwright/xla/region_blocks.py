"""Which operations of a block belong to which manual region, and in which order they can stand apart.

A value that comes out of a call `enter_region` is of that region, and so is what is computed from it, until it goes
through a call `leave_region`. What computes from nothing stands anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.errors import PlanError
from shardwright.regions import Border, read_border
from shardwright.xla import private
from shardwright.xla.operations import operations_within

_FRONTEND = "mhlo.frontend_attributes"


def border_of_operation(operation: Any) -> Border | None:
    """What an operation is at the border of a region; None for any other."""
    if operation.operation.name != "stablehlo.custom_call" or _FRONTEND not in operation.attributes:
        return None
    attributes = {item.name: getattr(item.attr, "value", "") for item in operation.attributes[_FRONTEND]}
    return read_border(str(operation.attributes["call_target_name"].value), attributes)


@dataclass(slots=True, eq=False)
class Region:
    """A region while it is written.

    border: of one of its arrays. parent: the region around it. has_regions: whether it is one around others.
    is_whole: whether it is manual over all axes of the plan's mesh. number: a device's number in the program, a value
    inside. copies: of operations that compute from nothing, by block and position.
    """

    border: Border
    parent: Region | None = None
    has_regions: bool = False
    is_whole: bool = False
    number: Any = None
    copies: dict[tuple[RegionBlock, int], Any] = field(default_factory=dict)

    @property
    def axes(self) -> tuple[str, ...]:
        """Its own manual axes."""
        return tuple(name for name, _ in self.border.axes)

    @property
    def around(self) -> tuple[Region, ...]:
        """The region and those around it, innermost first."""
        return (self, *(self.parent.around if self.parent is not None else ()))


class RegionBlock:
    """The operations of a block by region; `None` is outside of the block's own regions.

    operations: all but the last, as they were. kinds: their names. position: of the operation that makes a value.
    anywhere: operations that compute from nothing.
    """

    def __init__(self, operations: Sequence[Any], regions: Mapping[int, Region], around: Region | None) -> None:
        self.operations = operations
        self.kinds = [operation.operation.name for operation in operations]
        self.position: dict[Any, int] = {}
        self.anywhere: set[int] = set()
        self._reads: list[list[int]] = []
        self._places: list[Region | None] = []
        self._results: list[Region | None] = []  # the region that an operation's results are values of
        self._calls: dict[int, tuple[Region, bool]] = {}  # at the border: its region, and whether it goes in
        self._sides: dict[tuple[Region, bool], list[int]] = {}  # the same the other way round
        self._nodes: dict[Region | None, dict[int | Region, None]] = {None: {}}
        for number, operation in enumerate(operations):
            self._read(number, operation, regions, around)
            for result in operation.results:
                self.position[result] = number

    def _read(self, number: int, operation: Any, regions: Mapping[int, Region], around: Region | None) -> None:
        values = list(_values_from_outside(operation))
        reads = [self.position[value] for value in values if value in self.position]
        from_nothing = len(reads) == len(values) and self.anywhere.issuperset(reads)
        border = border_of_operation(operation)
        place = self._deepest([self._results[read] for read in reads if read not in self.anywhere], operation)
        result = place
        if border is not None:
            region = regions[border.region]
            outside = None if region.parent is around else region.parent
            fits = place is (outside if border.enters else region)
            if not fits and not (place is None and (border.enters or from_nothing)):
                raise _mixture(operation)
            place, result = outside, (region if border.enters else outside)
            self._calls[number] = (region, border.enters)
            self._sides.setdefault((region, border.enters), []).append(number)
            self._nodes.setdefault(region, {})
            self._nodes.setdefault(outside, {})[region] = None
        else:
            if from_nothing:
                self.anywhere.add(number)
            self._nodes.setdefault(place, {})[number] = None
        self._reads.append(reads)
        self._places.append(place)
        self._results.append(result)

    @staticmethod
    def _deepest(places: Sequence[Region | None], operation: Any) -> Region | None:
        """The innermost of the regions that values are of. Raises PlanError where one is not in the other."""
        deepest: Region | None = None
        for place in places:
            if place is None or (deepest is not None and place in deepest.around):
                continue
            if deepest is not None and deepest not in place.around:
                raise _mixture(operation)
            deepest = place
        return deepest

    def require_outside(self, terminator: Any) -> None:
        """Raises PlanError where what a block hands on is a value of one of its regions."""
        for value in terminator.operands:
            if value in self.position and self._results[self.position[value]] is not None:
                raise _mixture(self.operations[self.position[value]])

    def enters(self, region: Region) -> list[int]:
        """Positions of the calls by which arrays go in."""
        return self._sides.get((region, True), [])

    def leaves(self, region: Region) -> list[int]:
        """Positions of the calls by which arrays come out."""
        return self._sides.get((region, False), [])

    def members(self, region: Region) -> Iterator[Any]:
        """The operations of a region without those of regions in it, and the calls at its border."""
        numbers = [node for node in self._nodes[region] if isinstance(node, int)]
        return (self.operations[number] for number in (*self.enters(region), *numbers, *self.leaves(region)))

    def source_anywhere(self, value: Any) -> int | None:
        """The position of the operation that makes a value from nothing; None for other values."""
        number = self.position.get(value)
        return number if number in self.anywhere else None

    def order(self, level: Region | None) -> list[int | Region]:
        """What stands at one level, operations by position and whole regions, each behind what it reads.

        Raises PlanError: a region reads what is computed from its own results.
        """
        ordered: dict[int | Region, None] = {}
        for first in self._nodes[level]:
            pending = [(first, iter(self._nodes_read(first, level)))]
            path = {first}
            while pending and first not in ordered:
                node, reads = pending[-1]
                read = next((each for each in reads if each not in ordered), None)
                if read is None:
                    pending.pop()
                    path.discard(node)
                    ordered[node] = None
                    continue
                if read in path:
                    raise PlanError(
                        "an array goes into a manual region that is computed from what comes out of it",
                        where=self._name(read),
                    )
                path.add(read)
                pending.append((read, iter(self._nodes_read(read, level))))
        return list(ordered)

    def _nodes_read(self, node: int | Region, level: Region | None) -> Iterator[int | Region]:
        """What one node of a level reads of the same level."""
        readers = [node] if isinstance(node, int) else self.enters(node)
        for reader in readers:
            for read in self._reads[reader]:
                if read in self._calls:
                    region, enters = self._calls[read]
                    if not enters and self._results[read] is level:
                        yield region
                elif self._places[read] is level:
                    yield read

    def _name(self, node: int | Region) -> str:
        number = node if isinstance(node, int) else self.leaves(node)[0]
        return private.location_name(self.operations[number].location) or self.kinds[number]


def _values_from_outside(operation: Any) -> Iterator[Any]:
    """The values that an operation, or those within it, read and do not make."""
    yield from operation.operands
    if not len(operation.regions):
        return
    inner = list(operations_within(operation))
    own = {value for each in inner for value in each.results}
    own |= {
        value
        for each in (operation, *inner)
        for region in each.regions
        for block in region.blocks
        for value in block.arguments
    }
    yield from (value for each in inner for value in each.operands if value not in own)


def _mixture(operation: Any) -> PlanError:
    name = private.location_name(operation.location) or operation.operation.name
    return PlanError("an instruction reads values of a manual region outside of it", where=name)
