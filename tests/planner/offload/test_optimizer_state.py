"""Which arguments are the optimizer's state, read off the program; and the program that keeps them on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import shardwright as sw
from shardwright.hlo import Module, parse
from shardwright.hlo.entry import flat_aliases
from shardwright.planner.graph.dataflow import build_dataflow
from shardwright.planner.graph.inlining import inline_calls
from shardwright.planner.offload import find_optimizer_state, keep_on_host
from shardwright.reserved_names import PLACEMENT_TARGET

WIDTH = 512
PARAMETERS = {name: jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for name in ("first", "second")}
PARAMETERS["bias"] = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)
BATCH = jax.ShapeDtypeStruct((64, WIDTH), jnp.float32)


def loss_of(params: Any, batch: jax.Array) -> jax.Array:
    hidden = jax.nn.gelu(batch @ params["first"] + params["bias"])
    return ((hidden @ params["second"]) ** 2).mean()


def step_with(optimizer: optax.GradientTransformation, *, says_loss: bool = True) -> Callable[..., Any]:
    def step(params: Any, state: Any, batch: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        updates, state = optimizer.update(gradients, state, params)
        params = optax.apply_updates(params, updates)
        return (params, state, loss) if says_loss else (params, state)

    return step


def lower(optimizer: optax.GradientTransformation, **how: Any) -> tuple[Module, tuple[str, ...]]:
    """The lowered step, and its arguments' names."""
    donated = how.pop("donate_argnums", (0, 1))
    state = jax.eval_shape(optimizer.init, PARAMETERS)
    lowered = sw.lower(step_with(optimizer, **how), PARAMETERS, state, BATCH, donate_argnums=donated)
    leaves = jax.tree_util.tree_flatten_with_path((PARAMETERS, state, BATCH))[0]
    return inline_calls(parse(lowered.hlo_text)), tuple(jax.tree_util.keystr(path) for path, _ in leaves)


def found(optimizer: optax.GradientTransformation, **how: Any) -> set[str]:
    """Names of the optimizer's arrays."""
    module, names = lower(optimizer, **how)
    return {names[number] for number in find_optimizer_state(build_dataflow(module))}


def moments(*prefixes: str) -> set[str]:
    return {f"[1]{prefix}['{name}']" for prefix in prefixes for name in ("first", "second")}


@pytest.mark.parametrize("says_loss", [True, False])
def test_moments_are_found_and_neither_parameters_nor_small_arrays(says_loss: bool) -> None:
    adam = optax.adam(1e-3)
    assert found(adam, says_loss=says_loss) == moments("[0].mu", "[0].nu")
    assert found(optax.sgd(1e-3), says_loss=says_loss) == set()
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    assert found(clipped, says_loss=says_loss) == moments("[1][0].mu", "[1][0].nu")


def test_state_that_is_not_donated_stays_beside_the_new_one() -> None:
    assert found(optax.adam(1e-3), donate_argnums=(0,)) == set()


def test_an_optimizer_with_products_of_its_own_is_read_by_the_update_alone() -> None:
    """Shampoo's and Muon's: a product of momenta, whose result no loss depends on."""

    def orthogonalize(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        momentum = jax.tree.map(lambda old, new: 0.9 * old + new, state, updates)
        turned = jax.tree.map(lambda m: m @ m.T @ m if m.ndim == 2 else m, momentum)
        return jax.tree.map(lambda u: -1e-3 * u, turned), momentum

    muon = optax.GradientTransformation(lambda params: jax.tree.map(jnp.zeros_like, params), orthogonalize)
    assert found(muon) == moments("")
    assert found(muon, says_loss=False) == set()  # nothing tells a product of the update from one of the model


def test_averages_of_parameters_and_master_copies_are_read_by_the_update_alone() -> None:
    def step(params: Any, average: Any, batch: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, batch)
        params = jax.tree.map(lambda p, g: p - 1e-3 * g, params, gradients)
        return params, jax.tree.map(lambda a, p: 0.99 * a + 0.01 * p, average, params), loss

    def mixed(low: Any, master: Any, batch: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(low, batch.astype(jnp.bfloat16))
        master = jax.tree.map(lambda m, g: m - 1e-3 * g.astype(jnp.float32), master, gradients)
        return jax.tree.map(lambda m: m.astype(jnp.bfloat16), master), master, loss

    low = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16), PARAMETERS)
    for function, first in ((step, PARAMETERS), (mixed, low)):
        text = sw.lower(function, first, PARAMETERS, BATCH, donate_argnums=(0, 1)).hlo_text
        assert sorted(find_optimizer_state(build_dataflow(inline_calls(parse(text))))) == [4, 5]  # bias, first, second


def test_the_rewritten_program_reads_copies_and_returns_copies_in_the_same_buffers() -> None:
    module, _ = lower(optax.adam(1e-3))
    state = find_optimizer_state(build_dataflow(module))
    placed = parse(keep_on_host(module, state).to_text())
    assert flat_aliases(placed) == flat_aliases(module)
    readers = {number: [] for number in state}  # type: dict[int, list[Any]]
    for instruction in placed.entry:
        for operand in instruction.operands:
            if operand.opcode == "parameter" and operand.index in state:
                readers[operand.index].append(instruction)
    for number, output in state.items():
        (copy,) = readers[number]
        assert copy.get("custom_call_target") == PLACEMENT_TARGET
        assert copy.get("frontend_attributes") == {"_xla_buffer_placement": "device"}
        result = placed.entry.root.operands[output]
        assert result.get("frontend_attributes") == {"_xla_buffer_placement": "pinned_host"}
        assert result.operands[0].opcode != "parameter"
    assert keep_on_host(module, {}) is module
