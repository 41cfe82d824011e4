"""Arguments that XLA copies because a result is written over them, and the memory that is free meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from shardwright.cost import hardware_profile
from shardwright.cost.peak.buffer_assignment import assign_buffers
from tests.cost.one_device import program_of

SIZE = 256


def array(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def read_beside(weight: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Nothing says that the second product has read the weight when it is updated."""
    return weight - 0.1 * (x @ x), x @ weight


def read_before(weight: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    product = x @ weight
    return weight - 0.1 * (product @ x), product


def read_by_the_writer_elsewhere(weight: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return jnp.sin(weight[::-1]) + x, x @ x


def handed_on(weight: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    return weight, x @ weight


@pytest.mark.parametrize("step", [read_beside, read_before, read_by_the_writer_elsewhere, handed_on])
def test_arguments_are_copied_where_xla_copies_them(step: Callable[..., Any]) -> None:
    lowered = jax.jit(step, donate_argnums=(0,), keep_unused=True).lower(array(SIZE, SIZE), array(SIZE, SIZE))
    program = program_of(lowered.as_text("hlo"))
    weight, _ = program.parameters
    updated, _ = program.operands[program.root]
    buffers = assign_buffers(program, hardware_profile("cpu"), donated={weight: updated})
    copies = [owner for owner in buffers.owners if owner == (weight, 0)]
    text = lowered.compile().as_text()
    assert len(copies) - 1 == text[text.index("ENTRY") :].count(" copy(")  # one is the parameter


def test_an_argument_is_free_from_its_copy_to_its_update() -> None:
    lowered = jax.jit(read_beside, donate_argnums=(0,), keep_unused=True).lower(array(SIZE, SIZE), array(SIZE, SIZE))
    program = program_of(lowered.as_text("hlo"))
    weight, _ = program.parameters
    updated, product = program.operands[program.root]
    profile = hardware_profile("cpu")
    buffers = assign_buffers(program, profile, donated={weight: updated})
    position = {node: i for i, step in enumerate(buffers.order) for node in step}
    assert buffers.free == [(4 * SIZE * SIZE, 1, position[updated] - 1)]
    copy = max(number for number, owner in enumerate(buffers.owners) if owner == (weight, 0))
    assert (buffers.starts[copy], buffers.ends[copy]) == (0, max(position[updated], position[product]))
    assert not assign_buffers(program, profile).free
