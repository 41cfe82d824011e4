"""The strategies of one instruction on a mesh: its rule's factors, one or none per axis.

A strategy gives each mesh axis a factor of the rule, passes a partial sum through (if the instruction is linear), or
leaves it idle (the axis replicates). A contracted factor gives a partial sum. It stays partial until a reader needs the
value whole (all-reduce) or split (reduce-scatter): ZeRO-like plans come out of the same search. Maxima, products and
the like are reduced at once. Without an all-reduce for its partial results (argmax), every device gathers them and
reduces once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import prod

from shardwright.hlo import ArrayShape, Instruction
from shardwright.planner.rules import Factor, ManualPart, OpRule, axes_on, find_objection
from shardwright.planner.rules.halo import exchange_bytes
from shardwright.planner.rules.linear import linear_ways, why_not_partial
from shardwright.planner.strategies.axis_order import may_rotate_all, with_rotation
from shardwright.planner.strategies.padding import MaySplit, divides
from shardwright.plans.shardings import Mesh, TensorSharding, rotate_axes

#: Products take no partial sums through: a sum is reduced before the next product reads it, never after.
_NOT_THROUGH = frozenset({"dot", "convolution", "ragged-dot"})


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisChoice:
    """The choice of one mesh axis: idle, a factor to split, or partial sums of `linear` operand leaves to pass on."""

    factor: Factor | None = None
    linear: frozenset[int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A collective inside a split instruction.

    Neighbours exchange borders of an operand by collective-permutes; all devices exchange partial results by
    all-gathers, or add them up by all-reduces.

    kind: of the collective. axes: its mesh axes. payload_bytes: in the sense of `cost.wire_bytes`.
    """

    kind: str
    axes: tuple[str, ...]
    payload_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to compute an instruction.

    operands: sharding per array leaf of the operands, as used.
    results: sharding per array leaf of the result.
    partial: axes of contracted factors with an all-reduce for their partial results. A sum over them is left unreduced
        in `results`; anything else is reduced at once.
    summed_first: those of `partial` that XLA sums before the others, in a separate collective (over the image of a
        convolution).
    gathered: axes over which partial results are gathered instead.
    exchanges: gathers of these, sums inside the instruction (`Factor.summed`), and exchanges of neighbours' borders
        before it (`rules.halo`).
    choices: choice of each mesh axis, for strategies from a rule; redundant with the other fields.
    """

    operands: tuple[TensorSharding, ...]
    results: tuple[TensorSharding, ...]
    partial: tuple[str, ...] = ()
    summed_first: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    exchanges: tuple[Exchange, ...] = ()
    choices: tuple[AxisChoice, ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Restriction:
    """The strategies equal to `strategy` along every mesh axis that is not `free`.

    Compared by identity: create one object for all variables with the same restriction.
    """

    strategy: Strategy
    free: frozenset[str]

    def choices(self, mesh: Mesh, every: Sequence[AxisChoice]) -> list[Sequence[AxisChoice]]:
        """Per mesh axis, its admissible choices out of `every`."""
        fixed = zip(mesh.axes, self.strategy.choices, strict=True)
        return [every if axis.name in self.free else (choice,) for axis, choice in fixed]

    def admits(self, other: Strategy) -> bool:
        """Whether `other` has the layouts of `strategy`, apart from the free axes."""
        mine = (*self.strategy.operands, *self.strategy.results)
        return all(
            self._axes_not_free(a) == self._axes_not_free(b)
            for a, b in zip(mine, (*other.operands, *other.results), strict=True)
        )

    def _axes_not_free(self, sharding: TensorSharding) -> tuple[tuple[str, ...], ...]:
        return tuple(
            tuple(axis for axis in dim if axis not in self.free) for dim in (*sharding.dims, sharding.unreduced)
        )


def ways_through(instruction: Instruction) -> tuple[frozenset[int], ...]:
    """Operand leaves that may be partial sums together (`rules.linear`); none for products and scalars."""
    if instruction.opcode in _NOT_THROUGH or not any(leaf.rank for leaf in instruction.shape.leaves):
        return ()
    return tuple(way.operands for way in linear_ways(instruction) if way.operands)


def local_results(strategy: Strategy) -> tuple[TensorSharding, ...]:
    """Result shardings before any reduction."""
    if not strategy.partial or all(set(strategy.partial) <= set(s.unreduced) for s in strategy.results):
        return strategy.results
    return tuple(
        TensorSharding(s.dims, (*s.unreduced, *(axis for axis in strategy.partial if axis not in s.unreduced)))
        for s in strategy.results
    )


def stages_of_sum(strategy: Strategy) -> list[tuple[TensorSharding, ...]]:
    """Result shardings before any reduction, and after each reducing collective but the last."""
    local = local_results(strategy)
    if not strategy.summed_first:
        return [local]
    first = frozenset(strategy.summed_first)
    return [local, tuple(TensorSharding(s.dims, tuple(a for a in s.unreduced if a not in first)) for s in local)]


def shardings_of(
    shape: ArrayShape,
    mesh: Mesh,
    partial: bool = False,
    near: Restriction | None = None,
    may_split: MaySplit = divides,
    barred: Iterable[str] = (),
) -> Iterator[TensorSharding]:
    """Every way to split the dimensions of `shape` over the mesh axes; replicated first.

    Axes are in mesh order, and rotated if allowed (`axis_order`).

    partial: an axis may also hold partial sums, if shards are even. near: only strategies of this restriction.
    may_split: test of the number of parts of a dimension. barred: axes that split nothing.
    """
    every: list[int | None] = [None, *range(shape.rank), *((-1,) if partial else ())]
    options: list[list[int | None]] = [[None] if axis.name in barred else every for axis in mesh.axes]
    if near is not None:
        (sharding,) = near.strategy.results
        places = {axis: dim for dim, axes in enumerate(sharding.dims) for axis in axes} | dict.fromkeys(
            sharding.unreduced, -1
        )
        options = [
            some if axis.name in near.free else [places.get(axis.name)]
            for axis, some in zip(mesh.axes, options, strict=True)
        ]
    sizes = mesh.sizes
    for dims in product(*options):
        split: list[tuple[str, ...]] = [()] * shape.rank
        unreduced = tuple(axis.name for axis, dim in zip(mesh.axes, dims, strict=True) if dim == -1)
        for axis, dim in zip(mesh.axes, dims, strict=True):
            if dim is not None and dim >= 0:
                split[dim] = (*split[dim], axis.name)
        fits = divides if unreduced else may_split
        if all(fits(size, [sizes[axis] for axis in axes]) for size, axes in zip(shape.dimensions, split, strict=True)):
            yield from with_rotation(TensorSharding(tuple(split), unreduced), shape.dimensions, mesh)


def enumerate_strategies(
    instruction: Instruction,
    rule: OpRule,
    mesh: Mesh,
    linear: tuple[frozenset[int], ...] = (),
    near: Restriction | None = None,
    may_split: MaySplit = divides,
) -> Iterator[Strategy]:
    """Strategies of `instruction` on `mesh`: each axis takes one factor, partial sums through, or nothing.

    The first is replicated, unless `near` restricts them. Left out: factors not divided by their axes, unless
    `may_split` and the factor allow padding; two factors on one dimension of one tensor; combinations with known XLA
    bugs, and parts of a kernel that there is no program for.
    """
    choices = choices_of(rule, linear)
    along = [choices] * len(mesh.axes) if near is None else near.choices(mesh, choices)
    if rule.manual is None:
        yield from strategies_of(instruction, mesh, along, may_split)
    else:
        yield from _at_place(instruction, rule.manual, mesh, along, may_split)


def choices_of(rule: OpRule, linear: tuple[frozenset[int], ...]) -> list[AxisChoice]:
    """The choices of a mesh axis for an instruction, idle first. linear: see `enumerate_strategies`."""
    choices = [AxisChoice()]
    if not rule.leafwise:  # tuples and loops: their leaves are values of their own in the graph
        minor = rule.manual.minor if rule.manual is not None else ()
        choices += [AxisChoice(factor=factor) for factor in (*rule.factors, *rule.exchange_factors, *minor)]
        choices += [AxisChoice(linear=way) for way in linear]
    return choices


def _at_place(
    instruction: Instruction,
    manual: ManualPart,
    mesh: Mesh,
    choices: Sequence[Sequence[AxisChoice]],
    may_split: MaySplit,
) -> Iterator[Strategy]:
    """The strategies of an instruction in a manual region or at its border: manual axes idle, but for the layout
    outside and for what a collective sends."""
    barred = frozenset(axes_on(mesh, manual.axes))
    idle: Sequence[AxisChoice] = (AxisChoice(),)
    along = [idle if axis.name in barred else every for axis, every in zip(mesh.axes, choices, strict=True)]
    for strategy in strategies_of(instruction, mesh, along, may_split):
        if manual.kind:
            exchange = _sent(instruction, manual, strategy, mesh)
            yield replace(strategy, exchanges=(*strategy.exchanges, *exchange))
        elif manual.ahead:
            (inside,) = strategy.results
            outside = manual.split_outside(inside, mesh)
            if manual.enters:
                yield replace(strategy, operands=(outside,))
            else:
                yield replace(strategy, results=(outside,))
        else:
            yield strategy


def _sent(instruction: Instruction, manual: ManualPart, strategy: Strategy, mesh: Mesh) -> Iterator[Exchange]:
    """What a collective of a manual region sends, of one device's parts along free axes."""
    axes = axes_on(mesh, manual.over)
    if mesh.size(axes) == 1:
        return
    inputs = [leaf for operand in instruction.operands for leaf in operand.shape.leaves]
    read, given = (
        sum(
            ArrayShape(leaf.element_type, sharding.shard_shape(leaf.dimensions, mesh)).size_bytes
            for leaf, sharding in zip(leaves, shardings, strict=True)
        )
        for leaves, shardings in ((inputs, strategy.operands), (instruction.shape.leaves, strategy.results))
    )
    yield Exchange(kind=manual.kind, axes=axes, payload_bytes=max(read, given))


