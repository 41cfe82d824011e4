"""Top-k in rounds: what XLA finds, to the bit, and nothing that is searched is gathered."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

from shardwright.clusters.cluster import Cluster
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.planner.rewrites.top_k import expand_top_k
from shardwright.planner.tuning import MAX_TOP_K_ROUNDS
from shardwright.user_plans import compile_and_prove
from tests.planner.programs import lower
from tests.planner.rewrites.rewrite_programs import run

ROWS, EXPERTS = 64, 9
FLOATS: list[Any] = [np.float32, np.float16, ml_dtypes.bfloat16]
INTEGERS: list[Any] = [np.int32, np.int8, np.uint8]


def make_search(dtype: Any) -> np.ndarray:
    """Few different numbers, so that most rows hold equal ones: the extreme ones of the type among them."""
    random = np.random.default_rng(0)
    if dtype in INTEGERS:
        kinds = np.array([np.iinfo(dtype).min, np.iinfo(dtype).max, 0, 1, 3], dtype)
    else:
        # Zeros and NaNs of either sign; all NaN in some rows.
        kinds = np.array([0.0, -0.0, 1, -2, np.inf, -np.inf, np.nan, -np.nan], dtype)
    item = kinds[random.integers(0, len(kinds), (ROWS, EXPERTS))]
    item[:2] = kinds[-2:, None]
    item[2] = kinds.min() if dtype in INTEGERS else -np.inf
    return item


@pytest.mark.dear
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS], ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("largest", [True, False], ids=["largest", "smallest"])
def test_the_same_to_the_bit(dtype: Any, largest: bool) -> None:
    x = make_search(dtype)
    for k in (1, 2, MAX_TOP_K_ROUNDS):
        text = lower((lambda x, k=k: lax.top_k(x, k), (x,), ()))
        text = text.replace("largest=true", f"largest={str(largest).lower()}")
        assert "topk(" in text
        module = expand_top_k(parse(text))
        assert not [each for each in module.instructions() if each.opcode == "topk"]
        for expected, item in zip(run(text, [x]), run(module.to_text(), [x]), strict=True):
            assert expected.tobytes() == item.tobytes()


def router(params: Any, x: Any) -> Any:
    """The mean of what two experts of each token say, and the gradients."""

    def loss(params: Any) -> Any:
        best, which = lax.top_k(jnp.tanh(x @ params["gate"]), 2)
        said = jnp.einsum("bld,edf,blke->blkf", x, params["experts"], jax.nn.one_hot(which, 8))
        return jnp.mean(jnp.square(jnp.einsum("blk,blkf->blf", jax.nn.softmax(best), said)))

    return jax.value_and_grad(loss)(params)


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


PARAMS = {"gate": normal(1, 16, 8), "experts": normal(2, 8, 16, 4)}
X = normal(3, 16, 6, 16)
ROUTER = lower((router, (PARAMS, X), ()))


def test_gradients_are_the_same() -> None:
    arguments = [PARAMS["experts"], PARAMS["gate"], X]
    result = expand_top_k(parse(ROUTER)).to_text()
    for expected, item in zip(run(ROUTER, arguments), run(result, arguments), strict=True):
        np.testing.assert_allclose(item, expected, rtol=1e-6, atol=1e-7)


def test_in_a_loop() -> None:
    def worn(x: Any) -> Any:
        def turn(_: Any, x: Any) -> Any:
            best, which = lax.top_k(x, 2)
            return x.at[jnp.arange(ROWS)[:, None], which].set(best / 2)

        return lax.fori_loop(0, 4, turn, x)

    x = normal(4, ROWS, EXPERTS)
    text = lower((worn, (x,), ()))
    module = expand_top_k(parse(text))
    assert "topk(" not in module.to_text()
    np.testing.assert_array_equal(run(module.to_text(), [x]), run(text, [x]))


@pytest.mark.parametrize(
    ("function", "shape"),
    [
        (lambda x: lax.top_k(x, MAX_TOP_K_ROUNDS + 1), (ROWS, 32)),
        (lambda x: lax.top_k(x, 2), (1, 32)),
        (lambda x: lax.top_k(x, 2), (32,)),
    ],
    ids=["many", "one row", "no rows"],
)
def test_others_stay(function: Any, shape: tuple[int, ...]) -> None:
    module = parse(lower((function, (np.zeros(shape, np.float32),), ())))
    assert expand_top_k(module) is module


@pytest.mark.parametrize("rewrites", ["auto", "none"], ids=["in rounds", "as it is"])
def test_a_split_batch_is_not_gathered(rewrites: Any) -> None:
    options = PlanOptions(mesh={"data": 8}, force="data", rewrites=rewrites)
    step_plan = plan(ROUTER, Cluster.local(8), options)
    assert {each.kind for each in step_plan.collectives} == {"all-reduce"}
    assert any(each.opcode == "topk" for each in step_plan.instructions) == (rewrites == "none")
    proof = compile_and_prove(step_plan)
    assert proof.holds, proof.explain(everything=True)


def test_the_searched_dimension_splits_too() -> None:
    """Each round gathers one key and one place a row and device: of four devices, of two rows, four bytes each."""
    text = lower((lambda x: lax.top_k(x, 2), (jax.ShapeDtypeStruct((2, 1 << 14), jnp.float32),), ()))
    step_plan = plan(text, Cluster.local(4), PlanOptions(mesh={"model": 4}, force={"*": {1: "model"}}))
    assert [(each.kind, each.payload_bytes) for each in step_plan.collectives] == [("all-gather", 4 * 2 * 4)] * 4
    assert compile_and_prove(step_plan).holds
