"""Cases and trials of the brute-force validation: one instruction each, with factors given to mesh axes.

A case is one instruction, cut out of a lowered program. A trial is a case with an assignment of factors to
mesh axes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

from shardwright.hlo import Instruction, parse
from shardwright.planner.rules import Factor, find_xla_bug, rule_of
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.reserved_names import IDENTITY_TARGETS

#: Opcodes that make no case of their own: nothing is computed, or regions are planned inside.
NOT_CASES = frozenset({"parameter", "tuple", "get-tuple-element", "while", "call", "conditional"})

Assignment = dict[str, Factor | None]


@dataclass(frozen=True, eq=False)
class Case:
    """One instruction on its own; `name` tells program, opcode and result shape."""

    name: str
    instruction: Instruction
    factors: tuple[Factor, ...]

    def assignments(self, mesh: Mesh, *, uneven: bool = False) -> Iterator[Assignment]:
        """Every choice of at most one factor per axis, except all idle and what is denied.

        uneven: those where some factor is padded; otherwise those where all axes divide.
        """
        axes = mesh.axes
        for chosen in product((None, *self.factors), repeat=len(axes)):
            assignment = {axis.name: factor for axis, factor in zip(axes, chosen, strict=True)}
            if not any(chosen) or not _fits(assignment, mesh, uneven):
                continue
            if not find_xla_bug(self.instruction, assignment, mesh):
                yield assignment


def _fits(assignment: Assignment, mesh: Mesh, uneven: bool) -> bool:
    taken = shares(assignment, mesh)
    padded = [factor for factor, parts in taken.items() if factor.size % parts]
    if any(halo.permutes(parts) is None for factor, parts in taken.items() for halo in factor.halo):
        return False
    return bool(padded) == uneven and all(factor.may_pad for factor in padded)


def shares(assignment: Assignment, mesh: Mesh) -> dict[Factor, int]:
    """Into how many parts the axes together split each factor."""
    entries: dict[Factor, int] = {}
    for axis in mesh.axes:
        factor = assignment[axis.name]
        if factor is not None:
            entries[factor] = entries.get(factor, 1) * axis.size
    return entries


@dataclass(frozen=True)
class Trial:
    """A case, what each axis takes, and for sums that are to be reduce-scattered, axis → dimension of the result."""

    case: Case
    assignment: Assignment
    mesh: Mesh
    scatter: tuple[tuple[str, int], ...] = ()

    def __str__(self) -> str:
        taken = " ".join(f"{axis}={f.name if f else '-'}" for axis, f in self.assignment.items())
        scattered = " ".join(f"{axis} over {dim}" for axis, dim in self.scatter)
        return f"{self.case.name} on {self.mesh}: {taken}" + (f", scattered {scattered}" if scattered else "")

    def scattered(self) -> Iterator[Trial]:
        """The same with one sum's axis split over a dimension of the result, minor to what splits it already."""
        shapes = self.case.instruction.shape.leaves
        for axis, factor in self.assignment.items():
            if factor is None or factor.reduction != "add" or len(shapes) != 1:
                continue
            for dim, size in enumerate(shapes[0].dimensions):
                trial = replace(self, scatter=((axis, dim),))
                split = trial_shardings(trial, operands=False)[0].dims[dim]
                if split[-1] == axis and size % self.mesh.size(split) == 0:
                    yield trial

    @property
    def partial(self) -> tuple[str, ...]:
        return tuple(axis for axis, f in self.assignment.items() if f is not None and f.contracted)

    @property
    def summed(self) -> bool:
        """Whether partial results are combined by an all-reduce."""
        return any(f is not None and f.contracted and f.reduction != "gather" for f in self.assignment.values())


# ---- cases -----------------------------------------------------------------
def cases_of(programs: Mapping[str, str], *, without_factors: bool = False) -> list[Case]:
    """Distinct instructions of HLO texts (by program name), with the factors their rules give.

    without_factors: also those that have none, to look for splits that are missing.
    """
    seen: set[object] = set()
    cases: list[Case] = []
    for program, text in programs.items():
        for instruction in parse(text).instructions():
            key = _signature(instruction)
            if (
                instruction.opcode in NOT_CASES
                or instruction.get("custom_call_target") in IDENTITY_TARGETS
                or not instruction.shape.leaves
                or key in seen
            ):
                continue
            seen.add(key)
            rule = rule_of(instruction)
            if (rule.factors or rule.exchange_factors or without_factors) and not rule.leafwise:
                shape = ",".join(map(str, instruction.shape.leaves[0].dimensions))
                name = f"{program}/{instruction.opcode}[{shape}].{len(cases)}"
                cases.append(Case(name, instruction, (*rule.factors, *rule.exchange_factors)))
    return cases


def _signature(instruction: Instruction) -> object:
    """Equal for instructions that differ in their names only."""
    skipped = {"metadata", "to_apply", "sharding", "frontend_attributes", "backend_config"}
    regions = tuple(
        (name, tuple((i.opcode, i.payload) for c in computations for i in c))
        for name, computations in instruction.called.items()
    )
    return (
        instruction.opcode,
        instruction.shape,
        tuple((o.shape, o.payload if o.opcode == "constant" else "") for o in instruction.operands),
        tuple((a.name, a.text) for a in instruction.attributes.values() if a.name not in skipped),
        regions,
        instruction.payload,
    )


def missing_candidates(case: Case, parts: int) -> Iterator[Factor]:
    """Every way to split operands and result along one dimension each that no factor of the rule covers."""
    operands = [leaf for operand in case.instruction.operands for leaf in operand.shape.leaves]
    results = case.instruction.shape.leaves
    for dims in product(*[(None, *range(leaf.rank)) for leaf in operands], (None, *range(results[0].rank))):
        *split, result = dims
        sizes = [leaf.dimensions[d] for leaf, d in zip((*operands, results[0]), dims, strict=True) if d is not None]
        if not any(d is not None for d in split) or any(size % parts for size in sizes):
            continue
        candidate = Factor(
            name=f"{split}->{result}",
            size=parts,
            operands=tuple(split),
            results=(result,) * len(results),
            reduction="add" if result is None else None,
        )
        if not any(_covers(factor, candidate) for factor in case.factors):
            yield candidate


def _covers(factor: Factor, candidate: Factor) -> bool:
    """Whether the candidate is the factor with some operands left whole, which XLA slices for nothing."""
    if factor.results != candidate.results:
        return False
    return all(c in (None, f) for f, c in zip(factor.operands, candidate.operands, strict=True))


def trial_shardings(trial: Trial, *, operands: bool) -> tuple[TensorSharding, ...]:
    instruction = trial.case.instruction
    if operands:
        leaves = [leaf for operand in instruction.operands for leaf in operand.shape.leaves]
    else:
        leaves = list(instruction.shape.leaves)
    results = []
    for number, leaf in enumerate(leaves):
        dims: list[tuple[str, ...]] = [()] * leaf.rank
        for axis, factor in trial.assignment.items():
            split = None if factor is None else (factor.operands if operands else factor.results)[number]
            if not operands and axis in dict(trial.scatter):
                split = dict(trial.scatter)[axis]
            if split is not None:
                dims[split] = (*dims[split], axis)
        results.append(TensorSharding(tuple(dims)))
    return tuple(results)