def strategies_of(
    instruction: Instruction, mesh: Mesh, choices: Sequence[Sequence[AxisChoice]], may_split: MaySplit
) -> Iterator[Strategy]:
    """Every distinct strategy from one choice per mesh axis, and its rotation (`axis_order`) if allowed."""
    inputs = tuple(leaf for operand in instruction.operands for leaf in operand.shape.leaves)
    results = instruction.shape.leaves
    turns = may_rotate_all((*inputs, *results), (), mesh)
    seen, count = set[Strategy](), 0
    for combination in product(*choices):
        strategy = _strategy(instruction, combination, inputs, results, mesh, may_split)
        if strategy is None:
            continue
        assignment = {axis.name: choice.factor for axis, choice in zip(mesh.axes, combination, strict=True)}
        if any(assignment.values()) and find_objection(instruction, assignment, mesh):
            continue
        variants = [strategy]
        if turns and may_rotate_all((*inputs, *results), list(assignment.values()), mesh):
            variants += _rotate(strategy, (*inputs, *results), mesh)
        for variant in variants:
            seen.add(variant)
            if len(seen) > count:
                count = len(seen)
                yield variant


def _rotate(strategy: Strategy, leaves: Sequence[ArrayShape], mesh: Mesh) -> list[Strategy]:
    """The strategy with all arrays in the other order, if different: only whole arrays with even shards."""
    shardings = (*strategy.operands, *strategy.results)
    if not all(s.is_even(leaf.dimensions, mesh) and not s.unreduced for leaf, s in zip(leaves, shardings, strict=True)):
        return []
    operands, results = (tuple(rotate_axes(s, mesh) for s in side) for side in (strategy.operands, strategy.results))
    if (operands, results) == (strategy.operands, strategy.results):
        return []
    return [replace(strategy, operands=operands, results=results)]


