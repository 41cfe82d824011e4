"""Brute force: does XLA compute what a factor says, with the collectives it promises and no others?

A case is one instruction, cut out of a lowered program. A trial is a case with an assignment of factors to
mesh axes. Many trials are put side by side into one module whose arguments and outputs are sharded exactly
as each trial's factors say, so that whatever collective XLA inserts is the instruction's own. The module is
emitted as a Plan, compiled, run on CPU devices, and compared with the unsharded module:

1. Every number agrees with the unsharded result.
2. A parallel factor needs no collective; contracted ones need all-reduces of the result, nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.dtypes import to_dtype
from shardwright.hlo import ArrayShape, Attribute, Computation, Instruction, Module, Shape, TupleShape, parse
from shardwright.planner.rules import Factor, denied, rule_of
from shardwright.plans import (
    CostSummary,
    InstructionPlan,
    MemorySummary,
    Mesh,
    Plan,
    TensorSharding,
    ValueSharding,
    VariablePlan,
)
from shardwright.xla import emit_stablehlo, private

#: Opcodes that make no case of their own: nothing is computed, or regions are planned inside.
NOT_CASES = frozenset({"parameter", "tuple", "get-tuple-element", "while", "call", "conditional", "custom-call"})

Assignment = dict[str, Factor | None]

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


@dataclass(frozen=True, eq=False)
class Case:
    """One instruction on its own; `name` tells program, opcode and result shape."""

    name: str
    instruction: Instruction
    factors: tuple[Factor, ...]

    def assignments(self, mesh: Mesh, *, deny: bool = True) -> Iterator[Assignment]:
        """Every choice of at most one factor per axis that divides, except all idle and what is denied."""
        axes = mesh.axes
        for chosen in product((None, *self.factors), repeat=len(axes)):
            assignment = {axis.name: factor for axis, factor in zip(axes, chosen, strict=True)}
            if not any(chosen) or not _divides(assignment, mesh):
                continue
            if deny and denied(self.instruction, assignment, mesh):
                continue
            yield assignment


def _divides(assignment: Assignment, mesh: Mesh) -> bool:
    shares: dict[Factor, int] = {}
    for axis in mesh.axes:
        factor = assignment[axis.name]
        if factor is not None:
            shares[factor] = shares.get(factor, 1) * axis.size
    return all(factor.size % share == 0 for factor, share in shares.items())


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
                split = _shardings(trial, operands=False)[0].dims[dim]
                if split[-1] == axis and size % self.mesh.size(split) == 0:
                    yield trial

    @property
    def partial(self) -> tuple[str, ...]:
        return tuple(axis for axis, f in self.assignment.items() if f is not None and f.contracted)


@dataclass(frozen=True)
class Verdict:
    """What one trial showed. `error` is the largest deviation relative to the largest number of the result."""

    trial: Trial
    error: float
    collectives: tuple[str, ...] = ()
    crash: str = ""

    @property
    def wrong(self) -> bool:
        return bool(self.crash) or not self.error < 1e-4

    @property
    def extra(self) -> tuple[str, ...]:
        """Collectives that the factors do not promise."""
        allowed = "all-reduce" if self.trial.partial else ""
        return tuple(kind for kind in self.collectives if kind != allowed)

    def __str__(self) -> str:
        return f"{self.trial}: error {self.error:.1e} {', '.join(self.collectives)} {self.crash[:200]}"


# ---- cases -----------------------------------------------------------------
def cases_of(programs: Mapping[str, str]) -> list[Case]:
    """Distinct instructions of HLO texts (by program name), with the factors their rules give."""
    seen: set[object] = set()
    cases: list[Case] = []
    for program, text in programs.items():
        for instruction in parse(text).instructions():
            key = _signature(instruction)
            if instruction.opcode in NOT_CASES or not instruction.shape.leaves or key in seen:
                continue
            seen.add(key)
            rule = rule_of(instruction)
            if rule.factors and not rule.leafwise:
                shape = ",".join(map(str, instruction.shape.leaves[0].dimensions))
                cases.append(Case(f"{program}/{instruction.opcode}[{shape}].{len(cases)}", instruction, rule.factors))
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


# ---- one module for many trials --------------------------------------------
@dataclass
class _Bundle:
    """A module under construction: trial k is instruction `case.k` with parameters of its own."""

    mesh: Mesh
    entry: list[Instruction] = field(default_factory=list)
    regions: list[Computation] = field(default_factory=list)
    parameters: list[Instruction] = field(default_factory=list)
    outputs: list[Instruction] = field(default_factory=list)
    parameter_shardings: list[TensorSharding] = field(default_factory=list)
    output_shardings: list[TensorSharding] = field(default_factory=list)
    output_trials: list[int] = field(default_factory=list)
    plans: list[InstructionPlan] = field(default_factory=list)

    def add(self, number: int, trial: Trial) -> None:
        original = trial.case.instruction
        operand_shardings = _shardings(trial, operands=True)
        operands, values, leaf = [], [], 0
        for position, operand in enumerate(original.operands):
            count = len(operand.shape.leaves)
            shardings = operand_shardings[leaf : leaf + count]
            leaf += count
            operands.append(self._operand(f"p{number}_{position}", operand, shardings[0]))
            values.append(shardings)
        called, attributes = self._regions(number, original)
        case = Instruction(
            name=f"case.{number}", opcode=original.opcode, shape=original.shape, operands=tuple(operands),
            attributes=attributes, called=called, payload=original.payload, index=original.index,
        )  # fmt: skip
        self.entry.append(case)
        results = _shardings(trial, operands=False)
        self._output(number, case, results)
        self.plans.append(
            InstructionPlan(
                computation="main", name=case.name, opcode=case.opcode, operands=tuple(values), result=results,
                partial=trial.partial,
            )
        )  # fmt: skip

    def _operand(self, name: str, operand: Instruction, sharding: TensorSharding) -> Instruction:
        if operand.opcode == "constant" and not operand.shape.leaves[0].dimensions:
            copy = Instruction(name=name, opcode="constant", shape=operand.shape, payload=operand.payload)
        else:
            copy = Instruction(name=name, opcode="parameter", shape=operand.shape, index=len(self.parameters))
            self.parameters.append(copy)
            self.parameter_shardings.append(sharding)
        self.entry.append(copy)
        return copy

    def _regions(self, number: int, original: Instruction) -> tuple[dict[str, Any], dict[str, Attribute]]:
        attributes = {n: a for n, a in original.attributes.items() if n not in ("metadata", "sharding")}
        called = {}
        for name, computations in original.called.items():
            copies = tuple(_copy(c, f"case{number}_{name}_{i}") for i, c in enumerate(computations))
            self.regions.extend(copies)
            called[name] = copies
            attributes[name] = Attribute(name, copies[0].name, copies[0].name)
        return called, attributes

    def _output(self, number: int, case: Instruction, results: ValueSharding) -> None:
        leaves = [case]
        if isinstance(case.shape, TupleShape):
            leaves = [_element(case, i, element) for i, element in enumerate(case.shape.elements)]
            self.entry.extend(leaves)
        self.outputs.extend(leaves)
        self.output_shardings.extend(results)
        self.output_trials.extend([number] * len(leaves))

    def module(self) -> Module:
        shape = TupleShape(tuple(output.shape for output in self.outputs))
        root = Instruction(name="root", opcode="tuple", shape=shape, operands=tuple(self.outputs), is_root=True)
        entry = Computation("main", [*self.entry, root], root, tuple(self.parameters), is_entry=True)
        return Module("trials", {}, [*self.regions, entry], entry)

    def plan(self) -> Plan:
        return Plan(
            module_name="trials", hlo_sha256="", mesh=self.mesh, hardware="cpu", origin="trial",
            instructions=tuple(self.plans),
            parameters=_variables(self.parameters, self.parameter_shardings),
            outputs=_variables(self.outputs, self.output_shardings),
            collectives=(), cost=CostSummary(compute_s=0, communication_s=0, lower_bound_s=0, bound_scope=""),
            memory=MemorySummary(arguments_bytes=0, outputs_bytes=0, temporaries_bytes=0),
        )  # fmt: skip


def _element(value: Instruction, index: int, shape: Shape) -> Instruction:
    return Instruction(
        name=f"{value.name}_leaf{index}",
        opcode="get-tuple-element",
        shape=shape,
        operands=(value,),
        attributes={"index": Attribute("index", str(index), index)},
        index=index,
    )


def _copy(region: Computation, name: str) -> Computation:
    copies: dict[Instruction, Instruction] = {}
    for old in region:
        copies[old] = Instruction(
            name=f"{name}.{old.name}", opcode=old.opcode, shape=old.shape,
            operands=tuple(copies[operand] for operand in old.operands), payload=old.payload,
            attributes={n: a for n, a in old.attributes.items() if n != "metadata"},
            index=old.index, is_root=old.is_root,
        )  # fmt: skip
    return Computation(name, list(copies.values()), copies[region.root], tuple(copies[p] for p in region.parameters))


def _shardings(trial: Trial, *, operands: bool) -> tuple[TensorSharding, ...]:
    instruction = trial.case.instruction
    if operands:
        leaves = [leaf for operand in instruction.operands for leaf in operand.shape.leaves]
    else:
        leaves = list(instruction.shape.leaves)
    found = []
    for number, leaf in enumerate(leaves):
        dims: list[tuple[str, ...]] = [()] * leaf.rank
        for axis, factor in trial.assignment.items():
            split = None if factor is None else (factor.operands if operands else factor.results)[number]
            if not operands and axis in dict(trial.scatter):
                split = dict(trial.scatter)[axis]
            if split is not None:
                dims[split] = (*dims[split], axis)
        found.append(TensorSharding(tuple(dims)))
    return tuple(found)


def _variables(values: Sequence[Instruction], shardings: Sequence[TensorSharding]) -> tuple[VariablePlan, ...]:
    found = []
    for number, (value, sharding) in enumerate(zip(values, shardings, strict=True)):
        shape = value.shape.leaves[0]
        found.append(
            VariablePlan(
                number=number, name=value.name, element_type=shape.element_type, shape=shape.dimensions,
                sharding=sharding, stored_shape=shape.dimensions,
            )
        )  # fmt: skip
    return tuple(found)


# ---- compile, run, judge ---------------------------------------------------
def judge(trials: Sequence[Trial]) -> list[Verdict]:
    """Compile and run the trials, all of one mesh, side by side."""
    bundle = _Bundle(trials[0].mesh)
    for number, trial in enumerate(trials):
        bundle.add(number, trial)
    text, plan = bundle.module().to_text(), bundle.plan()
    arguments = [_input(parameter.shape.leaves[0], seed) for seed, parameter in enumerate(bundle.parameters)]
    with jax.enable_x64(True):
        expected, _ = _run(private.stablehlo_of(text), arguments, None)
        actual, compiled = _run(emit_stablehlo(text, plan), arguments, plan)
    errors = [0.0] * len(trials)
    for number, want, got in zip(bundle.output_trials, expected, actual, strict=True):
        errors[number] = max(errors[number], _error(want, got))
    collectives = _collectives(compiled, len(trials))
    return [Verdict(trial, errors[k], collectives[k]) for k, trial in enumerate(trials)]


class UnattributedError(Exception):
    """Among several trials, a collective that does not say whose it is."""


def judge_all(trials: Iterable[Trial], batch: int = 150) -> list[Verdict]:
    """`judge` in batches, one mesh after the other; a batch XLA refuses is halved until the culprit stands alone."""
    by_mesh: dict[Mesh, list[Trial]] = {}
    for trial in trials:
        by_mesh.setdefault(trial.mesh, []).append(trial)
    pending = [group[i : i + batch] for group in by_mesh.values() for i in range(0, len(group), batch)]
    verdicts: list[Verdict] = []
    while pending:
        group = pending.pop()
        try:
            verdicts += judge(group)
        except (jax.errors.JaxRuntimeError, UnattributedError) as error:
            if len(group) == 1:
                verdicts.append(Verdict(group[0], np.inf, crash=str(error)))
            else:
                pending += [group[: len(group) // 2], group[len(group) // 2 :]]
    return verdicts


def _input(shape: ArrayShape, seed: int) -> np.ndarray:
    """Random numbers; integers reach just outside 0..11, so that indices are sometimes out of bounds."""
    random = np.random.default_rng(seed)
    dtype = to_dtype(shape.element_type)
    if dtype == np.bool_:
        return random.random(shape.dimensions) < 0.8
    if np.issubdtype(dtype, np.integer):
        low = -1 if np.issubdtype(dtype, np.signedinteger) else 0
        return random.integers(low, 14, shape.dimensions).astype(dtype)
    return random.normal(size=shape.dimensions).astype(dtype)


def _run(stablehlo: str, arguments: list[np.ndarray], plan: Plan | None) -> tuple[list[np.ndarray], str]:
    count = 1 if plan is None else plan.mesh.device_count
    devices = jax.devices("cpu")[:count]
    mesh = JaxMesh(np.array(devices).reshape([a.size for a in plan.mesh.axes] if plan else [1]), _axes(plan))
    placements = (
        [_placement(mesh, v.sharding) for v in plan.parameters] if plan else [_placement(mesh, None)] * len(arguments)
    )
    options = private.compile_options(
        [device.id for device in devices], overrides=[("xla_disable_hlo_passes", "cpu-all-reduce-combiner")]
    )
    executable = private.compile_and_load(stablehlo, devices, options)
    placed = [jax.device_put(a, placement) for a, placement in zip(arguments, placements, strict=True)]
    shards = executable.execute_sharded(placed).disassemble_into_single_device_arrays()
    results = []
    for number, pieces in enumerate(shards):
        placement = _placement(mesh, plan.outputs[number].sharding if plan else None)
        shape = plan.outputs[number].shape if plan else pieces[0].shape
        results.append(np.asarray(jax.make_array_from_single_device_arrays(shape, placement, pieces)))
    return results, private.compiled_hlo(executable)


def _axes(plan: Plan | None) -> tuple[str, ...]:
    return tuple(axis.name for axis in plan.mesh.axes) if plan else ("single",)


def _placement(mesh: JaxMesh, sharding: TensorSharding | None) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(sharding.dims if sharding else ())))


def _error(want: np.ndarray, got: np.ndarray) -> float:
    if want.dtype == ml_dtypes.bfloat16:
        want, got = want.astype(np.float32), got.astype(np.float32)
    if not np.issubdtype(want.dtype, np.inexact):
        return 0.0 if np.array_equal(want, got) else np.inf
    finite = np.isfinite(want)
    if not np.array_equal(want[~finite], got[~finite], equal_nan=True) or not np.isfinite(got[finite]).all():
        return np.inf
    if not finite.any():
        return 0.0
    return float(np.abs(want[finite] - got[finite]).max() / max(np.abs(want[finite]).max(), 1e-6))


_COLLECTIVE = re.compile(rf" (?:{'|'.join(COLLECTIVES)})(?:-start)?\(.*op_name=\"[^\"]*?case\.(\d+)")
_ANY_COLLECTIVE = re.compile(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(")


def _collectives(compiled: str, count: int) -> list[tuple[str, ...]]:
    """Kinds of collectives in partitioned HLO, per trial."""
    found: list[list[str]] = [[] for _ in range(count)]
    for line in compiled.splitlines():
        if not _ANY_COLLECTIVE.search(line):
            continue
        match = _COLLECTIVE.search(line)
        if match is None and count > 1:
            raise UnattributedError(line)
        found[int(match[1]) if match else 0].append(_ANY_COLLECTIVE.search(line)[1])
    return [tuple(kinds) for kinds in found]
