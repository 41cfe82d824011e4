"""Attention calls computed part by part equal one device's attention, written out densely by JAX."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

import shardwright as sw
from shardwright.attention import AttentionCall
from shardwright.clusters.cluster import Cluster
from shardwright.errors import PlanError, PlatformError
from shardwright.plans.attention_note import AttentionNote
from shardwright.plans.plan import Plan
from shardwright.plans.shardings import Mesh, TensorSharding
from shardwright.user_plans import to_user_plan
from shardwright.xla import CompiledProgram, CompileService, emit_stablehlo
from shardwright.xla.attention_parts import split_attention
from shardwright.xla.compilers import find_compiler
from tests.xla.hand import entry, kinds, plan, run_emitted

FORWARD = AttentionCall(
    backward=False, batch=4, heads=8, kv_heads=4, rows=16, keys=12, width=8, value_width=8, element_type="f32",
    rows_first=True, scale=0.3,
)  # fmt: skip


MESH = {"x": 2, "y": 2, "z": 2}
DATA, HEADS, ROWS = ("x",), ("y", "z"), ("y", "z")


@dataclass(frozen=True, kw_only=True)
class Case:
    """split: axes by dimension (b, n, k, t) of the call."""

    call: AttentionCall
    split: Mapping[str, tuple[str, ...]]


def case(split: Mapping[str, tuple[str, ...]], **changes: Any) -> Case:
    return Case(call=replace(FORWARD, **changes), split=split)


CASES = {
    "whole": case({}, mask="causal"),
    "batch and heads": case({"b": DATA, "n": HEADS, "k": HEADS}, mask="causal", window=5),
    "few key heads": case({"b": DATA, "n": HEADS}, kv_heads=2, mask="causal", rows_first=False),
    "key heads over fewer axes": case({"n": ("x", "y", "z"), "k": ("x",)}, kv_heads=2, value_width=4),
    "uneven heads": case({"n": HEADS, "b": DATA}, heads=6, kv_heads=2),
    "uneven both": case({"n": HEADS, "k": HEADS, "b": DATA}, heads=6, kv_heads=6, batch=3),
    "uneven rows": case({"t": ("x", "y", "z")}, rows=13, mask="causal", window=6),
    "bias of all": case({"b": DATA, "n": HEADS, "k": HEADS}, bias=(1, 8, 16, 12)),
    "bias and rows": case({"b": DATA, "t": ROWS}, bias=(4, 1, 16, 12), mask="causal"),
    "lengths": case({"b": DATA, "t": ROWS}, mask="padding_causal"),
    "three axes": case({"b": ("x",), "n": ("y",), "k": ("y",), "t": ("z",)}, mask="causal"),
}


def layouts(call: AttentionCall, split: Mapping[str, tuple[str, ...]]) -> tuple[list[TensorSharding], ...]:
    """Of operands, and of results after sums."""

    def lay(role: str, dims: str, shape: Sequence[int]) -> TensorSharding:
        repeated = [role in ("bias", "dbias") and size == 1 for size in shape]
        return TensorSharding(
            tuple(() if one else split.get(letter, ()) for letter, one in zip(dims, repeated, strict=True))
        )

    operands = zip(call.operands, call.operand_dims, call.operand_shapes, strict=True)
    results = zip(call.results, call.result_dims, call.result_shape.leaves, strict=True)
    return [lay(r, d, s.dimensions) for r, d, s in operands], [lay(r, d, s.dimensions) for r, d, s in results]


def text_of(calls: Sequence[AttentionCall]) -> str:
    """A program with these calls, each of its own arguments; its outputs are all their results."""

    def shaped(shape: Any) -> str:
        return f"{shape.element_type}[{','.join(map(str, shape.dimensions))}]{{{shape.layout}}}"

    lines: list[str] = []
    arguments: list[str] = []
    results: list[str] = []
    outputs: list[str] = []
    for number, call in enumerate(calls):
        names = []
        for shape in call.operand_shapes:
            names.append(f"p{len(arguments)}")
            lines.append(f"{names[-1]} = {shaped(shape)} parameter({len(arguments)})")
            arguments.append(shaped(shape))
        kinds = [shaped(shape) for shape in call.result_shape.leaves]
        attributes = ", ".join(f"{name}={value}" for name, value in call.attribute_texts().items())
        lines.append(f"call{number} = ({', '.join(kinds)}) custom-call({', '.join(names)}), {attributes}")
        for place, kind in enumerate(kinds[:-1]):
            outputs.append(f"out{len(outputs)}")
            results.append(kind)
            lines.append(f"{outputs[-1]} = {kind} get-tuple-element(call{number}), index={place}")
    lines.append(f"ROOT tuple = ({', '.join(results)}) tuple({', '.join(outputs)})")
    layout = f"{{({', '.join(arguments)})->({', '.join(results)})}}"
    return f"HloModule m, entry_computation_layout={layout}\n\nENTRY main {{\n  " + "\n  ".join(lines) + "\n}\n"


def planned(cases: Sequence[Case]) -> Plan:
    """A plan of calls; their operands come as they are used."""
    entries, parameters, outputs = [], [], []
    for number, each in enumerate(cases):
        operands, results = layouts(each.call, each.split)
        entries.append(entry(f"call{number}", operands, results, opcode="custom-call"))
        parameters += operands
        outputs += results[:-1]
    text = text_of([each.call for each in cases])
    return plan(text, MESH, dict(enumerate(parameters)), dict(enumerate(outputs)), entries)


def both_of(each: Case) -> list[Case]:
    """Its forward call and its backward call."""
    backward = replace(each.call, backward=True, statistics=False, bias_gradient=bool(each.call.bias))
    return [each, replace(each, call=backward)]


def arrays_of(call: AttentionCall) -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    both = replace(call, backward=True, bias_gradient=bool(call.bias))
    arrays = {
        role: random.normal(size=shape.dimensions).astype(np.float32)
        for role, shape in zip(both.operands, both.operand_shapes, strict=True)
        if shape.element_type != "s32"
    }
    if call.has_lengths:
        arrays["q_lengths"] = np.array([16, 9, 1, 12], np.int32)[: call.batch]
        arrays["kv_lengths"] = np.array([12, 7, 3, 1], np.int32)[: call.batch]
    return arrays


def dense(call: AttentionCall, q: Any, k: Any, v: Any, bias: Any, lengths: Sequence[Any], keep: Any = None) -> Any:
    """One device's attention, all of it in float32: (out with rows as the operands', statistics)."""
    import jax
    import jax.numpy as jnp

    if call.rows_first:
        q, k, v = (jnp.swapaxes(each, 1, 2) for each in (q, k, v))
    k, v = (jnp.repeat(each, call.heads // call.kv_heads, axis=1) for each in (k, v))
    scores = call.scale * jnp.einsum("bntd,bnsd->bnts", q, k)
    if bias is not None:
        scores += bias
    ahead = jnp.arange(call.rows)[:, None] - jnp.arange(call.keys)
    visible = jnp.ones_like(scores, bool)
    if call.is_causal:
        visible &= (ahead >= 0) & ((ahead < call.window) if call.window else True)
    if lengths:
        visible &= jnp.arange(call.keys) < lengths[1][:, None, None, None]
    scores = jnp.where(visible, scores, -1e30)
    weights = jax.nn.softmax(scores)
    if lengths:
        weights *= jnp.arange(call.rows)[:, None] < lengths[0][:, None, None, None]
    weights = weights if keep is None else weights * keep / (1 - call.dropout_rate)
    return jnp.einsum("bnts,bnse->bnte", weights, v), jax.nn.logsumexp(scores, axis=-1)


def turned(call: AttentionCall, array: Any) -> Any:
    return array.swapaxes(1, 2) if call.rows_first else array


def references(
    calls: Mapping[str, AttentionCall], arrays: Mapping[str, Mapping[str, Any]], keep: Any = None
) -> dict[str, dict[str, np.ndarray]]:
    """Results of each call by role, all of them by one program of one device."""
    import jax

    def gradients(call: AttentionCall, arrays: Mapping[str, Any]) -> dict[str, Any]:
        lengths = [arrays["q_lengths"], arrays["kv_lengths"]] if call.has_lengths else []
        operands = [arrays["q"], arrays["k"], arrays["v"], arrays.get("bias")]
        out, pull, statistics = jax.vjp(lambda *qkv: dense(call, *qkv, lengths, keep), *operands, has_aux=True)
        dq, dk, dv, dbias = pull(turned(call, arrays["dout"]))
        return {"out": out, "statistics": statistics, "dbias": dbias} | {
            role: turned(call, array) for role, array in (("dq", dq), ("dk", dk), ("dv", dv))
        }

    results = jax.jit(lambda arrays: {name: gradients(calls[name], arrays[name]) for name in calls})(arrays)
    return jax.tree.map(np.asarray, results)


def reference(call: AttentionCall, arrays: Mapping[str, Any], keep: Any = None) -> dict[str, np.ndarray]:
    return references({"": call}, {"": arrays}, keep)[""]


Results = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


def run(cases: Mapping[str, Case], arrays: Mapping[str, dict[str, np.ndarray]]) -> dict[str, dict[str, np.ndarray]]:
    """Results by role of each case's forward and backward call, all of them in one program."""
    calls = [call for each in cases.values() for call in both_of(each)]
    inputs = [arrays[name][role] for name, each in cases.items() for c in both_of(each) for role in c.call.operands]
    by_hand = planned(calls)
    results = iter(run_emitted(emit_stablehlo(by_hand.require_hlo(), by_hand), by_hand, *inputs))
    return {
        name: {role: next(results) for c in both_of(each) for role in c.call.results[:-1]}
        for name, each in cases.items()
    }


