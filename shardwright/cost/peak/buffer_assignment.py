"""Buffers of a program's values, and the lifetime of each.

XLA's buffer assignment, in the parts that decide the peak:

- views share their source's buffer;
- a kernel may overwrite a dead operand of equal size, if each element is read only to compute the element at the same
  place;
- a loop's carried values are updated in place.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from shardwright.cost.opcodes import COPYING, ELEMENTWISE, IN_PLACE
from shardwright.cost.peak.all_reduce_combiner import combine_reductions, limits_of
from shardwright.cost.peak.bf16_propagation import round_for_products
from shardwright.cost.peak.copy_insertion import find_copied_arguments, find_overwrites
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.fusion import Kernels, fuse
from shardwright.cost.peak.inline import first_leaf
from shardwright.cost.peak.schedule import ScheduleStep, schedule
from shardwright.cost.profiles import HardwareProfile
from shardwright.hlo import Instruction
from shardwright.hlo.shapes import TupleShape

#: A kernel is elementwise if its root is; `Kernels.reads` covers the fused nodes.
_OVERWRITING = ELEMENTWISE | {"bitcast", "reshape", "copy"}


@dataclass(slots=True, kw_only=True)
class Buffers:
    """Storage of one computation; positions index `order`.

    owners: (node, leaf) of each buffer's value.
    size_bytes: per buffer; 0 for the caller's memory (parameters, results).
    starts / ends: first and last live position; `ends` precedes `starts` for a value in another's memory.
    follows: buffer → the earlier buffer that its value overwrites.
    free: (bytes, first, last position) of arguments that are empty meanwhile.
    where: per node, the buffer of each leaf; empty for nodes that are not stored.
    """

    order: list[ScheduleStep]
    owners: list[tuple[int, int]] = field(default_factory=list)
    size_bytes: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    follows: dict[int, int] = field(default_factory=dict)
    free: list[tuple[int, int, int]] = field(default_factory=list)
    where: list[tuple[int, ...]] = field(default_factory=list)

    def lifetimes(self) -> Iterator[tuple[int, int, int]]:
        """(bytes, first, last position) of each piece of memory, over all values that share it in turn."""
        starts: dict[int, int] = {}
        written_over = set(self.follows.values())
        for buffer, size in enumerate(self.size_bytes):
            if not size:
                continue
            before = self.follows.get(buffer)
            starts[buffer] = self.starts[buffer] if before is None else starts[before]
            if buffer not in written_over:
                yield size, starts[buffer], self.ends[buffer]


def assign_buffers(
    program: DeviceProgram,
    profile: HardwareProfile,
    *,
    donated: Mapping[int, int] | None = None,
    in_order: str | None = None,
) -> Buffers:
    """Fuse, schedule and allocate a program with a profile's compiler.

    donated: per parameter node, the node whose value overwrites it. in_order: one of the possible orders of the
        compiler's schedule, in place of the schedule itself.
    """
    compiler = profile.compiler
    if compiler.runs("products_read_bf16"):
        round_for_products(program)
    kernels = fuse(program, compiler)
    together = combine_reductions(program, limits_of(profile))
    order = schedule(program, kernels, in_order or compiler.schedule, together)
    in_place = IN_PLACE | {"all-reduce"} if compiler.runs("reduces_in_place") else IN_PLACE
    buffers = allocate(program, kernels, order, in_place)
    if compiler.schedule == "breadth-first":
        _copy_early(program, buffers)
    if compiler.runs("merges_loops"):
        _fill_together(program, buffers)
    if donated and compiler.runs("fills_donated"):
        _free_donated(program, kernels, buffers, donated)
    if donated and compiler.runs("copies_turned"):
        _keep_apart(program, kernels, buffers, donated.values())
    if donated and compiler.runs("copies_donated"):
        _copy_arguments(program, kernels, buffers, donated)
    return buffers


def _copy_early(program: DeviceProgram, buffers: Buffers) -> None:
    """Start each copy of a value updated in place (it has other readers) directly after its source.

    After CopyInsertion, which precedes scheduling: a copy depends on nothing else.
    """
    for buffer, (node, leaf) in enumerate(buffers.owners):
        if program.opcodes[node] not in COPYING or buffer in buffers.follows or not buffers.size_bytes[buffer]:
            continue
        sources = [source_buffer for operand in program.operands[node] for source_buffer in buffers.where[operand]]
        if leaf < len(sources):
            buffers.starts[buffer] = min(buffers.starts[buffer], buffers.starts[sources[leaf]] + 1)


def _fill_together(program: DeviceProgram, buffers: Buffers) -> None:
    """Start arrays of equal shape together that are filled with one scalar and then updated in place.

    After MultiOutputFusion of XLA:GPU (xla/service/gpu/transforms/multi_output_fusion.cc): fills are siblings with a
    common operand, written by one kernel. All gradients of embeddings of equal shape begin as zeros at once.
    """
    groups: dict[Hashable, list[int]] = {}
    for buffer, (node, _) in enumerate(buffers.owners):
        if program.opcodes[node] in COPYING and program.operands[node] and buffers.size_bytes[buffer]:
            fill = program.operands[node][0]
            constant = program.constant_of(fill)
            if constant is not None and program.opcodes[fill] == "broadcast":
                key = (program.instructions[constant].payload, program.elements[node], program.sizes_bytes[node])
                groups.setdefault(key, []).append(buffers.follows.get(buffer, buffer))
    for group in groups.values():
        begin = min(buffers.starts[buffer] for buffer in group)
        for buffer in group:
            buffers.starts[buffer] = begin


def _free_donated(program: DeviceProgram, kernels: Kernels, buffers: Buffers, donated: Mapping[int, int]) -> None:
    """Free donated arguments between their last reader and the write."""
    position = {node: i for i, step in enumerate(buffers.order) for node in step}
    for parameter, readers, writer in find_overwrites(program, kernels, donated):
        last = max((position[reader] for reader in readers), default=-1)
        if last + 1 < position[writer]:
            buffers.free.append((sum(program.sizes_bytes[parameter]), last + 1, position[writer] - 1))


def _keep_apart(program: DeviceProgram, kernels: Kernels, buffers: Buffers, results: Iterable[int]) -> None:
    """Add buffers of results written over arguments by a kernel that transposes its input: it cannot overwrite, and a
    copy follows it. Results computed from one transposed value are computed together.
    """
    position = {node: i for i, step in enumerate(buffers.order) for node in step}
    made_of: dict[int, list[int]] = {}
    places = {node for node in results if node in position}
    for node in sorted(places, key=position.__getitem__):
        for turned in _find_transposed_in_kernel(program, kernels, node, places):
            made_of.setdefault(turned, []).append(node)
    for nodes in made_of.values():
        buffers.owners.append((nodes[0], 0))
        buffers.size_bytes.append(sum(sum(program.sizes_bytes[node]) for node in nodes))
        buffers.starts.append(position[nodes[0]])
        buffers.ends.append(position[nodes[0]])


def _find_transposed_in_kernel(
    program: DeviceProgram, kernels: Kernels, node: int, results: Collection[int]
) -> Iterator[int]:
    """The transposed values inside a multi-result kernel, on the way to one of its results.

    Matrices excluded: a product makes them in either order.
    """
    todo, seen = [node], {node}
    while todo:
        for operand in program.operands[todo.pop()]:
            if operand in seen or (kernels.is_stored[operand] and operand not in results):
                continue
            seen.add(operand)
            if program.opcodes[operand] == "transpose" and program.rank(operand) > 2:
                yield operand
            else:
                todo.append(operand)


def _copy_arguments(program: DeviceProgram, kernels: Kernels, buffers: Buffers, donated: Mapping[int, int]) -> None:
    """Add copies of parameters, live from the start until their last readers; the parameters are free until
    overwritten.
    """
    position = {node: i for i, step in enumerate(buffers.order) for node in step}
    for parameter, readers, writer in find_copied_arguments(program, kernels, buffers.order, donated):
        size = sum(program.sizes_bytes[parameter])
        buffers.owners.append((parameter, 0))
        buffers.size_bytes.append(size)
        buffers.starts.append(0)
        buffers.ends.append(max(position[reader] for reader in readers))
        buffers.free.append((size, 1, position[writer] - 1))


def allocate(
    program: DeviceProgram,
    kernels: Kernels,
    order: list[ScheduleStep],
    in_place: Collection[str] = IN_PLACE,
) -> Buffers:
    """Buffers of a computation; its parameters and results belong to its caller.

    in_place: opcodes whose results may overwrite an operand of any shape.
    """
    buffers = Buffers(order=order, where=[()] * len(program.opcodes))
    position = {node: i for i, step in enumerate(order) for node in step}
    for node, is_kept in enumerate(kernels.is_stored):
        if is_kept:
            _place(program, kernels, buffers, node, position[node])
    where, ends = buffers.where, buffers.ends
    for node, i in position.items():
        for source in kernels.reads[node]:
            for buffer in where[source]:
                if ends[buffer] < i:
                    ends[buffer] = i
    _free_callers_buffers(program, buffers)
    for node, i in position.items():
        if not kernels.is_view[node] and not kernels.is_library[node]:
            _reuse_operands(program, kernels, buffers, node, i, in_place)
    return buffers


def _place(program: DeviceProgram, kernels: Kernels, buffers: Buffers, node: int, position: int) -> None:
    instruction = program.instructions[node]
    operand_buffers = [buffer for operand in program.operands[node] for buffer in buffers.where[operand]]
    if kernels.is_view[node]:
        first = 0
        if program.opcodes[node] == "get-tuple-element":
            shape = program.instructions[program.operands[node][0]].shape
            assert isinstance(shape, TupleShape)
            first = first_leaf(shape, instruction.index)
        buffers.where[node] = tuple(operand_buffers[first : first + len(program.sizes_bytes[node])])
        return
    unchanged = invariant_leaves(instruction) if program.opcodes[node] == "while" else set()
    leaves = []
    for leaf, size in enumerate(program.sizes_bytes[node]):
        if leaf in unchanged:
            leaves.append(operand_buffers[leaf])
            continue
        leaves.append(len(buffers.owners))
        buffers.owners.append((node, leaf))
        buffers.size_bytes.append(0 if program.opcodes[node] == "constant" else size)
        buffers.starts.append(position)
        buffers.ends.append(position)
    buffers.where[node] = tuple(leaves)


def _free_callers_buffers(program: DeviceProgram, buffers: Buffers) -> None:
    for node in (*program.parameters, program.root):
        for buffer in buffers.where[node]:
            buffers.size_bytes[buffer] = 0
    last = len(buffers.order) - 1
    for buffer in buffers.where[program.root]:
        buffers.ends[buffer] = last


def _reuse_operands(
    program: DeviceProgram, kernels: Kernels, buffers: Buffers, node: int, position: int, in_place: Collection[str]
) -> None:
    """Let results take over the buffers of operands that die here: those end one position earlier."""
    reusable = list(_reusable(program, kernels, buffers, node, position, in_place))
    for buffer in buffers.where[node]:
        size = buffers.size_bytes[buffer]
        if buffers.owners[buffer][0] != node or not size:
            continue
        old = next((candidate for candidate in reusable if buffers.size_bytes[candidate] == size), None)
        if old is not None:
            reusable.remove(old)
            buffers.ends[old] = position - 1
            buffers.follows[buffer] = old


def _reusable(
    program: DeviceProgram, kernels: Kernels, buffers: Buffers, node: int, position: int, in_place: Collection[str]
) -> Iterator[int]:
    opcode = program.opcodes[node]
    if opcode not in in_place and opcode not in _OVERWRITING:
        return
    starts, ends = buffers.starts, buffers.ends
    for source, aligned in kernels.reads[node].items():
        dying = [buffer for buffer in buffers.where[source] if ends[buffer] == position and starts[buffer] < position]
        if not dying or (opcode == "while" and source != program.operands[node][0]):
            continue  # hoisted values are read in every iteration
        if opcode in in_place or (aligned and _has_equal_shape(program, kernels, node, source)):
            yield from dying


def _has_equal_shape(program: DeviceProgram, kernels: Kernels, node: int, source: int) -> bool:
    """Whether both have one shape in XLA: a condition of overwriting, besides not being a view.

    After HloDataflowAnalysis::CanShareOperandBufferWithUser (xla/hlo/analysis/hlo_dataflow_analysis.cc).
    """
    ours, theirs = (program.instructions[number].shape.leaves for number in (node, source))
    is_same = len(ours) == len(theirs) == 1 and ours[0].dimensions == theirs[0].dimensions
    return is_same and not kernels.is_view[source]


def invariant_leaves(instruction: Instruction) -> set[int]:
    """Leaves passed through a loop unchanged: they stay in their buffer from before the loop."""
    invariant: set[int] = set()
    (body,) = instruction.called["body"]
    first = 0
    for index, value in enumerate(body.root.operands if body.root.opcode == "tuple" else ()):
        count = len(value.shape.leaves)
        is_parameter = value.opcode == "get-tuple-element" and value.operands[0] is body.parameters[0]
        if is_parameter and value.index == index:
            invariant.update(range(first, first + count))
        first += count
    return invariant
