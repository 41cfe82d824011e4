"""Pins by argument name, and what becomes of the arguments that they leave out.

`force={pattern: pins}` pins the arguments with matching names (`*` and `?` are wildcards): some of their dimensions, or
all of the tensor (`"replicated"`). `rest` says the others:

search      they are searched, and so is what is computed.
replicated  they are whole on every device; what is computed is searched.
data        the batch is split over all axes, all others are whole. What is computed runs along the batch, as under
            `force="data"`, except lookups, which go where they cost least. The update of state is computed on shards
            where it reads state that is pinned split (a parameter, or one of its slots), and the gradient's sum
            scattered; else it is whole on every device, and the sum is an all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from shardwright.errors import OptionError
from shardwright.options.plan_options import PlanOptions, TensorPins
from shardwright.options.user_options import name_matches
from shardwright.planner.constraints.confine import Roles
from shardwright.planner.constraints.forced import ForcedStrategy, splits_batch, state_arguments
from shardwright.planner.constraints.pins import DimPin, Requirement, Requirements, dim_pin
from shardwright.planner.graph.dataflow import Dataflow
from shardwright.plans.shardings import Mesh
from shardwright.spelling import nearest

#: Arguments listed when a name matches none and resembles none.
_NAMES_SHOWN = 8


def pins_by_name(
    flow: Dataflow, names: Sequence[str], force: Mapping[str, TensorPins], batch: Mapping[int, int]
) -> Requirements:
    """The requirements of pins by argument name. OptionError when no argument matches.

    batch: arguments with a micro-batch dimension, not counted by users, before this one.
    """
    requirements: Requirements = {}
    for pattern, pins in force.items():
        matched = [number for number, name in enumerate(names) if name_matches(pattern, name)]
        if not matched:
            raise OptionError(f"no argument is named {pattern!r}", where="force", remedy=_suggest_names(pattern, names))
        for number in matched:
            node = flow.parameters[number]
            rank = flow.nodes[node].shapes[0].rank - (number in batch)
            by_dim = (
                dict.fromkeys(range(rank), DimPin(axes=()))
                if isinstance(pins, str)
                else {dim + rank if dim < 0 else dim: dim_pin(pin) for dim, pin in pins.items()}
            )
            ahead = batch.get(number, 0)  # the program's dimensions from here on are one further behind
            dims = {dim + (0 < ahead <= dim + 1): pin for dim, pin in by_dim.items()}
            requirement = Requirement(asked_by=f"force[{pattern!r}]", dims=dims, may_pad=True)
            requirements.setdefault(node, []).append(requirement)
    return requirements


def replicate_rest(flow: Dataflow, pinned: Requirements) -> ForcedStrategy:
    """The pins, and all other arguments whole on every device."""
    whole = {node: [_whole(flow, node, "replicated")] for node in flow.parameters if node not in pinned}
    return ForcedStrategy(requirements=pinned | whole)


def split_batch(
    flow: Dataflow,
    names: Sequence[str],
    options: PlanOptions,
    mesh: Mesh,
    batch: Mapping[int, int],
    pinned: Requirements,
) -> ForcedStrategy:
    """The pins, the batch over all axes of the mesh, and all other arguments whole on every device.

    batch: flat number → batch dimension of the batch arguments.
    Raises PlanError when the mesh cannot split the batch.
    """
    axes = tuple(mesh.sizes)
    splits = splits_batch(flow, names, options, axes, mesh, batch, "rest='data'")
    requirements = replicate_rest(flow, pinned).requirements
    for number, along in batch.items():
        node = flow.parameters[number]
        if node not in pinned:
            whole = _whole(flow, node, "data")
            dims = {**whole.dims, along: DimPin(axes=axes if splits else ())}
            requirements[node] = [replace(whole, dims=dims, may_pad=True)]
    state = {flow.parameters[number] for number in state_arguments(flow, options) - batch.keys()}
    split_state = frozenset(node for node in state & pinned.keys() if any(map(_splits, pinned[node])))
    roles = Roles(batch=axes, sharded_state=axes if split_state else ()) if splits else Roles(not_batch=axes)
    return ForcedStrategy(
        requirements=requirements,
        roles=roles,
        batch=tuple((flow.parameters[number], dim) for number, dim in batch.items()),
        state_outputs=tuple(flow.outputs[output] for output in _updated_outputs(flow, state)),
        split_state=split_state,
        frees_lookups=True,
    )


def _whole(flow: Dataflow, node: int, rest: str) -> Requirement:
    dims = dict.fromkeys(range(flow.nodes[node].shapes[0].rank), DimPin(axes=()))
    return Requirement(asked_by=f"rest={rest!r}", dims=dims)


def _splits(requirement: Requirement) -> bool:
    return any(pin.axes or pin.somewhere for pin in requirement.dims.values())


def _updated_outputs(flow: Dataflow, state: set[int]) -> list[int]:
    """Numbers of the outputs that hold updated state: the aliased ones, or else those of state's types."""
    if flow.aliases:
        return sorted(flow.aliases)
    types = {(shape.element_type, shape.dimensions) for node in state for shape in flow.nodes[node].shapes}
    kinds = [flow.nodes[node].shapes[0] for node in flow.outputs]
    return [number for number, kind in enumerate(kinds) if (kind.element_type, kind.dimensions) in types]


def _suggest_names(pattern: str, names: Sequence[str]) -> str:
    """Replacement of an unknown name: the nearest names, else some of the existing ones."""
    near = nearest(pattern, names, most=3)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"the arguments are {', '.join(names[:_NAMES_SHOWN])}{', …' if len(names) > _NAMES_SHOWN else ''}"
