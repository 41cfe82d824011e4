"""Pins: the user's requirements on the shardings of single tensors.

`annotations` reads them. A pin holds or is refused with the tensor, its shape, its source line and the reason; none is
ever dropped. An axis of the program's own mesh splits nothing on a mesh without a match, and the plan notes it
(`mesh_unification`). An argument or output split unevenly by a pin is stored padded; a value inside the program too,
when its producer or a consumer can work on padded shards, else the pin is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, product
from math import prod

from shardwright.errors import AnnotationError
from shardwright.hlo import ArrayShape, Instruction, Module
from shardwright.options.plan_options import Pin
from shardwright.options.user_options import DEFAULT_AXES
from shardwright.planner.graph.dataflow import Dataflow, Node
from shardwright.planner.graph.imported_shardings import ImportedSharding
from shardwright.planner.rules import Factor, rule_of
from shardwright.planner.strategies.axis_order import with_rotation
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.reserved_names import IDENTITY_TARGETS
from shardwright.spelling import did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class DimPin:
    """The allowed split of one dimension.

    axes: exactly these (`is_open`: these first, maybe more); None: not given by name.
    is_open: see `axes`.
    count: over axes of this many devices together; None: any number.
    somewhere: over at least one axis.
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
    """Pins of one value.

    asked_by: their origin, in messages (`an annotation`, `argument_axes`, …).
    dims: pins per dimension.
    may_pad: the value is stored between steps: named axes need not divide it.
    rule: a further condition on the whole sharding (of a forced strategy); equal conditions compare equal.
    imported: a sharding over a mesh of the program's own; `on` translates it to pins of dimensions.
    """

    asked_by: str
    dims: Mapping[int, DimPin] = field(default_factory=dict)
    may_pad: bool = False
    rule: Callable[[TensorSharding], bool] | None = None
    imported: ImportedSharding | None = None

    def on(self, mesh: Mesh) -> Requirement:
        """The same with all axes named like those of `mesh`."""
        if self.imported is None:
            return self
        dims = {
            number: DimPin(
                axes=dim.axes,
                is_open=dim.is_open,
                count=None if dim.axes is not None else dim.count,
                somewhere=dim.axes is None and dim.count is None,
            )
            for number, dim in self.imported.on(mesh).items()
        }
        whole = frozenset(self.imported.whole_axes(mesh))
        rule = (lambda sharding: not whole.intersection(sharding.axes)) if whole else self.rule
        return replace(self, dims=dims, rule=rule, imported=None)

    @property
    def key(self) -> Hashable:
        """Equal among requirements with equal demands."""
        foreign = None
        if self.imported is not None:
            foreign = (self.imported.text, tuple(self.imported.sizes.items()), tuple(sorted(self.imported.dims)))
        return (self.asked_by, tuple(sorted(self.dims.items())), self.may_pad, self.rule, foreign)

    def accepts(self, sharding: TensorSharding, mesh: Mesh) -> bool:
        fits = all(pin.accepts(sharding.dims[dim], mesh) for dim, pin in self.dims.items())
        return fits and (self.rule is None or self.rule(sharding))


Requirements = dict[int, list[Requirement]]


def dim_pin(pin: Pin) -> DimPin:
    """A pin of the API: axis name(s), True: split somewhere, None: not split."""
    if pin is None or pin is False:
        return DimPin(axes=())
    if pin is True:
        return DimPin(somewhere=True)
    return DimPin(axes=(pin,) if isinstance(pin, str) else tuple(pin))


def axes_in_pins(requirements: Requirements) -> tuple[str, ...]:
    """Axes named in pins outside the program's meshes: the mesh must have them. In order of appearance."""
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
        if requirement.imported is not None and not requirement.imported.sizes
        for axis in requirement.imported.axis_names
    )
    return tuple(dict.fromkeys((*names, *undefined)))


def suspicious_axes(flow: Dataflow, requirements: Requirements) -> Iterator[str]:
    """Warnings about axis names in pins that resemble another name or a default one. Without a mesh of the user's or
    the program's, every name makes an axis, even a misspelled one."""
    names = axes_in_pins(requirements)
    for name in names:
        meant = "" if name in DEFAULT_AXES else did_you_mean(name, {*names, *DEFAULT_AXES} - {name})
        if meant:
            node = next(index for index in sorted(requirements) if name in axes_in_pins({0: requirements[index]}))
            instruction = flow.nodes[node].instruction
            where = _with_line(flow.module, instruction, array_name(flow.module, instruction))
            yield f"{requirements[node][0].asked_by} ({where}) makes an axis {name!r} of the mesh: {meant}"


