"""What XLA:GPU stores of a program: figures are of programs that it compiled for eight A100 without one."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import optax
import pytest

import shardwright as sw
from shardwright.clusters.cluster import Cluster
from shardwright.cost import hardware_profile
from shardwright.cost.peak.buffer_assignment import assign_buffers
from tests.cost.one_device import program_of

CLUSTER = Cluster.from_json(
    json.dumps({
        "name": "a100", "platform": "cuda", "hardware": "a100", "insecure": True, "workers": [],
        "master": {"ip": "10.0.0.1", "port": 2222, "gpu_ids": list(range(8))},
    })
)  # fmt: skip

WIDTH, LAYERS, BATCH = 2048, 8, 256


def perceptron() -> str:
    """A step of AdamW, of which the gradients are most."""

    def loss(params: list[dict[str, jax.Array]], x: jax.Array, y: jax.Array) -> jax.Array:
        for layer in params:
            x = jax.nn.gelu(x @ layer["w"] + layer["b"])
        return jnp.mean(jnp.square(x - y))

    optimizer = optax.adamw(1e-3)

    def step(params, state, x, y):  # type: ignore[no-untyped-def]
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    array = jax.ShapeDtypeStruct
    params = [{"w": array((WIDTH, WIDTH), "f4"), "b": array((WIDTH,), "f4")} for _ in range(LAYERS)]
    state, x = jax.eval_shape(optimizer.init, params), array((BATCH, WIDTH), "f4")
    lowered = jax.jit(step, donate_argnums=(0, 1), keep_unused=True).lower(params, state, x, x)
    return str(lowered.as_text("hlo", debug_info=True))


def test_gradients_wait_for_the_reduce_scatter_that_takes_them_all() -> None:
    """XLA:GPU assigns 151.1 MB of temporaries: all gradients, and an eighth of them."""
    plan = sw.plan(perceptron(), CLUSTER, force="zero1", mesh="8")
    assert plan.memory.temporaries_bytes == pytest.approx(151.1e6, rel=0.03)


def lookups() -> str:
    """A step of Adagrad on four tables of equal shape."""

    def loss(tables: list[jax.Array], ids: jax.Array, y: jax.Array) -> jax.Array:
        rows = [jnp.tanh(table[ids[:, number]]) for number, table in enumerate(tables)]
        return jnp.mean(jnp.square(sum(rows) - y))

    optimizer = optax.adagrad(1e-2)

    def step(tables, state, ids, y):  # type: ignore[no-untyped-def]
        value, gradients = jax.value_and_grad(loss)(tables, ids, y)
        updates, state = optimizer.update(gradients, state, tables)
        return optax.apply_updates(tables, updates), state, value

    array = jax.ShapeDtypeStruct
    tables = [array((200_000, 64), "f4") for _ in range(4)]
    state, rows = jax.eval_shape(optimizer.init, tables), (array((4096, 4), "i4"), array((4096, 64), "f4"))
    lowered = jax.jit(step, donate_argnums=(0, 1), keep_unused=True).lower(tables, state, *rows)
    return str(lowered.as_text("hlo", debug_info=True))


def test_gradients_of_equal_tables_begin_as_zeros_at_once() -> None:
    """XLA:GPU assigns 32.2 MB of temporaries: the gradients of all four tables, filled by one kernel."""
    plan = sw.plan(lookups(), CLUSTER, mesh="8")
    assert plan.memory.temporaries_bytes == pytest.approx(32.2e6, rel=0.03)


CONVOLVED = """HloModule convolved
ENTRY main {{
  x = f32[8,16,16,32]{{3,2,1,0}} parameter(0)
  k = f32[3,3,32,32]{{3,2,1,0}} parameter(1)
  y = {shape} convolution(x, k), window={{size=3x3 pad=1_1x1_1}}, dim_labels={labels}
  back = f32[3,3,32,32]{{3,2,1,0}} reverse(k), dimensions={{0,1}}
  ROOT z = {shape} convolution(y, back), window={{size=3x3 pad=1_1x1_1}}, dim_labels={backward}
}}
"""


def test_convolutions_read_one_copy_of_an_argument_in_both_passes() -> None:
    shape = "f32[8,16,16,32]{3,2,1,0}"
    text = CONVOLVED.format(shape=shape, labels="b01f_01io->b01f", backward="b01f_01oi->b01f")
    program = program_of(text, "a100")
    (first, second) = (node for node, opcode in enumerate(program.opcodes) if opcode == "convolution")
    kernels = {program.operands[node][1] for node in (first, second)}
    assert [program.opcodes[node] for node in kernels] == ["transpose"]
    assert program.opcodes[program.operands[first][0]] == "transpose"
    assert program.operands[second][0] == first  # what a program makes lies as its kernels take it
    assert "reverse" not in program.opcodes


TURNED = """HloModule turned
ENTRY main {{
  w = f32[{shape}] parameter(0)
  x = f32[{made}] parameter(1)
  y = f32[{made}] {opcode}
  t = f32[{shape}] transpose(y), dimensions={{{order}}}
  new = f32[{shape}] add(w, t)
  ROOT out = (f32[{shape}]) tuple(new)
}}
"""


@pytest.mark.parametrize(
    ("shape", "update", "opcode", "order", "is_apart"),
    [
        ("2,8,64", "2,64,8", "sort(x), dimensions={2}, to_apply=less", "0,2,1", True),
        ("64,8", "8,64", "sort(x), dimensions={1}, to_apply=less", "1,0", False),
    ],
)
def test_an_update_that_is_made_of_a_turned_gradient_lies_elsewhere_first(
    shape: str, update: str, opcode: str, order: str, is_apart: bool
) -> None:
    less = (
        "less {\n  l = f32[] parameter(0)\n  r = f32[] parameter(1)\n  ROOT s = pred[] compare(l, r), direction=LT\n}\n"
    )
    text = TURNED.format(shape=shape, made=update, opcode=opcode, order=order)
    program = program_of(text.replace("ENTRY", f"{less}ENTRY"), "a100")
    node = {instruction.name: i for i, instruction in enumerate(program.instructions)}
    buffers = assign_buffers(program, hardware_profile("a100"), donated={node["w"]: node["new"]})
    sizes = [size for owner, size in zip(buffers.owners, buffers.size_bytes, strict=True) if owner == (node["new"], 0)]
    assert sizes == ([0, 4 * 2 * 8 * 64] if is_apart else [0])


def test_products_read_a_transposed_matrix_as_it_was_before() -> None:
    text = """HloModule folded
ENTRY main {
  x = f32[64,32]{1,0} parameter(0)
  y = f32[64,32]{1,0} sine(x)
  t = f32[32,64]{1,0} transpose(y), dimensions={1,0}
  ROOT z = f32[64,64]{1,0} dot(x, t), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    assert "transpose" not in program_of(text, "a100").opcodes
    assert "transpose" in program_of(text, "tpu-v5e").opcodes
