"""Legality of a planned instruction, from the rules alone.

Conditions, per instruction:

1. every value has one sharding per array, of its rank, over known axes in mesh order, or rotated if allowed
   (`axis_order`); partial sums have even shards (`form_problems`);
2. each mesh axis is idle, takes one factor of the instruction's rule, or passes a partial sum on by one of the
   instruction's linear ways (`_explanations`). The result of a contracted factor or a way is reduced at once
   (`InstructionPlan.partial`) or stays partial; a maximum or a product is reduced at once and whole;
3. the factors divide among their axes, or may be padded, and no border reaches past a neighbour (`_padding_problem`);
   all arrays that one factor splits are split in one order (`_order_problem`);
4. XLA has no known bug for the combination, and there is a program for a kernel's part (`find_objection`,
   `why_not_partial`).

Only the instruction is examined: equal instructions with equal shardings are checked once (`verify`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from shardwright.hlo import Instruction, Shape
from shardwright.planner.rules import Factor, OpRule, Place, axes_on, find_objection, rule_at
from shardwright.planner.rules.linear import LinearWay, linear_ways, why_not_partial
from shardwright.planner.strategies.axis_order import may_rotate, may_rotate_all
from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh, TensorSharding, ValueSharding, has_rotated_axes, rotate_axes

#: How an axis is used: a factor split over it, a partial sum handed on, or not at all.
Explanation = Factor | LinearWay | None


# ---- form ----------------------------------------------------------------------


def form_problems(instruction: Instruction, entry: InstructionPlan, mesh: Mesh) -> tuple[str, ...]:
    """Checks opcode, numbers of operands and leaves, ranks, axes: the premises of the other checks."""
    if entry.opcode != instruction.opcode:
        return (f"planned as {entry.opcode}",)
    if len(entry.operands) != len(instruction.operands):
        return (f"planned with {len(entry.operands)} operands",)
    unknown = [axis for axis in entry.partial if axis not in mesh.sizes]
    if unknown or len(set(entry.partial)) != len(entry.partial):
        return (f"partial over {entry.partial}, which are not axes of the mesh",)
    problems = [
        f"operand {i} {problem}"
        for i, (operand, value) in enumerate(zip(instruction.operands, entry.operands, strict=True))
        for problem in _value_problems(operand.shape, value, mesh)
    ]
    problems += [f"the result {problem}" for problem in _value_problems(instruction.shape, entry.result, mesh)]
    if entry.shared:
        problems += [f"for readers it {problem}" for problem in _value_problems(instruction.shape, entry.shared, mesh)]
        for sharding, shared in zip(entry.result, entry.shared, strict=False):
            if shared.unreduced and shared != sharding:
                problems.append(f"for readers it is brought to a partial sum, {shared}")
    return tuple(problems)


def _value_problems(shape: Shape, value: ValueSharding, mesh: Mesh) -> Iterator[str]:
    """Checks number of leaves, rank and axes of one value's shardings."""
    if len(value) != len(shape.leaves):
        yield f"has {len(shape.leaves)} arrays, planned with {len(value)} shardings"
        return
    order = {axis.name: i for i, axis in enumerate(mesh.axes)}
    for leaf, sharding in zip(shape.leaves, value, strict=True):
        if len(sharding.dims) != leaf.rank:
            yield f"of rank {leaf.rank} is planned as {sharding}"
            continue
        unknown = [axis for axis in (*sharding.axes, *sharding.unreduced) if axis not in order]
        if unknown:
            yield f"is split over {', '.join(unknown)}: not an axis of the mesh"
            continue
        if sharding.unreduced and not sharding.is_even(leaf.dimensions, mesh):
            yield f"is partial and split unevenly, {sharding}: XLA has no such sums"
        if (
            has_rotated_axes(sharding, mesh)
            and may_rotate(leaf.dimensions, mesh)
            and sharding.is_even(leaf.dimensions, mesh)
        ):
            continue
        for dim, axes in enumerate((*sharding.dims, sharding.unreduced)):
            if list(axes) != sorted(axes, key=order.__getitem__):
                where = f"dimension {dim}" if dim < leaf.rank else "its partial sum"
                yield f"has the axes of {where} out of mesh order: {sharding}"


