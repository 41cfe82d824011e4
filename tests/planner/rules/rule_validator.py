"""Brute force: does XLA compute what a factor says, with the collectives it promises and no others?

A case is one instruction, cut out of a lowered program. A trial is a case with an assignment of factors to
mesh axes. Many trials are put side by side into one module whose arguments and outputs are sharded exactly
as each trial's factors say, so that whatever collective XLA inserts is the instruction's own. The module is
emitted as a Plan, compiled, run on CPU devices, and compared with the unsharded module:

1. Every number agrees with the unsharded result.
2. A parallel factor needs no collective; contracted ones need all-reduces of the result, nothing else.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import jax
import numpy as np
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from shardwright.dtypes import to_dtype
from shardwright.hlo import ArrayShape
from shardwright.hlo.shapes import ELEMENT_BITS
from shardwright.planner.rules.base import operand_leaves
from shardwright.planner.rules.halo import exchange_bytes
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.xla import emit_stablehlo, private
from tests.planner.rules.rule_bundle import Bundle
from tests.planner.rules.rule_cases import Case, Trial, shares, trial_shardings
from tests.planner.trial_parts import relative_error

COLLECTIVES = ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter")


@dataclass(frozen=True)
class Moved:
    """One collective that XLA inserted: its kind, and the bytes of its result on one device."""

    kind: str
    size_bytes: int

    def __str__(self) -> str:
        return f"{self.kind} {self.size_bytes}"


@dataclass(frozen=True)
class Verdict:
    """What one trial showed. `error` is the largest deviation relative to the largest number of the result."""

    trial: Trial
    error: float
    moved: tuple[Moved, ...] = ()
    crash: str = ""

    @property
    def collectives(self) -> tuple[str, ...]:
        return tuple(each.kind for each in self.moved)

    @property
    def wrong(self) -> bool:
        return bool(self.crash) or not self.error < 1e-4

    @property
    def extra(self) -> tuple[Moved, ...]:
        """Collectives that the factors do not promise."""
        left = list(self.moved)
        for moved in promise_bytes(self.trial):
            if moved in left:
                left.remove(moved)
        return tuple(moved for moved in left if not (self.trial.summed and moved.kind == "all-reduce"))

    @property
    def absent(self) -> tuple[Moved, ...]:
        """Borders that the factors promise to exchange and XLA does not."""
        left = list(self.moved)
        return tuple(moved for moved in promise_bytes(self.trial) if moved not in left)

    def __str__(self) -> str:
        return f"{self.trial}: error {self.error:.1e} {', '.join(map(str, self.moved))} {self.crash[:200]}"


def promise_bytes(trial: Trial) -> list[Moved]:
    """The borders that neighbours exchange, by the halos of the trial's factors, and gathered partial results.

    XLA gathers along one reduced dimension after the other, the last first, what it has gathered before again.
    """
    taken = shares(trial.assignment, trial.mesh)
    halos = [(halo, taken[f]) for f in trial.case.factors if f in taken for halo in f.halo]
    outcome: list[Moved] = []
    pairs = zip(operand_leaves(trial.case.instruction), trial_shardings(trial, operands=True), strict=True)
    for number, (leaf, sharding) in enumerate(pairs):
        sent = exchange_bytes(
            [each for each in halos if each[0].operand == number], _shard_bytes(leaf, sharding, trial.mesh)
        )
        outcome += [Moved("collective-permute", size_bytes) for size_bytes in sent]
    gathered = 1
    combined = [factor for factor in taken if factor.reduction == "gather"]
    for factor in sorted(combined, key=lambda factor: factor.operands[0] or 0, reverse=True):
        gathered *= taken[factor]
        results = zip(trial.case.instruction.shape.leaves, trial_shardings(trial, operands=False), strict=True)
        outcome += [Moved("all-gather", gathered * _shard_bytes(*result, trial.mesh)) for result in results]
    return outcome


def _shard_bytes(leaf: ArrayShape, sharding: TensorSharding, mesh: Mesh) -> int:
    shard = [-(-size // mesh.size(axes)) for size, axes in zip(leaf.dimensions, sharding.dims, strict=True)]
    return prod(shard) * ELEMENT_BITS[leaf.element_type] // 8


# ---- compile, run, judge ---------------------------------------------------
def judge(trials: Sequence[Trial]) -> list[Verdict]:
    """Compile and run the trials, all of one mesh, side by side.

    Trials of one case get the same numbers, and what one device makes of them is computed once.
    """
    bundle = Bundle(trials[0].mesh)
    for number, trial in enumerate(trials):
        bundle.add(number, trial)
    text, plan = bundle.module().to_text(), bundle.plan()
    with jax.enable_x64(True):
        arguments, expected = _on_one_device(list(dict.fromkeys(trial.case for trial in trials)))
        placed = [array for trial in trials for array in arguments[trial.case]]
        actual, compiled = _run(emit_stablehlo(text, plan), placed, plan)
    errors = [0.0] * len(trials)
    wanted = [array for trial in trials for array in expected[trial.case]]
    for number, want, got in zip(bundle.output_trials, wanted, actual, strict=True):
        errors[number] = max(errors[number], relative_error(want, got))
    collectives = _collectives(compiled, len(trials))
    return [Verdict(trial, errors[k], collectives[k]) for k, trial in enumerate(trials)]


_Arrays = dict[Case, list[np.ndarray]]


def _on_one_device(cases: Sequence[Case]) -> tuple[_Arrays, _Arrays]:
    """Arguments for each case, and what one device computes of them."""
    bundle = Bundle.whole(cases)
    arguments = [_input(parameter.shape.leaves[0], seed) for seed, parameter in enumerate(bundle.parameters)]
    for number in bundle.definite:
        arguments[number] = arguments[number] @ arguments[number].swapaxes(-1, -2)
    results, _ = _run(private.stablehlo_of(bundle.module().to_text()), arguments, None)
    given: _Arrays = {case: [] for case in cases}
    entries: _Arrays = {case: [] for case in cases}
    for number, array in zip(bundle.parameter_trials, arguments, strict=True):
        given[cases[number]].append(array)
    for number, array in zip(bundle.output_trials, results, strict=True):
        entries[cases[number]].append(array)
    return given, entries


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


def partition_text(trial: Trial) -> str:
    """What XLA's partitioner makes of a trial, also of one that XLA:CPU has no kernel for."""
    bundle = Bundle(trial.mesh)
    bundle.add(0, trial)
    devices = jax.devices("cpu")[: trial.mesh.device_count]
    with tempfile.TemporaryDirectory() as folder:
        overrides = [("xla_dump_to", folder), ("xla_dump_hlo_pass_re", ".*spmd-partitioning")]
        options = private.compile_options([device.id for device in devices], overrides=overrides)
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            private.compile_and_load(emit_stablehlo(bundle.module().to_text(), bundle.plan()), devices, options)
        (dump,) = Path(folder).glob("*after_spmd-partitioning*.txt")
        return dump.read_text()


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