def program_meshes(requirements: Requirements) -> tuple[Mapping[str, int], ...]:
    """The program's own meshes with axes named in pins, each once."""
    meshes = {tuple(s.sizes.items()): s.sizes for s in _imported_shardings(requirements) if s.axis_names}
    return tuple(sizes for sizes in meshes.values() if sizes)


def axis_orders(requirements: Requirements) -> set[tuple[str, ...]]:
    """Per dimension split by axes of the program's meshes, those axes, major first."""
    return {
        tuple(part.axis for part in dim.parts)
        for sharding in _imported_shardings(requirements)
        for dim in sharding.dims.values()
        if dim.parts and all(part.axis for part in dim.parts)
    }


def _imported_shardings(requirements: Requirements) -> list[ImportedSharding]:
    return [
        requirement.imported
        for index in sorted(requirements)
        for requirement in requirements[index]
        if requirement.imported is not None
    ]


def satisfying_shardings(
    flow: Dataflow,
    node: Node,
    requirements: Sequence[Requirement],
    mesh: Mesh,
    name: str,
    barred: Collection[str] = (),
) -> tuple[TensorSharding, ...]:
    """Shardings of a value satisfying all its pins. Raises AnnotationError with the violated pin and the reason.

    barred: axes that split nothing of it (manual ones, in their region).
    """
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
    shardings = tuple(
        sharding
        for sharding in _all_shardings(shape, mesh, padded)
        if all(requirement.accepts(sharding, mesh) for requirement in requirements)
        and not any(axis in barred for axis in sharding.axes)
    )
    if not shardings:
        pins = "; ".join(_describe(requirement) for requirement in requirements)
        raise pin_error(flow, node, name, f"no sharding over {mesh} satisfies {pins}", "change the pins or the mesh")
    return shardings


def _all_shardings(shape: ArrayShape, mesh: Mesh, padded: Collection[int]) -> Iterator[TensorSharding]:
    options = [None, *range(shape.rank)]
    for dims in product(options, repeat=len(mesh.axes)):
        split: list[tuple[str, ...]] = [()] * shape.rank
        for axis, dim in zip(mesh.axes, dims, strict=True):
            if dim is not None:
                split[dim] = (*split[dim], axis.name)
        if all(dim in padded or size % mesh.size(split[dim]) == 0 for dim, size in enumerate(shape.dimensions)):
            yield from with_rotation(TensorSharding(tuple(split)), shape.dimensions, mesh)


def _can_pad(flow: Dataflow, node: Node, dim: int) -> bool:
    """Whether a producer or consumer inside the program can work on uneven shards of `dim`."""
    makers = [
        factor.results[leaf] == dim
        for source, leaf in (use.source for use in node.uses)
        for factor in _padding_factors(flow.nodes[source])
    ]
    readers = [
        factor.operands[use.position] == dim
        for reader in flow.nodes
        for use in reader.uses
        if use.source[0] == node.index
        for factor in _padding_factors(reader)
    ]
    return any(makers) or any(readers)


def _padding_factors(node: Node) -> list[Factor]:
    return [] if node.is_value else [factor for factor in rule_of(node.instruction).factors if factor.may_pad]


# ---- errors of one pin ---------------------------------------------


def _check(flow: Dataflow, node: Node, requirement: Requirement, mesh: Mesh, name: str) -> None:
    shape = node.shapes[0]
    seen: dict[str, int] = {}
    for dim, pin in sorted(requirement.dims.items()):
        if not 0 <= dim < shape.rank:
            reason = f"{requirement.asked_by} pins dimension {dim}, but it has {shape.rank} dimensions"
            raise pin_error(flow, node, name, reason, f"pin dimensions 0 to {shape.rank - 1}")
        for axis in pin.axes or ():
            if axis not in mesh.sizes:
                reason = f"{requirement.asked_by} names axis {axis!r}, but the mesh is {mesh}"
                remedy = did_you_mean(axis, mesh.sizes) or "name an axis of the mesh, or pass mesh= with that axis"
                raise pin_error(flow, node, name, reason, remedy)
            if axis in seen:
                reason = f"{requirement.asked_by} splits dimensions {seen[axis]} and {dim} over the same axis {axis!r}"
                raise pin_error(flow, node, name, reason, "an axis can split one dimension of a tensor")
            seen[axis] = dim
        _check_order(flow, node, requirement, dim, pin, mesh, name)
        _check_split(flow, node, requirement, dim, pin, mesh, name)


