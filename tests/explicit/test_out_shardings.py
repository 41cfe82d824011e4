"""`plan.out_shardings()`: what JAX's Explicit mode asks for, and pasted, a program with the plan's collectives."""

from __future__ import annotations

import sys
from collections import Counter
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import shardwright as sw
from examples.llama import model as llama
from examples.mlp import train as mlp
from shardwright.explicit.answer import OutShardings
from shardwright.xla import CompileService
from shardwright.xla.inspect import find_collectives

pytestmark = pytest.mark.dear

P = PartitionSpec
BLOCK = "params['blocks'][*]"
TENSOR_PARALLEL = {
    "tokens": {0: "data"},
    **{f"{BLOCK}['{name}']": {1: "model"} for name in ("q", "k", "v", "gate", "up")},
    **{f"{BLOCK}['{name}']": {0: "model"} for name in ("o", "down")},
}


def is_spec(leaf: Any) -> bool:
    return isinstance(leaf, PartitionSpec)


def pasted(said: OutShardings, module: ModuleType) -> ModuleType:
    """The module with all of it written in."""
    assert module.__file__ is not None
    text = said.written_into(module.__file__)
    copy = ModuleType("pasted")
    copy.__dict__["P"] = PartitionSpec
    sys.modules["pasted"] = copy  # dataclasses look there
    exec(compile(text, "pasted", "exec"), copy.__dict__)
    return copy


def count(collectives: Any) -> Counter[tuple[str, int, int]]:
    return Counter((each.kind, each.payload_bytes, each.count) for each in collectives)


def collectives_of_jit(step: Any, arguments: Any, said: OutShardings) -> Counter[tuple[str, int, int]]:
    mesh = jax.make_mesh(said.mesh_sizes, said.mesh_names, axis_types=(AxisType.Explicit,) * len(said.mesh_names))
    shardings = [
        jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=is_spec)
        for specs in (said.arguments, said.results)
    ]
    typed = jax.tree.map(lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), arguments, shardings[0])
    with jax.set_mesh(mesh):
        lowered = jax.jit(step, out_shardings=shardings[1], donate_argnums=(0, 1)).lower(*typed)
    program = lowered.compile({"xla_disable_hlo_passes": "cpu-all-reduce-combiner"})
    return count(find_collectives(program.as_text(), 8))


def collectives_of_plan(plan: sw.Plan) -> Counter[tuple[str, int, int]]:
    with CompileService(8) as service:
        program = service.compile(plan.require_hlo(), plan, want_executable=False, inspect="partition-pass")
    return count(program.collectives)


def plan(step: Any, arguments: Any, **options: Any) -> sw.Plan:
    text = sw.lower(step, *arguments, donate_argnums=(0, 1)).hlo_text
    planned = sw.plan(text, 8, cache=False, **options)
    assert isinstance(planned, sw.Plan)
    return planned


def test_llama_in_tensor_parallel_is_told_at_three_lines() -> None:
    sizes = {"layers": 2, "context": 32, "width": 32, "hidden": 64, "vocabulary": 63, "remat": "none"}
    init, step, _ = llama.make_steps(llama.Config(**sizes), optax.sgd(0.01))
    tokens = jax.ShapeDtypeStruct((16, 33), "int32")
    arguments = (*jax.eval_shape(init, jax.random.key(0)), tokens)
    options = {"force": TENSOR_PARALLEL, "rest": "replicated", "mode": "propagate", "rewrites": "none"}
    planned = plan(step, arguments, mesh={"data": 4, "model": 2}, **options)
    said = planned.out_shardings(arguments=arguments, results=jax.eval_shape(step, *arguments))

    assert [(each.call, each.form, each.spec) for each in said.entries] == [
        ("einsum", "out_sharding", P("data", None, None)),  # heads are summed
        ("matmul", "out_sharding", P("data", None, None)),  # and hidden features
        ("at[].get", "out_sharding", P("data", None, None)),  # the table is whole
    ]
    assert "jax.make_mesh((4, 2), ('data', 'model'))" in str(said)
    copy = pasted(said, llama)
    _, step, _ = copy.make_steps(copy.Config(**sizes), optax.sgd(0.01))
    assert collectives_of_jit(step, arguments, said) == collectives_of_plan(planned)