# ---- rule ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Use:
    """The use of one mesh axis in an instruction: dimension per operand leaf and per result leaf.

    A leaf is split over the axis, partial over it, or neither: `TensorSharding` allows no axis twice.
    """

    operands: tuple[int | None, ...]
    results: tuple[int | None, ...]
    partial_operands: frozenset[int]
    partial_results: int  # leaves
    is_reduced: bool

    @property
    def is_idle(self) -> bool:
        splits = (*self.operands, *self.results)
        shows = self.is_reduced or self.partial_operands or self.partial_results
        return not shows and all(dim is None for dim in splits)

    @property
    def stays_partial(self) -> bool:
        return self.partial_results == len(self.results) and not self.is_reduced

    @property
    def is_reduced_here(self) -> bool:
        return self.is_reduced and not self.partial_results


def _use_of(axis: str, operands: Sequence[TensorSharding], entry: InstructionPlan) -> _Use:
    def places(value: Sequence[TensorSharding]) -> tuple[int | None, ...]:
        return tuple(next((dim for dim, axes in enumerate(s.dims) if axis in axes), None) for s in value)

    return _Use(
        operands=places(operands),
        results=places(entry.result),
        partial_operands=frozenset(i for i, s in enumerate(operands) if axis in s.unreduced),
        partial_results=sum(axis in s.unreduced for s in entry.result),
        is_reduced=axis in entry.partial,
    )


def rule_problems(
    instruction: Instruction, entry: InstructionPlan, mesh: Mesh, place: Place | None = None
) -> tuple[str, ...]:
    """Checks the axes: each takes at most one factor or way; together they are even and free of XLA bugs.

    place: see `place_problems`; of the entry with what stands outside left out (`entry_inside`).
    """
    operands = flat(entry.operands)
    rule: OpRule | None = None
    ways: tuple[LinearWay, ...] | None = None
    explanations: dict[str, list[Explanation]] = {}
    for axis in mesh.axes:
        if axis.size == 1:
            continue
        use = _use_of(axis.name, operands, entry)
        if use.is_idle:
            continue
        rule = rule or _rule_at(instruction, place)
        ways = linear_ways(instruction) if ways is None else ways
        candidates = _explanations(rule, ways, use)
        if not candidates:
            return (f"axis {axis.name}: {_why_not(instruction, rule, use, entry)}",)
        explanations[axis.name] = candidates
    reasons = []
    for combination in product(*explanations.values()):
        reason = _combination_problem(instruction, dict(zip(explanations, combination, strict=True)), entry, mesh)
        if reason is None:
            return ()
        reasons.append(reason)
    return (f"{_describe(entry)}: {reasons[0]}",)


def _rule_at(instruction: Instruction, place: Place | None) -> OpRule:
    rule = rule_at(instruction, place)
    minor = rule.manual.minor if rule.manual is not None else ()
    return replace(rule, factors=(*rule.factors, *minor)) if minor else rule


# ---- manual regions ------------------------------------------------------------


def entry_inside(entry: InstructionPlan, instruction: Instruction, place: Place, mesh: Mesh) -> InstructionPlan | None:
    """The entry of an instruction at the border of a manual region, its array outside laid out as inside; None where
    that is not split over manual axes as the program says."""
    manual = rule_at(instruction, place).manual
    assert manual is not None
    inside = entry.result if manual.enters else entry.operands[0]
    outside = entry.operands[0] if manual.enters else entry.result
    if len(outside) != 1 or len(inside[0].dims) != len(manual.ahead):
        return None
    if outside[0] != manual.split_outside(inside[0], mesh) or inside[0].unreduced:
        return None
    return replace(entry, operands=(inside,), result=inside)


def place_problems(entry: InstructionPlan, place: Place, inside: frozenset[tuple[str, int]], mesh: Mesh) -> str | None:
    """What is wrong with the axes of an entry in a manual region: manual ones split nothing inside, and sum nothing.

    inside: the manual axes around what it gives.
    """
    read = place.axes if place.border is None else frozenset[tuple[str, int]]()
    used = {axis for sharding in flat(entry.operands) for axis in (*sharding.axes, *sharding.unreduced)}
    given = {axis for sharding in (*entry.result, *entry.shared) for axis in (*sharding.axes, *sharding.unreduced)}
    wrong = used.intersection(axes_on(mesh, read)) | {*given, *entry.partial}.intersection(axes_on(mesh, inside))
    return f"uses manual axes {', '.join(sorted(wrong))}: {_describe(entry)}" if wrong else None


