"""The Plan: the sharding of each tensor of a program over a mesh, and its cost.

Frozen data, produced by the planner, checked by `planner.plans.verify`, put into
StableHLO by `xla.emit`, dispatched by the server. It holds, per instruction,
the sharding of every operand **as used** and of every result, because XLA needs both to follow the plan (a constraint
on the result alone does not fix the computation).

Units: bytes and seconds, in the names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from shardwright.errors import PlanError
from shardwright.plans.attention_note import AttentionNote
from shardwright.plans.kernel_note import KernelNote
from shardwright.plans.mixture_note import MixtureNote
from shardwright.plans.region_note import RegionNote
from shardwright.plans.shardings import Mesh, TensorSharding, ValueSharding
from shardwright.plans.variable_strategy import VariableStrategy

#: What XLA inserts to move or reduce data between devices.
COLLECTIVE_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

#: Version of the JSON that `plan_json` writes; readers refuse another major number.
PLAN_FORMAT = "1.10"

#: What a program's text in a plan may take, unpacked.
TEXT_LIMIT_BYTES = 1 << 28

#: How the note of a plan begins that took decisions over from an earlier plan.
TAKEN_OVER = "taken over from an earlier plan"

#: … and the one of a plan of a program with a sharding in the type of every value.
TYPED = "the program's types pin"

#: How the note begins of where the rows of mixtures of experts go.
MIXTURES = "experts:"

#: … and the one of a plan that keeps optimizer state on the host by the search's choice or the option's.
OFFLOADED = "optimizer state on the host"

#: What an option of XLA's can be set to.
OptionValue = bool | int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionPlan:
    """Sharding and partial sums of one instruction.

    operands: sharding of each operand in this instruction's use.
    result: sharding of its result.
    partial: axes the local results are summed (or max-ed, …) over to give `result`; an all-reduce, or a reduce-scatter
        if `result` is split over the axis.
    reason: cause of replication, if no rule allows more; else empty.
    shared: second layout of the result, made once, for readers with a use other than `result` (`source_of`); empty if
        every reader is served from `result` itself.
    """

    computation: str
    name: str
    opcode: str
    operands: tuple[ValueSharding, ...]
    result: ValueSharding
    partial: tuple[str, ...] = ()
    reason: str = ""
    shared: ValueSharding = ()

    def source_of(self, leaf: int, used: TensorSharding) -> TensorSharding:
        """Source layout of a result's array leaf, for a reader with the use `used`."""
        sharding = self.result[leaf]
        return sharding if not self.shared else choose_layout(sharding, self.shared[leaf], used)


def choose_layout(sharding: TensorSharding, shared: TensorSharding, used: TensorSharding) -> TensorSharding:
    """A reader's source among a value's two layouts: `sharding`, or `shared`; a partial sum's use takes the first."""
    return sharding if used == sharding or used.unreduced else shared


