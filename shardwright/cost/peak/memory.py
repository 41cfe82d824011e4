"""Peak bytes on one device: the per-device program's buffers over its schedule."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from shardwright.attention import read_call
from shardwright.cost.attention import written_out_bytes
from shardwright.cost.opcodes import PRODUCTS
from shardwright.cost.peak.buffer_assignment import Buffers, assign_buffers
from shardwright.cost.peak.copy_readers import CopyReader, reader_of
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.device_program_cache import DeviceProgramCache
from shardwright.cost.peak.heap_simulator import Interval, heap_bytes, intervals_outside, peak_time
from shardwright.cost.peak.inline import bodies
from shardwright.cost.peak.lowering import Lowering
from shardwright.cost.peak.memory_space_assignment import select_off_chip
from shardwright.cost.peak.schedule import ScheduleStep, possible_orders
from shardwright.cost.peak.stacked_layouts import DimOrder, orders_read, with_copied_stacks
from shardwright.cost.peak.tile_padding import fill_tiles
from shardwright.cost.profiles import HardwareProfile, hardware_profile
from shardwright.cost.ragged import masked_bytes
from shardwright.hlo import Computation, Module
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.placements import says_of_memory
from shardwright.plans.plan import InstructionPlan, MemorySummary, VariablePlan
from shardwright.plans.shardings import Mesh, TensorSharding


class LiveBuffer(NamedTuple):
    """A buffer live at a program's peak.

    name / leaf: the instruction and array leaf of its value.
    is_added: whether a plan or a compiler adds it to reshard the value; padding before an uneven slice does not count.
    reader: the consumer of a copy made on its behalf, or None.
    """

    name: str
    leaf: int
    is_added: bool
    size_bytes: int
    reader: CopyReader | None


class MemoryPrediction(NamedTuple):
    """Memory of a program on one device.

    held: buffers live at the peak of its temporaries.
    stored: the instruction and array leaf of every value ever in memory, in any sharding.
    """

    summary: MemorySummary
    held: tuple[LiveBuffer, ...]
    stored: frozenset[tuple[str, int]]


def predict_memory(
    module: Module,
    instructions: Iterable[InstructionPlan],
    parameters: Sequence[VariablePlan],
    outputs: Sequence[VariablePlan],
    mesh: Mesh,
    profile: HardwareProfile | None = None,
) -> MemorySummary:
    """Predicted bytes on one device of a planned program: see `predict_memory_and_peak`."""
    return predict_memory_and_peak(module, instructions, parameters, outputs, mesh, profile).summary


def predict_memory_and_peak(
    module: Module,
    instructions: Iterable[InstructionPlan],
    parameters: Sequence[VariablePlan],
    outputs: Sequence[VariablePlan],
    mesh: Mesh,
    profile: HardwareProfile | None = None,
) -> MemoryPrediction:
    """Predicted bytes on one device of a planned program, and the buffers at its peak.

    instructions: one entry per instruction of the entry computation and of the bodies of while, conditional and call;
        an instruction without an entry counts as replicated.
    profile: its compiler's rules apply; by default the CPU's.
    """
    donated = {variable.number: variable.alias for variable in parameters if variable.alias is not None}
    padded = {output.number for output in outputs if output.is_padded}
    estimates = list(_estimates(mesh, instructions, profile or hardware_profile("cpu")))
    for candidate in estimates:
        candidate.donated[module.entry], candidate.padded[module.entry] = donated, padded
    estimate = max(estimates, key=lambda estimate: estimate.peak_bytes(module.entry))
    kept = [variable for variable in outputs if variable.alias is None]
    uses_host = says_of_memory(module)
    summary = MemorySummary(
        arguments_bytes=_variables_bytes(parameters, mesh, is_on_host=False),
        outputs_bytes=_variables_bytes(kept, mesh, is_on_host=False),
        temporaries_bytes=estimate.peak_bytes(module.entry),
        constants_bytes=constants_bytes(module),
        host_arguments_bytes=_variables_bytes(parameters, mesh, is_on_host=True),
        host_outputs_bytes=_variables_bytes(kept, mesh, is_on_host=True),
        host_temporaries_bytes=(
            host_temporaries_bytes(module, instructions, mesh, profile or hardware_profile("cpu")) if uses_host else 0
        ),
    )
    return MemoryPrediction(summary, tuple(estimate.list_live(module.entry)), frozenset(estimate.list_stored()))


def host_temporaries_bytes(
    module: Module, instructions: Iterable[InstructionPlan], mesh: Mesh, profile: HardwareProfile
) -> int:
    """Predicted peak bytes of the values between arguments and results that lie on the host, one device's part: the
    program's schedule, with the sizes of those values alone.
    """
    lowering = Lowering(mesh, {entry.name: entry for entry in instructions}, profile, on_host=True)
    programs = DeviceProgramCache(lowering)
    orders = possible_orders(profile.compiler.schedule)
    return max(_MemoryEstimate(lowering, programs, profile, order).peak_bytes(module.entry) for order in orders)


def constants_bytes(module: Module) -> int:
    """Bytes of a program's constant arrays on each device.

    XLA keeps a constant whole on every device for as long as the program is loaded, also one of which each device reads
    a part: as its own allocation on CPUs, as a global of the kernels on GPUs. Single numbers become part of the code.
    """
    return sum(
        leaf.size_bytes
        for instruction in module.instructions()
        if instruction.opcode == "constant"
        for leaf in instruction.shape.leaves
        if prod(leaf.dimensions) > 1
    )


def temporaries_bytes(
    computations: Iterable[Computation], instructions: Iterable[InstructionPlan], mesh: Mesh, profile: HardwareProfile
) -> tuple[int, ...]:
    """Predicted peak bytes of temporaries on one device, in each of some computations of a planned program; parameters
    and results are the callers'.
    """
    estimates = list(_estimates(mesh, instructions, profile))
    return tuple(max(estimate.peak_bytes(computation) for estimate in estimates) for computation in computations)


def bytes_with_margin(summary: MemorySummary, profile: HardwareProfile) -> int:
    """Bytes a device must have to call a plan feasible: the predicted peak plus a margin on its temporaries.

    The margin is the profile's (`Compiler.margin_bytes`); arguments and outputs are known exactly.
    """
    return summary.peak_bytes + profile.compiler.margin_bytes(summary.temporaries_bytes)


def shard_bytes(element_type: str, shape: tuple[int, ...], sharding: TensorSharding, mesh: Mesh) -> int:
    """Bytes of one device's shard of an array."""
    return (prod(sharding.shard_shape(shape, mesh)) * ELEMENT_BITS[element_type] + 7) // 8


