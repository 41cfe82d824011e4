"""Per-device program of a plan, for memory prediction: shards, plus added instructions.

A plan adds collectives and slices: at operands used in another sharding, and at reductions of partial sums. Compilers
add conversions and copies (`Compiler` in the hardware profile). Readers with equal needs share one added node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import NamedTuple

from shardwright.cost.convolution import batch_groups, convolution_orders
from shardwright.cost.moves.reshard import reshard
from shardwright.cost.moves.reshard_cache import Move
from shardwright.cost.opcodes import ANY_TYPE, IDENTITIES, MARKER_TARGETS, PRODUCTS
from shardwright.cost.peak.all_reduce_combiner import all_reduce_mark
from shardwright.cost.peak.cse import EqualValues, eliminate_duplicates
from shardwright.cost.peak.device_program import DeviceProgram
from shardwright.cost.peak.dot_decomposer import (
    REORDERED,
    DimensionGroups,
    broadcast_orders,
    has_other_dimensions,
    is_elementwise_dot,
    needs_operand_copy,
    operand_orders,
)
from shardwright.cost.peak.gather_layouts import GATHERED
from shardwright.cost.peak.inline import FlatComputation
from shardwright.cost.peak.layout_assignment import copy_transposed_arguments
from shardwright.cost.peak.padding_masks import dims_to_mask, is_counted_in_group
from shardwright.cost.peak.scatter_expander import scatter_into_terms, select_by_indices, writes_one_a_row
from shardwright.cost.peak.simplify_divide import OWN_BROADCAST, multiply_by_inverses
from shardwright.cost.peak.simplify_minmax import simplify_limits
from shardwright.cost.peak.stacked_layouts import gather_mark
from shardwright.cost.profiles import HardwareProfile
from shardwright.cost.rounding import rounds_operand
from shardwright.hlo import Instruction
from shardwright.hlo.shapes import ELEMENT_BITS, ArrayShape
from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh, TensorSharding, ValueSharding

#: Opcode of a device's slice of a value it has.
_SLICE = "dynamic-slice"

#: Marks of products whose dimensions differ from their kernels': in any way, or in added ones of one element.
_RESHAPED, _LENGTHENED = ("reshaped",), ("lengthened",)


class Lowering:
    """Builds the per-device programs of one plan.

    plans: by instruction name; an instruction without an entry counts as replicated.
    profile: its compiler's rules apply. on_host: whether sizes are those of values in the host's memory, all others 0;
        otherwise those of values in the device's.
    """

    def __init__(
        self, mesh: Mesh, plans: Mapping[str, InstructionPlan], profile: HardwareProfile, *, on_host: bool = False
    ) -> None:
        self.on_host = on_host
        self.mesh = mesh
        self.plans = plans
        self.profile = profile
        self._shards: dict[tuple[int, int], _Shard] = {}

    def program(self, flat: FlatComputation) -> DeviceProgram:
        """The per-device program of a computation."""
        return _ComputationLowering(self, flat).run()

    def result_of(self, instruction: Instruction) -> ValueSharding:
        """Sharding of an instruction's result."""
        plan = self.plans.get(instruction.name)
        if plan is not None:
            return plan.result
        return tuple(TensorSharding.replicated(leaf.rank) for leaf in instruction.shape.leaves)

    def lengths(self, instruction: Instruction) -> tuple[int, ...]:
        """Dimensions of one device's part of an instruction's only array."""
        (leaf,), (sharding,) = instruction.shape.leaves, self.result_of(instruction)
        return sharding.shard_shape(leaf.dimensions, self.mesh)

    def shard(self, shape: ArrayShape, sharding: TensorSharding) -> tuple[int, int]:
        """Bytes and elements of one device's shard."""
        key = (id(shape), id(sharding))  # hashing contents would dominate the time
        shard = self._shards.get(key)
        if shard is None:
            elements = prod(sharding.shard_shape(shape.dimensions, self.mesh))
            size_bytes = (elements * ELEMENT_BITS[shape.element_type] + 7) // 8
            shard = _Shard(shape, sharding, size_bytes if shape.is_on_host == self.on_host else 0, elements)
            self._shards[key] = shard
        return shard.size_bytes, shard.elements


