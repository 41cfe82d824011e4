"""Rematerialization: the same numbers, less memory, and only the backward pass reads what is computed again."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from shardwright.errors import PlanError
from shardwright.hlo import Module, parse
from shardwright.planner.rewrites import forward_pass, rematerialize
from shardwright.planner.xla_version import xla_version
from shardwright.xla import private
from tests.planner.programs import gpt2, lower
from tests.planner.rewrites.rewrite_programs import compiled, deep, run


def temporaries_bytes(executable: Any) -> int:
    return private.memory_figures(executable)[3]


def residuals(module: Module, *shape: int) -> set[str]:
    """What layers hand on: sums of activations."""
    names = set(forward_pass(module))
    return {
        i.name for i in module.entry if i.name in names and i.opcode == "add" and i.shape.leaves[0].dimensions == shape
    }


def test_peak_falls_and_numbers_stay() -> None:
    program = deep()
    module = parse(lower(program))
    keep = residuals(module, 128, 32)
    result = rematerialize(module, keep=keep, recompute=set(forward_pass(module)) - keep).module
    arguments = jax.tree.leaves(program[1])
    before, after = (compiled(m.to_text()) for m in (module, result))
    for expected, item in zip(run(before, arguments), run(after, arguments), strict=True):
        np.testing.assert_array_equal(item, expected)
    assert temporaries_bytes(after) < 0.4 * temporaries_bytes(before)


def test_xla_on_cpu_undoes_rematerialization_by_default() -> None:
    """Until 0.12, where XLA:CPU keeps barriers until equal instructions are merged: `DISABLED_PASSES` is for those."""
    module = parse(lower(deep()))
    keep = residuals(module, 128, 32)
    result = rematerialize(module, keep=keep, recompute=set(forward_pass(module)) - keep).module
    before, after = (compiled(m.to_text(), every_pass=True) for m in (module, result))
    assert (temporaries_bytes(after) > 0.9 * temporaries_bytes(before)) == (xla_version() < (0, 12))


@pytest.mark.dear
def test_attention_is_computed_again() -> None:
    program = gpt2(layers=1)
    module = parse(lower(program))
    keep = residuals(module, 8, 16, 32)
    result = rematerialize(module, keep=keep, recompute=set(forward_pass(module)) - keep).module
    private.canonical_hlo(result.to_text())
    arguments = jax.tree.leaves(program[1])
    for expected, item in zip(run(module.to_text(), arguments), run(result.to_text(), arguments), strict=True):
        np.testing.assert_allclose(item, expected, rtol=1e-5, atol=1e-6)


def test_only_the_backward_pass_reads_clones_and_it_reads_nothing_else() -> None:
    module = parse(lower(deep(layers=3)))
    forward = set(forward_pass(module))
    keep = residuals(module, 128, 32)
    result = rematerialize(module, keep=keep, recompute=forward - keep).module
    originals = {instruction.name for instruction in module.entry}
    clones = {i.name for i in result.entry if i.name.endswith(".remat")}
    assert {name.removesuffix(".remat") for name in clones} <= forward - keep
    for instruction in result.entry:
        read = {operand.name for operand in instruction.operands}
        if instruction.name in forward:
            assert not read & clones
        elif instruction.name in originals and instruction.opcode != "tuple":
            assert not read & (forward - keep)
    for clone in (i for i in result.entry if i.name in clones):
        original = next(i for i in module.entry if i.name == clone.name.removesuffix(".remat"))
        assert (clone.opcode, clone.op_name, clone.shape) == (original.opcode, original.op_name, original.shape)


def test_every_segment_waits_for_a_value_of_the_backward_pass_that_is_read_behind_its_barrier() -> None:
    """XLA drops what comes out of a barrier and is not read, and then computes the clones early."""
    module = parse(lower(deep(layers=3)))
    keep = residuals(module, 128, 32)
    result = rematerialize(module, keep=keep, recompute=set(forward_pass(module)) - keep).module.entry
    waiting = 0
    for barrier in (i for i in result if i.opcode == "opt-barrier"):
        elements = [i for i in result if i.opcode == "get-tuple-element" and i.operands == (barrier,)]
        assert len(elements) == len(barrier.operands[0].operands)
        readers = [[i.name for i in result if element in i.operands] for element in elements]
        assert all(readers)
        waiting += any(not name.endswith(".remat") for names in readers for name in names)
    assert waiting >= 3  # each layer's


def test_forward_pass_is_what_the_loss_is_made_of_and_what_is_made_for_the_backward_pass() -> None:
    module = parse(lower(deep(layers=2)))
    forward = set(forward_pass(module))
    reached = {module.entry.root.operands[-1]}  # the loss
    for instruction in reversed(module.entry.instructions):
        if instruction in reached:
            reached.update(instruction.operands)
    variables = {i for i in module.entry if i.opcode in ("parameter", "constant")}
    made_of_variables = {i.name for i in reached - variables if any(o not in variables for o in i.operands)}
    assert made_of_variables <= forward
    assert not any("transpose(" in i.op_name for i in module.entry if i.name in forward)
    # Momentum times state belongs to neither pass.
    assert all("jvp(" in i.op_name for i in module.entry if i.name in forward)


def test_nothing_to_compute_again_gives_the_module_back() -> None:
    module = parse(lower(deep(layers=1)))
    assert rematerialize(module, keep=set(forward_pass(module)), recompute=set()).module is module
    assert forward_pass(parse(str(jax.jit(lambda x: x + 1).lower(np.ones(3)).as_text("hlo")))) == []


@pytest.mark.parametrize(
    ("keep", "recompute", "message"),
    [
        ({"x"}, {"nobody"}, "no instruction 'nobody' in the entry"),
        ({"a"}, {"a"}, "'a' is to be kept and to be computed again"),
        (set(), {"noise"}, "rng 'noise' must not run twice"),
        (set(), {"b"}, "'b' of the forward pass reads 'a', which is not of it"),
    ],
)
def test_impossible_requests_are_refused(keep: set[str], recompute: set[str], message: str) -> None:
    module = parse("""HloModule m

