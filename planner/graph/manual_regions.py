"""Manual regions (`shard_map`) of a text: which calls they are, and how they stand among other instructions.

JAX writes a region as three instructions, with local shapes between the outer two:

    i = (f32[2,8]{…}, …) custom-call(x, …), custom_call_target="xla.sdy.GlobalToLocalShape", frontend_attributes={
        xla.sdy.in_shardings=…, xla.sdy.manual_axes=…}                       none where nothing goes in
    c = (f32[2,8]{…}, …) call(i#0, …), to_apply=xla.sdy.manual_computation_body, frontend_attributes={
        inlineable="false"}
    o = (f32[2,64]{…}, …) custom-call(c#0, …), custom_call_target="xla.sdy.LocalToGlobalShape", frontend_attributes={
        xla.sdy.out_shardings=…, xla.sdy.manual_axes=…}

`find_regions` reads them; `inlining` writes each body out between calls for single arrays (`regions.border`).
`axes_inside` says of such a program which instructions are inside, by what they read and who reads them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import ArrayShape, Computation, Instruction, Module
from shardwright.hlo.opcodes import COLLECTIVES, DEVICE_NUMBERS
from shardwright.planner.graph.dataflow import CONTROL_FLOW
from shardwright.planner.graph.imported_shardings import frontend_attributes, read_meshes, shardy_leaves
from shardwright.planner.rewrites.edit import Names, attribute
from shardwright.planner.rules import Place
from shardwright.regions import Border, border_of
from shardwright.reserved_names import MANUAL_TARGETS

#: Manual axes with their sizes.
Axes = frozenset[tuple[str, int]]

_TO_LOCAL, _TO_GLOBAL = "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"
_SHARDINGS = {_TO_LOCAL: "xla.sdy.in_shardings", _TO_GLOBAL: "xla.sdy.out_shardings"}
_MANUAL_AXES = "xla.sdy.manual_axes"
_NAME = re.compile(r'"([^"]+)"')
_MESH_NAME = re.compile(r'@"?([\w.\-]+)"?')


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRegion:
    """A region as a text has it: its call, and the instructions around it."""

    call: Instruction
    enter: Instruction | None
    leave: Instruction


@dataclass(frozen=True, slots=True, kw_only=True)
class TextRegions:
    """The regions of a module, by each of their instructions; `meshes`: the program's own, by name."""

    by_instruction: Mapping[Instruction, TextRegion]
    meshes: Mapping[str, Mapping[str, int]]
    module: Module

    def write_border(
        self, border: Instruction, operands: Iterable[Instruction], region: int, parent: int | None
    ) -> list[Instruction]:
        """One call for each array of `border`, an instruction of a region, reading `operands`. Names are `border`'s.

        Raises UnsupportedProgramError where its attributes do not fit its shapes.
        """
        target = _target(border)
        attributes = border.get("frontend_attributes") or {}
        shardings = shardy_leaves(attributes.get(_SHARDINGS[target], ""))
        names = _NAME.findall(attributes.get(_MANUAL_AXES, ""))
        arrays, results = list(operands), border.shape.leaves
        if not len(arrays) == len(shardings) == len(results):
            raise self._error(border, f"{len(arrays)} arrays, {len(shardings)} shardings, {len(results)} results")
        calls = []
        for array, shape, sharding in zip(arrays, results, shardings, strict=True):
            mesh = self._mesh(border, sharding, names)
            edge = Border(
                enters=target == _TO_LOCAL,
                region=region,
                parent=parent,
                axes=tuple((name, size) for name, size in mesh.items() if name in names),
                mesh=tuple(mesh.items()),
                sharding=sharding,
            )
            calls.append(_border_call(border, array, shape, edge))
            self._check_shapes(border, array, calls[-1], edge)
        return calls

    def _mesh(self, border: Instruction, sharding: str, names: Iterable[str]) -> Mapping[str, int]:
        match = _MESH_NAME.search(sharding)
        mesh = self.meshes.get(match[1]) if match else None
        if mesh is None or not set(names) <= set(mesh):
            raise self._error(border, f"sharding {sharding!r} is over no mesh of the module with all its manual axes")
        return mesh

    def _check_shapes(self, border: Instruction, array: Instruction, call: Instruction, edge: Border) -> None:
        is_read = isinstance(array.shape, ArrayShape) and len(edge.dims) in (0, array.shape.rank)
        if not is_read or not _fits(call, edge):
            raise self._error(border, f"{array.shape} and {call.shape} are no array and its parts by {edge.sharding}")

    def _error(self, border: Instruction, what: str) -> UnsupportedProgramError:
        return UnsupportedProgramError(
            f"a manual region (shard_map) cannot be read: {what}",
            where=_place(self.module, border),
            remedy="hand over the text as JAX writes it",
        )


