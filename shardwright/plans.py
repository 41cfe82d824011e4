"""The Plan: how each tensor of a program is laid out over a mesh, and what that costs.

Frozen data, produced by the planner, checked by `planner.plans.verify`, put into
StableHLO by `xla.emit`, dispatched by the server. It holds, per instruction,
the sharding of every operand **as used** and of every result, because XLA
needs both to do what was meant (a constraint on the result alone does not fix
how an operation is computed).

Units: bytes and seconds, in the names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Literal

from shardwright.errors import PlanError
from shardwright.shardings import Mesh, TensorSharding, ValueSharding

if TYPE_CHECKING:
    from jax.sharding import NamedSharding

    from shardwright.report.proof import Proof

#: What XLA inserts to move or reduce data between devices.
COLLECTIVE_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

#: Version of the JSON that `Plan.to_json` writes; readers refuse another major number.
PLAN_FORMAT = "1.6"

#: What an option of XLA's can be set to.
OptionValue = bool | int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructionPlan:
    """How one instruction is computed.

    operands: sharding of each operand as this instruction uses it.
    result: sharding of its result.
    partial: axes the local results are summed (or max-ed, …) over to give `result`;
        an all-reduce, or a reduce-scatter where `result` is split over the axis.
    reason: why it is replicated, where no rule allows more; else empty.
    shared: how the result is brought to lie once, for readers that want it otherwise than `result` (`source_of`);
        empty where every reader is served from `result` itself.
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
        """How an array leaf of the result lies where a reader that uses it as `used` takes it from."""
        lies = self.result[leaf]
        return lies if not self.shared else choose_layout(lies, self.shared[leaf], used)


def choose_layout(lies: TensorSharding, shared: TensorSharding, used: TensorSharding) -> TensorSharding:
    """Which of a value's two layouts a reader takes it from: what is used as a partial sum is one as it lies."""
    return lies if used == lies or used.unreduced else shared


