"""Runs modules on one CPU, attention calls written out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardwright.attention import AttentionCall, read_call
from shardwright.hlo import Computation, Module, parse
from shardwright.planner.rewrites import edit
from shardwright.xla import private


def write_out(module: Module) -> Module:
    """`module` with a function in the place of each attention call."""
    functions: list[Computation] = []
    entries: dict[AttentionCall, Computation] = {}
    for instruction in list(module.instructions()):
        call = read_call(instruction)
        if call is not None:
            if call not in entries:
                function = _function(call, len(functions))
                functions += function.computations
                entries[call] = function.entry
            instruction.opcode = "call"
            instruction.called = {"to_apply": (entries[call],)}
            instruction.attributes = edit.callee_attributes(instruction.called)
    return edit.module_of(module, [*functions, *module.computations])


def run(module: Module, arguments: Sequence[Any]) -> list[np.ndarray[Any, Any]]:
    """The module's results on one CPU."""
    devices = jax.local_devices(backend="cpu")[:1]
    options = jax._src.compiler.get_compile_options(1, 1)
    executable = private.compile_and_load(private.stablehlo_of(module.to_text()), devices, options)
    results = executable.execute_sharded([jax.device_put(each, devices[0]) for each in arguments])
    return [np.asarray(each[0]) for each in results.disassemble_into_single_device_arrays()]


def _function(call: AttentionCall, number: int) -> Module:
    operands = [jax.ShapeDtypeStruct(shape.dimensions, _DTYPES[shape.element_type]) for shape in call.operand_shapes]
    lowered = jax.jit(_backward(call) if call.backward else _forward(call), keep_unused=True).lower(*operands)
    module = parse(lowered.compiler_ir("hlo").as_hlo_text())
    module.entry.is_entry = False
    for computation in module.computations:
        computation.name = f"attention{number}.{computation.name}"
        for instruction in computation:
            instruction.name = f"attention{number}.{instruction.name}"
    for instruction in module.instructions():
        instruction.attributes = {
            name: each for name, each in instruction.attributes.items() if name != "metadata"
        } | edit.callee_attributes(instruction.called)
    return module


_DTYPES = {"bf16": jnp.bfloat16, "f16": jnp.float16, "f32": jnp.float32, "s32": jnp.int32}


def _heads_first(call: AttentionCall, value: Any, times: int = 1) -> Any:
    value = value.astype(jnp.float32)
    value = value.transpose(0, 2, 1, 3) if call.rows_first else value
    return jnp.repeat(value, times, 1)


def _logits(call: AttentionCall, operands: dict[str, Any]) -> Any:
    group = call.heads // call.kv_heads
    q, k = _heads_first(call, operands["q"]), _heads_first(call, operands["k"], group)
    scores = call.scale * jnp.einsum("bntd,bnsd->bnts", q, k, precision="highest")
    if call.bias:
        scores += operands["bias"].astype(jnp.float32)
    if call.is_causal:
        distance = jnp.arange(call.rows)[:, None] - jnp.arange(call.keys)[None, :]
        seen = (distance >= 0) & ((distance < call.window) if call.window else True)
        scores = jnp.where(seen, scores, -jnp.inf)
    return scores


def _forward(call: AttentionCall) -> Callable[..., Any]:
    def forward(*values: Any) -> Any:
        operands = dict(zip(call.operands, values, strict=True))
        scores = _logits(call, operands)
        v = _heads_first(call, operands["v"], call.heads // call.kv_heads)
        out = jnp.einsum("bnts,bnse->bnte", jax.nn.softmax(scores, -1), v, precision="highest")
        results = {
            "out": out,
            "statistics": jax.nn.logsumexp(scores, -1),
            "workspace": jnp.zeros(0, jnp.uint8),
        }
        return _results(call, results)

    return forward


def _backward(call: AttentionCall) -> Callable[..., Any]:
    def backward(*values: Any) -> Any:
        operands = dict(zip(call.operands, values, strict=True))
        group = call.heads // call.kv_heads
        p = jnp.exp(_logits(call, operands) - operands["statistics"][..., None])
        q, out, dout = (_heads_first(call, operands[role]) for role in ("q", "out", "dout"))
        k, v = (_heads_first(call, operands[role], group) for role in ("k", "v"))
        exact = {"precision": "highest"}
        dp = jnp.einsum("bnte,bnse->bnts", dout, v, **exact)
        ds = p * (dp - (out * dout).sum(-1, keepdims=True))
        shared = lambda each: each.reshape(call.batch, call.kv_heads, group, *each.shape[2:]).sum(2)  # noqa: E731
        results = {
            "dq": call.scale * jnp.einsum("bnts,bnsd->bntd", ds, k, **exact),
            "dk": shared(call.scale * jnp.einsum("bnts,bntd->bnsd", ds, q, **exact)),
            "dv": shared(jnp.einsum("bnts,bnte->bnse", p, dout, **exact)),
            "dbias": ds.sum(0, keepdims=True) if call.bias and call.bias[0] == 1 else ds,
            "workspace": jnp.zeros(0, jnp.uint8),
        }
        return _results(call, results)

    return backward


def _results(call: AttentionCall, values: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(
        values[role].astype(_DTYPES.get(shape.element_type, jnp.uint8))
        for role, shape in zip(call.results, call.result_shape.leaves, strict=True)
    )