def _variables_bytes(variables: Iterable[VariablePlan], mesh: Mesh, *, is_on_host: bool) -> int:
    """Bytes of one device's parts of those variables that lie on its host, or of those that do not."""
    return sum(
        shard_bytes(variable.element_type, variable.stored_shape, variable.stored_sharding, mesh)
        for variable in variables
        if variable.is_on_host == is_on_host
    )


def _estimates(
    mesh: Mesh, instructions: Iterable[InstructionPlan], profile: HardwareProfile
) -> Iterator[_MemoryEstimate]:
    """One estimate per possible order of the program; the largest counts if the order is unknown."""
    lowering = Lowering(mesh, {entry.name: entry for entry in instructions}, profile)
    programs = DeviceProgramCache(lowering)
    for order in possible_orders(profile.compiler.schedule):
        yield _MemoryEstimate(lowering, programs, profile, order)


class _MemoryEstimate:
    """Memory of programs scheduled in one order (`schedule`)."""

    def __init__(self, lowering: Lowering, programs: DeviceProgramCache, profile: HardwareProfile, order: str) -> None:
        self._lowering = lowering
        self._programs = programs
        self._profile = profile
        self._order = order
        #: Per computation, donated parameter leaf → the output leaf written over it.
        self.donated: dict[Computation, dict[int, int]] = {}
        #: Per computation, output leaves stored padded.
        self.padded: dict[Computation, set[int]] = {}
        self._orders: dict[Computation, dict[int, DimOrder]] = {}
        self._free: dict[Computation, list[Interval]] = {}
        self._known: dict[tuple[Computation, bool], tuple[list[Interval], int]] = {}
        self._parts: dict[tuple[Computation, bool], tuple[DeviceProgram, Buffers, list[int]]] = {}

    def peak_bytes(self, computation: Computation) -> int:
        """Bytes of intermediate values; parameters and results are the caller's."""
        intervals, _ = self._intervals(computation)
        free = self._free.get(computation)
        return heap_bytes(intervals_outside(intervals, free) if free else intervals)

    def list_live(self, computation: Computation) -> Iterator[LiveBuffer]:
        """The buffers live at the peak."""
        intervals, _ = self._intervals(computation)
        if intervals:
            yield from self._list_live_at(computation, peak_time(intervals), is_loop=False)

    def list_stored(self) -> Iterator[tuple[str, int]]:
        """The instruction and array leaf of every value in a buffer, over the computations estimated."""
        for program, buffers, _ in self._parts.values():
            for (node, leaf), size in zip(buffers.owners, buffers.size_bytes, strict=True):
                if size:
                    yield program.instructions[node].name, leaf

    def _list_live_at(self, computation: Computation, time: int, *, is_loop: bool) -> Iterator[LiveBuffer]:
        program, buffers, begins = self._parts[computation, is_loop]
        at, users = bisect_right(begins, time) - 1, program.users()
        for (node, leaf), size, start, end in zip(
            buffers.owners, buffers.size_bytes, buffers.starts, buffers.ends, strict=True
        ):
            if size and start <= at <= end:
                instruction = program.instructions[node]
                is_added = program.opcodes[node] not in (instruction.opcode, "pad")
                yield LiveBuffer(instruction.name, leaf, is_added, size, reader_of(program, users, node))
        step = buffers.order[at] if at < len(buffers.order) else ()  # a longer body runs in parallel
        for body, repeats in _bodies(program, step):
            yield from self._list_live_at(body, time - begins[at], is_loop=repeats)

    def _intervals(self, computation: Computation, *, is_loop: bool = False) -> tuple[list[Interval], int]:
        """Lifetimes of the buffers of a computation and its bodies, and its duration."""
        key = (computation, is_loop)
        if key not in self._known:
            self._known[key] = self._build_intervals(computation, is_loop)
        return self._known[key]

    def _orders_read(self, body: Computation) -> dict[int, DimOrder]:
        if body not in self._orders:
            self._orders[body] = orders_read(self._programs.of(body, is_loop=True), self._orders_read)
        return self._orders[body]

    def _build_intervals(self, computation: Computation, is_loop: bool) -> tuple[list[Interval], int]:
        program = self._programs.of(computation, is_loop=is_loop)
        if self._profile.compiler.runs("copies_gathered"):
            program = with_copied_stacks(program, self._orders_read)
        if self.padded.get(computation):
            program = _with_padding(program, self.padded[computation])
        if self._profile.compiler.runs("copies_relayouts"):
            fill_tiles(program, self._lowering.lengths)
        donated = _nodes_of_donated(program, self.donated.get(computation, {}))
        buffers = assign_buffers(program, self._profile, donated=donated, in_order=self._order)
        intervals: list[Interval] = []
        has_kernels = not self._lowering.on_host  # what kernels need besides lies on the device
        workspace = self._profile.compiler.product_workspace_bytes if has_kernels else 0
        begins = [0]  # time of each position; a step lasts as long as its longest body
        for step in buffers.order:
            duration = 1
            for body, repeats in _bodies(program, step):
                inner, takes = self._intervals(body, is_loop=repeats)
                intervals += [Interval(size, begins[-1] + start, begins[-1] + end) for size, start, end in inner]
                duration = max(duration, takes)
            if workspace and any(program.opcodes[node] in PRODUCTS for node in step):
                intervals.append(Interval(workspace, begins[-1], begins[-1]))
            held = max((self._held_bytes(program, node) for node in step), default=0)
            if held and has_kernels:
                intervals.append(Interval(held, begins[-1], begins[-1] + duration - 1))
            begins.append(begins[-1] + duration)

        def to_intervals(pieces: Iterable[tuple[int, int, int]]) -> list[Interval]:
            return [Interval(size, begins[start], begins[end + 1] - 1) for size, start, end in pieces]

        intervals += to_intervals(select_off_chip(buffers.lifetimes(), self._profile.compiler.chip_memory_bytes))
        self._free[computation] = to_intervals(buffers.free)
        self._parts[computation, is_loop] = program, buffers, begins
        return intervals, begins[-1]

    def _held_bytes(self, program: DeviceProgram, node: int) -> int:
        """Bytes that a node holds while it runs: the scores of attention that is written out, rows once per group."""
        if program.opcodes[node] == "ragged-dot":
            sizes = [program.sizes_bytes[operand][0] for operand in program.operands[node]]
            return masked_bytes(program.instructions[node], sizes, self._profile)
        if program.opcodes[node] != "custom-call":
            return 0
        call = read_call(program.instructions[node])
        return 0 if call is None else written_out_bytes(call, program.sizes_bytes[node][0], self._profile)


