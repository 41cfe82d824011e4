"""Ties between array dimensions, for writing one of them as two.

A dimension of n elements becomes two of k and n/k only together with every dimension an instruction pairs it with. Per
instruction, each dimension of more than one element of its operands and result is one of:

- tied: it becomes two with the dimensions tied to it (`dot`'s contracted pair, an `add`'s columns);
- cut: it may become two at a block size n/k with no cut through a block (a `slice`, the joined dimension of a
  `concatenate`); cuts are the reason for the split;
- free: it may become two independently, behind a reshape (a piece before it is concatenated, a reshape that merges);
- denied: everything else, the default: an unlisted instruction takes no split.

Colours of named dimensions follow TOAST (Alabed et al., 2025); the stored fused weight `[d, 3, d]` is Megatron-LM's
(Shoeybi et al., 2019), derived here instead of written by hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from shardwright.hlo import Computation, Instruction, TupleShape, Window
from shardwright.planner.graph.dataflow import CONTROL_FLOW
from shardwright.planner.rules.data_movement import reshape_groups
from shardwright.planner.rules.elementwise import BINARY, NARY, UNARY
from shardwright.reserved_names import ANNOTATION_TARGET, PLACEMENT_TARGET

#: (value, array leaf of it, dimension of that leaf).
Dim = tuple[Instruction, int, int]


@dataclass(slots=True, kw_only=True)
class Links:
    """The links of one instruction between its dimensions.

    cuts: dimension → offsets of its cuts.
    merged: (the major-most of some dimensions, the dimension a reshape merges them into), either way round.
    """

    ties: dict[Dim, list[Dim]] = field(default_factory=dict)
    cuts: dict[Dim, tuple[int, ...]] = field(default_factory=dict)
    merged: list[tuple[Dim, Dim]] = field(default_factory=list)
    denied: set[Dim] = field(default_factory=set)


def links(instruction: Instruction) -> Links:
    """The links of one instruction, including its control flow computations."""
    builder = _Builder(instruction)
    rule = _RULES.get(instruction.opcode)
    if rule is not None and not _is_sharded(instruction):
        rule(builder, instruction)
    return builder.finish()


def _is_sharded(instruction: Instruction) -> bool:
    """Whether a user's sharding refers to the result's dimensions."""
    sharding = instruction.attributes.get("sharding")
    if sharding is not None and sharding.text not in ("{replicated}", "{}"):
        return True
    return "xla.sdy.sharding" in instruction.get("frontend_attributes", {})


class _Builder:
    """Collects links by slots: (number of the operand, -1 for the result; array leaf; dimension)."""

    def __init__(self, instruction: Instruction) -> None:
        self.values = (*instruction.operands, instruction)
        self.made = Links()
        self.allowed: set[tuple[int, int, int]] = set()
        self.allowed_whole: set[int] = set()  # values all of whose leaves and dimensions are

    def dims(self, number: int, leaf: int = 0) -> tuple[int, ...]:
        """Sizes of a leaf's dimensions."""
        return self.values[number].shape.leaves[leaf].dimensions

    def tie(self, *slots: tuple[int, int, int], others: Iterable[Dim] = ()) -> None:
        self.allowed.update(slots)
        group = list(dict.fromkeys([*((self.values[n], leaf, dim) for n, leaf, dim in slots), *others]))
        for dim in group:
            self.made.ties.setdefault(dim, []).extend(group)

    def tie_leaf(self, number: int, leaf: int, to_number: int, to_leaf: int) -> None:
        for dim in range(len(self.dims(number, leaf))):
            self.tie((number, leaf, dim), (to_number, to_leaf, dim))

    def cut(self, number: int, dim: int, offsets: Iterable[int]) -> None:
        self.allowed.add((number, 0, dim))
        key = (self.values[number], 0, dim)
        self.made.cuts[key] = (*self.made.cuts.get(key, ()), *offsets)

    def free(self, number: int, dim: int) -> None:
        self.allowed.add((number, 0, dim))

    def finish(self) -> Links:
        last = len(self.values) - 1
        allowed = {(last if n < 0 else n, leaf, dim) for n, leaf, dim in self.allowed}
        for number, value in enumerate(self.values):
            if number in self.allowed_whole and not any(shape.dynamic for shape in value.shape.leaves):
                continue  # skip tuples, possibly of thousands of elements
            for leaf, shape in enumerate(value.shape.leaves):
                for dim, size in enumerate(shape.dimensions):
                    dynamic = bool(shape.dynamic) and shape.dynamic[dim]
                    is_allowed = number in self.allowed_whole or (number, leaf, dim) in allowed
                    if size > 1 and (dynamic or not is_allowed):
                        self.made.denied.add((value, leaf, dim))
        return self.made