class _Shard(NamedTuple):
    """Size of a shard. References shape and sharding: their identities are its key."""

    shape: ArrayShape
    sharding: TensorSharding
    size_bytes: int
    elements: int


class _ComputationLowering:
    """Lowers one computation to a device's program."""

    def __init__(self, lowering: Lowering, flat: FlatComputation) -> None:
        self.lowering = lowering
        self.flat = flat
        self.compiler = lowering.profile.compiler
        self.program = DeviceProgram()
        self.results = [lowering.result_of(instruction) for instruction in flat.instructions]
        self.made: list[int] = []  # per node, the program's node of its final result
        self.added: dict[object, int] = {}
        self.widens = self.compiler.runs("computes_bf16_in_f32") and any(map(_is_bf16, flat.instructions))

    def run(self) -> DeviceProgram:
        equal = EqualValues() if self.compiler.runs("merges_before_partitioning") else None
        for node, instruction in enumerate(self.flat.instructions):
            first = node if equal is None else equal.first(node, instruction, self.flat.operands[node])
            if self.results[first] != self.results[node]:
                self.made.append(self._reshard_through_shared(first, self.results[node]))
                continue
            operands = self._operands(node, instruction)
            self.made.append(self._result(instruction, operands, self.results[node]))
            if instruction.opcode == "parameter":
                self.program.parameters.append(self.made[-1])
        self.program.root = self.made[self.flat.root]
        scatter_into_terms(self.program)
        simplify_limits(self.program)
        program = eliminate_duplicates(self.program)
        if self.compiler.runs("turns_arguments"):
            program = copy_transposed_arguments(program)
        return multiply_by_inverses(program) if self.compiler.runs("inverts_divisors") else program

    def _get_or_add(self, key: object, make: Callable[[], int]) -> int:
        """The node added under `key`, made on its first use."""
        if key not in self.added:
            self.added[key] = make()
        return self.added[key]

    # ---- operands ----------------------------------------------------------------

    def _operands(self, node: int, instruction: Instruction) -> tuple[int, ...]:
        operands = self.flat.operands[node]
        used = [self.made[operand] for operand in operands]
        plan = self.lowering.plans.get(instruction.name)
        if plan is not None and instruction.opcode not in ("parameter", "get-tuple-element"):
            for i, (operand, wanted) in enumerate(zip(operands, plan.operands, strict=True)):
                if self.results[operand] != wanted:
                    used[i] = self._reshard_through_shared(operand, wanted)
            if instruction.opcode in PRODUCTS or instruction.opcode == "reduce":
                used = self._mask_padding(instruction, operands, used, [leaf for (leaf,) in plan.operands])
        if self.widens and self._computes_in_f32(instruction):
            pairs = zip(operands, used, strict=True)
            used = [self._to_f32(self.flat.instructions[operand], operand_node) for operand, operand_node in pairs]
        if instruction.opcode == "dot" and self.compiler.runs("folds_transposes"):
            used = [self._before_transpose(operand_node) for operand_node in used]
        if (
            instruction.opcode == "dot"
            and self.compiler.runs("copies_dot_operands")
            and not self._is_elementwise_dot(instruction)
        ):
            orders = operand_orders(instruction, self._lengths(instruction))
            for i, (opcode, order) in enumerate(orders):
                if opcode:
                    used[i] = self._reorder_dims(self.flat.instructions[operands[i]], used[i], opcode, order)
        if instruction.opcode in PRODUCTS and self.compiler.runs("products_read_bf16"):
            used = [
                self._round_element(operand, operand_node) if rounds_operand(instruction, i) else operand_node
                for i, (operand, operand_node) in enumerate(zip(operands, used, strict=True))
            ]
        if (
            instruction.opcode == "divide"
            and self.compiler.runs("copies_dot_operands")
            and self._had_fewer_dimensions(used[0])
        ):
            used[1] = self._add_own_broadcast(used[1])
        if instruction.opcode == "convolution" and self.compiler.runs("copies_dot_operands"):
            for i, wanted_order in enumerate(convolution_orders(instruction.get("dim_labels"))[:2]):
                if not _is_natural(wanted_order):
                    source = self.flat.instructions[operands[i]]
                    turned = partial(self._add_like, "transpose", source, used[i], mark=wanted_order)
                    used[i] = self._get_or_add((used[i], wanted_order), turned)
        if instruction.opcode == "convolution" and self.compiler.runs("turns_convolved"):
            used = [self._channels_first(instruction, i, operand_node) for i, operand_node in enumerate(used)]
        return tuple(used)

    def _before_transpose(self, node: int) -> int:
        """The operand of a matrix transpose; any other node itself."""
        program = self.program
        is_turned = program.opcodes[node] == "transpose" and program.instructions[node].shape.leaves[0].rank == 2
        return program.operands[node][0] if is_turned else node

    def _channels_first(self, instruction: Instruction, number: int, node: int) -> int:
        """A copy of a convolution's operand with channels ahead of space, if it comes from a program argument (fixed
        layout). A reversed kernel is read backwards from that copy.
        """
        program, dims = self.program, instruction.get("dim_labels")
        order = (dims.input_batch, dims.input_feature, *dims.input_spatial)
        if number:
            order = (dims.kernel_output_feature, dims.kernel_input_feature, *dims.kernel_spatial)
        while program.opcodes[node] == "reverse":
            (node,) = program.operands[node]
            order = (order[1], order[0], *order[2:])
        source = node
        while program.opcodes[source] in ("all-gather", _SLICE):
            source = program.operands[source][0]
        if program.opcodes[source] != "parameter" or _is_natural(order):
            return node
        turned = partial(self._add_like, "transpose", program.instructions[node], node, mark=order)
        return self._get_or_add((node, "channels first"), turned)

    def _reorder_dims(self, source: Instruction, node: int, opcode: str, order: DimensionGroups) -> int:
        """A dot's operand with its dimensions in order. The operand of a transpose is read directly, in the composed
        order, possibly its own (AlgebraicSimplifierVisitor::HandleTranspose).
        """
        program = self.program
        before = program.instructions[node].get("dimensions")
        if opcode == "transpose" == program.opcodes[node] and node not in program.marks:
            order = tuple(tuple(before[dim] for dim in group) for group in order)
            (node,) = program.operands[node]
            if _is_natural(sum(order, ())):
                opcode = "bitcast"
                while program.opcodes[node] in IDENTITIES and node not in program.marks:  # one bitcast covers all
                    (node,) = program.operands[node]
        return self._get_or_add((node, order), partial(self._add_like, opcode, source, node, mark=order))

    def _round_element(self, operand: int, node: int) -> int:
        """A product's operand from a tuple element: a loop-invariant one is rounded ahead of the loop."""
        source = self.flat.instructions[operand]
        is_wide = source.shape.leaves[0].element_type == "f32"
        if source.opcode != "get-tuple-element" or not is_wide or node != self.made[operand]:
            return node
        return self._get_or_add((node, "bf16"), partial(self._add_like, "convert", source, node, 0.5))

    def _mask_padding(
        self, instruction: Instruction, operands: Sequence[int], used: list[int], shardings: Sequence[TensorSharding]
    ) -> list[int]:
        """The operands with padding masked along reduced dimensions."""
        masked = list(used)
        for i, node in enumerate(used):
            dims = dims_to_mask(instruction, i, shardings, self.lowering.mesh)
            if dims:
                in_group = is_counted_in_group(instruction, shardings)
                masked[i] = self._apply_mask(self.flat.instructions[operands[i]], node, shardings[i], dims, in_group)
        return masked

    def _apply_mask(
        self, source: Instruction, node: int, sharding: TensorSharding, dims: tuple[int, ...], in_group: bool
    ) -> int:
        program = self.program
        elements = program.elements[node]
        shard = sharding.shard_shape(source.shape.leaves[0].dimensions, self.lowering.mesh)
        mark = ("mask", shard, dims, in_group)
        mask = self._get_or_add(mark, partial(program.add, "compare", source, (), (elements,), elements))
        program.marks[mask] = mark
        return program.add("select", source, (mask, node), program.sizes_bytes[node], elements)

    def _had_fewer_dimensions(self, node: int) -> bool:
        """Whether a value comes from a product whose kernel drops dimensions of one element."""
        while self.program.opcodes[node] == "convert":
            (node,) = self.program.operands[node]
        return self.program.marks.get(node) == _LENGTHENED

    def _add_own_broadcast(self, node: int) -> int:
        """Divisor of such a quotient: XLA makes a separate broadcast of a broadcast divisor."""
        program = self.program
        if program.opcodes[node] != "broadcast":
            return node
        sizes, elements = program.sizes_bytes[node], program.elements[node]
        broadcast = program.add("broadcast", program.instructions[node], program.operands[node], sizes, elements)
        program.marks[broadcast] = OWN_BROADCAST
        return broadcast

    def _reshard_through_shared(self, operand: int, goal: ValueSharding) -> int:
        """An operand in another sharding, through the layout shared by its readers."""
        source, start = self.made[operand], self.results[operand]
        plan = self.lowering.plans.get(self.flat.instructions[operand].name)
        if plan is not None and plan.shared:
            shared = tuple(plan.source_of(leaf, sharding) for leaf, sharding in enumerate(goal))
            if shared not in (start, goal):
                source = self._get_or_add(
                    (operand, shared), partial(self._reshard_operand, operand, source, start, shared)
                )
                start = shared
        return self._get_or_add((operand, goal), partial(self._reshard_operand, operand, source, start, goal))

    def _reshard_operand(self, operand: int, program_node: int, start: ValueSharding, goal: ValueSharding) -> int:
        """An operand in another sharding; in a tuple, only the differing elements are moved."""
        source = self.flat.instructions[operand]
        if source.opcode != "tuple":
            return self._reshard_value(source, program_node, start, goal)
        elements = []
        first = 0
        for element, node in zip(self.flat.operands[operand], self.program.operands[program_node], strict=True):
            instruction = self.flat.instructions[element]
            leaves = slice(first, first + len(instruction.shape.leaves))
            first = leaves.stop
            if start[leaves] == goal[leaves]:
                elements.append(node)
            else:
                move = partial(self._reshard_value, instruction, node, start[leaves], goal[leaves])
                elements.append(self._get_or_add((node, goal[leaves]), move))
        return self._add("tuple", source, tuple(elements), goal)

    def _computes_in_f32(self, instruction: Instruction) -> bool:
        return instruction.opcode not in ANY_TYPE and any(map(_is_bf16, (instruction, *instruction.operands)))

    def _to_f32(self, instruction: Instruction, node: int) -> int:
        if not _is_bf16(instruction):
            return node
        return self._get_or_add((node, "f32"), partial(self._add_f32_convert, instruction, node))

    def _add_f32_convert(self, instruction: Instruction, node: int) -> int:
        if self.program.opcodes[node] != "broadcast":
            return self._add_like("convert", instruction, node, 2)
        # XLA converts a broadcast's operand, not its result.
        (size,) = self.program.sizes_bytes[node]
        operands, elements = self.program.operands[node], self.program.elements[node]
        return self.program.add("broadcast", instruction, operands, (2 * size,), elements)

    def _add_like(
        self, opcode: str, instruction: Instruction, node: int, factor: float = 1, mark: tuple[object, ...] = ()
    ) -> int:
        """A value with a node's number of elements, each `factor` times as wide; mark: its other key."""
        sizes = tuple(int(size * factor) for size in self.program.sizes_bytes[node])
        added = self.program.add(opcode, instruction, (node,), sizes, self.program.elements[node])
        self.program.marks[added] = mark
        return added

    # ---- results -----------------------------------------------------------------

    def _result(self, instruction: Instruction, operands: tuple[int, ...], result: ValueSharding) -> int:
        opcode = instruction.opcode
        if opcode == "custom-call" and instruction.get("custom_call_target") in MARKER_TARGETS:
            opcode = "bitcast"
        plan = self.lowering.plans.get(instruction.name)
        summed = plan.partial if plan is not None else ()
        local = tuple(_before_reduction(sharding, summed) for sharding in result) if summed else result
        if self.compiler.runs("scatters_compare") and writes_one_a_row(self.program, instruction, operands):
            node = self._add_index_select(instruction, operands, local)
        elif self.compiler.runs("expands_select_and_scatter") and opcode == "select-and-scatter":
            node = select_by_indices(self.program, instruction, operands)
        elif self._is_elementwise_dot(instruction):
            node = self._add_multiply(instruction, operands, local)
        else:
            node = self._add(opcode, instruction, operands, local)
            if opcode == "dot" and needs_operand_copy(instruction, self._lengths(instruction)):
                self.program.marks[node] = REORDERED
        is_wide = self.widens and self._computes_in_f32(instruction) and _is_bf16(instruction)
        if is_wide:
            self.program.sizes_bytes[node] = tuple(2 * size for size in self.program.sizes_bytes[node])
        if self.compiler.runs("copies_dot_operands") or (self.compiler.runs("folds_transposes") and opcode == "dot"):
            node = self._restore_order(instruction, self._expand_batch_groups(instruction, node), local)
        if is_wide:
            node = self._add_like("convert", instruction, node, 0.5)
        if summed and len(result) > 1:
            return self._gather_and_reduce(instruction, node, result, summed)
        if summed:
            unreduced = tuple(TensorSharding(sharding.dims, summed) for sharding in local)
            node = self._reshard_value(instruction, node, unreduced, result)
        return node

    def _add_index_select(self, instruction: Instruction, operands: tuple[int, ...], result: ValueSharding) -> int:
        """A scatter's result by index comparison: each element at its row's index takes the row's update."""
        spread = tuple(self._add("broadcast", instruction, (operand,), result) for operand in operands[1:])
        return self._add("select", instruction, spread, result)

    def _is_elementwise_dot(self, instruction: Instruction) -> bool:
        return instruction.opcode == "dot" and is_elementwise_dot(instruction, self._lengths(instruction))

    def _add_multiply(self, dot: Instruction, operands: tuple[int, ...], result: ValueSharding) -> int:
        """Result of a dot without contraction: both operands broadcast, and multiplied."""
        factors = []
        _, elements = self.lowering.shard(dot.shape.leaves[0], result[0])
        orders = broadcast_orders(dot, self._lengths(dot))
        for source, operand, order in zip(dot.operands, operands, orders, strict=True):
            node = operand
            if order != tuple(sorted(order)):
                node = self._get_or_add(
                    (operand, order), partial(self._add_like, "transpose", source, operand, mark=order)
                )
            if self.program.elements[node] < elements:
                node = self._add("broadcast", dot, (node,), result)
            factors.append(node)
        return self._add("multiply", dot, tuple(factors), result)

    def _expand_batch_groups(self, instruction: Instruction, node: int) -> int:
        """A convolution's result. With batch groups, XLA convolves every group with all groups' features, masks foreign
        products, and sums the rest.

        After ConvolutionGroupConverter::HandleBatchGroupCount (convolution_group_converter.cc).
        """
        groups = 1
        if instruction.opcode == "convolution":
            groups = batch_groups(instruction, self._lengths(instruction)[0])
        if groups == 1:
            return node
        program = self.program
        (size,), elements = program.sizes_bytes[node], program.elements[node]
        program.sizes_bytes[node], program.elements[node] = (groups * size,), groups * elements
        masked = self._add_like("transpose", instruction, node, mark=("masked",))
        return program.add("reduce-window", instruction, (masked,), (size,), elements)

    def _restore_order(self, instruction: Instruction, node: int, result: ValueSharding) -> int:
        """A product's result in its own dimension order."""
        if self._is_elementwise_dot(instruction):
            return node
        if instruction.opcode == "dot":
            lengths = result[0].shard_shape(instruction.shape.leaves[0].dimensions, self.lowering.mesh)
            is_reshaped = has_other_dimensions(instruction, self._lengths(instruction), lengths)
            mark = _LENGTHENED if 1 in lengths else _RESHAPED
            return self._add_like("bitcast", instruction, node, mark=mark) if is_reshaped else node
        if instruction.opcode != "convolution" or _is_natural(convolution_orders(instruction.get("dim_labels"))[2]):
            return node
        return self._add_like("transpose", instruction, node)

    def _lengths(self, instruction: Instruction) -> list[tuple[int, ...]]:
        """Dimensions of each operand on one device, in the sharding of its use; all are arrays."""
        plan = self.lowering.plans.get(instruction.name)
        shapes = [operand.shape.leaves[0].dimensions for operand in instruction.operands]
        if plan is None:
            return shapes
        used = [sharding for (sharding,) in plan.operands]
        return [sharding.shard_shape(shape, self.lowering.mesh) for sharding, shape in zip(used, shapes, strict=True)]

    def _gather_and_reduce(
        self, instruction: Instruction, node: int, result: ValueSharding, axes: tuple[str, ...]
    ) -> int:
        """Partial results of several arrays, gathered over `axes` and reduced once more."""
        parts = self.lowering.mesh.size(axes)
        sizes = tuple(parts * size for size in self.program.sizes_bytes[node])
        everyone = self.program.add("all-gather", instruction, (node,), sizes, parts * self.program.elements[node])
        return self._add(instruction.opcode, instruction, (everyone,), result)

    def _reshard_value(self, instruction: Instruction, node: int, start: ValueSharding, goal: ValueSharding) -> int:
        """A value in another sharding."""
        leaves = instruction.shape.leaves
        if len(leaves) != 1:
            return self._add("all-gather", instruction, (node,), goal)
        if instruction.opcode == "broadcast" and not instruction.operands[0].shape.leaves[0].rank:
            # Broadcast scalar: XLA makes the shard directly instead of slicing the whole.
            return self._add("broadcast", instruction, self.program.operands[node], goal)
        (shape,), (source,), (target,) = leaves, start, goal
        moves = reshard(shape.element_type, shape.dimensions, source, target, self.lowering.mesh)
        for number, move in enumerate(moves):
            is_split = move.kind == "reduce-scatter" and not self.compiler.runs("creates_reduce_scatters")
            kind = "all-reduce" if is_split else move.kind
            size = move.payload_bytes // (move.group_size if kind == "reduce-scatter" else 1)
            elements = size * 8 // ELEMENT_BITS[shape.element_type]
            wide = self.widens and _is_bf16(instruction)
            if wide:
                node = self._add_like("convert", instruction, node, 2)
            shard = node
            sent: tuple[int, ...] = (node,)
            if kind == "all-to-all" and size > self.program.sizes_bytes[node][0]:  # equal parts
                node = self.program.add("pad", instruction, (node,), (size,), elements)
                self.program.marks[node] = ("padded to", size)
            if kind == "all-to-all" and self.compiler.runs("splits_all_to_alls"):
                sent = self._split_for_group(instruction, node, move.group_size)
            node = self.program.add(kind, instruction, sent, (2 * size if wide else size,), elements)
            if len(sent) > 1:  # received pieces come in a tuple
                node = self._add_like("tuple", instruction, node, mark=("pieces", node))
                node = self._add_like("concatenate", instruction, node, mark=("of pieces", node))
            if kind == "all-gather" and number == 0 and (dim := _find_changed_dims(source, target)[-1]):
                self.program.marks[node] = gather_mark(dim, node)  # among several, the last is gathered first
            if kind in ("all-reduce", "reduce-scatter"):
                element_type = "f32" if wide else shape.element_type
                self.program.marks[node] = all_reduce_mark(instruction, element_type, move.atoms, node)
            if move.joined_bytes:
                node = self._concatenate_edges(move, shard, node, move.joined_bytes * (2 if wide else 1))
            if wide:
                node = self._add_like("convert", instruction, node, 0.5)
            if (
                kind == "all-gather"
                and self.compiler.runs("copies_gathered")
                and self._gathers_inner(shape, source, target)
            ):
                node = self._add_like("copy", instruction, node, mark=GATHERED)
        if self.program.sizes_bytes[node] != (self.lowering.shard(shape, target)[0],):
            if not moves:
                node = self._pad_shard(instruction, node, source, target)
            node = self._add(_SLICE, instruction, (node,), goal)
        return node

    def _pad_shard(self, instruction: Instruction, node: int, source: TensorSharding, target: TensorSharding) -> int:
        """A shard before slicing: padded to parts of one size, unless it was gathered from such parts.

        After PadBaseShapeBeforeUnevenTiledSharding (xla/service/spmd/spmd_partitioner_util.cc).
        """
        program, mesh, (shape,) = self.program, self.lowering.mesh, instruction.shape.leaves
        parts = (mesh.size(want) // mesh.size(have) for have, want in zip(source.dims, target.dims, strict=True))
        before, after = (sharding.shard_shape(shape.dimensions, mesh) for sharding in (source, target))
        lengths = [max(have, count * want) for count, have, want in zip(parts, before, after, strict=True)]
        uneven = [dim for dim, length in enumerate(lengths) if length > before[dim]]
        gathered = node
        while program.opcodes[gathered] in IDENTITIES:
            (gathered,) = program.operands[gathered]
        if not uneven or any(program.marks.get(gathered) == gather_mark(dim, gathered) for dim in uneven):
            return node
        size, elements = program.sizes_bytes[node][0], prod(lengths)
        padded = program.add("pad", instruction, (node,), (size * elements // program.elements[node],), elements)
        program.marks[padded] = ("padded to", *lengths)
        return padded

    def _split_for_group(self, instruction: Instruction, node: int, count: int) -> tuple[int, ...]:
        """The pieces of a value sent to each device of a group."""
        program = self.program
        sizes, elements = tuple(size // count for size in program.sizes_bytes[node]), program.elements[node] // count
        pieces = [program.add("slice", instruction, (node,), sizes, elements) for _ in range(count)]
        program.marks.update({piece: ("piece", piece) for piece in pieces})
        return tuple(pieces)

    def _concatenate_edges(self, move: Move, shard: int, edges: int, size: int) -> int:
        """A slice of a shard's size, out of the concatenation of the shard and its neighbors' edges."""
        program, instruction = self.program, self.program.instructions[shard]
        (before,) = program.sizes_bytes[shard]
        elements = program.elements[shard] * size // before
        node = program.add("concatenate", instruction, (shard, edges), (size,), elements)
        program.marks[node] = ("edges", move.is_minor)
        return program.add(_SLICE, instruction, (node,), (before,), program.elements[shard])

    def _gathers_inner(self, shape: ArrayShape, source: TensorSharding, target: TensorSharding) -> bool:
        """Whether a move gathers one dimension inside others of more than one element."""
        changed = _find_changed_dims(source, target)
        if len(changed) != 1:
            return False
        outer = zip(shape.dimensions[: changed[0]], target.dims, strict=False)
        return any(size > self.lowering.mesh.size(axes) for size, axes in outer)

    def _add(self, opcode: str, instruction: Instruction, operands: tuple[int, ...], shardings: ValueSharding) -> int:
        leaves = instruction.shape.leaves
        if len(leaves) == 1:
            size, elements = self.lowering.shard(leaves[0], shardings[0])
            return self.program.add(opcode, instruction, operands, (size,), elements)
        shards = [self.lowering.shard(*pair) for pair in zip(leaves, shardings, strict=True)]
        sizes = tuple(size for size, _ in shards)
        return self.program.add(opcode, instruction, operands, sizes, sum(elements for _, elements in shards))


def _find_changed_dims(source: TensorSharding, target: TensorSharding) -> list[int]:
    """The dimensions with different shardings."""
    return [dim for dim, (have, wanted) in enumerate(zip(source.dims, target.dims, strict=True)) if have != wanted]


def _is_natural(order: tuple[int, ...]) -> bool:
    return order == tuple(range(len(order)))


def _is_bf16(instruction: Instruction) -> bool:
    shape = instruction.shape
    return isinstance(shape, ArrayShape) and shape.element_type == "bf16"


def _before_reduction(result: TensorSharding, partial: tuple[str, ...]) -> TensorSharding:
    """Sharding of a partial sum before its reduction over the axes `partial`."""
    return TensorSharding(tuple(tuple(axis for axis in dim if axis not in partial) for dim in result.dims))
