"""Pins: what the user says about single tensors, from annotations inside the program and from options.

A pin is read into a `Requirement`: which shardings a value may have, and who asked. Pins hold or
are refused with the tensor, its shape, its source line and the reason; none is ever dropped.
They come from `shardwright.annotate`, from the program's own constraints and the shardings of its
arguments and outputs (`planner.foreign`), and from the options. An argument or output that a pin
splits unevenly is stored padded; so is a value inside the program where its maker or a reader can work on padded
shards, else the pin is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import prod

from shardwright.config import ANNOTATION_TARGET, Pin, PlanOptions
from shardwright.errors import AnnotationError, OptionError, UnsupportedProgramError
from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.dataflow import Dataflow, Node
from shardwright.planner.foreign import ForeignSharding, ForeignShardingError, meshes_of, sharding_of
from shardwright.planner.rules import Factor, rule_of
from shardwright.planner.rules.tuples import IDENTITY_TARGETS
from shardwright.plans import Mesh, TensorSharding

#: custom call by which JAX says how an output lies (`out_shardings`).
_OUTPUT_TARGET = "xla.sdy.FuncResultSharding"

#: custom calls at the border of what is written for one device.
_MANUAL_TARGETS = frozenset(
    {"SPMDFullToShardShape", "SPMDShardToFullShape", "xla.sdy.GlobalToLocalShape", "xla.sdy.LocalToGlobalShape"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class DimPin:
    """What one dimension may be split over.

    axes: these, exactly (`is_open`: these first, maybe more); None: not given by name.
    count: over axes of this many devices together; None: any number.
    """

    axes: tuple[str, ...] | None = None
    is_open: bool = False
    count: int | None = None
    somewhere: bool = False  # over at least one axis

    def accepts(self, split: tuple[str, ...], mesh: Mesh) -> bool:
        if self.axes is not None:
            return split[: len(self.axes)] == self.axes if self.is_open else split == self.axes
        if self.count is not None:
            return mesh.size(split) == self.count
        return bool(split) or not self.somewhere

    def __str__(self) -> str:
        if self.axes is not None:
            return "·".join(self.axes) or "not split"
        return f"split {self.count} ways" if self.count is not None else "split somewhere"


@dataclass(frozen=True, slots=True, kw_only=True)
class Requirement:
    """Pins of one value: per dimension, for messages also who asked (`an annotation`, `argument_axes`, …).

    may_pad: the value is stored between steps, so that named axes need not divide it.
    rule: a condition on the whole sharding (of a forced strategy), besides the dimensions'.
    foreign: a sharding over a mesh of the program's own; `on` turns it into pins of dimensions.
    """

    asked_by: str
    dims: Mapping[int, DimPin] = field(default_factory=dict)
    may_pad: bool = False
    rule: Callable[[TensorSharding], bool] | None = None
    foreign: ForeignSharding | None = None

    def on(self, mesh: Mesh) -> Requirement:
        """The same with all axes named as `mesh` names them."""
        if self.foreign is None:
            return self
        dims = {
            number: DimPin(axes=dim.axes, is_open=dim.is_open, count=None if dim.axes is not None else dim.count)
            for number, dim in self.foreign.on(mesh).items()
        }
        whole = frozenset(self.foreign.whole_axes(mesh))
        rule = (lambda sharding: not whole.intersection(sharding.axes)) if whole else self.rule
        return replace(self, dims=dims, rule=rule, foreign=None)

    @property
    def key(self) -> Hashable:
        """Equal for requirements that ask the same."""
        foreign = None
        if self.foreign is not None:
            foreign = (self.foreign.text, tuple(self.foreign.sizes.items()), tuple(sorted(self.foreign.dims)))
        rule = None if self.rule is None else id(self.rule)
        return (self.asked_by, tuple(sorted(self.dims.items())), self.may_pad, rule, foreign)

    def accepts(self, sharding: TensorSharding, mesh: Mesh) -> bool:
        fits = all(pin.accepts(sharding.dims[dim], mesh) for dim, pin in self.dims.items())
        return fits and (self.rule is None or self.rule(sharding))


Requirements = dict[int, list[Requirement]]


def collect(flow: Dataflow, options: PlanOptions) -> Requirements:
    """Pins by node: annotations and shardings in the program, and exact axes of arguments and outputs.

    Raises AnnotationError for one that cannot be read, OptionError, and UnsupportedProgramError for `shard_map`.
    """
    refuse_manual(flow)
    found: Requirements = {}
    meshes = meshes_of(flow.module)
    for node in flow.nodes:
        if node.is_value and _is_annotation(node.instruction) and node.uses:
            found.setdefault(node.index, []).extend(_annotation(flow, node, meshes))
    for index, requirement in (*_argument_shardings(flow, meshes), *_output_shardings(flow, meshes)):
        found.setdefault(index, []).append(replace(requirement, may_pad=True))
    exact = (
        ("argument_axes", options.argument_axes, flow.parameters),
        ("output_axes", options.output_axes, flow.outputs),
    )
    for option, axes_by_number, nodes in exact:
        for index, requirement in _exact(flow, option, axes_by_number, nodes, options):
            found.setdefault(index, []).append(requirement)
    return {index: requirements for index, requirements in found.items() if requirements}


def refuse_manual(flow: Dataflow) -> None:
    """Raises UnsupportedProgramError for computations that the program writes for one device (`shard_map`)."""
    for node in flow.nodes:
        target = node.instruction.get("custom_call_target")
        if target in _MANUAL_TARGETS:
            raise UnsupportedProgramError(
                f"the program holds computations written for one device ({target}; shard_map or the like)",
                where=str(flow.module.source(node.instruction) or node.instruction.name),
                remedy="hand over the step without shard_map: the planner shards it",
            )


def named_axes(requirements: Requirements) -> tuple[str, ...]:
    """Axes that pins name and that are no mesh's of the program: a mesh has to have them. In order of appearance."""
    names = (
        axis
        for index in sorted(requirements)
        for requirement in requirements[index]
        for dim in sorted(requirement.dims)
        for axis in requirement.dims[dim].axes or ()
    )
    undefined = (
        axis
        for index in sorted(requirements)
        for requirement in requirements[index]
        if requirement.foreign is not None and not requirement.foreign.sizes
        for axis in requirement.foreign.axis_names
    )
    return tuple(dict.fromkeys((*names, *undefined)))


