"""Steps cut into micro-batches give the numbers of the whole-batch step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import pytest

from shardwright.hlo import Module, parse
from shardwright.planner.microbatch import (
    Ahead,
    Along,
    Argument,
    Output,
    PartModule,
    SharedValue,
    StepSplit,
    accumulate_step,
    ahead_module,
    micro_module,
    once_module,
    split_step,
)
from shardwright.xla import private
from tests.planner.microbatch.microbatch_programs import BATCH, EXACT, LENGTH
from tests.planner.programs import Program, lower
from tests.planner.rewrites.rewrite_programs import compiled, run


def assert_equal(expected: list[np.ndarray], actual: list[np.ndarray]) -> None:
    """Equal within 1e-5 of each array's norm."""
    for want, got in zip(expected, actual, strict=True):
        difference = np.linalg.norm((np.asarray(want, np.float64) - np.asarray(got, np.float64)).ravel())
        assert difference <= 1e-5 * max(np.linalg.norm(np.asarray(want, np.float64).ravel()), 1e-12)


def arguments_of(program: Program) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(program[1])]


def run_accumulated(module: Module, arguments: list[np.ndarray]) -> list[np.ndarray]:
    stored = [p.shape.leaves[0].dimensions for p in module.entry.parameters]
    return run(module.to_text(), [a.reshape(dims) for a, dims in zip(arguments, stored, strict=True)])


def run_parts(split: StepSplit, arguments: list[np.ndarray], micro_batches: int) -> list[np.ndarray]:
    """Micro-batch after micro-batch, terms added and parts put together by numpy, then the once part."""
    first = ahead_module(split)
    given = [arguments[each.number] for each in first.inputs if isinstance(each, Argument)]
    ahead = dict(zip(first.outputs, run(first.module.to_text(), given) if first.outputs else (), strict=True))
    micro = micro_module(split, micro_batches)
    program = compiled(micro.module.to_text())
    results = [run(program, inputs(split, micro, arguments, ahead, micro_batches, i)) for i in range(micro_batches)]
    values = {shared: finish(shared, [m[k] for m in results]) for k, shared in enumerate(split.shared)}
    once = once_module(split)
    read = [arguments[i.number] if isinstance(i, Argument) else values[i] for i in once.inputs]  # type: ignore[index]
    return run(once.module.to_text(), read)


def inputs(
    split: StepSplit,
    part: PartModule,
    arguments: list[np.ndarray],
    ahead: Mapping[Output, np.ndarray],
    micro_batches: int,
    index: int,
) -> list[Any]:
    results: list[Any] = []
    for each in part.inputs:
        if isinstance(each, Ahead):
            results.append(ahead[each])
        elif not isinstance(each, Argument):
            results.append(np.int32(index))
        elif each.local:
            dim = split.batch[each.number].dim
            results.append(np.split(arguments[each.number], micro_batches, axis=dim)[index])
        else:
            results.append(arguments[each.number])
    return results


def finish(shared: SharedValue, values: list[np.ndarray]) -> np.ndarray:
    if isinstance(shared.kind, Along):
        dim, outer = shared.kind.dim, shared.kind.outer
        blocks = [v.reshape(*v.shape[:dim], outer, -1, *v.shape[dim + 1 :]) for v in values]
        return np.concatenate(blocks, axis=dim + 1).reshape(shared.shape.dimensions)
    reduce = {"add": np.add, "maximum": np.maximum}[shared.kind.reduction].reduce
    return np.asarray(reduce(values))


@pytest.mark.dear
@pytest.mark.parametrize("name", EXACT)
def test_equals_the_whole_batch(name: str) -> None:
    program = EXACT[name]()
    text, arguments = lower(program), arguments_of(program)
    expected = run(text, arguments)
    split = split_step(parse(text))
    assert_equal(expected, run_accumulated(accumulate_step(split, 2), arguments))
    assert_equal(expected, run_parts(split, arguments, 4))


def test_loops_carry_the_part_of_what_they_only_cut() -> None:
    """The mask is made of constants for the whole batch; a micro-batch never holds more than its part of it."""
    split = split_step(parse(lower(EXACT["attending"]())))
    shapes = [leaf.dimensions for i in micro_module(split, 2).module.instructions() for leaf in i.shape.leaves]
    assert (BATCH // 2, LENGTH, LENGTH) in shapes
    assert (BATCH, LENGTH, LENGTH) not in shapes


def test_what_counts_in_the_whole_batch_is_computed_once() -> None:
    """Ahead of the loop over micro-batches: the loop carries the number of tokens, not all lengths."""
    module = accumulate_step(split_step(parse(lower(EXACT["masked"]()))), 2)
    (loop,) = [i for i in module.entry if i.opcode == "while"]
    carried = [leaf.dimensions for leaf in loop.shape.leaves]
    assert (2, BATCH // 2) in carried  # lengths, by micro-batch
    assert all(i.opcode != "reshape" or i.shape.leaves[0].dimensions != (BATCH,) for i in loop.called["body"][0])


def test_one_micro_batch_is_the_step_itself() -> None:
    split = split_step(parse(lower(EXACT["masked"]())))
    assert accumulate_step(split, 1) is split.module


def test_texts_are_equal_whatever_the_hash_seed() -> None:
    """Two readings of one text: dictionaries and sets of objects must not leave traces."""
    text = lower(EXACT["rematerialised"]())
    first, second = (accumulate_step(split_step(parse(text)), 2).to_text() for _ in range(2))
    assert first == second
    private.canonical_hlo(first)
