"""Manual regions of a planned program, written as Shardy's manual computations.

In the program as it is planned a region's operations stand among all others, between calls at its border
(`shardwright.regions`). Here each region becomes one `sdy.manual_computation` again, manual over the axes of the plan's
mesh that its own axes lie on:

- inside is what is computed from what goes in (`region_blocks`). What computes from nothing, constants and iotas, is
  copied into each region that reads it;
- groups of collectives name devices of the plan's mesh (`regions.devices`);
- a device's number in the program is read from a table, an operand split over the region's axes: XLA has no number of
  a device for regions that leave axes to the partitioner;
- a region in which the plan splits nothing further is manual over all axes: XLA's partitioner leaves it alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.errors import PlanError, UnsupportedProgramError
from shardwright.hlo.replica_groups import parse_replica_groups
from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.regions.devices import RegionDevices
from shardwright.xla import private, tensors
from shardwright.xla.operations import CALLS, operations_within
from shardwright.xla.region_blocks import Region, RegionBlock, border_of_operation

_GROUPS = ("replica_groups", "source_target_pairs")
#: Where a ragged all-to-all, a custom call, has its groups.
_CONFIGURATION = "mhlo.backend_config"
#: An axis of the program's mesh, or a part of it, in groups that are named by axes.
_AXIS_OF_GROUPS = re.compile(r'name = "([^"]+)"(?:, sub_axis_info = \((\d+)\)(\d+))?')
_NUMBER = "stablehlo.partition_id"
_CONSTRAINT = "sdy.sharding_constraint"

AttributeOf = Callable[[TensorSharding], Any]


def write_regions(
    module: Any,
    mesh: Mesh,
    runs: Mapping[str, tuple[str, ...]],
    entries: Mapping[str, InstructionPlan],
    attribute: AttributeOf,
) -> None:
    """Move the operations of every region into a manual computation.

    runs: the plan's `manual_axes`. entries: its instructions by name. attribute: a sharding in Shardy's form.

    Raises PlanError: what is computed in a region is read outside of it. UnsupportedProgramError: its collectives reach
    along axes that are not manual.
    """
    regions = _find_regions(module)
    if not regions:
        return
    has_numbers = any(operation.name == _NUMBER for operation in operations_within(module.operation))
    functions = {each.name.value: each for each in module.body.operations if each.operation.name == "func.func"}
    writer = _Writer(regions, mesh, runs, entries, attribute, functions, has_numbers)
    writer.write_block(functions["main"].regions[0].blocks[0], None)


def _find_regions(module: Any) -> dict[int, Region]:
    borders = filter(None, map(border_of_operation, operations_within(module.operation)))
    regions = {border.region: Region(border) for border in borders}
    for region in regions.values():
        if region.border.parent is not None:
            region.parent = regions[region.border.parent]
            region.parent.has_regions = True
    return regions


def _refuse_collectives(function: Any) -> None:
    """Raises UnsupportedProgramError on a function with collectives: several regions may call it."""
    for operation in operations_within(function.operation):
        if operation.name == _NUMBER or any(name in operation.attributes for name in _GROUPS):
            raise UnsupportedProgramError(
                f"the function {function.name.value} holds a collective and is not written out where it is called",
                where=private.location_name(operation.location) or operation.name,
                remedy="call it without attributes of its own: it is then written out in its region",
            )


@dataclass(slots=True)
class _Writer:
    """Writes blocks, those around others first. has_numbers: whether the program reads a device's number."""

    regions: Mapping[int, Region]
    mesh: Mesh
    runs: Mapping[str, tuple[str, ...]]
    entries: Mapping[str, InstructionPlan]
    attribute: AttributeOf
    functions: Mapping[str, Any]
    has_numbers: bool

    def write_block(self, block: Any, around: Region | None) -> None:
        """Write the regions of a block that stands in the region `around`."""
        *operations, terminator = block.operations
        if not any(map(border_of_operation, operations)):
            for operation in operations:
                self._finish(operation, around)
            return
        content = RegionBlock(operations, self.regions, around)
        content.require_outside(terminator)
        self._fill(content, None, around, terminator)
        for number in content.anywhere:  # XLA's partitioner refuses a device's number though nobody reads it
            operation = operations[number]
            if content.kinds[number] == _NUMBER and around is None and not list(operation.results[0].uses):
                operation.operation.erase()

    def _fill(self, content: RegionBlock, region: Region | None, around: Region | None, end: Any) -> None:
        """Put one level of a block in order: outside of its regions (None), or the inside of one, ahead of the
        operation `end`."""
        for node in content.order(region):
            if isinstance(node, Region):
                self._write_region(content, node, region, end)
                continue
            operation = content.operations[node]
            operation.operation.move_before(end.operation)
            if region is not None:
                self._copy_constants(content, node, region, operation)
            self._finish(operation, region or around)

    def _write_region(self, content: RegionBlock, region: Region, outside: Region | None, end: Any) -> None:
        """Make one manual computation of a region, ahead of the operation `end`."""
        ir, sdy = private.ir(), private.dialect("sdy")
        region.is_whole = not region.has_regions and not self._splits_further(content, region)
        enters, leaves = content.enters(region), content.leaves(region)
        calls = [content.operations[number] for number in (*enters, *leaves)]
        with calls[-1].location, ir.InsertionPoint(end):
            if outside is not None:
                for number in enters:
                    self._copy_constants(content, number, outside, end)
            operands = [content.operations[number].operands[0] for number in enters]
            used = [self._entry(content.operations[number]).operands[0][0] for number in enters]
            results = [content.operations[number].results[0] for number in leaves]
            given = [self._entry(content.operations[number]).result[0] for number in leaves]
            inputs = [content.operations[number].results[0].type for number in enters]
            if self.has_numbers:
                for value, lies, kind in self._number_operands(region):
                    operands, used, inputs = [*operands, value], [*used, lies], [*inputs, kind]
            per_value = sdy.TensorShardingPerValueAttr.get
            manual = sdy.ManualComputationOp(
                [result.type for result in results],
                operands,
                per_value([*map(self.attribute, used)]),
                per_value([*map(self.attribute, given)]),
                sdy.ManualAxesAttr.get([ir.StringAttr.get(axis) for axis in self._manual_axes(region)]),
            )
            location = ir.Location.current
            block = manual.regions[0].blocks.append(*inputs, arg_locs=[location] * len(inputs))
        arguments = list(block.arguments)
        for number, argument in zip(enters, arguments, strict=False):
            content.operations[number].results[0].replace_all_uses_with(argument)
        with calls[-1].location, ir.InsertionPoint(block):
            if self.has_numbers:
                region.number = _add_numbers(arguments[len(enters) :])
            returned = sdy.ReturnOp([])
        self._fill(content, region, region, returned)
        for number in leaves:
            self._copy_constants(content, number, region, returned)
        with calls[-1].location, ir.InsertionPoint(returned):
            sdy.ReturnOp([content.operations[number].operands[0] for number in leaves])
        returned.operation.erase()
        for result, value in zip(results, manual.results, strict=True):
            result.replace_all_uses_with(value)
        for call in reversed(calls):
            call.operation.erase()

    def _manual_axes(self, region: Region) -> list[str]:
        """Axes of the plan's mesh that are manual in a region and not around it, in the mesh's order."""
        around = {axis for each in region.around[1:] for axis in self._runs_of(each)}
        inside = set(self.mesh.sizes) if region.is_whole else set(self._runs_of(region))
        return [axis for axis in self.mesh.sizes if axis in inside - around]

    def _runs_of(self, region: Region) -> tuple[str, ...]:
        return tuple(axis for name in region.axes for axis in self.runs[name])

    def _splits_further(self, content: RegionBlock, region: Region) -> bool:
        """Whether the plan splits anything in a region, or at its border, over axes that are not manual there."""
        manual = {axis for each in region.around for axis in self._runs_of(each)}
        return any(not manual.issuperset(self._axes_of(operation)) for operation in content.members(region))

    def _axes_of(self, operation: Any) -> Iterator[str]:
        """The axes that the plan's entries of an operation, and of those within it, use."""
        for each in (operation, *operations_within(operation)):
            entry = self.entries.get(private.location_name(each.location) or "")
            if entry is None:
                continue
            yield from entry.partial
            for value in (*entry.operands, entry.result):
                for lies in value:
                    yield from (*lies.axes, *lies.unreduced)

    def _entry(self, call: Any) -> InstructionPlan:
        name = private.location_name(call.location) or ""
        if name not in self.entries:
            raise PlanError("the plan does not say how an array lies at the border of its region", where=name)
        return self.entries[name]

    # ---- a device's number ---------------------------------------------------
    def _number_operands(self, region: Region) -> Iterator[tuple[Any, TensorSharding, Any]]:
        """What a device's number is added up from inside a region: (value, its layout, its type inside). Its places
        along the region's own axes, from a table; the number in the region around it."""
        ir = private.ir()
        numbers = np.asarray(self._devices(region).numbers_along(region.axes), np.uint32)
        kind = ir.RankedTensorType.get([len(numbers)], ir.IntegerType.get_unsigned(32))
        table = private.dialect("stablehlo").ConstantOp(ir.DenseElementsAttr.get(numbers, type=kind)).result
        yield table, TensorSharding((self._runs_of(region),)), ir.RankedTensorType.get([1], kind.element_type)
        if region.parent is not None:
            yield region.parent.number, TensorSharding(()), region.parent.number.type

    def _devices(self, region: Region) -> RegionDevices:
        return RegionDevices(
            program=dict(region.border.mesh),
            manual=tuple(axis for each in region.around for axis in each.axes),
            plan=self.mesh.sizes,
            runs=self.runs,
        )

    # ---- operations in their place -----------------------------------------------
    def _copy_constants(self, content: RegionBlock, number: int, region: Region, before: Any) -> None:
        """Have an operation of a region, and those within it, read copies of what computes from nothing."""
        operation = content.operations[number]
        for each in (operation.operation, *operations_within(operation)):
            for index, value in enumerate(each.operands):
                source = content.source_anywhere(value)
                if source is not None:
                    each.operands[index] = self._copy(content, source, value, region, before)

    def _copy(self, content: RegionBlock, source: int, value: Any, region: Region, before: Any) -> Any:
        """A value that is computed from nothing, in a region. It lies as its reader wants it: of its constraints, which
        may name manual axes, nothing is copied."""
        operation = content.operations[source]
        kind = content.kinds[source]
        if kind == _NUMBER:
            return region.number
        if kind == _CONSTRAINT:
            (inner,) = operation.operands
            return self._copy(content, content.position[inner], inner, region, before)
        copies = region.copies
        if (content, source) not in copies:
            copy = operation.operation.clone(private.ir().InsertionPoint(before))
            copies[content, source] = copy
            for each in (copy, *operations_within(copy)):
                for index, operand in enumerate(each.operands):
                    inner_source = content.source_anywhere(operand)
                    if inner_source is not None:
                        each.operands[index] = self._copy(content, inner_source, operand, region, copy)
            self._finish(copy, region)
        return copies[content, source].results[list(operation.results).index(value)]

    def _finish(self, operation: Any, region: Region | None) -> None:
        """Adjust an operation that stands in its place to the plan's mesh, and the blocks within it."""
        if region is not None:
            kind = operation.operation.name
            if kind == _NUMBER or (kind == _CONSTRAINT and (region.is_whole or _is_partial(operation))):
                value = region.number if kind == _NUMBER else operation.operands[0]
                operation.results[0].replace_all_uses_with(value)
                operation.operation.erase()
                return
            self._rename_devices(operation, region)
            if kind in CALLS:
                _refuse_collectives(self.functions[operation.attributes["callee"].value])
        for inner in operation.regions:
            for block in inner.blocks:
                self.write_block(block, region)

    def _rename_devices(self, operation: Any, region: Region) -> None:
        """Have a collective name devices of the plan's mesh."""
        ir = private.ir()
        for name in _GROUPS:
            if name in operation.attributes:
                operation.attributes[name] = self._groups_in_plan(operation.attributes[name], region)
        if _CONFIGURATION in operation.attributes:
            items = {item.name: item.attr for item in operation.attributes[_CONFIGURATION]}
            if _GROUPS[0] in items:
                items[_GROUPS[0]] = self._groups_in_plan(items[_GROUPS[0]], region)
                operation.attributes[_CONFIGURATION] = ir.DictAttr.get(items)

    def _groups_in_plan(self, attribute: Any, region: Region) -> Any:
        groups = self._devices(region).groups_in_plan(_groups_of(attribute, region))
        widest = max(map(len, groups))
        rows = [[*group, *[-1] * (widest - len(group))] for group in groups]
        return private.ir().DenseElementsAttr.get(np.asarray(rows, np.int64).reshape(len(rows), widest))