def _explanations(rule: OpRule, ways: Sequence[LinearWay], use: _Use) -> list[Explanation]:
    """The factors and ways with exactly this use of an axis."""
    explanations: list[Explanation] = [f for f in (*rule.factors, *rule.exchange_factors) if _is_split_by(f, use)]
    return [*explanations, *(way for way in ways if _is_handed_on(way, use))]


def _is_split_by(factor: Factor, use: _Use) -> bool:
    if factor.operands != use.operands or use.partial_operands:
        return False
    if not factor.contracted:
        return factor.results == use.results and not use.is_reduced and not use.partial_results
    if factor.reduction == "add":
        return use.is_reduced_here or use.stays_partial
    return use.is_reduced_here and all(dim is None for dim in use.results)


def _is_handed_on(way: LinearWay, use: _Use) -> bool:
    if way.operands != use.partial_operands or any(dim is not None for dim in use.operands):
        return False
    return use.stays_partial or (use.is_reduced_here and bool(way.operands))


def _why_not(instruction: Instruction, rule: OpRule, use: _Use, entry: InstructionPlan) -> str:
    if use.partial_operands:
        if not use.is_reduced and not use.partial_results:
            return f"an operand is partial, the result is not, nor is it reduced: {_describe(entry)}"
        return f"{instruction.opcode} is not linear in its partial operand: {_describe(entry)}"
    names = ", ".join(factor.name for factor in (*rule.factors, *rule.exchange_factors)) or f"none ({rule.reason})"
    return f"no factor of its rule splits {_describe(entry)}; factors: {names}"


def _combination_problem(
    instruction: Instruction, explanations: Mapping[str, Explanation], entry: InstructionPlan, mesh: Mesh
) -> str | None:
    """The conflict between these explanations, one per axis in use; None if they fit together."""
    factors = {axis: factor for axis, factor in explanations.items() if isinstance(factor, Factor)}
    if not factors:
        return None
    sums = any(factor.contracted for factor in factors.values())
    is_partial = any(sharding.unreduced for sharding in (*flat(entry.operands), *entry.result))
    if sums and is_partial and (why := why_not_partial(instruction, factors.values())):
        return why
    why_not = _padding_problem(factors, mesh) or _order_problem(instruction, factors, entry, mesh)
    return why_not or find_objection(instruction, factors, mesh)


def _order_problem(
    instruction: Instruction, factors: Mapping[str, Factor], entry: InstructionPlan, mesh: Mesh
) -> str | None:
    """The reason against rotated arrays: others are not rotated, or the instruction is not elementwise."""
    scattered = frozenset(entry.partial)  # over these a sum is split as its readers want it
    unscattered = (
        TensorSharding(tuple(tuple(a for a in axes if a not in scattered) for axes in s.dims)) for s in entry.result
    )
    shardings = (*flat(entry.operands), *unscattered)
    if not any(has_rotated_axes(sharding, mesh) for sharding in shardings):
        return None
    leaves = [leaf for value in (*instruction.operands, instruction) for leaf in value.shape.leaves]
    if may_rotate_all(leaves, tuple(factors.values()), mesh) and all(s == rotate_axes(s, mesh) for s in shardings):
        return None
    return "arrays are split along the mesh's first axis last, and others that it computes with are not, or may not be"


def _padding_problem(factors: Mapping[str, Factor], mesh: Mesh) -> str | None:
    parts: dict[str, int] = {}
    for axis, factor in factors.items():
        parts[factor.name] = parts.get(factor.name, 1) * mesh.sizes[axis]
    for factor in factors.values():
        count = parts[factor.name]
        if factor.size % count and not factor.may_pad:
            return f"factor {factor.name} has {factor.size} elements, not divided by {count}"
        if any(halo.permutes(count) is None for halo in factor.halo):
            return f"factor {factor.name} split {count} ways needs more than its neighbours' borders"
    return None


def flat(values: Sequence[ValueSharding]) -> ValueSharding:
    """Shardings of several values' leaves, in order."""
    return tuple(sharding for value in values for sharding in value)


def _describe(entry: InstructionPlan) -> str:
    operands = ", ".join(str(sharding) for sharding in flat(entry.operands))
    reduced = f" reduced over {', '.join(entry.partial)}" if entry.partial else ""
    return f"({operands}) -> {', '.join(str(sharding) for sharding in entry.result)}{reduced}"
