"""Loops over layers cut between layers: the same numbers, from stacks that are stored in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardwright.errors import PlanError
from shardwright.hlo import Module, parse
from shardwright.planner.graph.inlining import inline_calls
from shardwright.planner.rewrites.loop_parts import Rows
from shardwright.planner.rewrites.split_loops import Parts, SplitLoops, VariableRows, split_loops
from shardwright.planner.rewrites.stacked_loops import StackedLoop, match_stacked_loop
from tests.planner.programs import Program, lower
from tests.planner.rewrites.rewrite_programs import run

LAYERS, WIDTH, BATCH = 5, 8, 4


def at(*ends: int) -> Parts:
    """Parts of a stack that end at these rows, labelled 10, 11, …"""
    return tuple(Rows(a, b, 10 + i) for i, (a, b) in enumerate(pairwise((0, *ends))))


def normal(seed: int, *shape: int) -> np.ndarray:
    return (np.random.default_rng(seed).normal(size=shape) * 0.3).astype(np.float32)


def stack(seed: int, layers: int = LAYERS) -> dict[str, np.ndarray]:
    return {"w": normal(seed, layers, WIDTH, WIDTH), "b": normal(seed + 1, layers, WIDTH)}


def training(loss: Callable[..., Any], params: Any, *batch: Any) -> Program:
    """Adam behind a global norm: stacks are updated row by row, and summed over rows."""
    optimizer = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1))

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    return step, (params, optimizer.init(params), *batch), (0, 1)


def scanned(*, remat: bool, unroll: bool = False) -> Program:
    """Layers that read a mask and a weight that all share, between an embedding and a head."""
    params = {"layers": stack(1), "shared": normal(7, WIDTH), "first": normal(8, 3, WIDTH), "last": normal(9, WIDTH, 3)}

    def loss(p: Any, x: Any, mask: Any) -> Any:
        def layer(x: Any, q: Any) -> Any:
            return x + mask * jnp.tanh(x @ q["w"] + q["b"]) * p["shared"], None

        x, _ = jax.lax.scan(jax.checkpoint(layer) if remat else layer, x @ p["first"], p["layers"])
        return jnp.mean((x @ p["last"]) ** 2)

    return training(loss, params, normal(10, BATCH, 3), np.ones((BATCH, WIDTH), np.float32))


def two_stacks() -> Program:
    """An encoder whose result every layer of a decoder reads; each layer hands a statistic out."""
    params = {"encoder": stack(1, 3), "decoder": stack(5, 4)}

    def loss(p: Any, x: Any, y: Any) -> Any:
        encoded, _ = jax.lax.scan(lambda x, q: (jnp.tanh(x @ q["w"] + q["b"]), None), x, p["encoder"])

        def layer(y: Any, q: Any) -> Any:
            result = jnp.tanh(y @ q["w"] + encoded + q["b"])
            return result, jnp.sum(result**2)

        y, sums = jax.lax.scan(layer, y, p["decoder"])
        return jnp.mean(y**2) + jnp.sum(sums * jnp.arange(4.0))

    return training(loss, params, normal(10, BATCH, WIDTH), normal(11, BATCH, WIDTH))


def module_of(program: Program) -> Module:
    return inline_calls(parse(lower(program)))


def loops_of(module: Module) -> list[StackedLoop]:
    return [found for i in module.entry if i.opcode == "while" and (found := match_stacked_loop(i)) is not None]


def split_arguments(split: SplitLoops, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    return [
        np.asarray(arguments[piece.number])[piece.start : piece.stop]
        if piece.start is not None
        else arguments[piece.number]
        for piece in split.arguments
    ]


def together(split: SplitLoops, outputs: Sequence[np.ndarray]) -> list[np.ndarray]:
    entries: dict[int, list[np.ndarray]] = {}
    for piece, output in zip(split.outputs, outputs, strict=True):
        entries.setdefault(piece.number, []).append(output)
    return [np.concatenate(parts) if len(parts) > 1 else parts[0] for _, parts in sorted(entries.items())]


def assert_equal(module: Module, split: SplitLoops, program: Program) -> None:
    arguments = jax.tree.leaves(program[1])
    expected = run(module.to_text(), arguments)
    result = together(split, run(split.module.to_text(), split_arguments(split, arguments)))
    assert len(result) == len(expected)
    for a, b in zip(result, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("remat", "cuts"), [(True, at(2, 5)), pytest.param(False, at(1, 2, 3, 4, 5), marks=pytest.mark.dear)]
)
def test_numbers_stay(remat: bool, cuts: Parts) -> None:
    program = scanned(remat=remat)
    module = module_of(program)
    loops = loops_of(module)
    assert [loop.is_descending for loop in loops] == [False, True]
    assert all(loop.rows == LAYERS for loop in loops)
    result = split_loops(module, {loop.loop.name: cuts for loop in loops})
    assert sum(i.opcode == "while" for i in result.module.entry) == 2 * len(cuts)
    assert not [i.name for i in result.module.entry if i.opcode in ("concatenate", "slice")]
    assert_equal(module, result, program)


def test_stacks_are_stored_in_parts() -> None:
    program = scanned(remat=False)
    module = module_of(program)
    result = split_loops(module, {loop.loop.name: at(2, 5) for loop in loops_of(module)})
    names = [i.op_name for i in result.module.entry.parameters]
    assert "params['layers']['w'][0:2]" in names
    assert "params['layers']['w'][2:5]" in names
    assert "params['first']" in names
    position = names.index("params['layers']['w'][2:5]")
    assert result.module.entry.parameters[position].shape.leaves[0].dimensions == (3, WIDTH, WIDTH)
    assert result.arguments[position].start == 2
    # what shares a buffer is cut alike, moments of the optimizer too
    for alias in result.module.aliases:
        argument, output = result.arguments[alias.parameter_number], result.outputs[alias.output_index[0]]
        assert (argument.start, argument.stop) == (output.start, output.stop)
    assert sum(piece.start is not None for piece in result.arguments) == 2 * 2 * 3
    parts = {result.label_of[i.name] for i in result.module.entry if i.opcode == "while"}
    assert parts == {10, 11}


@pytest.mark.dear
@pytest.mark.parametrize("encoder", [at(1, 3), at(3)])
def test_two_stacks_are_cut_apart(encoder: Parts) -> None:
    program = two_stacks()
    module = module_of(program)
    by_rows = {3: encoder, 4: at(3, 4)}
    result = split_loops(module, {loop.loop.name: by_rows[loop.rows] for loop in loops_of(module)})
    assert sum(i.opcode == "while" for i in result.module.entry) == 2 * len(encoder) + 4
    assert_equal(module, result, program)


def test_nothing_to_split() -> None:
    module = module_of(scanned(remat=False))
    result = split_loops(module, {})
    assert result.arguments[:2] == (VariableRows(number=0), VariableRows(number=1))
    assert result.module is module
    assert len(result.outputs) == len(module.entry.root.shape.leaves)


def test_refusals() -> None:
    module = module_of(scanned(remat=False))
    forward, backward = (loop.loop.name for loop in loops_of(module))
    with pytest.raises(PlanError, match="has 5 rows and cannot be cut"):
        split_loops(module, {forward: at(3, 3, 5)})
    with pytest.raises(PlanError, match="no loop over stacked arrays"):
        split_loops(module, {"nowhere": at(1)})
    with pytest.raises(PlanError, match="would be cut at"):
        split_loops(module, {forward: at(2, 5), backward: at(3, 5)})


def test_loops_that_are_not_over_layers() -> None:
    """A loop whose trips read other rows than their own, and one that ends by what it computes."""

    def shifted(x: Any) -> Any:
        return jax.lax.fori_loop(0, 4, lambda i, x: x.at[i].set(x[(i + 1) % 4]), x)

    def open_ended(x: Any) -> Any:
        return jax.lax.while_loop(lambda c: c.sum() < 9, lambda c: c + 1, x)

    for function in (shifted, open_ended):
        text = jax.jit(function).lower(np.ones((4, 3), np.float32)).as_text("hlo")
        assert loops_of(inline_calls(parse(text))) == []