def find_regions(module: Module) -> TextRegions:
    """The manual regions of a text."""
    by_instruction: dict[Instruction, TextRegion] = {}
    for instruction in module.instructions():
        if _target(instruction) != _TO_GLOBAL:
            continue
        call = _producer(instruction)
        if call is None or call.opcode != "call":
            continue
        enter = _producer(call)
        enter = enter if enter is not None and _target(enter) == _TO_LOCAL else None
        region = TextRegion(call=call, enter=enter, leave=instruction)
        by_instruction |= {part: region for part in (call, enter, instruction) if part is not None}
    meshes = read_meshes(module) if by_instruction else {}
    return TextRegions(by_instruction=by_instruction, meshes=meshes, module=module)


def has_regions(text: str) -> bool:
    """Whether a program's text has manual regions."""
    return _TO_GLOBAL in text


def computations_inside(regions: TextRegions) -> frozenset[Computation]:
    """All computations that run in a region."""
    todo = [callee for region in regions.by_instruction.values() for callee in region.call.called.get("to_apply", ())]
    inside: set[Computation] = set()
    while todo:
        computation = todo.pop()
        if computation not in inside:
            inside.add(computation)
            todo += [c for i in computation.instructions for callees in i.called.values() for c in callees]
    return frozenset(inside)


def refuse_manual(module: Module, *, inlined: bool = False) -> None:
    """Raises UnsupportedProgramError on computations written per device in a form that is not read: GSPMD's, and once
    calls are written out (`inlined`) whatever is left of others."""
    refused = MANUAL_TARGETS if inlined else MANUAL_TARGETS - {_TO_LOCAL, _TO_GLOBAL}
    for instruction in module.instructions():
        if _target(instruction) in refused:
            raise UnsupportedProgramError(
                f"the program holds computations written for one device ({_target(instruction)}; shard_map or the like)"
                " in a form that is not read",
                where=_place(module, instruction),
                remedy="lower it with JAX's Shardy partitioner (jax_use_shardy_partitioner), or hand over the step "
                "without shard_map",
            )


def _target(instruction: Instruction) -> str:
    return str(instruction.get("custom_call_target")) if instruction.opcode == "custom-call" else ""


def _producer(reader: Instruction) -> Instruction | None:
    """The instruction whose results `reader` reads, all of them; None without a common one."""
    sources = {operand.operands[0] if operand.opcode == "get-tuple-element" else operand for operand in reader.operands}
    return next(iter(sources)) if len(sources) == 1 else None


def _place(module: Module, instruction: Instruction) -> str:
    return str(module.source(instruction) or instruction.op_name or instruction.name)


def _border_call(border: Instruction, array: Instruction, shape: ArrayShape, edge: Border) -> Instruction:
    attributes = {
        "custom_call_target": attribute("custom_call_target", f'"{edge.target}"'),
        "frontend_attributes": frontend_attributes(edge.attributes),
    }
    if "metadata" in border.attributes:
        attributes["metadata"] = border.attributes["metadata"]
    plain = ArrayShape(shape.element_type, shape.dimensions)
    return Instruction(border.name, "custom-call", plain, (array,), attributes, line=border.line)


