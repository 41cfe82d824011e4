"""Inlines calls and fusions: every call site then chooses its own sharding.

Frameworks lower a helper (`jnp.where`, the slice of a scan's inputs) to one function per shape, called from many
places. Without inlining all of them would share one sharding: every stacked weight of one shape one layout. XLA inlines
calls before partitioning; nothing else changes. A fusion, in text dumped after optimization, is a compiler-made call:
XLA fuses again after partitioning.

The body of a manual region (`shard_map`) is written out like a call, between a call of ours for each array that goes in
or comes out (`regions.border`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from shardwright.hlo import ArrayShape, Attribute, Computation, Instruction, Module, TupleShape
from shardwright.hlo.names import NameUniquer
from shardwright.placements import COMPUTE_ATTRIBUTE
from shardwright.planner.gc_pause import gc_paused
from shardwright.planner.graph.manual_regions import TextRegions, find_regions
from shardwright.planner.rewrites.edit import copy_of
from shardwright.planner.tuning import MAX_INLINED_DEPTH, MAX_INLINED_INSTRUCTIONS

#: A call with other attributes means more than its body (a composite, manual axes).
_PLAIN = frozenset({"to_apply", "metadata", "backend_config", "frontend_attributes"})

#: Prefix of a call's frontend attributes for a backend's execution; they do not change the result.
_OF_BACKENDS = "xla_cpu_"

#: Attributes whose computations run as part of the one they are named in.
_REGIONS = frozenset({"condition", "body", "branch_computations", "true_computation", "false_computation"})


def inline_calls(module: Module) -> Module:
    """`module` without calls and fusions in the entry, in loops and in branches; `module` itself without any.

    The first copy of a function keeps its instructions' names; further ones get new names and the source line of their
    call. Calls with attributes of their own stay; so do all past half a million instructions.
    """
    instructions = list(module.instructions())
    regions = find_regions(module)
    if not regions.by_instruction and not any(_may_inline(instruction) for instruction in instructions):
        return module
    if any("control-predecessors" in instruction.attributes for instruction in instructions):
        return module  # an order between instructions that a call would have to keep as a whole
    with gc_paused():
        entry = _Inliner(module, regions).region(module.entry, 0)
        return Module(module.name, module.header, callees_first(entry), entry, module.tables)


def _may_inline(instruction: Instruction) -> bool:
    """Whether an instruction is a fusion, or a call that says nothing else."""
    if instruction.opcode == "fusion":
        return True
    if instruction.opcode != "call" or not instruction.attributes.keys() <= _PLAIN:
        return False
    return all(
        name.startswith(_OF_BACKENDS) or name == COMPUTE_ATTRIBUTE  # its instructions say so themselves
        for name in instruction.get("frontend_attributes", ())
    )


@dataclass(slots=True)
class _Region:
    """A computation under construction: its instructions, and the root tuples of inlined calls."""

    instructions: list[Instruction] = field(default_factory=list)
    tuples: set[Instruction] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Site:
    """One place to inline a computation into.

    arguments: its parameters' values; None: it keeps its parameters.
    is_first: whether it is the first copy, with the original names.
    metadata: replaces the instructions' own, unless None.
    depth: nesting level.
    around: number of the manual region that it is in, if any.
    """

    arguments: Sequence[Instruction] | None
    is_first: bool
    metadata: Attribute | None
    depth: int
    around: int | None = None


class _Inliner:
    def __init__(self, module: Module, regions: TextRegions) -> None:
        self._regions = regions
        self._region_count = 0
        self._names = _uniquer(instruction.name for instruction in module.instructions())
        self._computation_names = _uniquer(computation.name for computation in module.computations)
        self._written: set[Computation] = set()
        self._size = 0

    def region(
        self, source: Computation, depth: int, metadata: Attribute | None = None, around: int | None = None
    ) -> Computation:
        """A copy of the entry, or of a computation run by a loop or a conditional."""
        is_first = self._is_first(source)
        region = _Region()
        root = self._write(source, _Site(None, is_first, metadata, depth, around), region)
        root.is_root = True
        instructions = _without_unread(region, root)
        return Computation(
            source.name if is_first else self._computation_names.register(source.name),
            instructions,
            root,
            tuple(sorted((i for i in instructions if i.opcode == "parameter"), key=lambda i: i.index)),
            source.is_entry,
            source.attributes,
        )

    def _is_first(self, source: Computation) -> bool:
        is_first = source not in self._written
        self._written.add(source)
        return is_first

    def _write(self, source: Computation, site: _Site, region: _Region) -> Instruction:
        """Append the instructions of `source`; returns its root."""
        copies: dict[Instruction, Instruction] = {}
        numbers: dict[Instruction, int] = {}  # calls of manual regions → the regions' numbers
        for instruction in source.instructions:
            if instruction.opcode == "parameter" and site.arguments is not None:
                copies[instruction] = site.arguments[instruction.index]
                continue
            operands = tuple([copies[operand] for operand in instruction.operands])
            if instruction.opcode == "get-tuple-element" and operands[0] in region.tuples:
                copies[instruction] = operands[0].operands[instruction.index]
            elif instruction in self._regions.by_instruction and self._has_room(site.depth):
                copies[instruction] = self._write_region(instruction, operands, site, region, numbers)
            elif _may_inline(instruction) and self._has_room(site.depth):
                copies[instruction] = self._inline(instruction, operands, site, region)
            else:
                copies[instruction] = self._copy(instruction, operands, site)
                region.instructions.append(copies[instruction])
        return copies[source.root]

    def _has_room(self, depth: int) -> bool:
        return depth < MAX_INLINED_DEPTH and self._size < MAX_INLINED_INSTRUCTIONS

    def _inline(self, call: Instruction, operands: Sequence[Instruction], site: _Site, region: _Region) -> Instruction:
        (callee,) = call.called["calls" if call.opcode == "fusion" else "to_apply"]
        is_first = self._is_first(callee)
        metadata = site.metadata or (None if is_first else call.attributes.get("metadata"))
        root = self._write(callee, _Site(operands, is_first, metadata, site.depth + 1, site.around), region)
        if root.opcode == "tuple":
            region.tuples.add(root)
        return root

    def _write_region(
        self,
        part: Instruction,
        operands: Sequence[Instruction],
        site: _Site,
        region: _Region,
        numbers: dict[Instruction, int],
    ) -> Instruction:
        """Append an instruction of a manual region: its body, or calls at its border, behind a tuple for several."""
        call = self._regions.by_instruction[part].call
        number = numbers.get(call)
        if number is None:
            number = numbers[call] = self._region_count
            self._region_count += 1
        if part is call:
            return self._inline(call, operands, replace(site, around=number), region)
        borders = self._regions.write_border(part, operands, number, site.around)
        for place, border in enumerate(borders):
            if place or not site.is_first:
                border.name = self._names.register(part.name)
            region.instructions.append(border)
        if isinstance(part.shape, ArrayShape):
            return borders[0]
        shape = TupleShape(tuple(border.shape for border in borders))
        together = Instruction(self._names.register(part.name), "tuple", shape, tuple(borders), line=part.line)
        region.instructions.append(together)
        region.tuples.add(together)
        return together

    def _copy(self, instruction: Instruction, operands: Sequence[Instruction], site: _Site) -> Instruction:
        """The instruction on copied operands. It keeps its name where its function is written out first."""
        self._size += 1
        copy = copy_of(instruction, operands, is_root=False)
        if not site.is_first:
            copy.name = self._names.register(instruction.name)
        if site.metadata is not None:
            copy.attributes["metadata"] = site.metadata
        if not _REGIONS.isdisjoint(instruction.called):
            copy.called = {
                name: tuple(self.region(callee, site.depth + 1, site.metadata, site.around) for callee in callees)
                for name, callees in instruction.called.items()
            }
            for name, callees in copy.called.items():
                copy.attributes[name] = with_callee_names(instruction.attributes[name], callees)
        return copy


def with_callee_names(attribute: Attribute, computations: Sequence[Computation]) -> Attribute:
    """The attribute with the names of `computations` in place of its own."""
    names = tuple(computation.name for computation in computations)
    if names == attribute.value:
        return attribute
    text = ", ".join(f"%{name}" for name in names)
    return Attribute(attribute.name, f"{{{text}}}" if attribute.text.startswith("{") else text, names)


def _without_unread(region: _Region, root: Instruction) -> list[Instruction]:
    """The instructions without unused root tuples of inlined calls."""
    if not region.tuples:
        return region.instructions
    used = {root}
    for instruction in region.instructions:
        used.update(instruction.operands)
    unread = region.tuples - used
    return [instruction for instruction in region.instructions if instruction not in unread]


def _uniquer(names: Iterable[str]) -> NameUniquer:
    uniquer = NameUniquer()
    for name in names:
        uniquer.register(name)
    return uniquer


def callees_first(entry: Computation) -> list[Computation]:
    """Every computation reachable from `entry`, callees before callers, `entry` last."""
    done: dict[Computation, None] = {}
    stack = [(entry, False)]
    while stack:
        computation, is_finished = stack.pop()
        if is_finished:
            done.setdefault(computation)
        elif computation not in done:
            stack.append((computation, True))
            callees = [callee for i in computation.instructions for called in i.called.values() for callee in called]
            stack += [(callee, False) for callee in reversed(callees) if callee not in done]
    return list(done)