def with_forward_results(call: AttentionCall, arrays: Mapping[str, Any], expected: Mapping[str, Any]) -> Any:
    return {**arrays, "out": turned(call, expected["out"]), "statistics": expected["statistics"]}


@pytest.fixture(scope="module")
def results() -> dict[str, Results]:
    """Of every case, in parts and as the reference has it."""
    arrays = {name: arrays_of(each.call) for name, each in CASES.items()}
    expected = references({name: each.call for name, each in CASES.items()}, arrays)
    inputs = {name: with_forward_results(CASES[name].call, arrays[name], expected[name]) for name in CASES}
    actual = run(CASES, inputs)
    return {name: (actual[name], expected[name]) for name in CASES}


@pytest.mark.dear
@pytest.mark.parametrize("name", CASES)
def test_parts_equal_the_whole(name: str, results: dict[str, Results]) -> None:
    actual, expected = results[name]
    for role, array in actual.items():
        np.testing.assert_allclose(array, expected[role], rtol=2e-6, atol=2e-6, err_msg=role)


DROPPED = case({"b": DATA, "n": HEADS}, keys=16, value_width=16, kv_heads=2, dropout_rate=0.25, seed=5)


@pytest.mark.dear
def test_dropout_is_the_same_in_any_parts_and_backward() -> None:
    """Values that are the unit matrix hand out which probabilities stayed."""
    call = DROPPED.call
    arrays = arrays_of(call)
    eye = np.broadcast_to(np.eye(16, dtype=np.float32)[None, :, None, :], arrays["v"].shape)
    whole, rows = replace(DROPPED, split={}), replace(DROPPED, split={"t": ROWS, "b": DATA})
    inputs = with_forward_results(call, {**arrays, "v": eye}, reference(call, arrays))
    shown = run({"whole": whole}, {"whole": inputs})["whole"]["out"]
    keep = shown > 0
    assert 0.7 < keep.mean() < 0.8
    expected = reference(call, arrays, keep)
    inputs = with_forward_results(call, arrays, expected)
    cases = {"heads": DROPPED, "rows": rows}
    for name, actual in run(cases, dict.fromkeys(cases, inputs)).items():
        for role, array in actual.items():
            np.testing.assert_allclose(array, expected[role], rtol=3e-6, atol=3e-6, err_msg=f"{name}: {role}")