def _groups_of(attribute: Any, region: Region) -> Sequence[Sequence[int]]:
    """The groups of a collective: in numbers, or by axes of the program's mesh, as newer JAX writes them."""
    if isinstance(attribute, private.ir().DenseIntElementsAttr):
        groups: list[list[int]] = np.asarray(attribute).tolist()
        return groups
    mesh = ",".join(f"'{name}'={size}" for name, size in region.border.mesh)
    axes = ",".join(
        f"'{name}'" + (f":({before}){size}" if before else "")
        for name, before, size in _AXIS_OF_GROUPS.findall(str(attribute))
    )
    return parse_replica_groups(f"mesh[{mesh}] {{{axes}}}")


def _is_partial(constraint: Any) -> bool:
    """Whether a constraint says that a value is partial: XLA takes no such mark beside manual axes. Without any of
    them in a region sums are reduced where they are made."""
    sharding = private.dialect("sdy").TensorShardingAttr(constraint.attributes["sharding"])
    return bool(sharding.unreduced_axes)


def _add_numbers(parts: list[Any]) -> Any:
    """A device's number in the program, from its number along a region's axes and that around it."""
    number = tensors.reshape(parts[0], ())
    return number if len(parts) == 1 else private.dialect("stablehlo").AddOp(number, parts[1]).result
