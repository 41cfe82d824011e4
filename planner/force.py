"""Forced strategies: pins on arguments, and the same search for everything else.

State are the arguments that share their buffer with an output (donated parameters and optimizer state).
Where the program aliases nothing, state are the arguments laid out by `argument_axes`; where there are none
of these either, each argument of rank 1 or more that has an output of the same type (each output once, in order).
All other arguments are the batch. What each strategy promises:

data        batch arguments split on dimension 0 over all axes where these divide it, else replicated;
            state replicated.
tensor      batch arguments replicated; each state tensor of rank 2 or more split over all axes (one or two
            dimensions) where they divide it, and computed with where it lies: it is never gathered.
mixed       two axes. Batch arguments split on dimension 0 over the first; state split as in `tensor` over
            the second, replicated over the first.
fsdp        batch arguments as in `data`; every state tensor split on one dimension over all axes where
            they divide one.
replicated  all arguments replicated.
{pattern: {dim: pin}}   the pins, on arguments whose name matches (`*` and `?` are wildcards).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwright.config import FORCED_STRATEGIES, Pins, PlanOptions
from shardwright.errors import OptionError
from shardwright.hlo import ArrayShape
from shardwright.planner.dataflow import Dataflow
from shardwright.planner.meshes import AXIS_NAMES, all_meshes
from shardwright.planner.pins import Requirement, Requirements, dim_pin
from shardwright.plans import Mesh, TensorSharding


@dataclass(frozen=True, slots=True, kw_only=True)
class Forced:
    """What a forced strategy asks on one mesh: pins by node, and nodes whose value may not be gathered."""

    requirements: Requirements = field(default_factory=dict)
    in_place: frozenset[int] = frozenset()


def check_force(options: PlanOptions) -> None:
    """OptionError for a strategy that does not exist."""
    force = options.force
    if isinstance(force, str) and force not in FORCED_STRATEGIES:
        raise OptionError(
            f"there is no strategy {force!r}",
            where="force",
            remedy=f"one of {', '.join(FORCED_STRATEGIES)}, or pins by argument name",
        )


def origin(options: PlanOptions) -> str:
    """`Plan.origin`: who decided."""
    if options.force is None:
        return "search"
    return f"forced: {options.force}" if isinstance(options.force, str) else "forced: pins"


def meshes_for(options: PlanOptions, device_count: int) -> tuple[Mesh, ...]:
    """Candidate meshes where the options give none: one axis but for `mixed`, which needs two."""
    if options.force == "mixed":
        meshes = tuple(mesh for mesh in all_meshes(device_count) if len(mesh.axes) == 2)
        if not meshes:
            raise OptionError(f"{device_count} devices have no two factors for a mixed strategy", where="force")
        return meshes
    if options.force == "tensor":
        return (Mesh.of({AXIS_NAMES[1]: device_count}),)
    return all_meshes(device_count)[:1] if isinstance(options.force, str) else all_meshes(device_count)


def forced(flow: Dataflow, names: Sequence[str], options: PlanOptions, mesh: Mesh) -> Forced:
    """The requirements that `options.force` stands for. OptionError where they make no sense."""
    if options.force is None:
        return Forced()
    if not isinstance(options.force, str):
        return Forced(requirements=_by_name(flow, names, options.force))
    if options.force == "mixed" and len(mesh.axes) != 2:
        raise OptionError(f"a mixed strategy needs two axes, mesh {mesh} has one", where="force")
    state = state_arguments(flow, options)
    requirements: Requirements = {}
    in_place = set()
    strategy = _Strategy.of(options.force, mesh)
    for number, node in enumerate(flow.parameters):
        shape = flow.nodes[node].shapes[0]
        rule = strategy.state(shape) if number in state else strategy.batch(shape)
        if rule is not None:
            asked_by = f"force={options.force!r}"
            requirements[node] = [Requirement(asked_by=asked_by, dims={}, rule=rule)]
            if number in state and shape.rank >= 2 and options.force in ("tensor", "mixed"):
                in_place.add(node)
    return Forced(requirements=requirements, in_place=frozenset(in_place))


def state_arguments(flow: Dataflow, options: PlanOptions) -> frozenset[int]:
    """Flat numbers of the arguments that are kept between steps (see the module's text)."""
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


def _type(shape: ArrayShape) -> tuple[str, tuple[int, ...]]:
    return shape.element_type, shape.dimensions


# ---- the named strategies -------------------------------------------------------

Rule = Callable[[TensorSharding], bool]


def _is_replicated(sharding: TensorSharding) -> bool:
    return sharding.is_replicated


@dataclass(frozen=True, slots=True, kw_only=True)
class _Strategy:
    """batch_axes: split the batch over these; state_axes: split state over these, `one_dim` together.

    least_rank: state of lower rank is free over state_axes (None of it is split over others).
    """

    mesh: Mesh
    batch_axes: tuple[str, ...] = ()
    state_axes: tuple[str, ...] = ()
    one_dim: bool = False
    least_rank: int = 1

    @classmethod
    def of(cls, force: str, mesh: Mesh) -> _Strategy:
        axes = tuple(mesh.sizes)
        return {
            "data": cls(mesh=mesh, batch_axes=axes),
            "tensor": cls(mesh=mesh, state_axes=axes, least_rank=2),
            "mixed": cls(mesh=mesh, batch_axes=axes[:1], state_axes=axes[1:], least_rank=2),
            "fsdp": cls(mesh=mesh, batch_axes=axes, state_axes=axes, one_dim=True),
            "replicated": cls(mesh=mesh),
        }[force]

    def batch(self, shape: ArrayShape) -> Rule:
        if not self.batch_axes or not shape.rank or shape.dimensions[0] % self.mesh.size(self.batch_axes):
            return _is_replicated
        wanted = TensorSharding((self.batch_axes, *((),) * (shape.rank - 1)))
        return lambda sharding: sharding == wanted

    def state(self, shape: ArrayShape) -> Rule:
        """Split over exactly `state_axes` where a sharding divides; else over no other axis."""
        if not self.state_axes or not shape.rank:
            return _is_replicated
        axes = set(self.state_axes)
        if shape.rank < self.least_rank or not self._can_split(shape):
            return lambda sharding: set(sharding.axes) <= axes
        one_dim = self.one_dim
        return lambda sharding: set(sharding.axes) == axes and (not one_dim or sum(map(bool, sharding.dims)) == 1)

    def _can_split(self, shape: ArrayShape) -> bool:
        devices = self.mesh.size(self.state_axes)
        if any(size % devices == 0 for size in shape.dimensions):
            return True
        sizes = [self.mesh.sizes[axis] for axis in self.state_axes]
        pairs = [(i, j) for i in range(shape.rank) for j in range(shape.rank) if i != j]
        return (
            not self.one_dim
            and len(sizes) == 2
            and any(shape.dimensions[i] % sizes[0] == 0 == shape.dimensions[j] % sizes[1] for i, j in pairs)
        )


def _by_name(flow: Dataflow, names: Sequence[str], force: Mapping[str, Pins]) -> Requirements:
    requirements: Requirements = {}
    for pattern, pins in force.items():
        wanted = re.compile(re.escape(pattern).replace(r"\*", ".*").replace(r"\?", "."))
        matched = [number for number, name in enumerate(names) if name == pattern or wanted.fullmatch(name)]
        if not matched:
            raise OptionError(
                f"no argument is named {pattern!r}",
                where="force",
                remedy=f"the arguments are {', '.join(names[:20])}{', …' if len(names) > 20 else ''}",
            )
        for number in matched:
            node = flow.parameters[number]
            rank = flow.nodes[node].shapes[0].rank
            dims = {dim + rank if dim < 0 else dim: dim_pin(pin) for dim, pin in pins.items()}
            requirement = Requirement(asked_by=f"force[{pattern!r}]", dims=dims, may_pad=True)
            requirements.setdefault(node, []).append(requirement)
    return requirements