#: Collectives stay apart, so that each tells whose it is; LLVM comes after all that is judged, and optimizes nothing.
_OVERRIDES: list[tuple[str, str | int | bool]] = [
    ("xla_disable_hlo_passes", "cpu-all-reduce-combiner"),
    ("xla_backend_optimization_level", 0),
    ("xla_llvm_disable_expensive_passes", True),
]


def _run(stablehlo: str, arguments: list[np.ndarray], plan: Plan | None) -> tuple[list[np.ndarray], str]:
    count = 1 if plan is None else plan.mesh.device_count
    devices = jax.devices("cpu")[:count]
    mesh = JaxMesh(np.array(devices).reshape([a.size for a in plan.mesh.axes] if plan else [1]), _axes(plan))
    placements = (
        [_placement(mesh, v.sharding) for v in plan.parameters] if plan else [_placement(mesh, None)] * len(arguments)
    )
    options = private.compile_options([device.id for device in devices], overrides=_OVERRIDES)
    executable = private.compile_and_load(stablehlo, devices, options)
    private.prepare_custom_calls(private.hlo_of_executable(executable))
    if plan:
        arguments = [_store_layout(a, v.stored_shape) for a, v in zip(arguments, plan.parameters, strict=True)]
    placed = [jax.device_put(a, placement) for a, placement in zip(arguments, placements, strict=True)]
    shards = executable.execute_sharded(placed).disassemble_into_single_device_arrays()
    results = []
    for number, pieces in enumerate(shards):
        placement = _placement(mesh, plan.outputs[number].sharding if plan else None)
        shape = plan.outputs[number].stored_shape if plan else pieces[0].shape
        whole = np.asarray(jax.make_array_from_single_device_arrays(shape, placement, pieces))
        results.append(whole[tuple(map(slice, plan.outputs[number].shape))] if plan else whole)
    return results, private.hlo_of_executable(executable)


def _store_layout(array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Padded with what no result may depend on: not a number, where the type has one."""
    if array.shape == shape:
        return array
    filler = np.nan if np.issubdtype(array.dtype, np.inexact) else 1
    stored = np.full(shape, filler, array.dtype)
    stored[tuple(map(slice, array.shape))] = array
    return stored


def _axes(plan: Plan | None) -> tuple[str, ...]:
    return tuple(axis.name for axis in plan.mesh.axes) if plan else ("single",)


def _placement(mesh: JaxMesh, sharding: TensorSharding | None) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(sharding.dims if sharding else ())))


_COLLECTIVE = re.compile(rf" = (\(?\w+\[.*) ({'|'.join(COLLECTIVES)})(?:-start)?\(")
_OWNER = re.compile(r"op_name=\"[^\"]*?case\.(\d+)")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


def _collectives(compiled: str, count: int) -> list[tuple[Moved, ...]]:
    """Collectives in partitioned HLO, per trial."""
    results: list[list[Moved]] = [[] for _ in range(count)]
    for line in compiled.splitlines():
        collective = _COLLECTIVE.search(line)
        if collective is None:
            continue
        owner = _OWNER.search(line)
        if owner is None and count > 1:
            raise UnattributedError(line)
        moved = Moved(collective[2], sum(_bytes(*array) for array in _ARRAY.findall(collective[1])))
        results[int(owner[1]) if owner else 0].append(moved)
    return [tuple(each) for each in results]


def _bytes(element_type: str, dimensions: str) -> int:
    bits = ELEMENT_BITS.get(element_type, 0)
    return prod(int(size) for size in dimensions.split(",") if size) * bits // 8