def test_weights_of_fsdp_are_resharded_where_they_are_read() -> None:
    params, state = jax.eval_shape(mlp.init, jax.random.key(0))
    arguments = params, state, jax.ShapeDtypeStruct((4096, 2), "float32"), jax.ShapeDtypeStruct((4096,), "int32")
    planned = plan(mlp.train_step, arguments, mesh={"data": 8}, force="fsdp")
    said = planned.out_shardings(arguments=arguments, results=jax.eval_shape(mlp.train_step, *arguments))

    assert {(each.call, each.form, each.operand) for each in said.entries} == {
        ("matmul", "reshard", 'layer["weight"]'),
        ("add", "reshard", 'layer["bias"]'),
        ("matmul", "reshard", 'params[-1]["weight"]'),
    }
    step = pasted(said, mlp).train_step
    assert collectives_of_jit(step, arguments, said) == collectives_of_plan(planned)


# ---- steps that Explicit mode refuses, one line of which is the answer ----------------------------


def two_products(w: Any, x: Any) -> Any:
    return (jax.nn.relu(x @ w["a"]) @ w["b"]).sum()


def lookup(w: Any, ids: Any) -> Any:
    return jnp.tanh(w["table"][ids]).sum()


def carried(w: Any, x: Any) -> Any:
    def cell(state: Any, x: Any) -> Any:
        return jnp.tanh(x + state @ w), None

    return jax.lax.scan(cell, jnp.zeros(x.shape[1:]), x)[0].sum()


def in_several_layers(w: Any, x: Any) -> Any:
    for layer in w:
        x = x @ layer
    return x.sum()


WEIGHTS = {"a": (P(None, "model"), (16, 64)), "b": (P("model", None), (64, 16))}


@pytest.mark.parametrize(
    ("step", "types", "calls"),
    [
        (two_products, (WEIGHTS, (P("data"), (32, 16))), {("matmul", P("data", None))}),
        (lookup, ({"table": (P(), (64, 32))}, (P("data"), (16,))), {("at[].get", P("data", None))}),
        (carried, ((P(), (16, 16)), (P(None, "data"), (4, 32, 16))), {("zeros", P("data", None))}),
        (
            in_several_layers,
            ([WEIGHTS["a"], WEIGHTS["b"]], (P("data"), (32, 16))),
            {("matmul", P("data", None))},
        ),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_the_line_that_explicit_mode_refuses_is_among_the_answers(step: Any, types: Any, calls: Any) -> None:
    def is_type(leaf: Any) -> bool:
        return isinstance(leaf, tuple) and isinstance(leaf[0], PartitionSpec)

    def lowered(kind: AxisType) -> str:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
        dtypes = "int32" if step is lookup else "float32"
        arguments = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(
                leaf[1], dtypes if len(leaf[1]) == 1 else "float32", sharding=NamedSharding(mesh, leaf[0])
            ),
            types,
            is_leaf=is_type,
        )
        with jax.set_mesh(mesh):
            return jax.jit(step).lower(*arguments).as_text("hlo", debug_info=True)

    with pytest.raises(Exception, match=r"out_sharding|must have equal types"):
        lowered(AxisType.Explicit)
    planned = sw.plan(lowered(AxisType.Auto), 8, cache=False, mode="propagate")
    said = planned.out_shardings()
    assert calls <= {(each.call, each.spec) for each in said.entries}
    assert {each.file for each in said.entries} == {__file__}


def test_a_line_that_lies_otherwise_each_time_says_so() -> None:
    arguments = [np.zeros((16, 64), "float32"), np.zeros((64, 16), "float32")] * 2, np.zeros((32, 16), "float32")
    text = sw.lower(in_several_layers, *arguments).hlo_text
    pins = {f"w[{n}]": {1 - n % 2: "model"} for n in range(4)}
    options = {"mesh": {"data": 4, "model": 2}, "mode": "propagate", "rest": "replicated"}
    said = sw.plan(text, 8, cache=False, force={**pins, "x": {0: "data"}}, **options).out_shardings()
    notes = {(each.call, each.spec): each.note for each in said.entries}
    assert "2 of the 4 values of this line lie so, others" in notes["matmul", P("data", None)]