# ---- what is inside -----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """What of a module is in manual regions.

    axes: per instruction in a region, the manual axes around what it gives; of one that leaves a region, those around
        that region.
    places: per instruction in a region or at its border, where it stands.
    regions: the numbers of the regions that an instruction is in.
    """

    axes: Mapping[Instruction, Axes] = field(default_factory=dict)
    places: Mapping[Instruction, Place] = field(default_factory=dict)
    regions: Mapping[Instruction, frozenset[int]] = field(default_factory=dict)

    @property
    def borders(self) -> dict[Instruction, Border]:
        """What stands at borders."""
        return {i: place.border for i, place in self.places.items() if place.border is not None}

    @property
    def manual_axes(self) -> tuple[tuple[str, int], ...]:
        """All manual axes, each once, in the order of the meshes that they are of."""
        borders = self.borders.values()
        return tuple(dict.fromkeys(axis for border in borders for axis in border.mesh if axis in border.axes))

    @property
    def meshes(self) -> tuple[dict[str, int], ...]:
        """The meshes of the regions, each once."""
        return tuple(dict(mesh) for mesh in dict.fromkeys(border.mesh for border in self.borders.values()))


def find_inside(module: Module) -> Inside:
    """The instructions of `module` in manual regions: what reads something inside, and what only they read."""
    borders = {i: border for i in module.instructions() if (border := border_of(i)) is not None}
    if not borders:
        return Inside()
    own = {border.region: border for border in borders.values()}
    around = {number: frozenset(_axes_around(border, own)) for number, border in own.items()}
    finder = _Finder(borders)
    finder.visit(module.entry, frozenset())
    axes = {i: frozenset[tuple[str, int]]().union(*(around[n] for n in ns)) for i, ns in finder.regions.items()}
    places = {i: Place(axes=axes[i], mesh=_mesh_of(i, own[min(ns)])) for i, ns in finder.regions.items()}
    places |= {i: Place(axes=around[border.region], border=border) for i, border in borders.items()}
    return Inside(axes=axes, places=places, regions=finder.regions)


def torn_region(module: Module) -> Instruction | None:
    """An instruction of a region that a rewrite has taken out of it: it is handed on without passing the border, is
    a collective or a device's number outside, or no longer fits. None where all regions are whole."""
    inside = find_inside(module)
    if not inside.regions:
        return None
    misfit = next((i for i, border in inside.borders.items() if not _fits(i, border)), None)
    if misfit is not None:
        return misfit
    called = {callee for i in inside.regions for callees in i.called.values() for callee in callees}
    for computation in module.computations:
        if computation not in called and computation.root in inside.regions:
            return computation.root
    return next((i for i in module.instructions() if i.opcode in _OF_DEVICES and i not in inside.regions), None)


_OF_DEVICES = COLLECTIVES | DEVICE_NUMBERS


def _fits(call: Instruction, border: Border) -> bool:
    """Whether the shapes on both sides of a border are of one array and its parts."""
    read, given = call.operands[0].shape.leaves[0].dimensions, call.shape.leaves[0].dimensions
    outer, inner = (read, given) if border.enters else (given, read)
    parts = border.parts or (1,) * len(inner)
    return outer == tuple(size * count for size, count in zip(inner, parts, strict=True))


def let_enter(module: Module) -> None:
    """Give what a rewrite has regions read from outside a way in, in place: one number for all devices, mostly."""
    inside = find_inside(module)
    borders = {border.region: border for border in inside.borders.values()}
    names = Names(module)
    for computation in module.computations if borders else ():
        for at, reader in reversed([*enumerate(computation.instructions)]):
            border = inside.borders.get(reader)
            numbers = inside.regions.get(reader, frozenset()) if border is None else frozenset({border.region})
            if not numbers or (border is not None and border.enters):
                continue
            strays = [o for o in reader.operands if o not in inside.regions and o not in inside.borders]
            for stray in dict.fromkeys(strays):
                call = _enter_whole(stray, borders[min(numbers)], names)
                computation.instructions.insert(at, call)
                reader.operands = tuple(call if operand is stray else operand for operand in reader.operands)


