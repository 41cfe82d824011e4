"""Functions inside `custom_partitioning`, and foreign calls in them: split as their rules say, the numbers of JAX."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend import core
from jax.interpreters import mlir

import shardwright as sw
from shardwright.client.frontends import jax as front_end
from shardwright.hlo import parse
from shardwright.kernels import RULE_ATTRIBUTE
from shardwright.planner.rules.base import rule_of

GRAMS = np.random.default_rng(0).normal(size=(8, 4, 4)).astype(np.float32)
GRAMS = GRAMS @ GRAMS.swapaxes(1, 2) + 4 * np.eye(4, dtype=np.float32)
QUERIES = np.zeros((8, 4, 16, 8), np.float32), np.zeros((8, 2, 16, 8), np.float32)
RIGHT = np.random.default_rng(1).normal(size=(8, 4, 6)).astype(np.float32)


@pytest.fixture(scope="module")
def four() -> Iterator[sw.Session]:
    jnp.linalg.cholesky(jnp.eye(2))  # JAX sets LAPACK up when it is first asked for it
    with sw.connect(devices=4) as session:
        yield session


def factorized(x: Any) -> Any:
    """Cholesky by LAPACK: a foreign call of two results, of which one is dropped."""
    types = jax.ShapeDtypeStruct(x.shape, x.dtype), jax.ShapeDtypeStruct(x.shape[:-2], np.int32)
    layout = tuple(range(x.ndim))
    call = jax.ffi.ffi_call(
        "lapack_spotrf_ffi", types, input_layouts=[layout], output_layouts=[layout, layout[:-2]],
        input_output_aliases={0: 0},
    )  # fmt: skip
    return call(x, uplo=np.uint8(ord("L")))[0]


def partition_text(function: Callable[..., Any], rule: Any, **more: Any) -> Any:
    result = custom_partitioning(function)
    result.def_partition(None, sharding_rule=rule, **more)
    return result


def by_types(mesh: Any, operands: Any, results: Any) -> Any:
    assert list(operands[0].shape) == list(results[0].shape)
    return "b i j -> b i j", {"need_replication_factors": ("i", "j")}


RULES = {
    "by names": ("b i j -> b i j", {"need_replication_factors": ("i", "j")}),
    "by leading dimensions": ("... i j -> ... i j", {"need_replication_factors": ("i", "j")}),
    "by a function": (by_types, {}),
}


def lower_text(function: Callable[..., Any], *arguments: Any) -> str:
    jax_function = front_end.JaxFunction(function)
    signature, _, _ = jax_function.describe(arguments, {}, takes_types=True)
    return jax_function.lower(signature, platform="cpu").hlo_text


def factors(text: str) -> list[tuple[Any, Any]]:
    (call,) = (each for each in parse(text).instructions() if each.opcode == "custom-call")
    return [(each.operands, each.results) for each in rule_of(call).factors]


@pytest.mark.dear
@pytest.mark.parametrize(("rule", "more"), RULES.values(), ids=RULES)
def test_a_foreign_call_is_split_as_its_rule_says(four: sw.Session, rule: Any, more: dict[str, Any]) -> None:
    factorize = partition_text(factorized, rule, **more)

    def step(x: Any) -> Any:
        return jnp.tril(factorize(x + 0.5).swapaxes(1, 2)).sum(), factorize(x)

    ours = four.parallelize(step, mesh={"data": 4}, force={"x": {0: "data"}})
    result, expected = ours(GRAMS), jax.jit(step)(GRAMS)
    for each, wanted in zip(result, expected, strict=True):
        np.testing.assert_allclose(np.asarray(each), wanted, rtol=1e-5)
    plan = ours.plan
    assert not any("all-gather" in each.kind for each in plan.collectives)
    calls = [each for each in plan.instructions if each.opcode == "custom-call"]
    assert len(calls) == 2
    assert all(each.operands[0][0].dims[0] == ("data",) for each in calls)
    assert plan.prove().holds


def test_in_a_loop_under_differentiation_and_beside_large_constants(four: sw.Session) -> None:
    factorize = partition_text(factorized, "b i j -> b i j", need_replication_factors=("i", "j"))

    @jax.custom_vjp
    def scaled(x: Any) -> Any:
        return factorize(x).sum((1, 2))

    scaled.defvjp(lambda x: (scaled(x), x), lambda x, g: (x * g[:, None, None],))
    weights = np.linspace(0, 1, 128, dtype=np.float32).reshape(8, 4, 4)

    def step(x: Any) -> Any:
        loss = lambda x: jnp.mean(scaled(x + weights.swapaxes(1, 2) @ weights))  # noqa: E731
        turn = lambda carry, _: (carry + 0.1 * jax.grad(loss)(carry), loss(carry))  # noqa: E731
        return jax.lax.scan(turn, x, None, length=3)

    ours = four.parallelize(step, mesh={"data": 4}, force={"x": {0: "data"}})
    for each, wanted in zip(ours(GRAMS), jax.jit(step)(GRAMS), strict=True):
        np.testing.assert_allclose(np.asarray(each), wanted, rtol=1e-5)
    calls = [each for each in parse(lower_text(step, GRAMS)).instructions() if each.opcode == "custom-call"]
    assert calls
    assert all([each.operands for each in rule_of(call).factors] == [(0,)] for call in calls)


def test_jax_code_is_split_by_its_own_rules(four: sw.Session) -> None:
    def product(a: Any, b: Any) -> Any:
        return jnp.tanh(a @ b)

    multiply = partition_text(product, "b i k, b k j -> b i j", reduction_factors=("k",))
    by_callbacks = custom_partitioning(functools.partial(product))
    by_callbacks.def_partition(lambda mesh, shapes, result: None, sharding_rule="b i k, b k j -> b i j")

    def step(x: Any, y: Any) -> Any:
        return multiply(x, y).sum(0), by_callbacks(x, y) * 2

    ours = four.parallelize(step, mesh={"data": 4}, force={"x": {0: "data"}, "y": {0: "data"}})
    for each, wanted in zip(ours(GRAMS, RIGHT), jax.jit(step)(GRAMS, RIGHT), strict=True):
        np.testing.assert_allclose(np.asarray(each), wanted, rtol=1e-5)
    assert {each.opcode for each in ours.plan.instructions} >= {"dot", "tanh"}
    assert [each.kind for each in ours.plan.collectives] in (["all-reduce"], ["reduce-scatter"])


def test_only_what_each_device_can_compute_alone_is_split() -> None:
    text = lower_text(partition_text(factorized, "b i j -> b i j", reduction_factors=("i",)), GRAMS)
    assert factors(text) == [((0,), (0, 0))], "of the dropped result only the batch is known"
    whole = lower_text(partition_text(factorized, "b i j -> b i j", need_replication_factors=("b",)), GRAMS)
    assert factors(whole) == []
    second = partition_text(lambda x, a: factorized(a), "c d, b i j -> b i j", need_replication_factors=("i", "j"))
    assert factors(lower_text(lambda a, x: second(x, a), GRAMS, RIGHT[0])) == [((0,), (0, 0))]
    mixed = partition_text(lambda a, x: (factorized(a), x * 2), "b i j, b k l -> b i j, b k l")
    assert factors(lower_text(mixed, GRAMS, RIGHT)) == [], "not one foreign call alone"


def test_a_rule_that_needs_the_mesh_says_nothing_here() -> None:
    needs_mesh = partition_text(factorized, lambda mesh, operands, results: mesh.shape["model"] and "b i j -> b i j")
    assert factors(lower_text(needs_mesh, GRAMS)) == []


def behind_a_primitive(name: str, kernel: Any) -> Any:
    """A kernel as libraries offer it: a primitive that is lowered through the function with the rule."""
    primitive = core.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(
        lambda *avals: [jax.core.ShapedArray(x.shape, x.dtype) for x in jax.tree.leaves(jax.eval_shape(kernel, *avals))]
    )
    primitive.def_impl(lambda *values: jax.tree.leaves(kernel(*values)))
    mlir.register_lowering(primitive, mlir.lower_fun(lambda *values: jax.tree.leaves(kernel(*values))))
    return lambda *values: primitive.bind(*values)[0]


def test_a_rule_behind_a_primitive_is_kept(four: sw.Session) -> None:
    kernel = partition_text(factorized, "b i j -> b i j", need_replication_factors=("i", "j"))
    factorize = behind_a_primitive("factorize", kernel)
    for step in (factorize, lambda x: jax.lax.map(lambda y: factorize(y + x), jnp.stack([x, 2 * x]))):
        text = lower_text(step, GRAMS)
        assert factors(text) == factors(lower_text(kernel, GRAMS)) == [((0,), (0, 0))]
    step, alone = (lambda x, each=each: each(x).sum((0, 1)) for each in (factorize, kernel))
    result = four.parallelize(step, mesh={"data": 4}, force={"x": {0: "data"}})(GRAMS)
    np.testing.assert_allclose(np.asarray(result), jax.jit(alone)(GRAMS), rtol=1e-5)


def attend(q: Any, k: Any) -> Any:
    """A foreign kernel of four results: an array, a largest number, a number, and a workspace that holds nothing."""
    types = [(q.shape, q.dtype), ((1,), q.dtype), ((), q.dtype), ((0,), np.uint8)]
    return jax.ffi.ffi_call("attend", [jax.ShapeDtypeStruct(*each) for each in types])(q, k)


@pytest.mark.parametrize("count", [1, 2, 4], ids=["dropped inside", "dropped by the caller", "all handed out"])
def test_results_without_elements_or_dimensions_and_numbers_that_nobody_reads_block_nothing(count: int) -> None:
    results = ["b (h g) i d", "a", "", "w"][:count]
    declared = partition_text(
        lambda q, k: attend(q, k)[:count],
        f"b (h g) i d, b h j d -> {', '.join(results)}",
        g=2,
        need_replication_factors=("i", "j", "d"),
    )

    def first(q: Any, k: Any) -> Any:
        return declared(q, k)[0]

    none = (None, None, None)
    assert factors(lower_text(first, *QUERIES)) == [((0, 0), (0, *none)), ((1, 1), (1, *none))]
    if count > 1:
        both = factors(lower_text(lambda q, k: declared(q, k)[:2], *QUERIES))
        assert both == [], "the largest number is of all parts"


def test_a_scaled_product_of_jaxs_is_split() -> None:
    """Its primitive is lowered to one custom call of XLA:GPU's, through `custom_partitioning`."""
    types = [((8, 128), jnp.float8_e4m3fn), ((64, 128), jnp.float8_e4m3fn)]
    types += [((shape[0], shape[1] // 32), jnp.float8_e8m0fnu) for shape, _ in types]
    text = sw.lower(jax.nn.scaled_matmul, *(jax.ShapeDtypeStruct((4, *shape), dtype) for shape, dtype in types),
                    platform="cuda").hlo_text  # fmt: skip
    batch, rows, columns = ((0, 0, 0, 0), (0,)), ((1, None, 1, None), (1,)), ((None, 1, None, 1), (2,))
    assert sorted(factors(text), key=str) == sorted([batch, rows, columns], key=str)


@pytest.mark.dear
def test_attention_that_is_asked_of_cudnn_runs_without_it(four: sw.Session) -> None:
    def step(w: Any, x: Any, implementation: str | None) -> Any:
        def loss(w: Any) -> Any:
            q, k, v = (jnp.einsum("btd,dhk->bthk", x, each) for each in w)
            out = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=implementation)
            return (out.astype(jnp.float32) ** 2).mean()

        return jax.value_and_grad(loss)(w)

    random = np.random.default_rng(0)
    w, x = random.normal(size=(3, 16, 4, 8), scale=0.2), random.normal(size=(4, 32, 16))
    values = jnp.asarray(w, jnp.bfloat16), jnp.asarray(x, jnp.bfloat16)
    ours = four.parallelize(lambda w, x: step(w, x, "cudnn"), mesh="4", force="data")
    result = [np.asarray(each, np.float32) for each in ours(*values)]
    for each, wanted in zip(result, jax.jit(lambda w, x: step(w, x, None))(*values), strict=True):
        np.testing.assert_allclose(each, np.asarray(wanted, np.float32), rtol=2e-2, atol=2e-4)


def test_a_kernel_in_manual_regions_keeps_its_rule() -> None:
    rule, more = RULES["by names"]
    call = partition_text(factorized, rule, **more)
    mesh = jax.sharding.AbstractMesh((4, 2), ("data", "model"))

    def outer(x: Any) -> Any:
        return jax.shard_map(call, in_specs=jax.P(), out_specs=jax.P(), axis_names={"model"}, check_vma=False)(x)

    region = jax.shard_map(outer, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"), axis_names={"data"})
    text = sw.lower(region, GRAMS).hlo_text
    (kernel,) = [line for line in text.splitlines() if "lapack_spotrf_ffi" in line]
    assert "f32[2,4,4]" in kernel
    assert RULE_ATTRIBUTE in kernel
