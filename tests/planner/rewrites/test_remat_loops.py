"""Rematerialization in loops over layers: the same numbers whatever is computed again, and less memory."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest

from shardwright.hlo import Module, parse
from shardwright.planner.graph.inlining import inline_calls
from shardwright.planner.rewrites.remat_loops import LoopPair, loop_pairs, rematerialize_loops
from shardwright.xla import private
from tests.planner.programs import Program, lower, scan
from tests.planner.rewrites.rewrite_programs import compiled, deep_scan, lstm, run

PROGRAMS: dict[str, Callable[[], Program]] = {
    "deep": deep_scan,
    "handed out": lambda: deep_scan(hands_out=True),
    "lstm": lstm,
    "scan": scan,
}


def module_of(program: Program) -> Module:
    return inline_calls(parse(lower(program)))


def compute_values(pair: LoopPair) -> list[str]:
    """What a forward loop's body computes."""
    return [i.name for i in pair.body if pair.element(i) is None and not pair.is_at_hand(i)]


@pytest.mark.dear
@pytest.mark.parametrize("part", [1.0, 0.5, 0.2])
@pytest.mark.parametrize("name", PROGRAMS)
def test_numbers_stay_whatever_is_computed_again(name: str, part: float) -> None:
    program = PROGRAMS[name]()
    module = module_of(program)
    (pair,) = loop_pairs(module)
    random = np.random.default_rng(7)
    again = {each for each in compute_values(pair) if random.random() < part}
    again |= {row.value.name for row in pair.saved[::2]} & set(compute_values(pair))
    result, twins = rematerialize_loops(module, again)
    text = result.to_text()
    private.canonical_hlo(text)
    assert set(twins.values()) <= {i.name for i in pair.body}
    assert any(added.endswith(".remat") for added in twins)
    arguments = jax.tree.leaves(program[1])
    for expected, item in zip(run(module.to_text(), arguments), run(text, arguments), strict=True):
        np.testing.assert_allclose(item, expected, rtol=1e-5, atol=1e-6)


def test_peak_falls() -> None:
    module = module_of(deep_scan())
    (pair,) = loop_pairs(module)
    result, _ = rematerialize_loops(module, set(compute_values(pair)))
    before, after = (private.memory_figures(compiled(m.to_text()))[3] for m in (module, result))
    assert after < 0.4 * before
    (rest,) = loop_pairs(result)
    assert [row.value.opcode for row in rest.saved] == ["get-tuple-element"]  # what a layer begins with


def test_value_that_was_not_stacked_becomes_so() -> None:
    module = module_of(deep_scan())
    (pair,) = loop_pairs(module)
    saved = {row.value for row in pair.saved}
    names = set(compute_values(pair))
    inner = next(
        operand
        for value in pair.body
        for operand in value.operands
        if value in saved and operand not in saved and operand.opcode in ("add", "multiply", "dot", "tanh")
    )
    result, _ = rematerialize_loops(module, names - {inner.name})
    (rest,) = loop_pairs(result)
    assert inner.name in {row.value.name for row in rest.saved}


def test_what_others_read_stays_stacked() -> None:
    module = module_of(deep_scan(hands_out=True))
    (pair,) = loop_pairs(module)
    result, _ = rematerialize_loops(module, set(compute_values(pair)))
    (rest,) = loop_pairs(result)
    saved = {row.written for row in rest.saved}
    assert set(rest.forward.writes) - saved  # what is handed out
    assert len(rest.forward.writes) == 2


def test_nothing_to_do_leaves_the_module() -> None:
    module = module_of(deep_scan())
    assert rematerialize_loops(module, set())[0] is module
    assert rematerialize_loops(module, {"no such value"})[0] is module