def test_a_row_that_a_bias_hides_is_what_frameworks_make_of_it() -> None:
    hidden = case({"b": DATA, "n": HEADS, "k": HEADS}, bias=(4, 1, 16, 12))
    arrays = arrays_of(hidden.call)
    arrays["bias"][1, 0, 3] = -np.inf
    arrays["bias"][2, 0, 4, :11] = -np.inf
    expected = reference(hidden.call, arrays)
    inputs = with_forward_results(hidden.call, arrays, expected)
    actual = run({"": hidden}, {"": inputs})[""]
    assert np.isnan(actual["out"][1, :, 3]).all()
    for role in ("out", "dq", "dv"):
        np.testing.assert_allclose(actual[role], expected[role], rtol=2e-6, atol=2e-6, err_msg=role)


@pytest.mark.parametrize(
    ("split", "changes", "reason"),
    [
        ({"s": DATA}, {}, "keys or widths"),
        ({"k": DATA}, {}, "no query heads"),
        ({"n": HEADS, "k": HEADS}, {"heads": 12, "kv_heads": 6}, "cut elsewhere"),
    ],
)
def test_layouts_that_no_rule_gives_are_refused(
    split: Mapping[str, tuple[str, ...]], changes: Mapping[str, int], reason: str
) -> None:
    each = case(split, **changes)
    with pytest.raises(PlanError, match=reason):
        split_attention(each.call, layouts(each.call, split)[0], Mesh.of(MESH))


@pytest.mark.parametrize(
    ("hardware", "backward", "targets"),
    [
        ("h100", {"b": DATA}, ["SoftmaxDropout", "SoftmaxDropoutBackward"]),
        ("h100", {"b": ("x", "y")}, []),  # the kernel would not drop the same backward
        ("v100", {"b": DATA}, []),
        ("cpu", {"b": DATA}, []),
    ],
)
def test_kernels_are_called_where_they_compute_the_same(
    hardware: str, backward: Mapping[str, tuple[str, ...]], targets: Sequence[str]
) -> None:
    each = case({"b": DATA}, dropout_rate=0.1, element_type="bf16")
    forward, other = both_of(each)
    by_hand = replace(planned([forward, replace(other, split=backward)]), hardware=hardware)
    emitted = emit_stablehlo(by_hand.require_hlo(), by_hand)
    assert re.findall(r"@__cudnn\$fmha(\w+)", emitted) == targets