def program_meshes(requirements: Requirements) -> tuple[Mapping[str, int], ...]:
    """The program's own meshes that pins name axes of, each once."""
    found = {tuple(each.sizes.items()): each.sizes for each in _foreign_shardings(requirements) if each.axis_names}
    return tuple(sizes for sizes in found.values() if sizes)


def tiled_sizes(requirements: Requirements, device_count: int) -> tuple[int, ...]:
    """Sizes of the axes, major first, of the coarsest mesh that has all tiles of the program's shardings.

    Empty where there are no tiles over `device_count` devices, or no such mesh.
    """
    tiles = [each for each in _foreign_shardings(requirements) if each.device_count == device_count and not each.sizes]
    parts = [part for each in tiles for dim in each.dims.values() for part in dim.parts]
    known = [(part.stride, part.size) for part in parts if part.stride is not None]
    if not parts or len(known) < len(parts):
        return ()
    cuts = sorted({1, device_count} | {end for stride, size in known for end in (stride, stride * size)})
    if any(larger % smaller for smaller, larger in pairwise(cuts)):
        return ()
    return tuple(larger // smaller for smaller, larger in reversed(list(pairwise(cuts))))


def _foreign_shardings(requirements: Requirements) -> list[ForeignSharding]:
    return [
        requirement.foreign
        for index in sorted(requirements)
        for requirement in requirements[index]
        if requirement.foreign is not None
    ]


def _exact(
    flow: Dataflow,
    option: str,
    axes_by_number: Mapping[int, tuple[tuple[str, ...], ...]],
    nodes: Sequence[int],
    options: PlanOptions,
) -> Iterator[tuple[int, Requirement]]:
    if axes_by_number and options.mesh is None:
        raise OptionError(f"{option} needs mesh", where=option, remedy="pass the mesh that the arrays lie on")
    for number, axes in sorted(axes_by_number.items()):
        if not 0 <= number < len(nodes):
            raise OptionError(f"there is no number {number}: the program has {len(nodes)}", where=option)
        dims = {dim: DimPin(axes=tuple(split)) for dim, split in enumerate(axes)}
        rank = flow.nodes[nodes[number]].shapes[0].rank
        if len(dims) != rank:
            raise OptionError(f"number {number} has rank {rank}, not {len(dims)}", where=option)
        yield nodes[number], Requirement(asked_by=option, dims=dims, may_pad=True)


def allowed(
    flow: Dataflow, node: Node, requirements: Sequence[Requirement], mesh: Mesh, name: str
) -> tuple[TensorSharding, ...]:
    """Shardings of a value that satisfy all its pins. AnnotationError says which cannot hold, and why."""
    shape = node.shapes[0]
    requirements = [requirement.on(mesh) for requirement in requirements]
    for requirement in requirements:
        _check(flow, node, requirement, mesh, name)
    padded = {
        dim
        for requirement in requirements
        for dim, pin in requirement.dims.items()
        if pin.axes is not None and (requirement.may_pad or _can_pad(flow, node, dim))
    }
    found = tuple(
        sharding
        for sharding in _all_shardings(shape, mesh, padded)
        if all(requirement.accepts(sharding, mesh) for requirement in requirements)
    )
    if not found:
        pins = "; ".join(_describe(requirement) for requirement in requirements)
        raise _error(flow, node, name, f"no sharding over {mesh} satisfies {pins}", "change the pins or the mesh")
    return found


def _all_shardings(shape: ArrayShape, mesh: Mesh, padded: Collection[int]) -> Iterator[TensorSharding]:
    options = [None, *range(shape.rank)]
    for dims in product(options, repeat=len(mesh.axes)):
        split: list[tuple[str, ...]] = [()] * shape.rank
        for axis, dim in zip(mesh.axes, dims, strict=True):
            if dim is not None:
                split[dim] = (*split[dim], axis.name)
        if all(dim in padded or size % mesh.size(split[dim]) == 0 for dim, size in enumerate(shape.dimensions)):
            yield TensorSharding(tuple(split))


def _can_pad(flow: Dataflow, node: Node, dim: int) -> bool:
    """Whether an instruction that makes or reads the value inside the program can work on uneven shards of `dim`."""
    makers = [
        found.results[leaf] == dim
        for source, leaf in (use.source for use in node.uses)
        for found in _padding_factors(flow.nodes[source])
    ]
    readers = [
        found.operands[use.position] == dim
        for reader in flow.nodes
        for use in reader.uses
        if use.source[0] == node.index
        for found in _padding_factors(reader)
    ]
    return any(makers) or any(readers)


def _padding_factors(node: Node) -> list[Factor]:
    return [] if node.is_value else [found for found in rule_of(node.instruction).factors if found.may_pad]


# ---- what can be wrong with one pin ---------------------------------------------


def _check(flow: Dataflow, node: Node, requirement: Requirement, mesh: Mesh, name: str) -> None:
    shape = node.shapes[0]
    seen: dict[str, int] = {}
    for dim, pin in sorted(requirement.dims.items()):
        if not 0 <= dim < shape.rank:
            reason = f"{requirement.asked_by} pins dimension {dim}, but it has {shape.rank} dimensions"
            raise _error(flow, node, name, reason, f"pin dimensions 0 to {shape.rank - 1}")
        for axis in pin.axes or ():
            if axis not in mesh.sizes:
                reason = f"{requirement.asked_by} names axis {axis!r}, but the mesh is {mesh}"
                raise _error(flow, node, name, reason, "name an axis of the mesh, or pass mesh= with that axis")
            if axis in seen:
                reason = f"{requirement.asked_by} splits dimensions {seen[axis]} and {dim} over the same axis {axis!r}"
                raise _error(flow, node, name, reason, "an axis can split one dimension of a tensor")
            seen[axis] = dim
        _check_order(flow, node, requirement, pin, mesh, name)
        _check_divides(flow, node, requirement, dim, pin, mesh, name)


def _check_order(flow: Dataflow, node: Node, requirement: Requirement, pin: DimPin, mesh: Mesh, name: str) -> None:
    order = list(mesh.sizes)
    axes = pin.axes or ()
    if list(axes) != sorted(axes, key=order.index):
        reason = f"{requirement.asked_by} names axes {', '.join(axes)} out of the mesh's order ({', '.join(order)})"
        raise _error(flow, node, name, reason, "name them in the mesh's order, or order the mesh so")


def _check_divides(
    flow: Dataflow, node: Node, requirement: Requirement, dim: int, pin: DimPin, mesh: Mesh, name: str
) -> None:
    size = node.shapes[0].dimensions[dim]
    devices = mesh.size(pin.axes) if pin.axes else pin.count or 1
    if size % devices and not requirement.may_pad and not (pin.axes and _can_pad(flow, node, dim)):
        reason = (
            f"{requirement.asked_by} splits dimension {dim}, {size} elements, over {devices} devices: not even, and "
            "nothing that makes or reads it can pad that dimension"
        )
        raise _error(flow, node, name, reason, "pad that dimension, or pin another one")
    if pin.somewhere and all(size % axis.size for axis in mesh.axes):
        reason = (
            f"{requirement.asked_by} wants dimension {dim} of {size} elements split, but no axis of {mesh} divides it"
        )
        raise _error(flow, node, name, reason, "pad that dimension, or change the mesh")
    counts = {prod(sizes) for sizes in product(*((1, axis.size) for axis in mesh.axes))}
    if pin.count is not None and pin.count not in counts:
        reason = f"{requirement.asked_by} splits dimension {dim} {pin.count} ways, which no axes of {mesh} do"
        raise _error(flow, node, name, reason, "pass a mesh with such an axis")


def _error(flow: Dataflow, node: Node, name: str, reason: str, remedy: str) -> AnnotationError:
    shape = node.shapes[0]
    line = flow.module.source(node.instruction)
    tensor = f"{name} {shape.element_type}[{','.join(map(str, shape.dimensions))}]"
    return AnnotationError(reason, where=f"{tensor}, {line}" if line else tensor, remedy=remedy)


def _describe(requirement: Requirement) -> str:
    dims = ", ".join(f"{dim}: {pin}" for dim, pin in sorted(requirement.dims.items()))
    return f"{requirement.asked_by} {{{dims}}}" if dims else requirement.asked_by


# ---- reading annotations ----------------------------------------------------------


def dim_pin(pin: Pin) -> DimPin:
    """A pin of the API: axis name(s), True for split somewhere, None for not split."""
    if pin is None or pin is False:
        return DimPin(axes=())
    if pin is True:
        return DimPin(somewhere=True)
    return DimPin(axes=(pin,) if isinstance(pin, str) else tuple(pin))


def _is_annotation(instruction: Instruction) -> bool:
    return instruction.opcode == "custom-call" and instruction.get("custom_call_target") in IDENTITY_TARGETS


def _annotation(flow: Dataflow, node: Node, meshes: Mapping[str, Mapping[str, int]]) -> list[Requirement]:
    if node.instruction.get("custom_call_target") == ANNOTATION_TARGET:
        return [Requirement(asked_by="an annotation", dims=_own_pins(flow, node))]
    return _foreign(flow, node, node.instruction, 0, "a sharding constraint", meshes)


def _argument_shardings(flow: Dataflow, meshes: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[int, Requirement]]:
    for index in flow.parameters:
        node = flow.nodes[index]
        for requirement in _foreign(flow, node, node.instruction, node.leaf, "the sharding of its argument", meshes):
            yield index, requirement


def _output_shardings(flow: Dataflow, meshes: Mapping[str, Mapping[str, int]]) -> Iterator[tuple[int, Requirement]]:
    """What JAX's mark on an output says, else the root. An output in an argument's place is that argument."""
    root = flow.module.entry.root
    for leaf, (index, (made, _)) in enumerate(zip(flow.outputs, flow.leaves[root], strict=True)):
        maker = flow.nodes[made]
        is_marked = maker.instruction.get("custom_call_target") == _OUTPUT_TARGET
        if maker.is_value and _is_annotation(maker.instruction) and not is_marked:
            continue
        instruction, at = (maker.instruction, 0) if is_marked else (root, leaf)
        if instruction.opcode == "parameter":
            continue
        for requirement in _foreign(flow, flow.nodes[index], instruction, at, "the sharding of its output", meshes):
            yield index, requirement


def _foreign(
    flow: Dataflow,
    node: Node,
    instruction: Instruction,
    leaf: int,
    asked_by: str,
    meshes: Mapping[str, Mapping[str, int]],
) -> list[Requirement]:
    try:
        sharding = sharding_of(instruction, meshes, node.shapes[0].rank, leaf)
    except ForeignShardingError as error:
        raise _error(flow, node, instruction.op_name or instruction.name, str(error), error.remedy) from None
    return [] if sharding is None else [Requirement(asked_by=asked_by, foreign=sharding)]


def _own_pins(flow: Dataflow, node: Node) -> dict[int, DimPin]:
    """`0:data,1:-,2:*`; axes of one dimension are joined by `·` or `+`."""
    text = str(node.instruction.get("backend_config") or "")
    pins = {}
    for item in filter(None, text.split(",")):
        match = re.fullmatch(r"\s*(\d+)\s*:\s*(\S+)\s*", item)
        if match is None:
            raise _error(flow, node, node.instruction.name, f"annotation {text!r} cannot be read", "write `0:data,1:-`")
        what = match[2]
        if what == "-":
            pins[int(match[1])] = DimPin(axes=())
        elif what == "*":
            pins[int(match[1])] = DimPin(somewhere=True)
        else:
            pins[int(match[1])] = DimPin(axes=tuple(re.split(r"[·+]", what)))
    return pins
