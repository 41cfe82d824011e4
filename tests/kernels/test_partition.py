"""Kernels that are split by a rule of the user's: the numbers of one device, each part's own kernel, its price."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.cost import compute_time_s, hardware_profile
from shardwright.errors import OptionError, UnsupportedProgramError
from shardwright.hlo import Instruction, parse
from shardwright.kernels import decode_forms, encode_forms, read_forms
from shardwright.planner.rules.base import rule_of
from tests.kernels import programs
from tests.kernels.programs import INTERPRETED, TRITON

H100 = replace(sw.Cluster.local(8), hardware="h100")
PARTS = (1, 2, 4, 8)
MULTIPLY = programs.multiplication(parts=PARTS, **INTERPRETED)
ATTEND = programs.attention(parts=PARTS, **INTERPRETED)


@pytest.fixture(scope="module")
def eight() -> Iterator[sw.Session]:
    with sw.connect(devices=8) as session:
        yield session


def normal(*shape: int) -> Any:
    return (np.random.default_rng(len(shape)).normal(size=shape) / np.sqrt(shape[-1])).astype(np.float32)


def step(weights: Any, x: Any) -> Any:
    """Two layers of attention over a scan, computed again backward."""
    batch, length, width = x.shape

    def heads(array: Any) -> Any:
        return array.reshape(batch, length, 4, width // 4).transpose(0, 2, 1, 3)

    def layer(hidden: Any, of_layer: Any) -> Any:
        q, k, v = (heads(MULTIPLY(hidden.reshape(-1, width), each)) for each in of_layer)
        return hidden + ATTEND(q, k, v).transpose(0, 2, 1, 3).reshape(x.shape), None

    def loss(weights: Any) -> Any:
        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).mean()

    value, gradient = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda weight, change: weight - 0.1 * change, weights, gradient), value


@pytest.mark.dear
def test_a_step_of_split_kernels_is_that_of_one_device(eight: sw.Session) -> None:
    weights, x = tuple(normal(2, 64, 64) for _ in "qkv"), normal(8, 16, 64)
    ours = eight.parallelize(step, mesh={"data": 4, "model": 2}, force={"x": {0: "data"}, "weights[0]": {2: "model"}})
    for value, wanted in zip(
        jax.tree.leaves(ours(weights, x)), jax.tree.leaves(jax.jit(step)(weights, x)), strict=True
    ):
        np.testing.assert_allclose(np.asarray(value), wanted, rtol=1e-6, atol=1e-6)
    calls = [each for each in ours.plan.instructions if each.opcode == "custom-call"]
    assert len(calls) >= 12
    assert all("data" in each.result[0].axes + each.result[0].unreduced + each.partial for each in calls)
    assert any("model" in each.result[0].axes for each in calls)
    assert any("data" in each.result[0].unreduced for each in calls), "a weight's gradient is a sum over the batch"
    assert ours.plan.prove().holds
    assert "certified" in str(ours.plan.explain())


@pytest.mark.dear
def test_a_mapped_kernel_is_split_along_what_is_mapped(eight: sw.Session) -> None:
    kernel = sw.partition(partial(programs.multiply_whole, **INTERPRETED), "i k, k j -> i j", reduction_factors=("k",))

    def mapped(x: Any, y: Any) -> Any:
        return jax.vmap(kernel, in_axes=(0, None))(x, y)

    x, y = normal(8, 16, 32), normal(32, 16)
    ours = eight.parallelize(mapped, mesh={"d": 8}, force={"x": {0: "d"}})
    np.testing.assert_allclose(np.asarray(ours(x, y)), x @ y, rtol=1e-5, atol=1e-6)
    (call,) = (each for each in ours.plan.instructions if each.opcode == "custom-call")
    assert str(call.result[0]) == "[d, -, -]"
    np.testing.assert_allclose(jax.jit(mapped)(x, y), x @ y, rtol=1e-5, atol=1e-6)


def lower(function: Any, *shapes: tuple[int, ...], platform: str = "cuda") -> str:
    types = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return sw.lower(function, *types, platform=platform).hlo_text


def kernel_calls(text: str) -> list[Instruction]:
    return [each for each in parse(text).instructions() if read_forms(each) is not None]


@pytest.mark.dear
def test_every_part_of_a_triton_kernel_has_its_own_program() -> None:
    text = lower(programs.multiplication(PARTS, block=64, **TRITON), (1024, 256), (256, 512))
    plan = sw.plan(text, H100, cache=False, mesh={"a": 4, "b": 2},
                   force={"x": {0: "a"}, "y": {1: "b"}})  # fmt: skip
    (note,) = plan.kernels
    assert note.is_known
    said = " ".join(str(plan.explain()).split())
    assert "kernel 'multiply_whole' (programs.py" in said
    assert "is its price by its own cost_estimate" in said
    assert "certified" in said
    (function,) = re.findall(r"func.func private @shardwright.kernel.*?\n  }", plan.emit(), re.DOTALL)
    assert "tensor<256x256xbf16>" in function
    assert re.search(r"grid_x = 4 : i32, grid_y = 4 : i32", function), "64 rows or columns a block"
    (call,) = kernel_calls(text)
    assert {each.size for each in rule_of(call).factors} == {8}, "as many as are asked for"


@pytest.mark.dear
@pytest.mark.parametrize("parts", [1, 8])
def test_a_split_kernel_is_priced_like_the_products_that_it_is(parts: int) -> None:
    profile = hardware_profile("h100")
    (call,) = kernel_calls(lower(programs.multiplication((parts,), block=64, **TRITON), (16384, 4096), (4096, 4096)))
    (product,) = (each for each in parse(lower(jnp.matmul, (16384, 4096), (4096, 4096))).instructions()
                  if each.opcode == "dot")  # fmt: skip
    shapes = [(16384 // parts, 4096), (4096, 4096)], [(16384 // parts, 4096)]
    assert compute_time_s(call, *shapes, profile) == pytest.approx(compute_time_s(product, *shapes, profile), rel=0.01)
    heads = (16, 16, 1024, 128)
    attend = programs.attention((parts,), **TRITON)
    back = jax.value_and_grad(lambda q, k, v: attend(q, k, v).astype(jnp.float32).sum())
    forward, backward = sorted(kernel_calls(lower(back, heads, heads, heads)), key=lambda call: len(call.operands))
    part = (16 // parts, *heads[1:])
    for kernel, operands, results, products in ((forward, 3, 1, 2), (backward, 4, 3, 5)):
        flops = 2.0 * products * 16 // parts * 16 * 1024 * 1024 * 128
        seconds = compute_time_s(kernel, [part] * operands, [part] * results, profile)
        assert seconds == pytest.approx(flops / profile.matmul_flops_per_s("bf16"), rel=0.1)


def test_the_programs_of_a_text_are_read_or_refused() -> None:
    (call,) = kernel_calls(lower(programs.multiplication((1, 2), block=64, **TRITON), (128, 64), (64, 64)))
    forms = read_forms(call)
    assert forms is not None
    assert decode_forms(encode_forms(forms)) == forms
    packed = encode_forms(forms)
    assert all(decode_forms(text) is None for text in ("", "AAAA", packed[:-8], "é"))


def test_rules_that_do_not_fit_say_where() -> None:
    x = np.zeros((4, 8), np.float32)
    for rule, words, message in (
        ("i j", {}, "cannot be read"), ("i j -> i j", {"need_replication": ("z",)}, "cannot be read"),
        (None, {}, "no text"), ("i j -> i j", {"reduction": ("j",), "reduction_factors": ("j",)}, "given twice"),
    ):  # fmt: skip
        with pytest.raises(OptionError, match=message):
            sw.partition(jnp.sin, rule, **words)
    with pytest.raises(OptionError, match="parts"):
        sw.partition(jnp.sin, "i -> i", parts=(0,))
    for rule, message in (
        ("i -> i", "of 1 dimensions in the rule"), ("i j, j -> i", "2 arguments"), ("i i -> i i", "i is 4, and 8"),
        ("i j -> i j, i", "2 results"), ("(a b) j -> (a b) j", "a · b are"),
    ):  # fmt: skip
        words = {"a": 3, "b": 2} if "a" in rule else {}
        with pytest.raises(OptionError, match=message) as raised:
            sw.partition(jnp.sin, rule, **words)(x)
        assert "test_partition.py" in raised.value.where
    with pytest.raises(OptionError, match="j is a reduction, and a dimension of a result"):
        sw.partition(jnp.sin, "i j -> i j", reduction="j")(x)
    summed = sw.partition(lambda x: x.sum(1), "i j -> i", reduction="j")
    with pytest.raises(UnsupportedProgramError, match="no derivative"):
        jax.grad(lambda x: summed(x).sum())(x)
    wrong = sw.partition(lambda x: jnp.zeros((4, 8)) + x[0], "i j -> i j")
    with pytest.raises(OptionError, match="the rule says") as raised:
        sw.lower(lambda x: wrong(x) + 1, x)
    assert "test_partition.py" in raised.value.where


@pytest.mark.dear
def test_a_kernel_without_a_rule_is_priced_and_spoken_of() -> None:
    def used(x: Any, y: Any) -> Any:
        return programs.multiply_whole(jnp.tanh(x), y, block=64, **TRITON)

    def priced(x: Any, y: Any) -> Any:
        with sw.cost(flops=1e12, bytes=1e6):
            return used(x, y)

    for function, said in ((used, "its own cost_estimate"), (priced, "its price by sw.cost")):
        plan = sw.plan(lower(function, (8192, 1024), (1024, 1024)), H100, cache=False, mesh={"d": 8})
        (note,) = plan.kernels
        assert note.whole
        assert note.step_share > 0.03
        first = str(plan.explain()).splitlines()[1]
        assert "kernel" in first
        assert said in " ".join(str(plan.explain()).split())
        assert "certified" not in str(plan.explain())
        assert sw.Plan.from_json(plan.to_json()).kernels == plan.kernels
    for number in (-1, float("nan"), 10**400, "3", True):
        with pytest.raises(OptionError, match="flops"):
            sw.cost(flops=number)
    sw.cost(flops=np.prod((64, 32)), bytes=np.float32(3))


@pytest.mark.dear
def test_a_kernel_in_a_manual_region_is_one_device_s(eight: sw.Session) -> None:
    """Its programs know nothing of the region's mesh, though they are lowered within: XLA aborts on its shardings."""
    kernel = sw.partition(partial(programs.multiply_whole, **INTERPRETED), "i k, k j -> i j", parts=(1, 2))
    mesh, spec = jax.sharding.AbstractMesh((2, 4), ("a", "b")), jax.P("a")

    def used(x: Any, y: Any) -> Any:
        region = lambda x: jnp.tanh(kernel(x, y))  # noqa: E731
        return jax.shard_map(region, mesh=mesh, in_specs=spec, out_specs=spec, axis_names={"a"}, check_vma=False)(x)

    x, y = normal(64, 32), normal(32, 64)
    np.testing.assert_allclose(np.asarray(eight.parallelize(used)(x, y)), np.tanh(x @ y), rtol=1e-5, atol=1e-6)
    (call,) = kernel_calls(sw.lower(used, x, y).hlo_text)
    assert all("sharding" not in form.hlo_text for form in (read_forms(call) or {}).values())