@dataclass(frozen=True, slots=True, kw_only=True)
class VariablePlan:
    """A parameter or an output leaf of the program, in its storage between steps.

    stored_shape: `shape` with every dimension padded up to a multiple of its devices; the program sees the logical part
        only. A partial sum (`sharding.unreduced`, only between the programs of a pipeline) is stored as the stack of
        its terms: `stored_shape` has one dimension more, in front, for the devices it is partial over.
    alias: the output leaf (of a parameter) or the parameter (of an output) sharing the buffer, or None.
    view_of: the dimensions in the user's program, if the planned one was rewritten and `shape` is another row-major
        view of the same elements (`[d, 3, d]` for `[d, 3d]`); else None.
    is_on_host: whether it lies in the memory of its devices' hosts.
    """

    number: int
    name: str
    element_type: str
    shape: tuple[int, ...]
    sharding: TensorSharding
    stored_shape: tuple[int, ...]
    alias: int | None = None
    view_of: tuple[int, ...] | None = None
    is_on_host: bool = False

    def __post_init__(self) -> None:
        if self.view_of is not None and prod(self.view_of) != prod(self.shape):
            raise PlanError(f"{self.name}: {list(self.shape)} is no view of {list(self.view_of)}")

    @classmethod
    def from_sharding(
        cls,
        number: int,
        name: str,
        element_type: str,
        shape: tuple[int, ...],
        sharding: TensorSharding,
        mesh: Mesh,
        *,
        alias: int | None = None,
        view_of: tuple[int, ...] | None = None,
        is_on_host: bool = False,
    ) -> VariablePlan:
        """The variable with this sharding, and the stored shape it needs."""
        stored = tuple(
            -(-size // devices) * devices for size, devices in zip(shape, map(mesh.size, sharding.dims), strict=True)
        )
        return cls(
            number=number,
            name=name,
            element_type=element_type,
            shape=shape,
            sharding=sharding,
            stored_shape=(mesh.size(sharding.unreduced), *stored) if sharding.unreduced else stored,
            alias=alias,
            view_of=view_of,
            is_on_host=is_on_host,
        )

    @property
    def user_shape(self) -> tuple[int, ...]:
        """Dimensions in the user's program."""
        return self.shape if self.view_of is None else self.view_of

    @property
    def is_padded(self) -> bool:
        return not self.is_stacked and self.shape != self.stored_shape

    @property
    def is_stacked(self) -> bool:
        """Whether it is a partial sum, stored as the stack of its terms."""
        return bool(self.sharding.unreduced)

    @property
    def stored_sharding(self) -> TensorSharding:
        """Sharding of the stored array: the variable's own, or that of the stack of a partial sum's terms."""
        return self.sharding.stacked if self.is_stacked else self.sharding


#: Element types that a compiler sends float32 as; empty: as it is.
SENT_AS = ("", "bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """A collective expected from XLA by the plan.

    kind: one of `COLLECTIVE_KINDS`.
    axes: of the mesh; without `groups`, a group has all devices that differ only along them.
    instruction: the instruction whose result or operand makes it necessary.
    cause: in words, e.g. `gradient of params['w']` or `params['w'] for matmul (model.py:63)`.
    payload_bytes: bytes on one device of the larger of its operand and result: the whole array of an all-reduce,
        all-gather or reduce-scatter, one shard of an all-to-all or permute.
    wire_bytes: bytes one device puts on the wire, once (ring algorithm).
    count: executions a step (trip counts of loops multiplied in).
    time_s: seconds a step, all executions, including the launch of a kernel that ends here to write the operand.
    groups: devices (in mesh order) of each group, if XLA moves along parts of the axes; else empty.
    combined: a number, from 1, shared by collectives combined by a compiler; they share a latency. 0: it runs by
        itself.
    sent_as: the element type that this compiler sends float32 as, where only products read it (`cost.rounding`);
        payload and wire bytes are of that, other compilers' are twice as many. Empty: as it is.
    """

    kind: str
    axes: tuple[str, ...]
    instruction: str
    cause: str
    payload_bytes: int
    wire_bytes: int
    count: int
    time_s: float
    groups: tuple[tuple[int, ...], ...] = ()
    combined: int = 0
    sent_as: str = ""

    @property
    def over(self) -> str:
        """Its axes in words, plus the group size of partial groups."""
        axes = "·".join(self.axes)
        return f"{len(self.groups[0])} devices along {axes}" if self.groups else axes


def count_combined(collectives: Iterable[PlannedCollective]) -> int:
    """Collectives a step after the compiler has combined them."""
    counts = {collective.combined or (number,): collective.count for number, collective in enumerate(collectives)}
    return sum(counts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSummary:
    """Predicted seconds of one step, and the certified lower bound of the search.

    `communication_s`: all collectives, and the client's arguments of the step, counted only while the step waits;
    `hidden_s`: the collectives that run beside compute, which costs no step time. `transfers_s`: moves between the
    memories of devices and hosts, no part of the two others.

    `bound_scope` names the bound's objective and choices. is_bounded: whether the plan itself is among them; a plan on
    a subdivision of its search's mesh axes is not, and may well be under the bound.
    """

    compute_s: float
    communication_s: float
    lower_bound_s: float
    bound_scope: str
    hidden_s: float = 0.0
    is_bounded: bool = True
    transfers_s: float = 0.0

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s + self.transfers_s

    @property
    def gap(self) -> float:
        """(plan − bound) / plan; 0 is proven optimal within the scope, or not `is_bounded` and under all in it."""
        return max(0.0, 1.0 - self.lower_bound_s / self.step_s) if self.step_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySummary:
    """Predicted bytes on one device: the peak is arguments + outputs not aliased + temporaries + constants.

    host_…: of what lies in the memory of the device's host, for this device; no part of the others. host_limit_bytes:
    what there may lie of it; 0: not asked.
    """

    arguments_bytes: int
    outputs_bytes: int  # not aliased to an argument
    temporaries_bytes: int  # peak of live intermediate values
    constants_bytes: int = 0  # the program's arrays of numbers, whole on every device
    host_arguments_bytes: int = 0
    host_outputs_bytes: int = 0  # not aliased to an argument
    host_temporaries_bytes: int = 0
    host_limit_bytes: int = 0

    @property
    def host_bytes(self) -> int:
        """Peak in the memory of the device's host."""
        return self.host_arguments_bytes + self.host_outputs_bytes + self.host_temporaries_bytes

    @property
    def peak_bytes(self) -> int:
        return self.arguments_bytes + self.outputs_bytes + self.temporaries_bytes + self.constants_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan the search priced: its mesh and seconds a step, or why it was left out.

    name: how it came about: "search", or the expert plan that it is ("data parallel", "ZeRO-3", …).
    """

    mesh: Mesh
    step_s: float | None
    note: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentPlan:
    """A part of the program solved as one problem, given the values at its boundary.

    name: in explanations. kind: number of its class; segments of one kind are equal problems, solved once.
    instructions: their number. repeats: number of equal segments behind this entry, itself included.
    boundary: the values handed to the next one, in the form (instruction, sharding).
    """

    name: str
    kind: int
    instructions: int
    repeats: int = 1
    boundary: tuple[tuple[str, TensorSharding], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedSegment:
    """A segment of the forward pass, rematerialized in the backward pass instead of kept.

    name: the segment's, in the original program. repeats: number of equal segments behind this entry.
    values: number of instructions rematerialized in each. time_s: seconds a step, saved_bytes: memory saved on one
        device; both of all repeats and predicted by the plan that was too large.
    """

    name: str
    repeats: int
    values: int
    time_s: float
    saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CallTrees:
    """How a function's arguments and results are made of a program's flat ones.

    arguments / results: pytree structures, in JAX's form; of (positional arguments, arguments by keyword) without the
        static ones, and of the result.
    argument_leaves / result_leaves: (flat number, rank in the user's program) of each of their leaves.
    """

    arguments: Any
    results: Any
    argument_leaves: tuple[tuple[int, int], ...]
    result_leaves: tuple[tuple[int, int], ...]

    def __reduce__(self) -> tuple[Any, ...]:
        """Structures of users' own nodes belong to their process: a plan is copied elsewhere without them."""
        return type(None), ()

    def __deepcopy__(self, memo: Any) -> CallTrees:
        return self


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checked parallelization of one HLO module over one mesh.

    Users hold it as `user_plans.Plan`. `hlo_text` travels beside the JSON, or in it (it may be absent in a plan
    read back without it; emission needs it). `original_sha256` is set if the planned program is a rewritten one:
    the hash of the original text. `hlo_text` and `hlo_sha256` are then the rewritten program's; it travels in the
    JSON. `call`: of a step's plan, how its function is called. `program_sha256`: of the original program's
    computation, whatever its names and source lines ("": not known). `recomputed`: segments rematerialized to save
    memory. `micro_batches`: number of sequential parts of the batch, with accumulated gradients. `compile_options`:
    XLA's, by name, assumed by its prices: servers compile with them; `jax.jit` takes them through
    `compiler_options`. `strategies`: by variable name, of a plan that a strategy builder asked for.
    `attention`: what became fused kernels, and what did not. `manual_axes`: axes of the program that its regions
    (`shard_map`) are manual over → axes of `mesh`, together of their size; `regions`: what is said of them.
    `kernels`: custom calls that hold more than a few per cent of it. `mixtures`: parts of its mixtures of experts.
    """

    module_name: str
    hlo_sha256: str
    mesh: Mesh
    hardware: str  # name of the hardware profile the costs come from
    origin: str  # "search", or "forced: data", …
    instructions: tuple[InstructionPlan, ...]
    parameters: tuple[VariablePlan, ...]
    outputs: tuple[VariablePlan, ...]
    collectives: tuple[PlannedCollective, ...]
    cost: CostSummary
    memory: MemorySummary
    candidates: tuple[Candidate, ...] = ()
    segments: tuple[SegmentPlan, ...] = ()
    recomputed: tuple[RecomputedSegment, ...] = ()
    micro_batches: int = 1
    compile_options: Mapping[str, OptionValue] = field(default_factory=dict, hash=False)
    strategies: Mapping[str, VariableStrategy] = field(default_factory=dict, hash=False)
    attention: tuple[AttentionNote, ...] = ()
    manual_axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict, hash=False)
    regions: tuple[RegionNote, ...] = ()
    kernels: tuple[KernelNote, ...] = ()
    mixtures: tuple[MixtureNote, ...] = ()
    notes: tuple[str, ...] = ()
    planning_s: float = 0.0
    original_sha256: str = ""
    program_sha256: str = ""
    call: CallTrees | None = field(default=None, compare=False, repr=False)
    hlo_text: str | None = field(default=None, compare=False, repr=False)

    @property
    def portable(self) -> bool:
        """Whether the user's own `jax.jit` follows the plan under `shardings()`: every variable has the dimensions of
        the user's program and equal shards, and neither computation nor place was changed to save memory.
        """
        stored = (*self.parameters, *self.outputs)
        is_as_written = not any(variable.view_of is not None or variable.is_padded for variable in stored)
        return is_as_written and not self.recomputed and self.micro_batches == 1 and not self.is_offloaded

    @property
    def is_offloaded(self) -> bool:
        """Whether it keeps optimizer state on the host that the user's program keeps on the devices."""
        return any(note.startswith(OFFLOADED) for note in self.notes)

    def require_portable(self) -> None:
        """Raises PlanError unless it is `portable`."""
        if self.recomputed or self.micro_batches > 1:
            raise PlanError(
                "the plan fits the memory because its program computes otherwise than the function itself: "
                + ("some values again" if self.recomputed else f"in {self.micro_batches} micro-batches"),
                where=self.module_name,
                remedy='plan with remat="none" and micro_batches=1, or compile plan.emit()',
            )
        if self.is_offloaded:
            raise PlanError(
                "the plan keeps optimizer state on the host, and its program moves it; the function itself does not",
                where=self.module_name,
                remedy='plan with offload="none", or compile plan.emit()',
            )
        for variable in (*self.parameters, *self.outputs):
            if variable.is_padded:
                raise PlanError(
                    f"{variable.name} of {list(variable.user_shape)} is stored as {list(variable.stored_shape)}: "
                    "jax.jit takes no arrays that their axes do not divide",
                    where=self.module_name,
                    remedy='plan with rewrites="none", which splits evenly alone, or compile plan.emit()',
                )
            if variable.view_of is not None:
                raise PlanError(
                    f"{variable.name} is stored as {list(variable.shape)}, not as {list(variable.user_shape)}: no "
                    "sharding of the function's own arrays says how it lies",
                    where=self.module_name,
                    remedy='plan with rewrites="none", or compile plan.emit()',
                )

    def require_hlo(self) -> str:
        if self.hlo_text is None:
            raise PlanError(
                f"the plan of {self.module_name} came without its HLO text",
                remedy="pass hlo_text= to Plan.from_json, or --hlo FILE on the command line",
            )
        return self.hlo_text
