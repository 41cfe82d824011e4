"""Rules of instructions in manual regions (`shard_map`) and at their borders.

A region is written for one device of its manual axes: inside, arrays are one device's parts along these, and no
strategy uses them. Other axes are free, inside as outside. At the border a dimension is split outside over the manual
axes that the program says, and over free axes behind them (minor) as inside. A collective inside runs over manual
axes, whatever free ones split; it takes any split of the dimensions that it leaves alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from shardwright.errors import PlanError
from shardwright.hlo import Instruction
from shardwright.hlo.opcodes import COLLECTIVES, DEVICE_NUMBERS
from shardwright.planner.rules.base import Factor, OpRule, factor, rule_of
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.regions import Border
from shardwright.reserved_names import IDENTITY_TARGETS

#: An axis of the program's mesh, with its size.
Axis = tuple[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where an instruction stands among manual regions.

    axes: the manual axes of the regions that it is in, or at whose border it is.
    border: what it is at a border.
    mesh: the program's mesh, major first, of collectives.
    """

    axes: frozenset[Axis]
    border: Border | None = None
    mesh: tuple[Axis, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ManualPart:
    """What a rule says of manual axes, by the program's names.

    axes: used by no strategy.
    ahead: at a border, per dimension of the array, the axes that split it outside, ahead of all others.
    enters: whether the operand is outside; otherwise the result.
    minor: further factors at a border: free axes behind these.
    kind, over: the collective that it is, and its axes; empty for any other instruction.
    """

    axes: frozenset[Axis]
    ahead: tuple[tuple[Axis, ...], ...] = ()
    enters: bool = False
    minor: tuple[Factor, ...] = ()
    kind: str = ""
    over: tuple[Axis, ...] = ()

    def split_outside(self, inside: TensorSharding, mesh: Mesh) -> TensorSharding:
        """An array's layout outside, by that inside."""
        ahead = (axes_on(mesh, axes) for axes in self.ahead or ((),) * len(inside.dims))
        return TensorSharding(tuple((*axes, *dim) for axes, dim in zip(ahead, inside.dims, strict=True)))


def axes_on(mesh: Mesh, axes: Iterable[Axis]) -> tuple[str, ...]:
    """The axes of a mesh that stand for axes of the program, in order. Raises PlanError where one has none."""
    return tuple(name for axis in axes for name in _axes_for(mesh, axis))


def devices_alike(mesh: Mesh, place: Place | None) -> int:
    """Devices that compute the same where nothing is split: all, but for the manual axes around."""
    return mesh.device_count // mesh.size(axes_on(mesh, place.axes if place is not None else ()))


def _axes_for(mesh: Mesh, axis: Axis) -> tuple[str, ...]:
    match = match_axis(mesh, axis)
    if match is None:
        name, size = axis
        raise PlanError(
            f"mesh {mesh} has no axis for {name}={size}, over which a region (shard_map) of the program is manual"
        )
    return match


def match_axis(mesh: Mesh, axis: Axis) -> tuple[str, ...] | None:
    """The axes of a mesh that stand for one of the program: the one of its name and size, or a run of its size; None
    without any."""
    name, size = axis
    if size == 1 or mesh.sizes.get(name) == size:
        return () if size == 1 else (name,)
    names = [axis.name for axis in mesh.axes]
    runs = (tuple(names[first:end]) for first in range(len(names)) for end in range(first + 1, len(names) + 1))
    return next((run for run in runs if mesh.size(run) == size), None)


def rule_at(instruction: Instruction, place: Place | None) -> OpRule:
    """The rule of an instruction where it stands."""
    if place is None:
        return rule_of(instruction)
    if place.border is not None:
        return _border_rule(instruction, place.axes, place.border)
    kept_whole = _KEPT_WHOLE.get(instruction.opcode)
    if kept_whole is None:
        return _inside_rule(instruction, rule_of(instruction), place.axes)
    part = ManualPart(
        axes=place.axes, kind=_PRICED_AS.get(instruction.opcode, instruction.opcode), over=_axes_of(instruction, place)
    )
    return OpRule(factors=tuple(_along_others(instruction, kept_whole(instruction))), manual=part)


def _inside_rule(instruction: Instruction, rule: OpRule, axes: frozenset[Axis]) -> OpRule:
    """The rule in a region: without what devices compute by parts of their own (`xla.manual_computation`), as regions
    do."""
    part = ManualPart(axes=axes)
    if instruction.opcode in DEVICE_NUMBERS:
        return OpRule(factors=(), manual=part)
    if instruction.opcode in _COMPUTED_BY_PARTS and not _is_marker(instruction):
        return OpRule(factors=(), reason="in a manual region: it stays whole along other axes", manual=part)
    return replace(rule, exchange_factors=(), manual=part)


#: Opcodes that are split by manual computations.
_COMPUTED_BY_PARTS = frozenset({"custom-call", "fft", "topk"})


def _is_marker(instruction: Instruction) -> bool:
    return instruction.get("custom_call_target") in IDENTITY_TARGETS


def _border_rule(instruction: Instruction, axes: frozenset[Axis], border: Border) -> OpRule:
    sizes = dict(border.axes)
    dims = border.dims or ((),) * instruction.shape.leaves[0].rank
    ahead = tuple(tuple((name, sizes[name]) for name in dim) for dim in dims)
    factors: list[Factor] = []
    minor: list[Factor] = []
    for dim, split in enumerate(ahead):
        one = factor(instruction, f"d{dim}", {0: dim}, {0: dim}, may_pad=False)
        if one is not None:
            (minor if prod(size for _, size in split) > 1 else factors).append(one)
    part = ManualPart(axes=axes, ahead=ahead, enters=border.enters, minor=tuple(minor))
    return OpRule(factors=tuple(factors), manual=part)


# ---- collectives --------------------------------------------------------------------


def _along_others(instruction: Instruction, kept_whole: Iterable[int]) -> Iterator[Factor]:
    """A factor for each dimension of all operands and results, but for those kept whole."""
    inputs = [leaf for operand in instruction.operands for leaf in operand.shape.leaves]
    outputs = instruction.shape.leaves
    kept = frozenset(kept_whole)
    if {leaf.rank for leaf in inputs} != {leaf.rank for leaf in outputs} or len({leaf.rank for leaf in inputs}) != 1:
        return
    for dim in range(inputs[0].rank):
        one = None
        if dim not in kept:
            places = dict.fromkeys(range(len(inputs)), dim), dict.fromkeys(range(len(outputs)), dim)
            one = factor(instruction, f"d{dim}", *places, may_pad=False)
        if one is not None:
            yield one


def _dimensions(instruction: Instruction) -> Sequence[int]:
    return tuple(instruction.get("dimensions") or ())


def _nothing(instruction: Instruction) -> Sequence[int]:
    return ()


def _all_dimensions(instruction: Instruction) -> Sequence[int]:
    return range(max((leaf.rank for leaf in instruction.shape.leaves), default=0))


#: The dimensions that a collective moves elements along, or that are not followed.
_KEPT_WHOLE: Mapping[str, Callable[[Instruction], Sequence[int]]] = {
    **dict.fromkeys(COLLECTIVES, _all_dimensions),
    "all-reduce": _nothing,
    "all-gather": _dimensions,
    "reduce-scatter": _dimensions,
    "all-to-all": _dimensions,
    "collective-permute": _nothing,
    "collective-broadcast": _nothing,
}

#: What costs have no formula of their own for, by what sends as much.
_PRICED_AS = {
    "collective-broadcast": "collective-permute",
    "collective-reduce": "reduce-scatter",
    "ragged-all-to-all": "all-to-all",
}


def _axes_of(instruction: Instruction, place: Place) -> tuple[Axis, ...]:
    """The axes of the program's mesh along which a collective's devices differ."""
    pairs = instruction.get("source_target_pairs")
    groups = pairs if pairs is not None else instruction.get("replica_groups") or ()
    differing: dict[Axis, None] = {}
    stride = prod(size for _, size in place.mesh)
    for name, size in place.mesh:
        stride //= size
        if not groups or any(len({device // stride % size for device in group}) > 1 for group in groups):
            differing[name, size] = None
    return tuple(axis for axis in differing if axis in place.axes)
