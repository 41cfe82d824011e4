"""Whatever a plan says, the numbers stay: shardings drawn at random for every use and every result."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardwright import hlo
from shardwright.hlo import Computation, Module
from shardwright.plans.plan import InstructionPlan
from shardwright.plans.shardings import Mesh, TensorSharding
from tests.xla.hand import lower, plan, run_planned

MESH = {"x": 2, "y": 4}


def draw(dice: random.Random, shape: tuple[int, ...]) -> TensorSharding:
    """Each axis splits one dimension or none; sizes it does not divide are drawn too."""
    dims: list[list[str]] = [[] for _ in shape]
    for axis in MESH:
        choice = dice.randrange(len(shape) + 1)
        if choice < len(shape) and shape[choice] > 1:
            dims[choice].append(axis)
    return TensorSharding(tuple(tuple(axes) for axes in dims))


def planned_computations(module: Module) -> list[Computation]:
    """The entry, and the bodies and callees whose instructions a plan covers."""
    results: list[Computation] = []
    pending = [module.entry]
    while pending:
        computation = pending.pop()
        if computation in results:
            continue
        results.append(computation)
        for instruction in computation:
            keys = ("to_apply",) if instruction.opcode == "call" else ("body", "branch_computations")
            pending += [called for key in keys for called in instruction.called.get(key, ())]
    return results


def random_entries(text: str, dice: random.Random) -> list[InstructionPlan]:
    return [
        InstructionPlan(
            computation=computation.name,
            name=instruction.name,
            opcode=instruction.opcode,
            operands=tuple(
                tuple(draw(dice, leaf.dimensions) for leaf in operand.shape.leaves) for operand in instruction.operands
            ),
            result=tuple(draw(dice, leaf.dimensions) for leaf in instruction.shape.leaves),
        )
        for computation in planned_computations(hlo.parse(text))
        for instruction in computation
    ]


def attention(x, w, mask):
    q, k, v = jnp.split(x @ w, 3, axis=-1)
    scores = jnp.where(mask, jnp.einsum("btd,bsd->bts", q, k), -1e9)
    return jax.nn.softmax(scores) @ v, scores.max(axis=(0, 1)), jnp.argmax(scores, axis=-1)


def recurrent(x, w):
    def body(carry, t):
        h, total = carry
        h = jnp.tanh(h @ w + t)
        return (h, total + h.sum(0)), h[:, 0]

    return jax.lax.scan(body, (x, jnp.zeros(x.shape[1])), jnp.arange(3.0))


def indexing(x, i):
    rows = x[i]
    spread = jnp.zeros_like(x).at[i].add(rows)
    return jax.lax.cond(x[0, 0] > 0, lambda a: a * 2, lambda a: jnp.roll(a, 1, 0), spread), jnp.cumsum(x, 0)


def data(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32) / 4


PROGRAMS = {
    "attention": (attention, (data(4, 4, 4), data(4, 12), np.tri(4, dtype=bool))),
    "recurrent": (recurrent, (data(4, 8), data(8, 8))),
    "indexing": (indexing, (data(8, 6), np.array([3, 1, 3, 7], np.int32))),
}


@pytest.mark.dear
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("program", PROGRAMS)
def test_numbers_do_not_depend_on_the_plan(program, seed):
    function, arguments = PROGRAMS[program]
    text = lower(function, *arguments)
    dice = random.Random(f"{program}{seed}")
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(function)(*arguments))]
    sides = {n: draw(dice, a.shape).dims for n, a in enumerate(arguments)}
    results = {n: draw(dice, a.shape).dims for n, a in enumerate(expected)}
    planned = plan(text, MESH, sides, results, random_entries(text, dice))
    assert planned.mesh == Mesh.of(MESH)
    outputs, _ = run_planned(planned, *arguments)
    for out, want in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(out, want, rtol=2e-4, atol=1e-5)