def _strategy(
    instruction: Instruction,
    combination: tuple[AxisChoice, ...],
    inputs: tuple[ArrayShape, ...],
    results: tuple[ArrayShape, ...],
    mesh: Mesh,
    may_split: MaySplit,
) -> Strategy | None:
    """The strategy of the axes' choices combined; None if they conflict."""
    assigned = [
        (axis.name, choice.factor) for axis, choice in zip(mesh.axes, combination, strict=True) if choice.factor
    ]
    if assigned and not all(splits(factor, axes, may_split) for factor, axes in _sizes_taken(assigned, mesh)):
        return None
    through = [(axis.name, c.linear) for axis, c in zip(mesh.axes, combination, strict=True) if c.linear is not None]
    of_operands = [(axis, factor.name, factor.operands) for axis, factor in assigned]
    operands = [_split(leaf, i, of_operands) for i, leaf in enumerate(inputs)]
    of_results = [(axis, factor.name, factor.results) for axis, factor in assigned]
    outputs = [_split(leaf, i, of_results) for i, leaf in enumerate(results)]
    if None in operands or None in outputs:
        return None
    gathered = tuple(axis for axis, factor in assigned if factor.reduction == "gather")
    contracted = tuple(axis for axis, factor in assigned if factor.contracted and axis not in gathered)
    summable = [] if why_not_partial(instruction, [factor for _, factor in assigned]) else assigned
    sums = {axis for axis, factor in summable if factor.reduction == "add"} | {axis for axis, _ in through}
    if any(axis not in sums for axis in contracted) and through:
        return None  # a maximum over partial sums is none
    unreduced = tuple(axis.name for axis in mesh.axes if axis.name in sums)
    used = tuple(
        [
            _sharding(tuple(dims), tuple([axis for axis, leaves in through if i in leaves]))
            for i, dims in enumerate(operands)
            if dims is not None
        ]
    )
    result_shardings = tuple([_sharding(tuple(dims), unreduced) for dims in outputs if dims is not None])
    if through and not all(_is_even(*pair, mesh) for pair in ((inputs, used), (results, result_shardings))):
        return None
    return Strategy(
        operands=used,
        exchanges=(
            *_borders(assigned, inputs, used, mesh),
            *_gathers(assigned, results, result_shardings, mesh),
            *_sums_inside(assigned, results, result_shardings, mesh),
        )
        if assigned
        else (),
        results=result_shardings,
        partial=contracted,
        summed_first=_axes_summed_first(assigned),
        gathered=gathered,
        choices=combination,
    )