@dataclass(frozen=True, slots=True, kw_only=True)
class VariablePlan:
    """A parameter or an output leaf of the program, as it is stored between steps.

    `stored_shape` is `shape` with every dimension padded up to a multiple of the
    devices it is split over; the program sees the logical part only.
    A partial sum (`sharding.unreduced`, only between the programs of a pipeline) is stored as the stack of its
    terms: `stored_shape` has one dimension more, in front, that counts the devices it is partial over.
    `alias` is the output leaf (of a parameter) or the parameter (of an output)
    that shares the buffer, or None.
    `view_of` are the dimensions that the user's program has, where the planned one was rewritten and `shape`
    views the same elements, row-major, otherwise (`[d, 3, d]` for `[d, 3d]`); else None.
    """

    number: int
    name: str
    element_type: str
    shape: tuple[int, ...]
    sharding: TensorSharding
    stored_shape: tuple[int, ...]
    alias: int | None = None
    view_of: tuple[int, ...] | None = None

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
    ) -> VariablePlan:
        """The variable that lies as `sharding`, with the stored shape that this needs."""
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
        )

    @property
    def user_shape(self) -> tuple[int, ...]:
        """Dimensions in the program that the user wrote."""
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
        """How the stored array lies: the sharding itself, or that of the stack of a partial sum's terms."""
        return self.sharding.stacked if self.is_stacked else self.sharding


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedCollective:
    """A collective the plan expects XLA to insert.

    kind: one of `COLLECTIVE_KINDS`.
    axes: of the mesh; where `groups` says nothing else, a group has all devices that differ only along them.
    instruction: the instruction whose result or operand makes it necessary.
    cause: in words, e.g. `gradient of params['w']` or `params['w'] for matmul (model.py:63)`.
    payload_bytes: bytes on one device of the larger of its operand and result: the whole array
        of an all-reduce, all-gather or reduce-scatter, one shard of an all-to-all or permute.
    wire_bytes: bytes one device puts on the wire, once (ring algorithm).
    count: executions a step (trip counts of loops multiplied in).
    time_s: seconds a step, all executions, with the launch of a kernel that ends here to write what it moves.
    groups: devices (in mesh order) of each group, where XLA moves along parts of the axes; else empty.
    combined: a number, from 1, that all those have which a compiler combines; they share a latency. 0: it runs by
        itself.
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

    @property
    def over(self) -> str:
        """Its axes in words, and how many of their devices a group has where it has not all."""
        axes = "·".join(self.axes)
        return f"{len(self.groups[0])} devices along {axes}" if self.groups else axes


def count_combined(collectives: Iterable[PlannedCollective]) -> int:
    """Collectives a step that are left once the compiler has combined them."""
    counts = {each.combined or (number,): each.count for number, each in enumerate(collectives)}
    return sum(counts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSummary:
    """Predicted seconds of one step, and the certified lower bound of the search.

    `communication_s`: all collectives, and the arguments that the client sends with the step, as far as the step waits
    for them; `hidden_s`: the collectives that run beside compute, which costs no step time.

    `bound_scope` says which objective and which choices the bound covers. is_bounded: whether the plan itself is among
    them; a plan that divides the axes of the mesh it was found on is not, and may well be under the bound.
    """

    compute_s: float
    communication_s: float
    lower_bound_s: float
    bound_scope: str
    hidden_s: float = 0.0
    is_bounded: bool = True

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s

    @property
    def gap(self) -> float:
        """(plan − bound) / plan; 0 is proven optimal within the scope, or not `is_bounded` and under all in it."""
        return max(0.0, 1.0 - self.lower_bound_s / self.step_s) if self.step_s > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySummary:
    """Predicted bytes on one device: the peak is arguments + outputs not aliased + temporaries."""

    arguments_bytes: int
    outputs_bytes: int  # not aliased to an argument
    temporaries_bytes: int  # peak of live intermediate values

    @property
    def peak_bytes(self) -> int:
        return self.arguments_bytes + self.outputs_bytes + self.temporaries_bytes


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
    """A part of the program that was solved as one problem, given the values at its boundary.

    name: what explanations call it. kind: number of its class; segments of one kind are equal problems, solved once.
    instructions: how many it holds. repeats: how many equal segments this entry stands for, itself included.
    boundary: the values it hands to the next one, as (instruction, sharding).
    """

    name: str
    kind: int
    instructions: int
    repeats: int = 1
    boundary: tuple[tuple[str, TensorSharding], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputedSegment:
    """What a segment of the forward pass does not keep for the backward pass, but computes again for it.

    name: the segment's, in the program as it was before. repeats: how many equal segments this entry stands for.
    values: how many instructions each computes again. time_s: seconds a step, saved_bytes: what one device need not
    keep, both of all repeats and predicted by the plan that was too large.
    """

    name: str
    repeats: int
    values: int
    time_s: float
    saved_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A checked parallelization of one HLO module over one mesh.

    Made by `shardwright.plan` or a server. `hlo_text` travels beside the JSON
    (it may be absent in a plan read back without it; `emit` then needs it).
    `original_sha256` is set where the planned program is a rewritten one: the hash of the text it was
    rewritten from. `hlo_text` and `hlo_sha256` are then the rewritten program's, which travels in the JSON.
    `recomputed` is what it computes again to save memory; `micro_batches` how many parts of the batch it goes
    through one after another, accumulating gradients. `compile_options` are XLA's, by name, that its prices take for
    granted: servers compile with them; `jax.jit` takes them as `compiler_options`.
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
    notes: tuple[str, ...] = ()
    planning_s: float = 0.0
    original_sha256: str = ""
    hlo_text: str | None = field(default=None, compare=False, repr=False)

    @property
    def portable(self) -> bool:
        """Whether the user's own `jax.jit` does what is planned when it takes `shardings()`: every variable has the
        dimensions of the user's program and shards that are alike, and nothing is computed otherwise than there to
        save memory."""
        stored = (*self.parameters, *self.outputs)
        is_as_written = not any(variable.view_of is not None or variable.is_padded for variable in stored)
        return is_as_written and not self.recomputed and self.micro_batches == 1

    # ---- serialization -------------------------------------------------
    def to_json(self, *, indent: int | None = None) -> str:
        """The plan as JSON (schema: docs/plan-schema.json); without the HLO text, but for a rewritten program's."""
        from shardwright.plan_json import encode

        return json.dumps(encode(self), indent=indent)

    @classmethod
    def from_json(cls, text: str, *, hlo_text: str | None = None) -> Plan:
        """Read `to_json`'s text; raises PlanError naming the field that is wrong,
        or that `hlo_text` is not the program the plan was made for (or that one was rewritten from)."""
        from shardwright.plan_json import decode

        return decode(text, hlo_text)

    # ---- what a user does with a plan ----------------------------------
    def explain(self, *, width: int = 110) -> str:
        """A report for people, in lines of at most `width` columns (80 or more read well): layout per tensor,
        collectives by cause, memory by kind, what the search compared, solved apart and can certify."""
        from shardwright.report.text import explain_plan

        return explain_plan(self, width=width)

    def emit(self) -> str:
        """StableHLO with Shardy constraints: compiles anywhere, without Shardwright.

        Raises PlanError where the HLO text is absent, UnsupportedProgramError where it leaves constants out.
        """
        from shardwright.xla import emit_stablehlo

        return emit_stablehlo(self.require_hlo(), self)

    def prove(
        self,
        *,
        tolerance: float = 0.02,
        inspect: Literal["compiled", "partition-pass"] = "partition-pass",
        deadline_s: float | None = None,
    ) -> Proof:
        """Whether XLA's program has the collectives of `self.collectives`: matched one by one, with source lines.

        tolerance: part of the bytes that may differ. inspect: read what XLA's partitioner leaves (seconds), or the
        program compiled to the end. XLA runs in a child process, on CPU devices of this machine.

        Raises PlanError where the HLO text is absent, CompilationError where XLA refuses the program,
        DeadlineError after `deadline_s` seconds.
        """
        from shardwright.report.proof import prove
        from shardwright.xla import CompileService

        with CompileService(self.mesh.device_count) as service:
            program = service.compile(
                self.require_hlo(), self, want_executable=False, inspect=inspect, deadline_s=deadline_s
            )
        return prove(self, program.collectives, tolerance=tolerance)

    def shardings(self, devices: Any = None) -> tuple[tuple[NamedSharding, ...], tuple[NamedSharding, ...]]:
        """(per argument, per output) `NamedSharding`s over `devices` (default `jax.devices()`),
        for the user's own `jax.jit`. Raises PlanError where too few devices are there, or where the plan is
        not `portable`."""
        from shardwright.xla import to_named_shardings

        self._require_portable()
        return to_named_shardings(self, devices)

    def _require_portable(self) -> None:
        if self.recomputed or self.micro_batches > 1:
            raise PlanError(
                "the plan fits the memory because its program computes otherwise than the function itself: "
                + ("some values again" if self.recomputed else f"in {self.micro_batches} micro-batches"),
                where=self.module_name,
                remedy='plan with remat="none" and micro_batches=1, or compile plan.emit()',
            )
        for variable in (*self.parameters, *self.outputs):
            if variable.is_padded:
                raise PlanError(
                    f"{variable.name} of {list(variable.user_shape)} is stored as {list(variable.stored_shape)}: "
                    "jax.jit takes no arrays that their axes do not divide",
                    where=self.module_name,
                    remedy='plan with rewrites="none" and pins that divide, or compile plan.emit()',
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

    def as_dict(self) -> dict[str, Any]:
        from shardwright.plan_json import encode

        return encode(self)