_Rule = Callable[[_Builder, Instruction], None]


# ---- values and tuples -------------------------------------------------------


def _source(builder: _Builder, instruction: Instruction) -> None:
    """A parameter takes its argument's dimensions; callers tie them."""
    for leaf, shape in enumerate(instruction.shape.leaves):
        for dim in range(shape.rank):
            builder.allowed.add((-1, leaf, dim))


def _leafwise(builder: _Builder, instruction: Instruction) -> None:
    target = 0
    for number, operand in enumerate(instruction.operands):
        for leaf in range(len(operand.shape.leaves)):
            if target < len(instruction.shape.leaves):
                builder.tie_leaf(number, leaf, -1, target)
            target += 1


def _element(builder: _Builder, instruction: Instruction) -> None:
    shape = instruction.operands[0].shape
    assert isinstance(shape, TupleShape)
    builder.allowed_whole.add(0)  # an unread element of a tuple has no ties
    first = sum(len(element.leaves) for element in shape.elements[: instruction.index])
    for leaf in range(len(instruction.shape.leaves)):
        builder.tie_leaf(0, first + leaf, -1, leaf)


def _while(builder: _Builder, loop: Instruction) -> None:
    (body,), (condition,) = loop.called["body"], loop.called["condition"]
    ends = [(value, 0) for value in (body.parameters[0], body.root, condition.parameters[0])]
    for leaf in range(len(loop.shape.leaves)):
        _tie_across(builder, (0, leaf), (-1, leaf), others=[(value, leaf) for value, _ in ends])


def _call(builder: _Builder, call: Instruction) -> None:
    (callee,) = call.called["to_apply"]
    for number, operand in enumerate(call.operands):
        for leaf in range(len(operand.shape.leaves)):
            _tie_across(builder, (number, leaf), others=[(callee.parameters[number], leaf)])
    for leaf in range(len(call.shape.leaves)):
        _tie_across(builder, (-1, leaf), others=[(callee.root, leaf)])


def _conditional(builder: _Builder, choice: Instruction) -> None:
    branches = callees_of(choice)
    for number, branch in enumerate(branches, start=1):
        for leaf in range(len(choice.operands[number].shape.leaves)):
            _tie_across(builder, (number, leaf), others=[(branch.parameters[0], leaf)])
    for leaf in range(len(choice.shape.leaves)):
        _tie_across(builder, (-1, leaf), others=[(branch.root, leaf) for branch in branches])


def _tie_across(builder: _Builder, *slots: tuple[int, int], others: list[tuple[Instruction, int]]) -> None:
    """Tie every dimension of whole leaves, those of called computations included."""
    for dim in range(len(builder.dims(*slots[0]))):
        builder.tie(
            *((number, leaf, dim) for number, leaf in slots), others=[(value, leaf, dim) for value, leaf in others]
        )


def callees_of(instruction: Instruction) -> list[Computation]:
    """The control flow computations of an instruction, in the order of its attributes."""
    names = CONTROL_FLOW.get(instruction.opcode, ())
    return [callee for name in names for callee in instruction.called.get(name, ())]


# ---- computing ---------------------------------------------------------------


def _elementwise(builder: _Builder, instruction: Instruction) -> None:
    sizes = builder.dims(-1)
    numbers = [n for n in range(len(instruction.operands)) if builder.dims(n) == sizes]
    for dim in range(len(sizes)):
        builder.tie((-1, 0, dim), *((number, 0, dim) for number in numbers))


def _dot(builder: _Builder, instruction: Instruction) -> None:
    sides = ("lhs", "rhs")
    batch = [instruction.get(f"{side}_batch_dims", ()) for side in sides]
    contracting = [instruction.get(f"{side}_contracting_dims", ()) for side in sides]
    for lhs, rhs in zip(*contracting, strict=True):
        builder.tie((0, 0, lhs), (1, 0, rhs))
    target = 0
    for lhs, rhs in zip(*batch, strict=True):
        builder.tie((0, 0, lhs), (1, 0, rhs), (-1, 0, target))
        target += 1
    for number in (0, 1):
        for dim in range(len(builder.dims(number))):
            if dim not in batch[number] and dim not in contracting[number]:
                builder.tie((number, 0, dim), (-1, 0, target))
                target += 1