def _check_order(
    flow: Dataflow, node: Node, requirement: Requirement, dim: int, pin: DimPin, mesh: Mesh, name: str
) -> None:
    order = list(mesh.sizes)
    axes = pin.axes or ()
    pinned = tuple(sorted(axes, key=order.index))
    dims = node.shapes[0].dimensions
    orders = with_rotation(TensorSharding(tuple(pinned if at == dim else () for at in range(len(dims)))), dims, mesh)
    if all(candidate.dims[dim] != axes for candidate in orders):
        reason = f"{requirement.asked_by} names axes {', '.join(axes)} out of the mesh's order ({', '.join(order)})"
        raise pin_error(flow, node, name, reason, "name them in the mesh's order, or order the mesh so")


def _check_split(
    flow: Dataflow, node: Node, requirement: Requirement, dim: int, pin: DimPin, mesh: Mesh, name: str
) -> None:
    size = node.shapes[0].dimensions[dim]
    counts = {prod(sizes) for sizes in product(*((1, axis.size) for axis in mesh.axes))}
    if pin.count is not None and pin.count not in counts:
        reason = f"{requirement.asked_by} splits dimension {dim} {pin.count} ways, which no axes of {mesh} do"
        has_such = mesh.device_count % pin.count == 0
        remedy = "pass a mesh with such an axis" if has_such else f"plan for devices that {pin.count} divides"
        raise pin_error(flow, node, name, reason, f"{remedy}, or take the sharding out")
    devices = mesh.size(pin.axes) if pin.axes else pin.count or 1
    if size % devices and not requirement.may_pad and not (pin.axes and _can_pad(flow, node, dim)):
        reason = (
            f"{requirement.asked_by} splits dimension {dim}, {size} elements, over {devices} devices: not even, and "
            "nothing that makes or reads it can pad that dimension"
        )
        raise pin_error(flow, node, name, reason, "pad that dimension, or pin another one")
    if pin.somewhere and all(size % axis.size for axis in mesh.axes):
        reason = (
            f"{requirement.asked_by} wants dimension {dim} of {size} elements split, but no axis of {mesh} divides it"
        )
        raise pin_error(flow, node, name, reason, "pad that dimension, or change the mesh")


def pin_error(flow: Dataflow, node: Node, name: str, reason: str, remedy: str) -> AnnotationError:
    """The error of a pin on `node`, called `name` in messages, with its type and the user's line."""
    return array_error(flow.module, node.instruction, node.shapes[0], name, reason, remedy)


def array_name(module: Module, instruction: Instruction) -> str:
    """The name in messages of the array produced or annotated by an instruction."""
    if instruction.get("custom_call_target") in IDENTITY_TARGETS and instruction.operands:
        return array_name(module, instruction.operands[0])
    named_alike = (parameter for parameter in module.entry.parameters if parameter.op_name == instruction.op_name)
    is_shared = instruction.opcode == "parameter" and len(list(islice(named_alike, 2))) > 1
    return instruction.name if is_shared else instruction.op_name or instruction.name


def array_error(
    module: Module, instruction: Instruction, shape: ArrayShape, name: str, reason: str, remedy: str
) -> AnnotationError:
    """The same, with an instruction in place of a node."""
    tensor = f"{name} {shape.element_type}[{','.join(map(str, shape.dimensions))}]"
    return AnnotationError(reason, where=_with_line(module, instruction, tensor), remedy=remedy)


def _with_line(module: Module, instruction: Instruction, name: str) -> str:
    line = module.source(instruction)
    return f"{name}, {line}" if line else name


def _describe(requirement: Requirement) -> str:
    dims = ", ".join(f"{dim}: {pin}" for dim, pin in sorted(requirement.dims.items()))
    return f"{requirement.asked_by} {{{dims}}}" if dims else requirement.asked_by
