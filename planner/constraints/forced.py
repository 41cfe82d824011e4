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
{pattern: pins}   see `shardwright.planner.constraints.named_pins`.

Annotations inside the program also hold under a forced strategy, with reshards around them when they differ.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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

#: Strategies whose first axis splits the batch and whose others split state, used in place.
MIXED = ("mixed", "megatron")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForcedStrategy:
    """A forced strategy's demands on one mesh.

    requirements: pins by node.
    in_place: nodes with values that may not be gathered.
    roles: of the axes in every instruction; None: free.
    batch: nodes of the batch arguments, with their batch dimension.
    across: nodes of arguments, with a dimension across the batch (`Roles.across`, `Roles.not_across`).
    state_outputs: nodes of the updated state.
    split_state: nodes of the state that is split (`Confinement.split_state`); None: all of it.
    frees_lookups: whether lookups are computed in any way.
    """

    requirements: Requirements = field(default_factory=dict)
    in_place: frozenset[int] = frozenset()
    roles: Roles | None = None
    batch: tuple[tuple[int, int], ...] = ()
    across: tuple[tuple[int, int], ...] = ()
    state_outputs: tuple[int, ...] = ()
    split_state: frozenset[int] | None = None
    frees_lookups: bool = False

    def confinement(self, flow: Dataflow, ties: TiedDims) -> Confinement:
        """The roles' restriction of each instruction; ties: of the program's dimensions."""
        assert self.roles is not None, "without roles nothing is confined"
        dims = ties.dims(self.batch)
        across = ties.dims(self.across) if self.across else None
        return Confinement.of(
            flow,
            self.roles,
            dims,
            self.state_outputs,
            across,
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
    state = state_arguments(flow, options) - batch.keys()
    requirements: Requirements = {}
    in_place = set()
    strategy = _Strategy.of(options.force, mesh)
    asked_by = f"force={options.force!r}"
    splits = not strategy.batch_axes or splits_batch(flow, names, options, strategy.batch_axes, mesh, batch, asked_by)
    lies_along = strategy.batch_axes if splits else ()
    whole = _state_in_compute(flow, state) if options.force == "zero1" else frozenset()
    experts = _experts(flow, state, batch) if options.force == "expert" else {}
    across = tuple(experts.items()) if experts else _other_dims(flow, batch) if options.force == "megatron" else ()
    for number, node in enumerate(flow.parameters):
        shape = flow.nodes[node].shapes[0]
        rule: Rule = _is_replicated
        if number in experts:
            rule = strategy.experts(shape, experts[number])
        elif number in state - whole:
            rule = strategy.state(shape)
        requirement = Requirement(asked_by=asked_by, rule=rule)
        if number in batch:
            pins = {dim: DimPin(axes=lies_along if dim == batch[number] else ()) for dim in range(shape.rank)}
            requirement = replace(requirement, dims=pins, rule=None, may_pad=True)
        requirements[node] = [requirement]
        if number in experts or (number in state and shape.rank >= 2 and options.force in ("tensor", *MIXED)):
            in_place.add(node)
    state_types = {_type(flow.nodes[flow.parameters[number]].shapes[0]) for number in state}
    return ForcedStrategy(
        requirements=requirements,
        in_place=frozenset(in_place),
        roles=strategy.roles(splits),
        batch=tuple((flow.parameters[number], dim) for number, dim in batch.items()),
        across=tuple((flow.parameters[number], dim) for number, dim in across),
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


def _state_in_compute(flow: Dataflow, state: frozenset[int]) -> frozenset[int]:
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


def _type(shape: ArrayShape) -> tuple[str, tuple[int, ...]]:
    return shape.element_type, shape.dimensions


# ---- the named strategies -------------------------------------------------------

Rule = Callable[[TensorSharding], bool]


def _is_replicated(sharding: TensorSharding) -> bool:
    return sharding.is_replicated


@dataclass(frozen=True, slots=True)
class _IsSharding:
    """Accepts one sharding."""

    wanted: TensorSharding

    def __call__(self, sharding: TensorSharding) -> bool:
        return sharding == self.wanted


@dataclass(frozen=True, slots=True)
class _SplitOver:
    """Accepts shardings over no axes but these. all_axes: over every one of them; one_dim: and in one dimension."""

    axes: frozenset[str]
    all_axes: bool = False
    one_dim: bool = False

    def __call__(self, sharding: TensorSharding) -> bool:
        if not self.all_axes:
            return self.axes.issuperset(sharding.axes)
        return self.axes == set(sharding.axes) and (not self.one_dim or sum(map(bool, sharding.dims)) == 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strategy:
    """A named strategy on one mesh.

    batch_axes: split the batch.
    state_axes: split state, on one dimension together with `one_dim`.
    min_rank: state of lower rank is free over state_axes (none of it is split over others).
    expert_axes: split the weights of experts.
    not_across: split nothing across the batch.
    """

    mesh: Mesh
    batch_axes: tuple[str, ...] = ()
    state_axes: tuple[str, ...] = ()
    one_dim: bool = False
    min_rank: int = 1
    expert_axes: tuple[str, ...] = ()
    not_across: tuple[str, ...] = ()

    @classmethod
    def of(cls, force: str, mesh: Mesh) -> _Strategy:
        axes = tuple(mesh.sizes)
        return {
            "data": cls(mesh=mesh, batch_axes=axes),
            "tensor": cls(mesh=mesh, state_axes=axes, min_rank=2),
            "mixed": cls(mesh=mesh, batch_axes=axes[:1], state_axes=axes[1:], min_rank=2),
            "megatron": cls(mesh=mesh, batch_axes=axes[:1], state_axes=axes[1:], min_rank=2, not_across=axes[1:]),
            "expert": cls(mesh=mesh, batch_axes=axes, expert_axes=axes[-1:]),
            "zero1": cls(mesh=mesh, batch_axes=axes, state_axes=axes, one_dim=True),
            "fsdp": cls(mesh=mesh, batch_axes=axes, state_axes=axes, one_dim=True),
            "replicated": cls(mesh=mesh),
        }[force]

    def roles(self, splits_batch: bool) -> Roles:
        """Roles of the axes, with the batch split or whole."""
        axes = tuple(self.mesh.sizes)
        if not self.batch_axes and not self.state_axes:
            return Roles(idle=axes)
        others = tuple(axis for axis in self.state_axes if axis not in self.batch_axes)
        if not splits_batch:
            return Roles(not_batch=axes) if self.one_dim or others else Roles(idle=axes)
        return Roles(
            batch=self.batch_axes,
            not_batch=others,
            across=self.expert_axes,
            not_across=self.not_across,
            sharded_state=self.one_dim,
        )

    def experts(self, shape: ArrayShape, dim: int) -> Rule:
        """Split by experts when divisible by the axis; else whole."""
        if shape.dimensions[dim] % self.mesh.size(self.expert_axes):
            return _is_replicated
        wanted = TensorSharding(tuple(self.expert_axes if at == dim else () for at in range(shape.rank)))
        return _IsSharding(wanted)

    def state(self, shape: ArrayShape) -> Rule:
        """Split over exactly `state_axes` when possible evenly; else over no other axis."""
        if not self.state_axes or not shape.rank:
            return _is_replicated
        axes = frozenset(self.state_axes)
        if shape.rank < self.min_rank or not self._can_split(shape):
            return _SplitOver(axes)
        return _SplitOver(axes, all_axes=True, one_dim=self.one_dim)

    def _can_split(self, shape: ArrayShape) -> bool:
        """Whether all `state_axes` divide one dimension, or (not `one_dim`) some dimensions between them."""
        if self.one_dim:
            return any(size % self.mesh.size(self.state_axes) == 0 for size in shape.dimensions)
        return any(
            all(
                size % self.mesh.size(tuple(axis for axis, at in zip(self.state_axes, dims, strict=True) if at == dim))
                == 0
                for dim, size in enumerate(shape.dimensions)
            )
            for dims in product(range(shape.rank), repeat=len(self.state_axes))
        )
