"""Splitting dimensions: which are found, and that the program computes the same."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from shardwright.hlo import parse
from shardwright.planner.rewrites import rewrite
from shardwright.xla import private
from tests.planner.programs import lower
from tests.planner.rewrites.rewrite_programs import REWRITTEN, run


@pytest.mark.parametrize("name", REWRITTEN)
def test_rewritten_program_computes_the_same(name: str) -> None:
    program = REWRITTEN[name]()
    arguments = [np.asarray(leaf) for leaf in jax.tree.leaves(program[1])]
    text = lower(program)
    made = rewrite(parse(text))
    assert made.changed, made.notes
    new_text = made.module.to_text()
    private.canonical_hlo(new_text)
    expected = run(text, arguments)
    viewed = [a.reshape(made.parameters.get(n, a.shape)) for n, a in enumerate(arguments)]
    found = run(new_text, viewed)
    for number, (e, f) in enumerate(zip(expected, found, strict=True)):
        assert f.shape == made.outputs.get(number, e.shape)
        np.testing.assert_allclose(f.reshape(e.shape), e, rtol=2e-6, atol=2e-7)
