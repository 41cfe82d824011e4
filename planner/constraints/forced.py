"""Forced strategies: the user's decision about the arguments and about every instruction.

State arguments share their buffer with an output (donated parameters and optimizer state). In a program without
aliases, state are the arguments in `argument_axes`; without these either, each argument of rank 1 or more with an
output of the same type (each output once, in order). The batch dimensions of arguments are derived from the program
(`search.batch_dims`); an argument with one is no state, though a result has its type (inference, decoding). The rest
(keys, tables, scalars) is replicated. An instruction runs along the batch when a factor of its rule ties one of its
dimensions to the batch (`graph.batch_dim_analysis`). A batch not divisible by the axes is stored padded when that pays
(`strategies.padding`), else the strategy is refused; when arrays are already stored (`argument_axes`: the last, smaller
batch of an epoch) it is kept whole. Guarantees of each strategy, on all instructions that allow them:

data        over all axes. Batch arguments, activations and their gradients are split along the batch and stay so.
            State is replicated; each sum over the batch is one all-reduce (per dot or reduction producing one, in
            a loop per iteration); everything else, including the update of state, is computed whole on every device.
zero1       over all axes. Along the batch like `data`. State used by the step (parameters: any non-state output
            depends on them) is replicated, all other state (of the optimizer) is split like `fsdp`; gradients are
            reduce-scattered, the update is computed on shards, and the part used by the next step is gathered.
fsdp        over all axes. Along the batch like `data`. Every state tensor is split on one dimension, when one is
            divisible by all axes together, and gathered before use; gradients are reduce-scattered and the update is
            computed on shards, when divisible.
tensor      over all axes. Batch arguments are replicated and nothing is split along the batch. Each state tensor of
            rank 2 or more is split over all axes (on one dimension or several) when divisible, and used
            in place: it is never gathered. (Exceptions are noted in the plan.) State of rank 1 is split or not,
            whichever is cheaper.
mixed       two axes or three. The first like `data`, the others like `tensor`.
megatron    like `mixed`, but the others split no dimension of the batch arguments: no sequence sharding
            (Shoeybi et al., 2019; `mixed` also allows the splits of Korthikanti et al., 2022).
expert      one axis or two. Like `data`, but the weights of a mixture's experts (`graph.moe_detection`) and their
            state are split by experts over the last axis, when divisible, and used in place; the experts'
            inputs and outputs may be split by experts over it, instead of along the batch.
replicated  everything is computed whole on every device: no collectives.
axes        each axis of the mesh does what its name says (`AXIS_ROLES`), beside the others:
            data      like `data`.
            zero1     like `zero1`. zero2: gradients are scattered where they arise, in every micro-batch.
            fsdp      like `fsdp`. With `data` before it, copies of shards (HSDP).
            expert    like the last axis of `expert`.
            context   the sequence (of the batch arguments, the dimension after the batch) is split wherever possible,
                      in attention its rows: keys and values are gathered or sent round. State is whole.
            tensor    like the others of `megatron`; model: like those of `mixed`, sequences may be split over it.
{pattern: pins}   see `shardwright.planner.constraints.named_pins`.

Annotations inside the program also hold under a forced strategy, with reshards around them when they differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod

from shardwright.errors import OptionError, PlanError
from shardwright.hlo import ArrayShape
from shardwright.options.plan_options import FORCED_STRATEGIES, PlanOptions
from shardwright.planner.constraints.confine import LOOKUPS, Confinement, Roles
from shardwright.planner.constraints.pins import DimPin, Requirement, Requirements
from shardwright.planner.graph.batch_dim_analysis import TiedDims
from shardwright.planner.graph.dataflow import Dataflow
from shardwright.planner.graph.moe_detection import find_expert_weights
from shardwright.planner.strategies.padding import divides, divides_or_pays_along_one
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.spelling import did_you_mean

#: Strategies whose first axis splits the batch and whose others split state, used in place.
MIXED = ("mixed", "megatron")

#: What an axis may do under `force="axes"`, by its name.
AXIS_ROLES = ("data", "zero1", "zero2", "fsdp", "expert", "context", "tensor", "model")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedStrategy:
    """A forced strategy's demands on one mesh.

    requirements: pins by node.
    in_place: nodes with values that may not be gathered.
    kept_axes: the axes over which they may not; none: any.
    roles: of the axes in every instruction; None: free.
    batch: nodes of the batch arguments, with their batch dimension.
    across: nodes of arguments, with a dimension across the batch (`Roles.across`).
    sequence: nodes of the batch arguments, with another dimension (`Roles.sequence`, `Roles.not_sequence`).
    state_outputs: nodes of the updated state.
    split_state: nodes of the state that is split (`Confinement.split_state`); None: all of it.
    frees_lookups: whether lookups are computed in any way.
    """

    requirements: Requirements = field(default_factory=dict)
    in_place: frozenset[int] = frozenset()
    kept_axes: frozenset[str] = frozenset()
    roles: Roles | None = None
    batch: tuple[tuple[int, int], ...] = ()
    across: tuple[tuple[int, int], ...] = ()
    sequence: tuple[tuple[int, int], ...] = ()
    state_outputs: tuple[int, ...] = ()
    split_state: frozenset[int] | None = None
    frees_lookups: bool = False

    def confinement(self, flow: Dataflow, ties: TiedDims) -> Confinement:
        """The roles' restriction of each instruction; ties: of the program's dimensions."""
        assert self.roles is not None, "without roles nothing is confined"
        dims = ties.dims(self.batch)
        return Confinement.of(
            flow,
            self.roles,
            dims,
            self.state_outputs,
            across=ties.dims(self.across) if self.across else None,
            sequence=ties.dims(self.sequence) if self.sequence else None,
            split_state=self.split_state,
            free_opcodes=LOOKUPS if self.frees_lookups else frozenset(),
        )


def check_force(options: PlanOptions) -> None:
    """Raises OptionError on an unknown strategy."""
    force = options.force
    if isinstance(force, str) and force not in FORCED_STRATEGIES:
        raise OptionError(
            f"there is no strategy {force!r}",
            where="force",
            remedy=f"one of {', '.join(FORCED_STRATEGIES)}, or pins by argument name",
        )


def origin(options: PlanOptions) -> str:
    """`Plan.origin`: who decided."""
    if options.mode == "propagate":
        return "propagated from annotations"
    if options.force is None:
        return "search"
    if isinstance(options.force, str):
        return f"forced: {options.force}"
    return "forced: pins" if options.rest == "search" else f"forced: pins, the rest {options.rest}"


def force_strategy(
    flow: Dataflow, names: Sequence[str], options: PlanOptions, mesh: Mesh, batch: Mapping[int, int]
) -> ForcedStrategy:
    """The requirements of the strategy named in `options.force`.

    batch: flat number → batch dimension of the batch arguments.
    Raises OptionError when the strategy makes no sense, PlanError when the mesh cannot split the batch.
    """
    assert isinstance(options.force, str)
    if options.force in MIXED and len(mesh.axes) == 1:
        raise OptionError(
            f"a {options.force} strategy needs two axes or three, mesh {mesh} has one",
            where="force",
            remedy="give a mesh like 2x4, or leave the mesh out",
        )
    strategy = _Strategy.of(options.force, mesh)
    state = state_arguments(flow, options) - batch.keys()
    asked_by = f"force={options.force!r}"
    splits = not strategy.batch_axes or splits_batch(flow, names, options, strategy.batch_axes, mesh, batch, asked_by)
    read = state_in_compute(flow, state) if strategy.optimizer_axes else frozenset()
    experts = _experts(flow, state, batch) if strategy.expert_axes else {}
    requirements: Requirements = {}
    for number, node in enumerate(flow.parameters):
        shape = flow.nodes[node].shapes[0]
        rule: Rule = _is_replicated
        if number in experts:
            rule = strategy.experts(shape, experts[number])
        elif number in state:
            rule = strategy.state(shape, is_read=number in read)
        requirements[node] = [Requirement(asked_by=asked_by, rule=rule)]
    sequence = _sequence_dims(flow, batch) if strategy.sequence_axes else _other_dims(flow, batch)
    for number, dim in batch.items():
        node = flow.parameters[number]
        shape = flow.nodes[node].shapes[0]
        pins = {at: DimPin(axes=strategy.batch_axes if at == dim and splits else ()) for at in range(shape.rank)}
        if (at := dict(sequence).get(number)) is not None and strategy.splits_sequence(shape.dimensions[at]):
            pins[at] = DimPin(axes=strategy.sequence_axes)
        requirements[node] = [Requirement(asked_by=asked_by, dims=pins, may_pad=True)]
    ranks = {number: flow.nodes[flow.parameters[number]].shapes[0].rank for number in state}
    in_place = {number for number, rank in ranks.items() if rank >= 2} if strategy.tensor_axes else experts
    state_types = {_type(flow.nodes[flow.parameters[number]].shapes[0]) for number in state}
    return ForcedStrategy(
        requirements=requirements,
        in_place=frozenset(flow.parameters[number] for number in {*in_place, *experts}),
        kept_axes=frozenset((*strategy.tensor_axes, *strategy.expert_axes)) if strategy.shard_axes else frozenset(),
        roles=strategy.roles(splits),
        batch=tuple((flow.parameters[number], dim) for number, dim in batch.items()),
        across=tuple((flow.parameters[number], dim) for number, dim in experts.items()),
        sequence=tuple((flow.parameters[number], dim) for number, dim in sequence) if strategy.knows_sequence else (),
        state_outputs=tuple(node for node in flow.outputs if _type(flow.nodes[node].shapes[0]) in state_types),
    )


def splits_batch(
    flow: Dataflow,
    names: Sequence[str],
    options: PlanOptions,
    axes: Sequence[str],
    mesh: Mesh,
    batch: Mapping[int, int],
    asked_by: str,
) -> bool:
    """Whether the axes can split all batch arguments, evenly or with little padding.

    Otherwise a program with stored state (the last, smaller batch of an epoch) keeps its batch whole; any other raises
    PlanError.
    """
    sizes = [mesh.sizes[axis] for axis in axes]
    may_split = divides if options.rewrites == "none" else divides_or_pays_along_one
    for number, dim in batch.items():
        size = flow.nodes[flow.parameters[number]].shapes[0].dimensions[dim]
        if may_split(size, sizes):
            continue
        if options.argument_axes:
            return False
        raise PlanError(
            f"{asked_by} splits the batch over {prod(sizes)} devices ({mesh}), but "
            f"{names[number]} has {size} elements of it, in dimension {dim}",
            where=asked_by.partition("=")[0],
            remedy=f"take a batch that {prod(sizes)} divides, or a mesh that splits it less",
        )
    return True


def state_arguments(flow: Dataflow, options: PlanOptions) -> frozenset[int]:
    """Flat numbers of the arguments stored between steps (see the module's docstring)."""
    if flow.aliases:
        return frozenset(flow.aliases.values())
    if options.argument_axes:
        return frozenset(options.argument_axes)
    outputs = Counter(_type(flow.nodes[node].shapes[0]) for node in flow.outputs)
    state = set()
    for number, node in enumerate(flow.parameters):
        shape = flow.nodes[node].shapes[0]
        if shape.rank and outputs[_type(shape)] > 0:
            outputs[_type(shape)] -= 1
            state.add(number)
    return frozenset(state)


def state_in_compute(flow: Dataflow, state: frozenset[int]) -> frozenset[int]:
    """Flat numbers of the state behind a non-state output, such as the loss."""
    types = Counter(_type(flow.nodes[flow.parameters[number]].shapes[0]) for number in state)
    todo = []
    for number, output in enumerate(flow.outputs):
        kind = _type(flow.nodes[output].shapes[0])
        if number in flow.aliases or (not flow.aliases and types[kind] > 0):
            types[kind] -= 1
        else:
            todo.append(output)
    parameters = {node: number for number, node in enumerate(flow.parameters)}
    reached = set(todo)
    while todo:
        for source, _ in (use.source for use in flow.nodes[todo.pop()].uses):
            if source not in reached:
                reached.add(source)
                if source not in parameters:  # one that is updated in place reads its new value
                    todo.append(source)
    return frozenset(parameters[node] for node in reached if node in parameters) & state


def _experts(flow: Dataflow, state: frozenset[int], batch: Mapping[int, int]) -> dict[int, int]:
    """Flat numbers of the state of the same shape as experts' weights, each with its expert dimension."""
    weights = find_expert_weights(flow, [flow.parameters[number] for number in batch])
    dims = {_type(flow.nodes[node].shapes[0])[1]: dim for node, dim in weights.items()}
    shapes = {number: flow.nodes[flow.parameters[number]].shapes[0].dimensions for number in sorted(state)}
    experts = {number: dims[shape] for number, shape in shapes.items() if shape in dims}
    if not experts:
        raise OptionError(
            "no state is multiplied, expert by expert, with what depends on the batch: there is no mixture of experts",
            where="force",
            remedy="choose another strategy",
        )
    return experts


def _other_dims(flow: Dataflow, batch: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """The dimensions of the batch arguments but the batch, by flat number."""
    ranks = {number: flow.nodes[flow.parameters[number]].shapes[0].rank for number in batch}
    return tuple((number, dim) for number, rank in ranks.items() for dim in range(rank) if dim != batch[number])


def _sequence_dims(flow: Dataflow, batch: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    """The sequence of the batch arguments, by flat number: the dimension after the batch (before it, where there is
    none) of the largest one, and those of this size of the others."""
    sizes = {number: flow.nodes[flow.parameters[number]].shapes[0].dimensions for number in batch}
    nearest = {
        number: (*range(batch[number] + 1, len(shape)), *reversed(range(batch[number])))
        for number, shape in sizes.items()
    }
    largest = max(sizes, key=lambda number: prod(sizes[number]), default=None)
    if largest is None or not nearest[largest]:
        return ()
    length = sizes[largest][nearest[largest][0]]
    found = (
        (number, next((dim for dim in dims if sizes[number][dim] == length), None)) for number, dims in nearest.items()
    )
    return tuple((number, dim) for number, dim in found if dim is not None)


def _type(shape: ArrayShape) -> tuple[str, tuple[int, ...]]:
    return shape.element_type, shape.dimensions


# ---- the named strategies -------------------------------------------------------

Rule = Callable[[TensorSharding], bool]


def _is_replicated(sharding: TensorSharding) -> bool:
    return sharding.is_replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class _SplitOver:
    """Accepts shardings over no axes but `allowed`, and over every one of `required`; `together`: these, where they
    split anything, are all on one dimension."""

    allowed: frozenset[str]
    required: frozenset[str] = frozenset()
    together: frozenset[str] = frozenset()

    def __call__(self, sharding: TensorSharding) -> bool:
        axes = set(sharding.axes)
        if not (self.required <= axes <= self.allowed):
            return False
        required = self.together & self.required
        return not required or sum(bool(required.intersection(dim)) for dim in sharding.dims) == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strategy:
    """A strategy on one mesh, by what its axes do.

    batch_axes: split the batch.
    shard_axes: of these, those that split state, together on one dimension; it is gathered before its use.
    optimizer_axes: of these, those that split only the state that the step does not read (of the optimizer).
    accumulator_axes: of these, those over which gradients are scattered where they arise.
    tensor_axes: split state of `min_rank` and more, used in place; of lower rank it is free over them.
    expert_axes: of `batch_axes`, those that split the weights of experts.
    sequence_axes: split the sequence.
    not_sequence: never split the sequence.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...] = ()
    shard_axes: tuple[str, ...] = ()
    optimizer_axes: tuple[str, ...] = ()
    accumulator_axes: tuple[str, ...] = ()
    tensor_axes: tuple[str, ...] = ()
    min_rank: int = 2
    expert_axes: tuple[str, ...] = ()
    sequence_axes: tuple[str, ...] = ()
    not_sequence: tuple[str, ...] = ()

    @classmethod
    def of(cls, force: str, mesh: Mesh) -> _Strategy:
        axes = tuple(mesh.sizes)
        if force == "axes":
            return cls.by_names(mesh)
        return {
            "data": cls(mesh=mesh, batch_axes=axes),
            "tensor": cls(mesh=mesh, tensor_axes=axes),
            "mixed": cls(mesh=mesh, batch_axes=axes[:1], tensor_axes=axes[1:]),
            "megatron": cls(mesh=mesh, batch_axes=axes[:1], tensor_axes=axes[1:], not_sequence=axes[1:]),
            "expert": cls(mesh=mesh, batch_axes=axes, expert_axes=axes[-1:]),
            "zero1": cls(mesh=mesh, batch_axes=axes, shard_axes=axes, optimizer_axes=axes),
            "fsdp": cls(mesh=mesh, batch_axes=axes, shard_axes=axes),
            "replicated": cls(mesh=mesh),
        }[force]

    @classmethod
    def by_names(cls, mesh: Mesh) -> _Strategy:
        """Each axis by its name. Raises OptionError on a name that says nothing."""
        for name in mesh.sizes:
            if name not in AXIS_ROLES:
                raise OptionError(
                    f"force='axes': the axis {name!r} does not say what it splits",
                    where="mesh",
                    remedy=did_you_mean(name, AXIS_ROLES) or f"name axes {', '.join(AXIS_ROLES)}",
                )

        def named(*names: str) -> tuple[str, ...]:
            return tuple(name for name in mesh.sizes if name in names)

        return cls(
            mesh=mesh,
            batch_axes=named("data", "zero1", "zero2", "fsdp", "expert"),
            shard_axes=named("zero1", "zero2", "fsdp"),
            optimizer_axes=named("zero1", "zero2"),
            accumulator_axes=named("zero2"),
            tensor_axes=named("tensor", "model"),
            expert_axes=named("expert"),
            sequence_axes=named("context"),
            not_sequence=named("tensor"),
        )

    @property
    def knows_sequence(self) -> bool:
        """Whether any axis has to do with the sequence."""
        return bool(self.sequence_axes or self.not_sequence)

    def splits_sequence(self, length: int) -> bool:
        """Whether a batch argument's sequence is stored split: evenly, else instructions split what they read."""
        return bool(self.sequence_axes) and length % self.mesh.size(self.sequence_axes) == 0

    def roles(self, splits_batch: bool) -> Roles:
        """Roles of the axes, with the batch split or whole."""
        axes = tuple(self.mesh.sizes)
        if not (self.batch_axes or self.tensor_axes or self.sequence_axes):
            return Roles(idle=axes)
        if not splits_batch:
            return Roles(not_batch=axes) if self.shard_axes or self.tensor_axes else Roles(idle=axes)
        return Roles(
            batch=self.batch_axes,
            not_batch=(*self.tensor_axes, *self.sequence_axes),
            across=self.expert_axes,
            sequence=self.sequence_axes,
            not_sequence=self.not_sequence,
            sharded_state=self.shard_axes,
            scattered=self.accumulator_axes,
        )

    def experts(self, shape: ArrayShape, dim: int) -> Rule:
        """Split by experts when divisible by the axis, else whole; over `shard_axes` and `tensor_axes` as can be."""
        if shape.dimensions[dim] % self.mesh.size(self.expert_axes):
            return self.state(shape, is_read=False)
        return _IsSplitByExperts(dim=dim, axes=self.expert_axes, free=frozenset((*self.shard_axes, *self.tensor_axes)))

    def state(self, shape: ArrayShape, *, is_read: bool) -> Rule:
        """Split over all its axes when possible evenly; else over those of either kind that can, and no others.

        is_read: the step reads it, not only the update.
        """
        shards = tuple(axis for axis in self.shard_axes if not (is_read and axis in self.optimizer_axes))
        allowed = frozenset((*shards, *self.tensor_axes))
        if not allowed or not shape.rank:
            return _is_replicated
        tensor = self.tensor_axes if shape.rank >= self.min_rank else ()
        for required in ((shards, tensor), (shards, ()), ((), tensor)):
            if self._can_split(shape, *required):
                return _SplitOver(
                    allowed=allowed,
                    required=frozenset(axis for axes in required for axis in axes),
                    together=frozenset(shards),
                )
        return _SplitOver(allowed=allowed)

    def _can_split(self, shape: ArrayShape, shards: tuple[str, ...], tensor: tuple[str, ...]) -> bool:
        """Whether `shards` divide one dimension, together with those of `tensor`, each on some dimension."""
        return any(
            all(
                size
                % (
                    self.mesh.size(tuple(axis for axis, on in zip(tensor, dims, strict=True) if on == dim))
                    * (self.mesh.size(shards) if dim == place else 1)
                )
                == 0
                for dim, size in enumerate(shape.dimensions)
            )
            for place in range(shape.rank)
            for dims in product(range(shape.rank), repeat=len(tensor))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _IsSplitByExperts:
    """Accepts shardings by experts over `axes`, and over no others but `free`."""

    dim: int
    axes: tuple[str, ...]
    free: frozenset[str]

    def __call__(self, sharding: TensorSharding) -> bool:
        over = set(sharding.axes)
        return set(self.axes) <= set(sharding.dims[self.dim]) and over - set(self.axes) <= self.free