@lru_cache(maxsize=1 << 16)
def _sharding(dims: tuple[tuple[str, ...], ...], unreduced: tuple[str, ...]) -> TensorSharding:
    """One object for equal shardings: programs have few, and creation and comparison are slower."""
    return TensorSharding(dims, unreduced)


def _axes_summed_first(axis_factors: Sequence[tuple[str, Factor]]) -> tuple[str, ...]:
    """Axes that sum over an image split with borders, beside others with any other sum."""
    sums = [(axis, factor) for axis, factor in axis_factors if factor.reduction == "add"]
    bordered = tuple(axis for axis, factor in sums if factor.halo)
    return bordered if len(bordered) < len(sums) else ()


def _sizes_taken(axis_factors: Iterable[tuple[str, Factor]], mesh: Mesh) -> Iterable[tuple[Factor, list[int]]]:
    """The sizes of the axes of each factor."""
    sizes = mesh.sizes
    sizes_of: dict[str, tuple[Factor, list[int]]] = {}
    for axis, factor in axis_factors:
        sizes_of.setdefault(factor.name, (factor, []))[1].append(sizes[axis])
    return sizes_of.values()


def splits(factor: Factor, axes: Sequence[int], may_split: MaySplit) -> bool:
    """Whether a factor may be split over axes of these sizes."""
    if not divides(factor.size, axes) and not (factor.may_pad and may_split(factor.size, axes)):
        return False
    return all(halo.permutes(prod(axes)) is not None for halo in factor.halo)