def _nodes_of_donated(program: DeviceProgram, donated: Mapping[int, int]) -> dict[int, int]:
    """`donated` by nodes of a program, over single-array parameters and outputs."""
    if not donated or program.opcodes[program.root] != "tuple":
        return {}
    outputs = program.operands[program.root]
    if any(len(program.sizes_bytes[node]) != 1 for node in (*program.parameters, *outputs)):
        return {}
    numbers = {program.instructions[node].index: node for node in program.parameters}
    return {numbers[leaf]: outputs[output] for leaf, output in donated.items()}


def _with_padding(program: DeviceProgram, padded: Collection[int]) -> DeviceProgram:
    """The program with zeros added to outputs stored padded; other readers read the unpadded value."""
    outputs = program.operands[program.root]
    if program.opcodes[program.root] != "tuple" or any(len(program.sizes_bytes[node]) != 1 for node in outputs):
        return program
    program = program.copy()
    last, operands = program.root, list(outputs)
    for leaf in padded:
        node = operands[leaf]
        sizes, elements = program.sizes_bytes[node], program.elements[node]
        operands[leaf] = program.add("select", program.instructions[node], (node,), sizes, elements)
        program.marks[operands[leaf]] = ("padded",)
    sizes, elements = program.sizes_bytes[last], program.elements[last]
    program.root = program.add("tuple", program.instructions[last], tuple(operands), sizes, elements)
    return program.without_dead()


def _bodies(program: DeviceProgram, step: ScheduleStep) -> Iterator[tuple[Computation, bool]]:
    """The computations called by a step, and whether it repeats them."""
    for node in step:
        opcode = program.opcodes[node]
        if opcode == program.instructions[node].opcode:  # not added by a plan
            for body in bodies(program.instructions[node]):
                yield body, opcode == "while"
