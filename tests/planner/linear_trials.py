"""Brute force: does XLA take a partial sum through an instruction, exactly and without a collective?

A trial is one instruction, cut out of a lowered program, with one of its linear ways on some mesh axes and
factors of its rule on others. Its partial operands are made so by sums over a dimension that is split over
the axis; its result stays partial and is reduced at the end of the program: one all-reduce per axis or group of
axes, of the result and of nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from shardwright.dtypes import to_dtype
from shardwright.hlo import ArrayShape, Attribute, Computation, Instruction, Module, parse
from shardwright.planner.rules import Factor, find_xla_bug, rule_of
from shardwright.planner.rules.linear import LinearWay, linear_ways, why_not_partial
from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla import emit_stablehlo, private
from tests.planner.trial_parts import copied_regions, relative_error, trials_module
from tests.xla.hand import plan as plan_by_hand

Choice = LinearWay | Factor | None


@dataclass(frozen=True)
class Trial:
    """An instruction and what each axis of a mesh does: a linear way, a factor, or nothing.

    reduced: axes whose contracted factor is summed at once; the others' sums stay partial.
    """

    instruction: Instruction
    mesh: Mesh
    chosen: Mapping[str, Choice]
    reduced: tuple[str, ...] = ()

    def __str__(self) -> str:
        axes = []
        for axis, choice in self.chosen.items():
            what = "-" if choice is None else choice.name if isinstance(choice, Factor) else sorted(choice.operands)
            axes.append(f"{axis}={what}")
        reduced = f" reduced over {'·'.join(self.reduced)}" if self.reduced else ""
        return f"{self.instruction.name}: {self.instruction.opcode} on {self.mesh}: {' '.join(axes)}{reduced}"

    @property
    def all_reduces(self) -> int:
        """One of the sum of both twins, and one of each twin that sums at once."""
        return 3 if self.reduced else 1

    @property
    def partial(self) -> tuple[str, ...]:
        """Axes that the result is partial over: taken by a way, or by a factor that is summed."""
        return tuple(
            axis
            for axis, choice in self.chosen.items()
            if isinstance(choice, LinearWay)
            or (isinstance(choice, Factor) and choice.contracted and axis not in self.reduced)
        )

    def operand(self, leaf: int, rank: int) -> TensorSharding:
        unreduced = tuple(
            axis for axis, choice in self.chosen.items() if isinstance(choice, LinearWay) and leaf in choice.operands
        )
        return TensorSharding(self._dims(leaf, rank, "operands"), unreduced)

    def result(self, leaf: int, rank: int) -> TensorSharding:
        return TensorSharding(self._dims(leaf, rank, "results"), self.partial)

    def _dims(self, leaf: int, rank: int, side: str) -> tuple[tuple[str, ...], ...]:
        dims: list[tuple[str, ...]] = [()] * rank
        for axis, choice in self.chosen.items():
            if isinstance(choice, Factor) and (dim := getattr(choice, side)[leaf]) is not None:
                dims[dim] = (*dims[dim], axis)
        return tuple(dims)


@dataclass(frozen=True)
class Verdict:
    trial: Trial
    error: float
    collectives: tuple[str, ...] = ()
    crash: str = ""

    @property
    def is_exact(self) -> bool:
        return not self.crash and self.error < 1e-4

    @property
    def is_cheap(self) -> bool:
        """No collective but the sums that were meant."""
        return self.collectives == ("all-reduce",) * self.trial.all_reduces

    def __str__(self) -> str:
        return f"{self.trial}: error {self.error:.1e} {', '.join(self.collectives)} {self.crash[:300]}"


# ---- trials ------------------------------------------------------------------

_NOT_TRIED = frozenset({"parameter", "tuple", "get-tuple-element", "while", "call", "conditional"})


def instructions_of(programs: Mapping[str, str]) -> Iterator[Instruction]:
    """Distinct instructions of HLO texts that are linear in something."""
    seen: set[object] = set()
    for program, text in programs.items():
        for instruction in parse(text).instructions():
            if instruction.opcode in _NOT_TRIED or not any(way.operands for way in linear_ways(instruction)):
                continue
            key = (
                instruction.opcode,
                instruction.shape,
                tuple((o.shape, o.payload if o.opcode == "constant" else "") for o in instruction.operands),
                tuple((a.name, a.text) for a in instruction.attributes.values() if a.name in _TELLING),
            )
            if key not in seen:
                seen.add(key)
                instruction.name = f"{program}.{instruction.name}"
                yield instruction


_TELLING = frozenset({
    "dimensions", "slice", "padding", "window", "dim_labels", "lhs_contracting_dims", "rhs_contracting_dims",
    "lhs_batch_dims", "rhs_batch_dims", "feature_group_count", "batch_group_count", "offset_dims",
    "collapsed_slice_dims", "start_index_map", "index_vector_dim", "slice_sizes", "dynamic_slice_sizes",
    "update_window_dims", "inserted_window_dims", "scatter_dims_to_operand_dims", "operand_batching_dims",
    "input_batching_dims",
})  # fmt: skip


def trials_of(instruction: Instruction, mesh: Mesh) -> Iterator[Trial]:
    """Every way, and every factor whose sum may be kept, on the first axis; the second idle, split, or as the first."""
    first, *others = (axis.name for axis in mesh.axes)
    ways = [way for way in linear_ways(instruction) if way.operands]
    divided = [f for f in rule_of(instruction).factors if f.size % 4 == 0]
    factors = [f for f in divided if not f.contracted]
    results = [] if why_not_partial(instruction) else [f for f in divided if f.reduction == "add"]
    for way in (*ways, *results):
        for choice in (None, way, *factors) if others else (None,):
            chosen: dict[str, Choice] = {first: way, **dict.fromkeys(others)}
            if others:
                chosen[others[0]] = choice
            taken = {axis: factor for axis, factor in chosen.items() if isinstance(factor, Factor)}
            if not find_xla_bug(instruction, taken, mesh):
                yield Trial(instruction, mesh, chosen)


# ---- one module for many trials ----------------------------------------------


@dataclass
class _Bundle:
    mesh: Mesh
    entry: list[Instruction] = field(default_factory=list)
    regions: list[Computation] = field(default_factory=list)
    parameters: list[Instruction] = field(default_factory=list)
    outputs: list[Instruction] = field(default_factory=list)
    plans: list[InstructionPlan] = field(default_factory=list)
    lies: list[tuple[tuple[str, ...], ...]] = field(default_factory=list)
    returned: list[tuple[tuple[str, ...], ...]] = field(default_factory=list)

    def add(self, number: int, trial: Trial) -> None:
        """The instruction twice, and the sum of both, partial too: reduced before, it would cost two all-reduces."""
        shape = trial.instruction.shape
        assert isinstance(shape, ArrayShape)
        first, second = (self._case(f"{number}.{twin}", trial) for twin in "ab")
        total = Instruction(name=f"sum.{number}", opcode="add", shape=shape, operands=(first, second))
        lies = trial.result(0, shape.rank)
        self.plans.append(_entry(total, [(lies,), (lies,)], (lies,)))
        self.entry.append(total)
        self.outputs.append(total)
        self.returned.append(lies.dims)

    def _case(self, label: str, trial: Trial) -> Instruction:
        original = trial.instruction
        operands, used = [], []
        for position, operand in enumerate(original.operands):
            (shape,) = operand.shape.leaves
            sharding = trial.operand(position, shape.rank)
            operands.append(self._operand(f"t{label}_{position}", operand, shape, sharding))
            used.append((sharding,))
        called, attributes = copied_regions(label, original)
        self.regions += [region for regions in called.values() for region in regions]
        case = Instruction(
            name=f"case.{label}", opcode=original.opcode, shape=original.shape, operands=tuple(operands),
            attributes=attributes, called=called, payload=original.payload, index=original.index,
        )  # fmt: skip
        self.entry.append(case)
        self.plans.append(_entry(case, used, (trial.result(0, original.shape.leaves[0].rank),), trial.reduced))
        return case

    def _operand(self, name: str, operand: Instruction, shape: ArrayShape, sharding: TensorSharding) -> Instruction:
        if operand.opcode == "constant" and not shape.dimensions and not sharding.unreduced:
            copy = Instruction(name=name, opcode="constant", shape=operand.shape, payload=operand.payload)
            self.entry.append(copy)
            return copy
        if not sharding.unreduced:
            return self._parameter(name, shape, sharding.dims)
        count = self.mesh.size(sharding.unreduced)
        stacked = ArrayShape(shape.element_type, (count, *shape.dimensions))
        source = self._parameter(f"{name}_s", stacked, (sharding.unreduced, *sharding.dims))
        zero = Instruction(
            name=f"{name}_z", opcode="constant", shape=ArrayShape(shape.element_type, ()), payload=_zero(shape)
        )
        region = _adder(f"{name}_add", shape.element_type)
        self.regions.append(region)
        summed = Instruction(
            name=name, opcode="reduce", shape=shape, operands=(source, zero), called={"to_apply": (region,)},
            attributes={
                "dimensions": Attribute("dimensions", "{0}", (0,)),
                "to_apply": Attribute("to_apply", region.name, region.name),
            },
        )  # fmt: skip
        self.entry += [zero, summed]
        split = TensorSharding((sharding.unreduced, *sharding.dims))
        self.plans.append(_entry(summed, [(split,), (TensorSharding(()),)], (sharding,)))
        return summed

    def _parameter(self, name: str, shape: ArrayShape, dims: tuple[tuple[str, ...], ...]) -> Instruction:
        instruction = Instruction(name=name, opcode="parameter", shape=shape, index=len(self.parameters))
        self.parameters.append(instruction)
        self.lies.append(dims)
        self.entry.append(instruction)
        return instruction

    def module(self) -> Module:
        return trials_module(self.regions, self.entry, self.parameters, self.outputs)


def _entry(
    instruction: Instruction, operands: Sequence[Any], result: Any, partial: tuple[str, ...] = ()
) -> InstructionPlan:
    return InstructionPlan(
        computation="main",
        name=instruction.name,
        opcode=instruction.opcode,
        operands=tuple(operands),
        result=result,
        partial=partial,
    )


def _zero(shape: ArrayShape) -> str:
    return "(0, 0)" if shape.element_type.startswith("c") else "0"


def _adder(name: str, element_type: str) -> Computation:
    scalar = ArrayShape(element_type, ())
    left, right = (
        Instruction(name=f"{name}.{side}", opcode="parameter", shape=scalar, index=i) for i, side in enumerate("lr")
    )
    root = Instruction(name=f"{name}.sum", opcode="add", shape=scalar, operands=(left, right), is_root=True)
    return Computation(name, [left, right, root], root, (left, right))


# ---- compile, run, judge -------------------------------------------------------

_COLLECTIVE = re.compile(r" (all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(")


def judge(trials: Sequence[Trial]) -> list[Verdict]:
    """Compile and run trials of one mesh side by side; collectives are told apart for a lone trial only."""
    bundle = _Bundle(trials[0].mesh)
    for number, trial in enumerate(trials):
        bundle.add(number, trial)
    text = bundle.module().to_text()
    header = _header(bundle)
    plan = plan_by_hand(
        header, bundle.mesh.sizes, dict(enumerate(bundle.lies)), dict(enumerate(bundle.returned)), bundle.plans
    )
    arguments = [_input(parameter.shape.leaves[0], seed) for seed, parameter in enumerate(bundle.parameters)]
    with jax.enable_x64(True):
        expected, _ = _run(private.stablehlo_of(text), arguments, None, bundle)
        actual, compiled = _run(emit_stablehlo(text, plan), arguments, bundle.mesh, bundle)
    kinds = tuple(match[1] for match in _COLLECTIVE.finditer(compiled))
    return [
        Verdict(trial, relative_error(want, got), kinds)
        for trial, want, got in zip(trials, expected, actual, strict=True)
    ]


def judge_all(trials: Sequence[Trial], batch: int = 40) -> list[Verdict]:
    """`judge` in batches; a batch that is not one all-reduce a trial is halved until the culprit stands alone."""
    by_mesh: dict[Mesh, list[Trial]] = {}
    for trial in trials:
        by_mesh.setdefault(trial.mesh, []).append(trial)
    pending = [group[i : i + batch] for group in by_mesh.values() for i in range(0, len(group), batch)]
    verdicts: list[Verdict] = []
    while pending:
        group = pending.pop()
        try:
            results = judge(group)
        except jax.errors.JaxRuntimeError as error:
            results = [Verdict(trial, np.inf, crash=str(error)) for trial in group]
        meant = ("all-reduce",) * sum(trial.all_reduces for trial in group)
        if len(group) > 1 and (results[0].crash or results[0].collectives != meant):
            pending += [group[: len(group) // 2], group[len(group) // 2 :]]
        elif len(group) > 1:
            verdicts += [replace(v, collectives=("all-reduce",) * v.trial.all_reduces) for v in results]
        else:
            verdicts += results
    return verdicts


def _header(bundle: _Bundle) -> str:
    def listed(values: Sequence[Instruction]) -> str:
        return ", ".join(
            f"{v.shape.leaves[0].element_type}[{','.join(map(str, v.shape.leaves[0].dimensions))}]" for v in values
        )

    return f"HloModule trials, entry_computation_layout={{({listed(bundle.parameters)})->({listed(bundle.outputs)})}}"


def _input(shape: ArrayShape, seed: int) -> np.ndarray:
    random = np.random.default_rng(seed)
    dtype = to_dtype(shape.element_type)
    if dtype == np.bool_:
        return random.random(shape.dimensions) < 0.8
    if np.issubdtype(dtype, np.integer):
        return random.integers(0, 5, shape.dimensions).astype(dtype)
    return random.normal(size=shape.dimensions).astype(dtype)


def _run(
    stablehlo: str, arguments: list[np.ndarray], mesh: Mesh | None, bundle: _Bundle
) -> tuple[list[np.ndarray], str]:
    count = 1 if mesh is None else mesh.device_count
    sizes = mesh.sizes if mesh else {"single": 1}
    devices = jax.devices("cpu")[:count]
    grid = jax.sharding.Mesh(np.array(devices).reshape(list(sizes.values())), tuple(sizes))
    options = private.compile_options(
        [device.id for device in devices], overrides=[("xla_disable_hlo_passes", "cpu-all-reduce-combiner")]
    )
    executable = private.compile_and_load(stablehlo, devices, options)
    lies = bundle.lies if mesh else [()] * len(arguments)
    placed = [jax.device_put(a, jax.NamedSharding(grid, jax.P(*dims))) for a, dims in zip(arguments, lies, strict=True)]
    shards = executable.execute_sharded(placed).disassemble_into_single_device_arrays()
    results = []
    for pieces, output, dims in zip(shards, bundle.outputs, bundle.returned, strict=True):
        place = jax.NamedSharding(grid, jax.P(*(dims if mesh else ())))
        (shape,) = output.shape.leaves
        results.append(np.asarray(jax.make_array_from_single_device_arrays(shape.dimensions, place, pieces)))
    return results, private.hlo_of_executable(executable)