def _is_even(leaves: Sequence[ArrayShape], shardings: Sequence[TensorSharding], mesh: Mesh) -> bool:
    """Whether partial sums have even shards: XLA cannot mark others as partial."""
    pairs = zip(leaves, shardings, strict=True)
    return all(not sharding.unreduced or sharding.is_even(leaf.dimensions, mesh) for leaf, sharding in pairs)


def _borders(
    axis_factors: list[tuple[str, Factor]], inputs: tuple[ArrayShape, ...], used: tuple[TensorSharding, ...], mesh: Mesh
) -> Iterator[Exchange]:
    """The permutes of every operand's borders; each dimension's carry along the borders of earlier dimensions."""
    factors = {factor.name: factor for _, factor in axis_factors if factor.halo}
    if not factors:
        return
    axes_of: dict[str, tuple[str, ...]] = {}
    for axis, factor in axis_factors:
        axes_of[factor.name] = (*axes_of.get(factor.name, ()), axis)
    for i, (leaf, sharding) in enumerate(zip(inputs, used, strict=True)):
        shard = ArrayShape(leaf.element_type, sharding.shard_shape(leaf.dimensions, mesh)).size_bytes
        for name, factor in factors.items():
            for halo in factor.halo:
                axes = axes_of[name]
                parts = mesh.size(axes)
                if halo.operand == i and parts > 1:
                    for payload_bytes in exchange_bytes([(halo, parts)], shard):
                        yield Exchange(kind="collective-permute", axes=axes, payload_bytes=payload_bytes)
                    shard = shard * halo.size_with_halo(parts) // (halo.size // parts)


def _gathers(
    axis_factors: list[tuple[str, Factor]],
    results: tuple[ArrayShape, ...],
    shardings: tuple[TensorSharding, ...],
    mesh: Mesh,
) -> Iterator[Exchange]:
    """The all-gathers of each result's partial results: along one reduced dimension after the other, the last first.

    Nothing is reduced in between: each gathers the result of the one before.
    """
    axes_of: dict[int, tuple[str, ...]] = {}
    for axis, factor in axis_factors:
        if factor.reduction == "gather" and (reduced := factor.operands[0]) is not None:
            axes_of[reduced] = (*axes_of.get(reduced, ()), axis)
    if not axes_of:
        return
    for leaf, sharding in zip(results, shardings, strict=True):
        gathered = ArrayShape(leaf.element_type, sharding.shard_shape(leaf.dimensions, mesh)).size_bytes
        for reduced in sorted(axes_of, reverse=True):
            axes = axes_of[reduced]
            if mesh.size(axes) > 1:
                gathered *= mesh.size(axes)
                yield Exchange(kind="all-gather", axes=axes, payload_bytes=gathered)


def _sums_inside(
    axis_factors: list[tuple[str, Factor]],
    results: tuple[ArrayShape, ...],
    shardings: tuple[TensorSharding, ...],
    mesh: Mesh,
) -> Iterator[Exchange]:
    """The all-reduces of results that the instruction adds up itself."""
    for number, (leaf, sharding) in enumerate(zip(results, shardings, strict=True)):
        axes = tuple(axis for axis, factor in axis_factors if number in factor.summed)
        if axes and mesh.size(axes) > 1:
            shard = ArrayShape(leaf.element_type, sharding.shard_shape(leaf.dimensions, mesh))
            yield Exchange(kind="all-reduce", axes=axes, payload_bytes=shard.size_bytes)


def _split(
    leaf: ArrayShape, position: int, axis_factors: list[tuple[str, str, tuple[int | None, ...]]]
) -> list[tuple[str, ...]] | None:
    """Axes per dimension of one array leaf; None if two factors meet on one dimension.

    axis_factors: axes with their factor's name and the dimension it splits of each leaf.
    """
    dims: list[tuple[str, ...]] = [()] * len(leaf.dimensions)
    owner: dict[int, str] = {}
    for axis, name, splits in axis_factors:
        dim = splits[position]
        if dim is None:
            continue
        if owner.setdefault(dim, name) != name:
            return None
        dims[dim] = (*dims[dim], axis)
    return dims
