"""Every instruction that a micro-batch may compute by itself, tried on XLA: parts and terms make the whole result.

Instructions are those of the rules' own tests, each with one operand along the batch, dimension by dimension, or as a
sum over it; the other operands are whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from shardwright.hlo import ArrayShape, Computation, Instruction, Module, TupleShape, parse
from shardwright.planner.microbatch import Along, accumulate_step
from shardwright.planner.microbatch.kinds import DONE, SUM, WHOLE, Kind
from shardwright.planner.microbatch.split import cut_step, label_step
from shardwright.planner.rewrites import edit
from tests.planner.rewrites.rewrite_programs import run
from tests.planner.rules.rule_cases import Case, cases_of
from tests.planner.rules.rule_programs import hlo_text, operations
from tests.planner.rules.rule_texts import TEXTS

PARTS = 2

_ADD = """HloModule m
add { a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT r = f32[] add(a, b) }
ENTRY e { ROOT p = f32[] parameter(0) }"""


@dataclass(frozen=True)
class Trial:
    """An instruction, of which flat operand leaf `leaf` is of this kind."""

    instruction: Instruction
    leaf: int
    kind: Kind

    def __str__(self) -> str:
        return f"{self.instruction.opcode} {self.instruction.shape} operand {self.leaf} {self.kind}"


@dataclass
class Bundle:
    """Trials side by side in one module, each with parameters of its own."""

    trials: Sequence[Trial]
    entry: list[Instruction] = field(default_factory=list)
    batch: dict[int, Along] = field(default_factory=dict)
    made: list[Instruction] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.parameters: list[Instruction] = []
        (self.add, *_) = parse(_ADD).computations
        self.zero = Instruction("zero", "constant", ArrayShape("f32", ()), payload="0")
        self.entry.append(self.zero)
        self.regions: dict[Computation, None] = {self.add: None}
        for number, trial in enumerate(self.trials):
            self._add(number, trial)
        outputs = [leaf for made in self.made for leaf in self._leaves(made)]
        shape = TupleShape(tuple(output.shape for output in outputs))
        root = Instruction("root", "tuple", shape, tuple(outputs), is_root=True)
        entry = Computation("main", [*self.entry, root], root, tuple(self.parameters), is_entry=True)
        self.module = Module("trials", {}, [*self.regions, entry], entry)

    def _add(self, number: int, trial: Trial) -> None:
        source = trial.instruction
        operands = []
        for position, operand in enumerate(source.operands):
            kind = trial.kind if position == trial.leaf else WHOLE
            operands.append(self._operand(f"p{number}.{position}", operand, kind))
        attributes = {n: a for n, a in source.attributes.items() if n not in ("metadata", "sharding")}
        called = {}
        for name, computations in source.called.items():
            copies = tuple(_copy(c, f"case{number}.{name}") for c in computations)
            self.regions |= dict.fromkeys(copies)
            called[name] = copies
            attributes[name] = edit.attribute(name, f"%{copies[0].name}")
        changes = {"attributes": attributes, "called": called, "is_root": False}
        result = edit.copy_of(source, operands, name=f"case.{number}", **changes)
        self.entry.append(result)
        self.made.append(result)

    def _operand(self, name: str, operand: Instruction, kind: Kind) -> Instruction:
        shape = operand.shape
        assert isinstance(shape, ArrayShape)
        if operand.opcode == "constant" and not shape.rank:
            self.entry.append(edit.copy_of(operand, (), name=name, is_root=False))
            return self.entry[-1]
        if kind == SUM:
            terms = self._parameter(f"{name}.terms", ArrayShape(shape.element_type, (PARTS, *shape.dimensions)))
            self.batch[terms.index] = Along(0)
            attributes = {
                "dimensions": edit.int_list("dimensions", [0]),
                "to_apply": edit.attribute("to_apply", "%add"),
            }
            result = Instruction(name, "reduce", shape, (terms, self.zero), attributes, {"to_apply": (self.add,)})
            self.entry.append(result)
            return result
        result = self._parameter(name, shape)
        if isinstance(kind, Along):
            self.batch[result.index] = kind
        return result

    def _parameter(self, name: str, shape: ArrayShape) -> Instruction:
        instruction = Instruction(name, "parameter", shape, index=len(self.parameters))
        self.parameters.append(instruction)
        self.entry.append(instruction)
        return instruction

    def _leaves(self, instruction: Instruction) -> Iterator[Instruction]:
        if not isinstance(instruction.shape, TupleShape):
            yield instruction
            return
        for index, shape in enumerate(instruction.shape.elements):
            attributes = {"index": edit.attribute("index", str(index))}
            element = Instruction(
                f"{instruction.name}.{index}", "get-tuple-element", shape, (instruction,), attributes, index=index
            )
            self.entry.append(element)
            yield element


def _copy(region: Computation, name: str) -> Computation:
    copies: dict[Instruction, Instruction] = {}
    for old in region:
        operands = [copies[operand] for operand in old.operands]
        copies[old] = edit.copy_of(old, operands, name=f"{name}.{old.name}")
    parameters = tuple(copies[parameter] for parameter in region.parameters)
    root = copies[region.root]
    return replace(region, name=name, instructions=list(copies.values()), root=root, parameters=parameters)


def trials_of(cases: Sequence[Case]) -> list[Trial]:
    """Every operand along every dimension that is even, and as a sum; no more than micro-batches can compute."""
    results = [Trial(case.instruction, leaf, kind) for case in cases for leaf, kind in _kinds(case.instruction)]
    bundle = Bundle(results)
    _, labels = label_step(bundle.module, bundle.batch)
    return [t for t, made in zip(results, bundle.made, strict=True) if DONE not in labels.kinds[made]]


def _kinds(instruction: Instruction) -> Iterator[tuple[int, Kind]]:
    leaves = [*instruction.shape.leaves, *(leaf for operand in instruction.operands for leaf in operand.shape.leaves)]
    if any(leaf.element_type in ("u64", "s64", "f64") for leaf in leaves):
        return  # JAX holds none of these unless told to
    for leaf, operand in enumerate(instruction.operands):
        shape = operand.shape.leaves[0]
        if operand.opcode == "constant" and not shape.rank:
            continue
        yield from ((leaf, Along(dim)) for dim, size in enumerate(shape.dimensions) if size and size % PARTS == 0)
        if shape.element_type == "f32":
            yield leaf, SUM


def values_of(shape: ArrayShape, seed: int) -> np.ndarray:
    """Numbers that every operation takes: matrices are diagonally dominant."""
    random = np.random.default_rng(seed)
    if shape.element_type == "pred":
        return random.random(shape.dimensions) < 0.8
    if shape.element_type[0] in "su":
        kind, bits = shape.element_type[0], shape.element_type[1:]
        return random.integers(0, 5, shape.dimensions).astype({"s": "int", "u": "uint"}[kind] + bits)
    values = random.uniform(0.1, 0.9, shape.dimensions)
    if shape.rank >= 2 and shape.dimensions[-1] == shape.dimensions[-2]:
        values = values + np.swapaxes(values, -1, -2) + 4 * shape.dimensions[-1] * np.eye(shape.dimensions[-1])
    return values.astype({"f32": "float32", "c64": "complex64", "f16": "float16"}[shape.element_type])


def check(trials: Sequence[Trial]) -> None:
    bundle = Bundle(trials)
    arguments = [values_of(p.shape.leaves[0], n) for n, p in enumerate(bundle.parameters)]
    module = accumulate_step(cut_step(bundle.module, bundle.batch, *label_step(bundle.module, bundle.batch)), PARTS)
    stored = [a.reshape(p.shape.leaves[0].dimensions) for a, p in zip(arguments, module.entry.parameters, strict=True)]
    expected = run(bundle.module.to_text(), arguments)
    result = run(module.to_text(), stored)
    owners = [trial for trial, made in zip(trials, bundle.made, strict=True) for _ in made.shape.leaves]
    wrong = [
        str(trial)
        for trial, want, got in zip(owners, expected, result, strict=True)
        if not np.allclose(want, got, rtol=1e-4, atol=1e-5, equal_nan=True)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.fixture(scope="module")
def trials() -> list[Trial]:
    programs = {name: hlo_text(program) for name, program in operations().items()} | TEXTS
    return trials_of(cases_of(programs, without_factors=True))


def sample(trials: Sequence[Trial]) -> list[Trial]:
    """Of each opcode, operand and kind of kind the first, and every twelfth further one."""
    seen: Counter[object] = Counter()
    results = []
    for trial in trials:
        key = (trial.instruction.opcode, trial.leaf, type(trial.kind))
        if seen[key] % 12 == 0:
            results.append(trial)
        seen[key] += 1
    return results


@pytest.mark.dear
def test_parts_and_terms_make_the_whole(trials: list[Trial]) -> None:
    """All of them are right; a sample keeps the time short (`check(trials)` takes minutes)."""
    counts = Counter(trial.instruction.opcode for trial in trials)
    assert len(trials) > 1000
    assert {"dot", "convolution", "reduce-window", "sort", "fft", "topk", "gather", "scatter"} <= counts.keys()
    check(sample(trials))
