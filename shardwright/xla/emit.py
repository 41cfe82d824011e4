"""Writes a plan onto StableHLO: Shardy constraints on operations, found by name.

Converted HLO carries the HLO instruction's name in each operation's location: a decision about `dot.5` lands on the
operation named `dot.5`. Inserted are:

1. One `sdy.mesh`, and its sharding on every argument and every output of `main`.
2. After each operation, a `sdy.sharding_constraint` of its result. A scattered sum gets a constraint of the whole sum
   first: asked for the scattered result at once, XLA adds permutes and gathers wherever another mesh axis is idle; the
   two together become one reduce-scatter.
3. Before an operation, a constraint on each operand **use** with a layout other than the value's own; a value full of
   one number is rematerialized there. A constraint on the result alone does not fix the computation (XLA would gather a
   contracted operand instead of summing partial products). Equal uses stay bare: the value's own constraint holds for
   them; therefore every array value has one.
4. Explicit padding of variables not divided by their axes: the argument comes padded and is sliced, the output is
   padded with zeros. XLA would silently change such a boundary sharding instead. Partial sums at the boundary are
   stored as stacks of their terms (`boundary`).

Partial sums: a value left partial by the plan is marked `unreduced` at its definition, and so is every value on its
way, for XLA believes the mark: one missing mark scales a sum by the size of the axis. A sum made and reduced in one
place needs no mark, unless its operands are partial already.

Steps: strip the user's own shardings → spell ragged products (`ragged_products`) → join operations split by HLO
(`broadcasts`) → collect layouts of values and uses → insert constraints → write operations that XLA would gather as
manual computations (`manual`) → hold fetches from the host back (`late_fetches`) → pad → set aliases → pin layouts
(`row_major`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shardwright.cost.profiles import AttentionKernel, platform_of_profile
from shardwright.errors import PlanError
from shardwright.hlo import require_values
from shardwright.plans.plan import InstructionPlan, Plan, choose_layout
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.reserved_names import ENTER_REGION, IDENTITY_TARGETS, LEAVE_REGION, MESH_NAME
from shardwright.xla import private
from shardwright.xla.attention import PlannedCall, compute_attention, kernel_of_devices, read_operation
from shardwright.xla.boundary import finish_boundary, sharding_text, store_arguments
from shardwright.xla.broadcasts import join_broadcasts
from shardwright.xla.kernels import KernelWriter, is_kernel
from shardwright.xla.late_fetches import delay_fetches
from shardwright.xla.manual_computation import compute_manually, is_manual
from shardwright.xla.operations import CALLS, operations_within
from shardwright.xla.partial_sums import steps_of_reduction, steps_to
from shardwright.xla.ragged_kernel import multiprocessors_of_devices
from shardwright.xla.ragged_products import spell_ragged_products
from shardwright.xla.regions import write_regions
from shardwright.xla.row_major import pin_row_major
from shardwright.xla.strip import annotation_target, erase_annotations, strip_foreign_shardings

#: HLO opcodes that leave no operation behind: their value is their operand's or an argument.
WITHOUT_OPERATION = frozenset({"parameter", "tuple", "get-tuple-element", "constant", "domain", "add-dependency"})

#: Operations whose regions are planned instruction by instruction; other regions are scalar functions.
CONTROL_FLOW = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if"})


def emit_stablehlo(hlo_text: str, plan: Plan, *, with_stand_ins: bool = False, platform: str | None = None) -> str:
    """StableHLO text of `hlo_text`, with `plan` written in Shardy constraints.

    The text compiles with any XLA that has Shardy, for `plan.mesh.device_count` devices. with_stand_ins: elided
    constants get numbers of XLA's, in a program that is inspected and never run. platform: of the devices, in JAX's
    spelling, `cuda` or `gpu` for CUDA; default: the plan's. It says how attention is computed (`attention`).

    Raises UnsupportedProgramError: such constants without `with_stand_ins`. PlanError: an instruction of the plan is
    not in the program, or the plan's argument and output counts differ. HloSyntaxError: XLA cannot read `hlo_text`.
    """
    if not with_stand_ins:
        require_values(hlo_text)
    converted = private.stablehlo_of(hlo_text)
    with private.mlir_context():
        module = private.parse_module(converted)
        has_host_memory = (platform or platform_of_profile(plan.hardware)) != "cpu"
        kernel, multiprocessors = (
            kernel_of_devices(plan.hardware, platform),
            multiprocessors_of_devices(plan.hardware, platform),
        )
        _Emitter(module, plan, kernel, has_host_memory, multiprocessors).run()
        private.verify(module)
        # With locations: collectives of the compiled program then carry instruction names.
        return str(module.operation.get_asm(enable_debug_info=True))


def mesh_text(mesh: Mesh) -> str:
    """`sdy.mesh @shardwright_mesh = <["data"=4, "model"=2]>`."""
    axes = ", ".join(f'"{axis.name}"={axis.size}' for axis in mesh.axes)
    return f"sdy.mesh @{MESH_NAME} = <[{axes}]>"


@dataclass(slots=True)
class _Use:
    operation: Any
    index: int
    wanted: TensorSharding | None  # None: takes the value in its own layout


@dataclass(slots=True)
class _Value:
    """A tensor value: its layout, its uses, and whether the layout must be written down."""

    value: Any
    sharding: TensorSharding | None
    pinned: bool  # put a constraint where it is defined
    steps: tuple[TensorSharding, ...] = ()  # its layouts ahead of that
    shared: TensorSharding | None = None  # how it is brought to lie once, for readers that want it otherwise
    uses: list[_Use] = field(default_factory=list)


class _Emitter:
    """Walks `main` and its callees once, then inserts."""

    def __init__(
        self, module: Any, plan: Plan, kernel: AttentionKernel | None, has_host_memory: bool, multiprocessors: int
    ) -> None:
        self.has_host_memory = has_host_memory
        self.module = module
        self.plan = plan
        self.kernel, self.multiprocessors = kernel, multiprocessors
        self.ir = private.ir()
        self.sdy = private.dialect("sdy")
        self.entries: dict[str, InstructionPlan] = {entry.name: entry for entry in plan.instructions}
        self.functions = {op.name.value: op for op in module.body.operations if op.operation.name == "func.func"}
        self.main = self.functions["main"]
        self.values: dict[Any, _Value] = {}
        self.landed: set[str] = set()
        self.visited: set[str] = set()
        self.attributes: dict[TensorSharding, Any] = {}
        self.annotations: list[Any] = []
        self.in_parts: list[tuple[Any, InstructionPlan]] = []
        self.attention: list[PlannedCall] = []
        self.kernels: list[tuple[Any, InstructionPlan | None]] = []
        self.has_regions = False

    def run(self) -> None:
        strip_foreign_shardings(self.module)
        spell_ragged_products(self.module)
        self.entries = join_broadcasts(self.module, self.entries)
        arguments = list(self.main.arguments)
        if len(arguments) != len(self.plan.parameters):
            raise PlanError(
                f"the plan has {len(self.plan.parameters)} arguments, the program {len(arguments)}",
                where=self.plan.module_name,
            )
        self._add_mesh()
        logical = store_arguments(self.main, self.plan, self.attribute)
        shared = self._argument_layouts()
        for value, variable, brought in zip(logical, self.plan.parameters, shared, strict=True):
            self._define(value, variable.sharding, pinned=variable.is_padded, shared=brought)
        self._walk_block(self.main.body.blocks[0], tuple(output.sharding for output in self.plan.outputs))
        self._require_all_landed()
        for value in list(self.values.values()):
            self._insert(value)
        erase_annotations(self.annotations)
        if self.has_regions:
            write_regions(self.module, self.plan.mesh, self.plan.manual_axes, self.entries, self.attribute)
        for operation, entry in self.in_parts:
            compute_manually(operation, entry, self.plan.mesh, self.attribute)
        writer = KernelWriter(self.module, self.plan.mesh, self.attribute, self.multiprocessors)
        for operation, planned in self.kernels:
            writer.compute(operation, planned)
        compute_attention(self.attention, self.plan.mesh, self.attribute, self.kernel)
        delay_fetches(self.main)
        finish_boundary(self.module, self.main, self.plan, self.attribute, has_host_memory=self.has_host_memory)
        pin_row_major(self.module)

    def _argument_layouts(self) -> list[TensorSharding | None]:
        """Per argument of `main`, its second, shared layout."""
        layouts: list[TensorSharding | None] = []
        leaf: dict[str, int] = {}
        for argument in self.main.arguments:
            name = private.location_name(argument.location) or ""
            entry = self.entries.get(name)
            number = leaf[name] = leaf.get(name, -1) + 1
            layouts.append(entry.shared[number] if entry is not None and entry.shared else None)
        return layouts

    # ---- collect -----------------------------------------------------------
    def _walk_block(self, block: Any, returned: Sequence[TensorSharding | None] | None) -> None:
        """Record every definition and use in a block. returned: layouts of its terminator's operands."""
        operations = list(block.operations)
        for operation in operations[:-1]:
            self._walk_operation(operation)
        terminator = operations[-1]
        for number, (index, operand) in enumerate(_tensors(terminator.operands)):
            wanted = returned[number] if returned is not None and number < len(returned) else None
            self._use(terminator, index, operand, wanted)

    def _walk_operation(self, operation: Any) -> None:
        """Record the layouts of an operation's operands and results, by the plan's entry of its name."""
        entry = self._entry(operation)
        wanted = _flat(entry.operands) if entry is not None else ()
        for number, (index, operand) in enumerate(_tensors(operation.operands)):
            use = wanted[number] if number < len(wanted) else None
            self._use(operation, index, operand, _fitting(use, operand))
        if annotation_target(operation) in IDENTITY_TARGETS:
            self.annotations.append(operation)
            if entry is None:  # the planner kept no trace of it: the value has its operand's sharding
                self._define(operation.results[0], self._sharding_of(operation.operands[0]), pinned=False)
                return
        if entry is not None:
            self.landed.add(entry.name)
        self._define_results(operation, entry)
        kind = operation.operation.name
        call = read_operation(operation)
        if annotation_target(operation) in (ENTER_REGION, LEAVE_REGION):
            self.has_regions = True
        if call is not None:
            self.attention.append(PlannedCall(operation=operation, call=call, entry=entry))
        elif is_kernel(operation):
            self.kernels.append((operation, entry))
        elif entry is not None and is_manual(operation, entry):
            self.in_parts.append((operation, entry))
        if kind in CONTROL_FLOW:
            self._walk_regions(operation, entry)
        elif kind in CALLS:
            self._walk_call(operation, entry)
        else:  # a reducer of JAX's in a region that leaves axes free has calls that say nothing
            inside = operations_within(operation.operation)
            self.annotations += [inner for inner in inside if annotation_target(inner) in IDENTITY_TARGETS]

    def _entry(self, operation: Any) -> InstructionPlan | None:
        """The plan of the instruction behind this operation."""
        entry = self.entries.get(private.location_name(operation.location) or "")
        if entry is None:
            return None
        # Conversion gives helpers the instruction's name too: rng's shape as a constant.
        is_helper = operation.operation.name == "stablehlo.constant" and entry.opcode != "constant"
        return None if is_helper else entry

    def _define_results(self, operation: Any, entry: InstructionPlan | None) -> None:
        """Give each result its layout in the entry, and the steps by which its partial sums are reduced to that."""
        shardings = entry.result if entry is not None else ()
        if operation.operation.name == "stablehlo.get_tuple_element":  # of a custom-call that gives a tuple
            shardings = shardings[operation.attributes["index"].value :]
        from_scalars = all(operand.type.rank == 0 for _, operand in _tensors(operation.operands))
        for number, (_, result) in enumerate(_tensors(operation.results)):
            if entry is None and result in self.values:  # an argument, taken from how it is stored
                continue
            sharding = _fitting(shardings[number], result) if number < len(shardings) else None
            shape = tuple(result.type.shape)
            steps = steps_of_reduction(operation, entry, sharding, shape, self.plan.mesh) if entry and sharding else ()
            # A scalar made of scalars has nothing to decide; a constraint would only cost time.
            idle = from_scalars and _is_whole_scalar(sharding) and not steps
            shared = entry.shared[number] if entry and number < len(entry.shared) else None
            self._define(result, sharding, pinned=sharding is not None and not idle, steps=steps, shared=shared)

    def _walk_regions(self, operation: Any, entry: InstructionPlan | None) -> None:
        handed_on = list(entry.result) if entry is not None else None
        carried = operation.operation.name == "stablehlo.while"
        for number, region in enumerate(operation.regions):
            block = region.blocks[0]
            for index, (_, argument) in enumerate(_tensors(block.arguments)):
                sharding = handed_on[index] if handed_on is not None and index < len(handed_on) else None
                self._define(argument, _fitting(sharding, argument), pinned=not _is_whole_scalar(sharding))
            is_condition = carried and number == 0
            self._walk_block(block, None if is_condition else handed_on)

    def _walk_call(self, operation: Any, entry: InstructionPlan | None) -> None:
        """A callee is walked once, at its first call; its shardings are its own instructions'."""
        callee = operation.attributes["callee"].value
        if callee in self.visited:
            return
        self.visited.add(callee)
        function = self.functions[callee]
        wanted = _flat(entry.operands) if entry is not None else ()
        seen: dict[str, int] = {}
        for index, (_, argument) in enumerate(_tensors(function.arguments)):
            name = private.location_name(argument.location) or ""
            leaf = seen[name] = seen.get(name, -1) + 1
            parameter = self.entries.get(name)
            sharding = parameter.result[leaf] if parameter and leaf < len(parameter.result) else None
            if sharding is None and index < len(wanted):
                sharding = wanted[index]
            self._define(argument, _fitting(sharding, argument), pinned=not _is_whole_scalar(sharding))
        self._walk_block(function.body.blocks[0], entry.result if entry is not None else None)

    def _define(
        self,
        value: Any,
        sharding: TensorSharding | None,
        *,
        pinned: bool,
        steps: tuple[TensorSharding, ...] = (),
        shared: TensorSharding | None = None,
    ) -> None:
        self.values[value] = _Value(value, sharding, pinned, steps, shared)

    def _use(self, operation: Any, index: int, operand: Any, target: TensorSharding | None) -> None:
        value = self.values.get(operand)
        if value is not None:
            value.uses.append(_Use(operation, index, target))

    def _sharding_of(self, operand: Any) -> TensorSharding | None:
        value = self.values.get(operand)
        return None if value is None else value.sharding

    def _require_all_landed(self) -> None:
        """Every instruction of the plan is an operation, or can have none."""
        absent = [e for e in self.entries.values() if e.name not in self.landed and e.opcode not in WITHOUT_OPERATION]
        if not absent:
            return
        elsewhere = set(_all_names(self.module))  # in functions that nothing calls
        for entry in absent:
            if entry.name not in elsewhere:
                raise PlanError(
                    f"{entry.opcode} of the plan is not in the program XLA made of the HLO",
                    where=f"{entry.computation}/{entry.name}",
                    remedy="plan the same HLO text that is emitted",
                )

    # ---- insert ------------------------------------------------------------
    def _insert(self, value: _Value) -> None:
        source = value.value
        if value.pinned and value.sharding is not None:
            source = self._constrain_definition(value)
        brought: dict[tuple[Any, TensorSharding], Any] = {}  # once per block: it stands before the first use there

        def bring(use: _Use, before: Any, sharding: TensorSharding | None, target: TensorSharding) -> Any:
            key = (use.operation.operation.block, target)
            if target == sharding:
                return before
            if key not in brought:
                if _is_filled(value.value) and not target.unreduced and sharding is not None and not sharding.unreduced:
                    before = self._clone_broadcast(value.value.owner, use.operation)
                    sharding = target
                brought[key] = self._reshard(before, sharding, target, use.operation)
            return brought[key]

        for use in value.uses:
            operand = source
            if use.wanted is not None:
                layout = value.sharding
                if value.shared is not None and layout is not None:
                    layout = choose_layout(layout, value.shared, use.wanted)
                    operand = bring(use, source, value.sharding, layout)
                operand = bring(use, operand, layout, use.wanted)
            if operand is not value.value:
                use.operation.operands[use.index] = operand

    def _clone_broadcast(self, broadcast: Any, user: Any) -> Any:
        """An array full of one number, made for one user. From one in another layout XLA cuts each device's part, and
        with uneven parts it stores the whole first, padded.
        """
        return broadcast.clone(self.ir.InsertionPoint(user)).results[0]

    def _reshard(self, source: Any, sharding: TensorSharding | None, target: TensorSharding, user: Any) -> Any:
        with self.ir.InsertionPoint(user):
            for step in (*steps_to(sharding, target, tuple(source.type.shape), self.plan.mesh), target):
                source = self._constraint(source, step, user.location)
        return source

    def _constrain_definition(self, value: _Value) -> Any:
        owner = value.value.owner
        if isinstance(owner, self.ir.Block):
            point, location = self.ir.InsertionPoint.at_block_begin(owner), owner.owner.location
        else:
            point, location = self.ir.InsertionPoint.after(owner), owner.location
        source = value.value
        with point:
            for step in (*value.steps, value.sharding):
                source = self._constraint(source, step, location)
        return source

    def _constraint(self, value: Any, sharding: TensorSharding | None, location: Any) -> Any:
        assert sharding is not None
        return self.sdy.ShardingConstraintOp(value, self.attribute(sharding), loc=location).result

    def attribute(self, sharding: TensorSharding) -> Any:
        """The `#sdy.sharding` attribute, one object per distinct sharding."""
        attribute = self.attributes.get(sharding)
        if attribute is None:
            attribute = self.ir.Attribute.parse(f"#sdy.sharding<@{MESH_NAME}, {sharding_text(sharding)}>")
            self.attributes[sharding] = attribute
        return attribute

    def _add_mesh(self) -> None:
        mesh = self.ir.Operation.parse(mesh_text(self.plan.mesh))
        self.ir.InsertionPoint.at_block_begin(self.module.body).insert(mesh)


def _flat(shardings: Sequence[tuple[TensorSharding, ...]]) -> tuple[TensorSharding, ...]:
    return tuple(leaf for value in shardings for leaf in value)


def _is_whole_scalar(sharding: TensorSharding | None) -> bool:
    """Whether a value has no sharding to write down: a scalar, or no array at all."""
    return sharding is None or not (sharding.dims or sharding.unreduced)


def _is_filled(value: Any) -> bool:
    """Whether a value is one number, broadcast."""
    owner = value.owner
    return getattr(owner, "name", None) == "stablehlo.broadcast_in_dim" and owner.operands[0].type.rank == 0


def _fitting(sharding: TensorSharding | None, value: Any) -> TensorSharding | None:
    """The sharding, if its rank is the array's."""
    return sharding if sharding is not None and len(sharding.dims) == value.type.rank else None


def _tensors(values: Any) -> list[tuple[int, Any]]:
    """The arrays among values, each with its position; tokens and tuples have no sharding."""
    return [(index, value) for index, value in enumerate(values) if hasattr(value.type, "rank")]


def _all_names(module: Any) -> Iterator[str]:
    for operation in operations_within(module.operation):
        name = private.location_name(operation.location)
        if name is not None:
            yield name