def _reduce(builder: _Builder, instruction: Instruction) -> None:
    reduced = instruction.get("dimensions", ())
    arrays = range(len(instruction.operands) // 2)
    target = 0
    for dim in range(len(builder.dims(0))):
        slots = [(number, 0, dim) for number in arrays]
        if dim not in reduced:
            slots += [(-1, leaf, target) for leaf in arrays]
            target += 1
        builder.tie(*slots)


def _reduce_window(builder: _Builder, instruction: Instruction) -> None:
    arrays = range(len(instruction.operands) // 2)
    for dim in idle_window_dims(instruction.get("window"), len(builder.dims(0))):
        builder.tie(*((number, 0, dim) for number in arrays), *((-1, leaf, dim) for leaf in arrays))


def idle_window_dims(window: Window | None, rank: int) -> list[int]:
    """Dimensions with a trivial window: one element wide, no effect."""
    if window is None:
        return list(range(rank))
    return [
        dim
        for dim in range(rank)
        if window.sizes[dim] == window.strides[dim] == window.lhs_dilation[dim] == window.rhs_dilation[dim] == 1
        and window.padding_low[dim] == window.padding_high[dim] == 0
    ]


def _sort(builder: _Builder, instruction: Instruction) -> None:
    (sorted_dim,) = instruction.get("dimensions")
    arrays = range(len(instruction.operands))
    for dim in range(len(builder.dims(0))):
        if dim != sorted_dim:
            builder.tie(*((number, 0, dim) for number in arrays), *((-1, leaf, dim) for leaf in arrays))


def _annotation(builder: _Builder, instruction: Instruction) -> None:
    """`shardwright.annotate` hands its operand on; the user's constraints refer to the dimensions it splits. A move
    between memories hands it on as it is."""
    if instruction.get("custom_call_target") == PLACEMENT_TARGET:
        builder.tie_leaf(0, 0, -1, 0)
        return
    if instruction.get("custom_call_target") != ANNOTATION_TARGET:
        return
    pins = read_annotation(instruction)
    for dim in range(len(builder.dims(-1))):
        if pins.get(dim, "-") == "-":
            builder.tie((0, 0, dim), (-1, 0, dim))


def read_annotation(instruction: Instruction) -> dict[int, str]:
    """The text of an annotation's pins: `0:data,1:-`; none for unreadable ones."""
    items = [item.partition(":") for item in str(instruction.get("backend_config") or "").split(",")]
    return {int(dim): pin for dim, _, pin in items if dim.isdecimal()}


# ---- moving data -------------------------------------------------------------


def _free_result(builder: _Builder, instruction: Instruction) -> None:
    """Made in its own shape and reshaped: no storage, no move."""
    for dim in range(len(builder.dims(-1))):
        builder.free(-1, dim)


def _broadcast(builder: _Builder, instruction: Instruction) -> None:
    mapped = {target: source for source, target in enumerate(instruction.get("dimensions", ()))}
    for dim in range(len(builder.dims(-1))):
        if dim in mapped:
            builder.tie((-1, 0, dim), (0, 0, mapped[dim]))
        else:
            builder.free(-1, dim)


def _transpose(builder: _Builder, instruction: Instruction) -> None:
    for target, source in enumerate(instruction.get("dimensions", ())):
        builder.tie((0, 0, source), (-1, 0, target))


def _reverse(builder: _Builder, instruction: Instruction) -> None:
    builder.tie_leaf(0, 0, -1, 0)


def _reshape(builder: _Builder, instruction: Instruction) -> None:
    source, target = builder.dims(0), builder.dims(-1)
    for source_dims, target_dims in reshape_groups(source, target):
        if len(source_dims) == len(target_dims) == 1:
            builder.tie((0, 0, source_dims[0]), (-1, 0, target_dims[0]))
            continue
        for number, dims in ((0, source_dims), (-1, target_dims)):
            for dim in dims:
                builder.free(number, dim)
        before, after = (instruction.operands[0], 0, source_dims[0]), (instruction, 0, target_dims[0])
        if len(source_dims) == 1:
            builder.made.merged.append((after, before))
        elif len(target_dims) == 1:
            builder.made.merged.append((before, after))


def _slice(builder: _Builder, instruction: Instruction) -> None:
    sizes = builder.dims(0)
    for dim, (start, limit, stride) in enumerate(instruction.get("slice")):
        if (start, limit, stride) == (0, sizes[dim], 1):
            builder.tie((0, 0, dim), (-1, 0, dim))
            continue
        builder.free(-1, dim)
        if stride == 1:
            builder.cut(0, dim, (start, limit))


def _pad(builder: _Builder, instruction: Instruction) -> None:
    sizes = builder.dims(0)
    for dim, (low, high, interior) in enumerate(instruction.get("padding")):
        if (low, high, interior) == (0, 0, 0):
            builder.tie((0, 0, dim), (-1, 0, dim))
        elif low >= 0 and high >= 0 and interior == 0:
            builder.free(0, dim)
            builder.cut(-1, dim, (low, low + sizes[dim]))


def _concatenate(builder: _Builder, instruction: Instruction) -> None:
    (joined,) = instruction.get("dimensions")
    numbers = range(len(instruction.operands))
    for dim in range(len(builder.dims(-1))):
        if dim != joined:
            builder.tie((-1, 0, dim), *((number, 0, dim) for number in numbers))
            continue
        offset = 0
        for number in numbers:
            builder.free(number, dim)
            builder.cut(-1, dim, (offset,))
            offset += builder.dims(number)[dim]


def _dynamic_slice(builder: _Builder, instruction: Instruction) -> None:
    if len(instruction.operands) != 1 + len(builder.dims(0)):
        return
    for dim, size in enumerate(builder.dims(-1)):
        if size == builder.dims(0)[dim]:
            builder.tie((0, 0, dim), (-1, 0, dim))


def _dynamic_update_slice(builder: _Builder, instruction: Instruction) -> None:
    if len(instruction.operands) != 2 + len(builder.dims(0)):
        return
    for dim, size in enumerate(builder.dims(1)):
        if size == builder.dims(0)[dim]:
            builder.tie((0, 0, dim), (1, 0, dim), (-1, 0, dim))


def _gather(builder: _Builder, instruction: Instruction) -> None:
    """Ties of columns sliced in full by every index, and of the indices' dimensions."""
    offset_dims, sizes = instruction.get("offset_dims"), instruction.get("slice_sizes")
    gone = {*instruction.get("collapsed_slice_dims"), *instruction.get("operand_batching_dims", ())}
    window = [dim for dim in range(len(builder.dims(0))) if dim not in gone]
    for dim, target in zip(window, offset_dims, strict=True):
        if sizes[dim] == builder.dims(0)[dim] and dim not in instruction.get("start_index_map"):
            builder.tie((0, 0, dim), (-1, 0, target))
    if instruction.get("start_indices_batching_dims", ()):
        return
    index_dims = [dim for dim in range(len(builder.dims(1))) if dim != instruction.get("index_vector_dim")]
    batch_dims = [dim for dim in range(len(builder.dims(-1))) if dim not in offset_dims]
    for dim, target in zip(index_dims, batch_dims, strict=True):
        builder.tie((1, 0, dim), (-1, 0, target))


def _scatter(builder: _Builder, instruction: Instruction) -> None:
    """Ties of columns covered in full by every update, and of the indices' dimensions; one array only."""
    if len(instruction.operands) != 3:
        return
    window_dims = instruction.get("update_window_dims")
    gone = {*instruction.get("inserted_window_dims"), *instruction.get("input_batching_dims", ())}
    window = [dim for dim in range(len(builder.dims(0))) if dim not in gone]
    for dim, update in zip(window, window_dims, strict=True):
        indexed = dim in instruction.get("scatter_dims_to_operand_dims")
        if builder.dims(2)[update] == builder.dims(0)[dim] and not indexed:
            builder.tie((0, 0, dim), (2, 0, update), (-1, 0, dim))
    if instruction.get("scatter_indices_batching_dims", ()):
        return
    index_dims = [dim for dim in range(len(builder.dims(1))) if dim != instruction.get("index_vector_dim")]
    batch_dims = [dim for dim in range(len(builder.dims(2))) if dim not in window_dims]
    for dim, update in zip(index_dims, batch_dims, strict=True):
        builder.tie((1, 0, dim), (2, 0, update))


_RULES: dict[str, _Rule] = {
    **dict.fromkeys((*UNARY, *BINARY, *NARY), _elementwise),
    **dict.fromkeys(("constant", "iota"), _free_result),
    **dict.fromkeys(("tuple", "opt-barrier", "domain", "add-dependency"), _leafwise),
    "broadcast": _broadcast,
    "call": _call,
    "concatenate": _concatenate,
    "conditional": _conditional,
    "custom-call": _annotation,
    "dot": _dot,
    "dynamic-slice": _dynamic_slice,
    "dynamic-update-slice": _dynamic_update_slice,
    "gather": _gather,
    "get-tuple-element": _element,
    "pad": _pad,
    "parameter": _source,
    "reduce": _reduce,
    "reduce-window": _reduce_window,
    "reshape": _reshape,
    "reverse": _reverse,
    "scatter": _scatter,
    "slice": _slice,
    "sort": _sort,
    "transpose": _transpose,
    "while": _while,
}
