"""What is computed from a product, up to the next products."""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass, field

from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.attention.axes import (
    CutAxisError,
    Label,
    Labels,
    NoLabelsError,
    merge,
    permuted,
    reshape_labels,
)
from shardwright.planner.attention.elementwise import ELEMENTWISE
from shardwright.planner.attention.flow import Flow, Readers
from shardwright.planner.attention.tuning import MAX_CONE_NODES


@dataclass(frozen=True, slots=True)
class ProductDims:
    """The dimensions of a product: pairs of batch dimensions, contracted ones, and each operand's others."""

    batch: tuple[tuple[int, int], ...]
    contracted: tuple[tuple[int, int], ...]
    free: tuple[tuple[int, ...], tuple[int, ...]]


def dims_of(dot: Instruction) -> ProductDims:
    batch = tuple(zip(dot.get("lhs_batch_dims", ()), dot.get("rhs_batch_dims", ()), strict=True))
    contracted = tuple(zip(dot.get("lhs_contracting_dims", ()), dot.get("rhs_contracting_dims", ()), strict=True))
    free = tuple(
        tuple(
            dim
            for dim in range(operand.shape.leaves[0].rank)
            if dim not in {pair[side] for pair in (*batch, *contracted)}
        )
        for side, operand in enumerate(dot.operands)
    )
    return ProductDims(batch, contracted, (free[0], free[1]))


@dataclass(slots=True)
class Cone:
    """Values computed from a product.

    product: the scores, or the gradient of the probabilities.
    labels: of each value, in the program's order.
    ends: products that read one, with the operand's place.
    sums: reductions over other axes than the keys.
    problem: why it is no attention; None where none was seen.
    """

    product: Instruction
    sizes: dict[str, int]
    labels: dict[Instruction, Labels] = field(default_factory=dict)
    ends: list[tuple[Instruction, int]] = field(default_factory=list)
    sums: list[Instruction] = field(default_factory=list)
    escapes: list[Instruction] = field(default_factory=list)
    keys: Label = ()


def result_labels(dot: Instruction, cuts: Mapping[int, tuple[int, ...]]) -> tuple[Labels, dict[str, int]]:
    """A product's own axes, one a dimension, or as many as `cuts` cut it into."""
    labels: list[Label] = []
    sizes: dict[str, int] = {}
    for dim, size in enumerate(dot.shape.leaves[0].dimensions):
        parts = cuts.get(dim, (size,)) if size > 1 else ()
        axes = tuple(f"x{dim}.{number}" for number in range(len(parts)))
        sizes.update(zip(axes, parts, strict=True))
        labels.append(axes)
    return tuple(labels), sizes


def cut_dim(cuts: dict[int, tuple[int, ...]], cut: CutAxisError, product: Instruction) -> None:
    """Cut one of a product's own axes further."""
    dim, place = (int(number) for number in cut.axis[1:].split("."))
    parts = list(cuts.get(dim, (product.shape.leaves[0].dimensions[dim],)))
    parts[place : place + 1] = cut.sizes
    cuts[dim] = tuple(parts)


def grow(product: Instruction, readers: Readers, cuts: Mapping[int, tuple[int, ...]]) -> Cone:
    """The cone of a product. Raises CutAxisError, NoLabelsError."""
    labels, sizes = result_labels(product, cuts)
    cone = Cone(product, sizes, {product: labels})
    pending = [(readers.position[product], product)]
    queued = {product}
    while pending:
        _, value = heapq.heappop(pending)
        if value is not product:
            cone.labels[value] = label_of(value, cone.labels, cone.sizes, readers.flow)
        if len(cone.labels) > MAX_CONE_NODES:
            raise NoLabelsError
        for reader, place in readers.of(value):
            if not _enters(reader, place, value, cone):
                continue
            if reader not in queued:
                queued.add(reader)
                heapq.heappush(pending, (readers.position[reader], reader))
        if readers.is_returned(value):
            cone.escapes.append(readers.computation.root)
    _fill(cone, readers)
    return cone