ENTRY main {
  x = f32[4] parameter(0)
  zero = f32[] constant(0)
  one = f32[] constant(1)
  noise = f32[4] rng(zero, one), distribution=rng_uniform
  a = f32[4] add(x, noise)
  b = f32[4] tanh(a)
  ROOT y = f32[4] multiply(b, a)
}
""")
    with pytest.raises(PlanError, match=message):
        rematerialize(module, keep=keep, recompute=recompute)


def test_clones_wait_for_no_value_of_a_manual_region() -> None:
    """What a region computes is read in it alone: a barrier outside of it must not hold it."""

    def border(target: str, operand: str) -> str:
        attributes = 'shardwright.region="0",shardwright.region_axes="c=4",shardwright.region_mesh="c=4"'
        sharding = 'shardwright.region_sharding="#sdy.sharding<@mesh, [{\\"c\\"}]>"'
        call = f'custom_call_target="shardwright.{target}_region", frontend_attributes={{{attributes},{sharding}}}'
        return f"custom-call({operand}), {call}"

    module = parse(f"""HloModule m
ENTRY e {{
  x = f32[16] parameter(0)
  kept = f32[16] exponential(x)
  again = f32[16] tanh(kept)
  slope = f32[16] negate(kept)
  slope_in = f32[4] {border("enter", "slope")}
  steep = f32[4] cosine(slope_in)
  again_in = f32[4] {border("enter", "again")}
  product = f32[4] multiply(steep, again_in)
  ROOT out = f32[16] {border("leave", "product")}
}}""")
    result = rematerialize(module, keep={"kept"}, recompute={"again"}).module
    instructions = {instruction.name: instruction for instruction in result.entry}
    (barrier,) = (each for each in instructions.values() if each.opcode == "opt-barrier")
    assert "slope" in {each.name for each in barrier.operands[0].operands}
    assert all(each.shape.leaves[0].dimensions == (16,) for each in barrier.operands[0].operands)
