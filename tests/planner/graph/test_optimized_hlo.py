"""Text dumped after optimization is planned as the instructions that it stands for, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import shardwright as sw
from shardwright.errors import UnsupportedProgramError
from shardwright.hlo import Module, parse
from shardwright.planner.graph.inlining import inline_calls
from shardwright.planner.graph.optimized_hlo import undo_optimization
from shardwright.plans.plan import Plan
from tests.planner.running import xla_outputs

_COMPUTATIONS = """add { a = f32[] parameter(0) b = f32[] parameter(1) ROOT s = f32[] add(a, b) }
more { pa = f32[] parameter(0) pb = f32[] parameter(1) ROOT pc = pred[] compare(pa, pb), direction=GT }
negated { pn = f32[16,8]{1,0} parameter(0) ROOT n = f32[16,8]{1,0} negate(pn) }
turned { pt = f32[16,8]{1,0} parameter(0) ROOT t = f32[8,16]{0,1} bitcast(pt) }
inner { pi = f32[16,8]{1,0} parameter(0) ROOT e = f32[16,8]{1,0} exponential(pi) }
nested {
  pq = f32[16,8]{1,0} parameter(0)
  f = f32[16,8]{1,0} fusion(pq), kind=kLoop, calls=inner
  ROOT m = f32[16,8]{1,0} multiply(f, pq)
}
both {
  pm = f32[16,8]{1,0} parameter(0)
  c = f32[16,8]{1,0} cosine(pm)
  z = f32[] constant(0)
  r = f32[16]{0} reduce(pm, z), dimensions={1}, to_apply=add
  ROOT o = (f32[16,8]{1,0}, f32[16]{0}) tuple(c, r)
}
"""


def _text(body: str, header: str = ", is_scheduled=true") -> str:
    return f"HloModule m{header}\n{_COMPUTATIONS}ENTRY main {{\n  x = f32[16,8]{{1,0}} parameter(0)\n{body}\n}}\n"


_Expected = Callable[[np.ndarray], Any]

#: Of what a compiler writes: the text, and what it computes.
_WRITTEN: dict[str, tuple[str, _Expected]] = {
    "loop fusion": ("ROOT r = f32[16,8] fusion(x), kind=kLoop, calls=negated", lambda x: -x),
    "custom fusion": (
        'ROOT r = f32[16,8] fusion(x), kind=kCustom, calls=negated, backend_config={"kind":"__ynn_fusion"}',
        lambda x: -x,
    ),
    "fusion in a fusion": ("ROOT r = f32[16,8] fusion(x), kind=kOutput, calls=nested", lambda x: np.exp(x) * x),
    "two results": (
        """y = (f32[16,8], f32[16]) fusion(x), kind=kInput, calls=both
        u = f32[16,8] get-tuple-element(y), index=0
        v = f32[16] get-tuple-element(y), index=1
        w = f32[16,8] broadcast(v), dimensions={0}
        ROOT r = f32[16,8] add(u, w)""",
        lambda x: np.cos(x) + x.sum(1, keepdims=True),
    ),
    "call with a backend's notes": (
        """y = f32[16,8] call(x), to_apply=negated, frontend_attributes={xla_cpu_small_call="true"}
        ROOT r = f32[16,8] call(y), to_apply=inner, backend_config={"outer_dimension_partitions":["2"]}""",
        lambda x: np.exp(-x),
    ),
    "copy": (
        """s = (f32[16,8]{1,0:S(1)}, f32[16,8]{1,0}, u32[]) copy-start(x), cross_program_prefetch_index=0
        d = f32[16,8]{1,0:S(1)} copy-done(s)
        ROOT r = f32[16,8] negate(d)""",
        lambda x: -x,
    ),
    "async call": (
        """s = ((f32[16,8]), f32[16,8], s32[]) async-start(x), async_execution_thread="other", calls=negated
        u = ((f32[16,8]), f32[16,8], s32[]) async-update(s)
        ROOT d = f32[16,8] async-done(u)""",
        lambda x: -x,
    ),
    "async fusion": (
        """s = ((f32[16,8]), f32[16,8], s32[]) fusion-start(x), kind=kLoop, calls=nested
        ROOT d = f32[16,8] fusion-done(s)""",
        lambda x: np.exp(x) * x,
    ),
    "async slice": (
        """s = ((f32[16,8]), f32[8,8], s32[]) slice-start(x), slice={[8:16], [0:8]}
        ROOT d = f32[8,8] slice-done(s)""",
        lambda x: x[8:],
    ),
    "bitcast to another layout": ("ROOT r = f32[8,16]{0,1} bitcast(x)", lambda x: x.T),
    "bitcast in a fusion": (
        """y = f32[8,16]{0,1} fusion(x), kind=kLoop, calls=turned
        ROOT r = f32[8,16]{1,0} copy(y)""",
        lambda x: x.T,
    ),
    "bitcast to another shape": ("ROOT r = f32[4,4,8]{2,1,0} bitcast(x)", lambda x: x.reshape(4, 4, 8)),
    "order": (
        """y = f32[16,8] fusion(x), kind=kLoop, calls=negated
        ROOT r = f32[16,8] copy(x), control-predecessors={y}""",
        lambda x: x,
    ),
    "top-k": (
        """t = (f32[16,3], s32[16,3]) custom-call(x), custom_call_target="TopK", called_computations={more}
        ROOT r = f32[16,3] get-tuple-element(t), index=0""",
        lambda x: -np.sort(-x, axis=1)[:, :3],
    ),
    "collective of one device": (
        "ROOT r = f32[16,8] all-reduce(x), replica_groups={{0}}, to_apply=add",
        lambda x: x,
    ),
}


@pytest.mark.parametrize("kind", _WRITTEN)
def test_what_compilers_write_is_planned_as_what_it_computes(kind: str) -> None:
    body, expected = _WRITTEN[kind]
    planned = sw.plan(_text(body), 8, cache=False, mesh={"data": 8}, rewrites="none")
    assert isinstance(planned, Plan)
    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    (result,) = xla_outputs(planned, x)
    np.testing.assert_allclose(result, expected(x), rtol=2e-6, atol=2e-6)
    assert any("dumped after optimization" in note for note in planned.notes)
    assert not any("has no rule" in note or "opaque" in note for note in planned.notes)


def _opcodes(module: Module) -> set[str]:
    return {instruction.opcode for instruction in module.instructions()}


@pytest.mark.parametrize("kind", _WRITTEN)
def test_nothing_of_a_compiler_is_left(kind: str) -> None:
    left = _opcodes(inline_calls(undo_optimization(parse(_text(_WRITTEN[kind][0])))))
    assert not [opcode for opcode in left if opcode.endswith(("-start", "-update", "-done"))]
    assert left.isdisjoint({"fusion", "call", "bitcast", "custom-call", "all-reduce"})


def test_a_program_from_before_optimization_stays_as_it_is() -> None:
    module = parse(_text("ROOT r = f32[16,8] call(x), to_apply=negated", header=""))
    module.computations = [each for each in module.computations if each.name in ("negated", "main")]
    assert undo_optimization(module) is module


_REFUSED = {
    "gemm": (
        """y = (f32[16,8], s8[64]) custom-call(x, x), custom_call_target="__cublas$gemm"
        ROOT r = f32[16,8] get-tuple-element(y), index=0""",
        r"'y' \(custom-call\): '__cublas\$gemm' stands for ordinary instructions",
    ),
    "convolution": (
        """y = (f32[16,8], u8[0]) custom-call(x, x), custom_call_target="__cudnn$convForward"
        ROOT r = f32[16,8] get-tuple-element(y), index=0""",
        "convForward",
    ),
    "onednn": ('ROOT r = f32[16,8] custom-call(x, x), custom_call_target="__onednn$matmul"', "onednn"),
    "sort": ('ROOT r = f32[16,8] custom-call(x), custom_call_target="__cub$DeviceRadixSort"', "cub"),
    "tiles": ("ROOT r = f32[128]{0:T(128)} bitcast(y)", "which element becomes which"),
    "width": ("ROOT r = bf16[16,16]{1,0} bitcast(x)", "which element becomes which"),
    "top-k of other sizes": (
        """t = (f32[163], s32[16,3]) custom-call(x), custom_call_target="TopK", called_computations={more}
        ROOT r = s32[16,3] get-tuple-element(t), index=1""",
        "does not search the last dimension",
    ),
    "wrapped for other operands": (
        "s = ((f32[16,8]), f32[16], s32[]) async-start(x), calls=negated\nROOT d = f32[16] async-done(s)",
        "'negated' takes or gives other shapes",
    ),
    "not done": ("ROOT s = (f32[16,8], f32[16,8], u32[]) copy-start(x)", "never done"),
    "read before it is done": (
        "s = (f32[16,8], f32[16,8], u32[]) copy-start(x)\nROOT part = f32[16,8] get-tuple-element(s), index=0",
        "'part' reads what is not done",
    ),
}


@pytest.mark.parametrize("kind", _REFUSED)
def test_what_the_text_no_longer_says_is_refused_by_name(kind: str) -> None:
    body, said = _REFUSED[kind]
    if kind == "tiles":
        body = f"y = f32[16,8]{{1,0:T(8,128)}} copy(x)\n{body}"
    with pytest.raises(UnsupportedProgramError, match=said) as caught:
        sw.plan(_text(body), 8, cache=False)
    assert caught.value.message.startswith("the text was dumped after optimization")
    assert caught.value.where.startswith("line ")
    assert "before_optimizations" in caught.value.remedy


@pytest.mark.parametrize("target", ["__cudnn$fmhaSoftmax", "__gpu$xla.gpu.triton", "tpu_custom_call", "my_ffi"])
def test_what_users_call_stays_opaque(target: str) -> None:
    body = f'ROOT r = f32[16,8] custom-call(x), custom_call_target="{target}"'
    planned = sw.plan(_text(body, header=""), 8, cache=False)
    assert any(target in note and "opaque" in note for note in planned.notes)


# ---- what XLA makes of whole functions ------------------------------------------------------


def _mlp(w: Any, v: Any, x: Any) -> Any:
    loss, (dw, dv) = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(x @ p[0]) @ p[1]) ** 2))((w, v))
    return w - 0.1 * dw, v - 0.1 * dv, loss


def _convolution(kernel: Any, x: Any) -> Any:
    def loss(kernel: Any) -> Any:
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.sum(jax.nn.relu(y) ** 2)

    return kernel - 0.01 * jax.grad(loss)(kernel)


def _scan(ws: Any, x: Any) -> Any:
    return jax.grad(lambda ws: jnp.sum(lax.scan(lambda y, w: (jnp.tanh(y @ w), None), x, ws)[0] ** 2))(ws)


def _branches(x: Any, y: Any) -> Any:
    return lax.cond(x[0, 0] > 0, lambda z: jnp.sin(z) @ z.T, lambda z: jnp.cos(z) @ z.T, y)


def _sorts(x: Any) -> Any:
    return jnp.sort(x, axis=1), jnp.argsort(x, axis=1), lax.top_k(x, 3)


def _random(x: Any) -> Any:
    return x * jax.random.normal(jax.random.key(0), x.shape)


def _lookup(table: Any, x: Any) -> Any:
    rows = jnp.clip(jnp.int32(8 + 4 * x[:, 0]), 0, 15)
    return table - 0.1 * jax.grad(lambda table: jnp.sum(jnp.take(table, rows, axis=0) ** 2))(table)


_FUNCTIONS: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "mlp": (_mlp, ((16, 32), (32, 8), (64, 16))),
    "convolution": (_convolution, ((3, 3, 4, 8), (8, 8, 8, 4))),
    "scan": (_scan, ((3, 16, 16), (32, 16))),
    "branches": (_branches, ((8, 8), (16, 16))),
    "sorts": (_sorts, ((16, 8),)),
    "random": (_random, ((16, 8),)),
    "lookup": (_lookup, ((16, 8), (32, 8))),
}


@pytest.mark.dear
@pytest.mark.parametrize("name", _FUNCTIONS)
def test_compiled_text_planned_and_run_gives_the_numbers_of_jit(name: str) -> None:
    function, shapes = _FUNCTIONS[name]
    random = np.random.default_rng(0)
    arguments = [0.3 * random.normal(size=shape).astype(np.float32) for shape in shapes]
    compiled = jax.jit(function).lower(*arguments).compile()
    planned = sw.plan(compiled.as_text(), 8, cache=False, mesh={"data": 2, "model": 4}, micro_batches=1)
    assert isinstance(planned, Plan)
    expected = jax.tree.leaves(compiled(*arguments))
    for value, wanted in zip(xla_outputs(planned, *arguments), expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-5, atol=1e-5)


def test_compiled_text_is_split_as_the_text_that_it_was_compiled_from() -> None:
    function, shapes = _FUNCTIONS["mlp"]
    lowered = jax.jit(function).lower(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes])
    texts = lowered.as_text("hlo"), lowered.compile().as_text()
    before, after = (sw.plan(text, 8, cache=False, mesh={"data": 8}, force="data") for text in texts)
    assert isinstance(before, Plan)
    assert isinstance(after, Plan)
    assert [each.sharding for each in after.parameters] == [each.sharding for each in before.parameters]
    assert after.cost.step_s < 1.2 * before.cost.step_s