def _enters(reader: Instruction, place: int, value: Instruction, cone: Cone) -> bool:
    """Whether a reader belongs to the cone; otherwise it is noted where the cone ends."""
    if reader.opcode == "dot":
        cone.ends.append((reader, place))
        return False
    if reader.opcode == "reduce" and len(reader.operands) == 2 and place == 0:
        dims = reader.get("dimensions")
        axes = [cone.labels[value][dim] for dim in dims]
        reduced = tuple(axis for label in axes if label for axis in label)
        if None in axes:
            axes, reduced = [], cone.keys
        if not cone.keys and len(reduced) == 1:
            cone.keys = reduced
        if reduced and reduced != cone.keys:
            cone.sums.append(reader)
            return False
        return True
    is_inner = reader.opcode in ELEMENTWISE or reader.opcode in ("reshape", "transpose", "broadcast")
    if not is_inner or not isinstance(reader.shape, ArrayShape):
        cone.escapes.append(reader)
        return False
    return True


def label_of(value: Instruction, labels: Mapping[Instruction, Labels], sizes: Mapping[str, int], flow: Flow) -> Labels:
    """The labels of an elementwise operation, view or reduction of values that have labels."""
    opcode = value.opcode
    dims = value.shape.leaves[0].dimensions
    sources = [flow.source(operand) for operand in value.operands]
    if opcode in ELEMENTWISE:
        merged: Labels = tuple(() if size == 1 else None for size in dims)
        for source in sources:
            if source in labels and source.shape.leaves[0].rank:
                merged = merge(merged, labels[source])
        return merged
    inner = labels[sources[0]]
    if opcode == "transpose":
        return permuted(inner, value.get("dimensions"))
    if opcode == "reshape":
        return reshape_labels(inner, sources[0].shape.leaves[0].dimensions, dims, sizes)
    if opcode == "reduce":
        axes = value.get("dimensions")
        return tuple(label for dim, label in enumerate(inner) if dim not in axes)
    along = list(value.get("dimensions", ()))
    return tuple(
        inner[along.index(dim)] if dim in along else (() if size == 1 else None) for dim, size in enumerate(dims)
    )


def _fill(cone: Cone, readers: Readers) -> None:
    """Labels that only readers tell: of dimensions that a broadcast adds."""
    for _ in range(2):
        for value in reversed(list(cone.labels)):
            for source, labels in _told(value, cone, readers):
                cone.labels[source] = merge(cone.labels[source], labels)
        for value in cone.labels:
            if value is not cone.product:
                cone.labels[value] = merge(cone.labels[value], label_of(value, cone.labels, cone.sizes, readers.flow))


def _told(value: Instruction, cone: Cone, readers: Readers) -> list[tuple[Instruction, Labels]]:
    """What a value's labels say of its operands in the cone, where they lack any."""
    sources = [readers.flow.source(operand) for operand in value.operands]
    lacking = [each for each in sources if each in cone.labels and None in cone.labels[each]]
    if not lacking:
        return []
    labels, opcode = cone.labels[value], value.opcode
    dims = value.shape.leaves[0].dimensions
    if opcode in ELEMENTWISE:
        return [(each, labels) for each in lacking if each.shape.leaves[0].rank]
    (source, *_) = lacking
    if opcode == "transpose":
        inner: list[Label | None] = [None] * len(labels)
        for to, dim in enumerate(value.get("dimensions")):
            inner[dim] = labels[to]
        return [(source, tuple(inner))]
    if opcode == "reshape":
        return [(source, reshape_labels(labels, dims, source.shape.leaves[0].dimensions, cone.sizes))]
    if opcode == "reduce":
        axes = value.get("dimensions")
        outer = iter(labels)
        reduced = cone.keys if sum(source.shape.leaves[0].dimensions[dim] > 1 for dim in axes) == 1 else None
        return [
            (
                source,
                tuple(
                    (reduced if size > 1 else ()) if dim in axes else next(outer)
                    for dim, size in enumerate(source.shape.leaves[0].dimensions)
                ),
            )
        ]
    return [(source, tuple(labels[dim] for dim in value.get("dimensions", ())))]