def test_shardings_say_that_a_users_own_jit_has_no_kernels() -> None:
    note = AttentionNote(place="model.py:31", count=2, kind="forward", words="causal")
    by_hand = planned([CASES["whole"]])
    to_user_plan(replace(by_hand, attention=(replace(note, replaced=False),))).partition_specs()
    with pytest.warns(UserWarning, match=r"the attention at model\.py:31 as the function writes it"):
        to_user_plan(replace(by_hand, attention=(note,))).partition_specs()


SIZES: Any = {"element_type": "bf16", "rows": 512, "keys": 512, "width": 64, "value_width": 64}
ON_GPUS = [
    case({"b": DATA, "n": HEADS, "k": HEADS}, **SIZES, mask="causal"),
    case({"b": DATA, "n": HEADS}, **SIZES, kv_heads=2, mask="causal"),
    case({"b": DATA, "t": ROWS}, **SIZES, mask="causal"),
    case({"b": DATA, "n": HEADS, "k": HEADS}, **SIZES, bias=(1, 8, 512, 512)),
    case({"b": DATA}, **{**SIZES, "element_type": "f32"}),
]


def compile_on(on: str, cases: Sequence[Case]) -> CompiledProgram:
    """Forward and backward calls as the compiler of devices that are not here makes them; skips without it."""
    try:
        compiler = find_compiler(on, 8)
    except PlatformError as error:
        pytest.skip(str(error))
    by_hand = replace(planned([call for each in cases for call in both_of(each)]), hardware=on)
    with CompileService(8, children=1, compiler=compiler) as service:
        return service.compile(by_hand.require_hlo(), by_hand, want_executable=False)


@pytest.mark.dear
def test_tpus_run_parts_written_out() -> None:
    program = compile_on("tpu-v5e", [CASES["uneven rows"], CASES["batch and heads"]])
    assert kinds(program.collectives) == [("all-reduce", 8)] * 2


@pytest.mark.dear
def test_gpus_run_the_kernel_on_their_parts() -> None:
    """As XLA:GPU compiles it: sizes in the kernel's configuration, and sums of gradients that lie whole."""
    program = compile_on("h100", ON_GPUS)
    text = gzip.decompress(program.partitioned_gzip).decode()
    kernels = re.findall(r"= \((\w+)\[.*custom-call\(.*\$fmha(\w*)\".*?\"dimensions\":\s*\[(.*?)\]", text)
    parts = Counter((kind, name, re.sub('[" ]', "", sizes)) for kind, name, sizes in kernels)
    assert parts == {
        ("bf16", "Softmax", "2,2,512,512"): 2, ("bf16", "SoftmaxBackward", "2,2,512,512"): 2,
        ("bf16", "ScaleBiasSoftmax", "2,8,128,512"): 1, ("bf16", "ScaleBiasSoftmaxBackward", "2,8,128,512"): 1,
        ("bf16", "ScaleBiasSoftmax", "2,2,512,512"): 1, ("bf16", "ScaleBiasSoftmaxBackward", "2,2,512,512"): 1,
        ("bf16", "Softmax", "2,8,512,512"): 1, ("bf16", "SoftmaxBackward", "2,8,512,512"): 1,
    }  # fmt: skip
    # of dk and dv, of query heads that share key heads and of split rows; of the bias' gradient
    assert kinds(program.collectives) == [("all-reduce", 2), *[("all-reduce", 4)] * 4]


@pytest.mark.dear
def test_a_planned_step_has_the_predicted_collectives() -> None:
    """Of a program that asks for cuDNN's attention: by XLA:CPU, which has no such kernel, and by XLA:GPU."""
    import jax
    import jax.numpy as jnp

    cluster = Cluster(name="c", platform="cuda", hardware="h100", nodes=Cluster.local(8).nodes)

    def loss(weights: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btm,mnd->btnd", x, weights[name]) for name in "qkv")
        out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")
        return jnp.square(jnp.einsum("btnd,mnd->btm", out, weights["o"]).astype(jnp.float32)).mean()

    heads = {"q": 16, "k": 4, "v": 4, "o": 16}
    weights = {name: jax.ShapeDtypeStruct((1024, count, 64), jnp.bfloat16) for name, count in heads.items()}
    x = jax.ShapeDtypeStruct((2, 2048, 1024), jnp.bfloat16)
    text = sw.lower(jax.grad(loss), weights, x, platform="cuda").hlo_text
    step = sw.plan(text, cluster, cache=False)
    assert isinstance(step, sw.Plan)
    assert len(re.findall(r"@__cudnn\$fmha", step.emit())) == 2
    assert step.prove().holds