def _enter_whole(value: Instruction, border: Border, names: Names) -> Instruction:
    """A call that has all of an array enter a region, the same on every device."""
    mesh = _MESH_NAME.search(border.sharding)
    assert mesh is not None
    dims = ", ".join(["{}"] * value.shape.leaves[0].rank)
    sharding = f"#sdy.sharding<{mesh[0]}, [{dims}]>"
    call = _border_call(value, value, value.shape.leaves[0], replace(border, enters=True, sharding=sharding))
    call.name = names.like(value.name, "entered")
    return call


def number_apart(module: Module) -> None:
    """Give copies of a region in several computations numbers of their own, in place."""
    borders = {
        (computation, border.region): border
        for computation in module.computations
        for i in computation.instructions
        if (border := border_of(i)) is not None
    }
    numbers = [number for _, number in borders]
    if len(set(numbers)) == len(numbers):
        return
    fresh = {key: number for number, key in enumerate(borders)}
    for computation in module.computations:
        for instruction in computation.instructions:
            border = border_of(instruction)
            if border is not None:
                parent = fresh.get((computation, border.parent)) if border.parent is not None else None
                changed = replace(border, region=fresh[computation, border.region], parent=parent)
                instruction.attributes["frontend_attributes"] = frontend_attributes(changed.attributes)


def _mesh_of(instruction: Instruction, border: Border) -> tuple[tuple[str, int], ...]:
    """The mesh that an instruction's groups of devices are of; none for all others: equal ones are equal anywhere."""
    return border.mesh if instruction.opcode in COLLECTIVES else ()


def _axes_around(border: Border | None, by_region: Mapping[int, Border]) -> Iterator[tuple[str, int]]:
    while border is not None:
        yield from border.axes
        border = None if border.parent is None else by_region.get(border.parent)


class _Finder:
    """regions: the numbers of the regions that each instruction is in, of those that are in any."""

    def __init__(self, borders: Mapping[Instruction, Border]) -> None:
        self._borders = borders
        self.regions: dict[Instruction, frozenset[int]] = {}

    def visit(self, computation: Computation, around: frozenset[int]) -> None:
        """Mark what is inside; around: the regions that all of the computation is in."""
        inside: dict[Instruction, frozenset[int]] = {}
        for instruction in computation.instructions:
            border = self._borders.get(instruction)
            if border is None:
                inside[instruction] = around.union(*(inside[operand] for operand in instruction.operands))
            else:
                inside[instruction] = _sides(border, around)[1]
        readers: dict[Instruction, frozenset[int]] = {}
        of_nothing = _made_of_nothing(computation)
        for instruction in reversed(computation.instructions):
            border = self._borders.get(instruction)
            if border is None and instruction in of_nothing:
                inside[instruction] = inside[instruction] or readers.get(instruction, frozenset())
            wanted = inside[instruction] if border is None else _sides(border, around)[0]
            for operand in instruction.operands if wanted else ():
                readers[operand] = readers.get(operand, frozenset()) | wanted
        self.regions |= {instruction: numbers for instruction, numbers in inside.items() if numbers}
        for instruction in computation.instructions:
            if instruction.opcode in CONTROL_FLOW:
                for callee in (callee for callees in instruction.called.values() for callee in callees):
                    self.visit(callee, inside[instruction])


def _made_of_nothing(computation: Computation) -> set[Instruction]:
    """What is computed from constants and device numbers alone: it is where its readers are."""
    made: set[Instruction] = set()
    for instruction in computation.instructions:
        if instruction.opcode != "parameter" and all(operand in made for operand in instruction.operands):
            made.add(instruction)
    return made


def _sides(border: Border, around: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
    """The regions that hold what a border reads, and what it gives."""
    outer = around if border.parent is None else frozenset({border.parent})
    inner = frozenset({border.region})
    return (outer, inner) if border.enters else (inner, outer)
