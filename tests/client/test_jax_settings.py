"""JAX's settings around a step: NaNs and infinities are found where they lie, traces follow, the rest is told of."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import shardwright as sw
from shardwright.errors import NonFiniteError, SettingWarning
from shardwright.plans.pipeline_plan import PipelinePlan

ONES = np.ones((8, 3), np.float32)

#: Function of ones → what `debug_nans` and what `debug_infs` say, "" for nothing; as jax.jit raises, or does not.
FUNCTIONS: dict[str, tuple[Callable[[Any], Any], str, str]] = {
    "the first of several": (
        lambda x: (x.sum(), {"w": jnp.sqrt(-x), "ok": x}, jnp.log(-x)),
        "result[1]['w'], float32[8, 3], holds NaNs; so do result[2]",
        "",
    ),
    "infinity": (lambda x: (x, x / 0), "", "result[1], float32[8, 3], holds infinities"),
    "both": (lambda x: jnp.stack([x / 0, jnp.log(-x)]), "holds NaNs", "holds infinities"),
    "scalar": (lambda x: jnp.log(-x).mean(), "result, float32[], holds NaNs", ""),
    "bf16": (lambda x: jnp.log(-x).astype(jnp.bfloat16), "bfloat16[8, 3], holds NaNs", ""),
    "f16": (lambda x: (x * 1e6).astype(jnp.float16), "", "float16[8, 3], holds infinities"),
    "fp8": (lambda x: jnp.log(-x).astype(jnp.float8_e4m3fn), "float8_e4m3fn[8, 3], holds NaNs", ""),
    "complex": (lambda x: jnp.log(x * 0) + 1j, "", "complex64[8, 3], holds infinities"),
    "no floats": (lambda x: (x.astype(int), x > 0, jax.random.key(0)), "", ""),
    "nothing": (lambda x: None, "", ""),
}


def error_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except FloatingPointError as error:
        return str(error)
    return ""


@pytest.mark.dear
@pytest.mark.filterwarnings("ignore:.*encountered in")  # of numpy, when JAX looks for the operation
@pytest.mark.parametrize("name", FUNCTIONS)
def test_what_is_not_finite_is_named(session: sw.Session, name: str) -> None:
    function, nans, infs = FUNCTIONS[name]
    step, alone = session.parallelize(function, force="data"), jax.jit(function)
    assert error_of(lambda: step(ONES)) == ""
    for setting, expected in ((jax.debug_nans, nans), (jax.debug_infs, infs)):
        with setting(True):
            result, oracle = error_of(lambda: step(ONES)), error_of(lambda: alone(ONES))
        assert expected in result
        assert bool(result) == bool(oracle) == bool(expected)


def test_a_training_step_stops_at_the_first_bad_result(session: sw.Session) -> None:
    def train_step(params: Any, x: Any) -> Any:
        return {"n": params["n"] + 1, "w": params["w"] - jnp.log(x).mean(0)}, jnp.log(x).sum()

    step = session.parallelize(train_step, donate_argnums=0, force="data")
    params = {"n": np.int32(0), "w": np.zeros(3, np.float32)}
    bad = ONES.copy()
    bad[5, 1] = -1
    with jax.debug_nans(True):
        params, _ = step(params, ONES)
        with pytest.raises(NonFiniteError, match=r"train_step: result\[0\]\['w'\], .*; so do result\[1\]") as caught:
            step(params, bad)
    assert isinstance(caught.value, sw.errors.ExecutionError)
    assert params["w"].is_deleted(), "donated, as by any step"
    after, loss = caught.value.result
    np.testing.assert_array_equal(np.isnan(after["w"]), [False, True, False])
    assert int(after["n"]) == 2
    assert bool(jnp.isnan(loss))
    step({**after, "w": np.zeros(3, np.float32)}, bad)  # off again


def test_padding_is_not_looked_at(session: sw.Session) -> None:
    step = session.parallelize(jnp.log, mesh="8", force={"x": {0: "data"}})
    with jax.debug_nans(True), jax.debug_infs(True):
        step(np.ones(13, np.float32))
    assert step.plan.outputs[0].stored_shape == (16,)


def test_an_initializer_is_looked_at_when_it_runs(session: sw.Session) -> None:
    params = session.parallelize(lambda p: p).init(lambda: {"w": jnp.zeros(3) / 0})
    with jax.debug_nans(True), pytest.raises(NonFiniteError, match=r"result\['w'\]"):
        np.asarray(params["w"])


@pytest.mark.cluster
def test_the_stages_of_a_pipeline_look_at_their_own(two_workers: sw.Session) -> None:
    def loss_of(params: Any, x: jax.Array) -> jax.Array:
        for number, p in enumerate(params):
            with jax.named_scope(f"chunk{number}"):
                x = x + jnp.tanh(x @ p["w"])
        with jax.named_scope("chunk1"):
            return jnp.mean(x**2)

    def train_step(params: Any, x: jax.Array, rate: jax.Array) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(params, x)
        first, second = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        return [first, {"w": second["w"] * jnp.log(rate), "n": second["n"]}], loss

    step = two_workers.parallelize(train_step, donate_argnums=0, stages=2, micro_batches=2, schedule="gpipe")
    w = np.eye(8, dtype=np.float32)
    params, x = [{"w": w, "n": np.zeros(2, np.float32)} for _ in range(2)], np.ones((8, 8), np.float32)
    with jax.debug_nans(True), jax.debug_infs(True):
        params, _ = step(params, x, np.float32(2))
        with pytest.raises(NonFiniteError, match=r"train_step: result\[0\]\[1\]\['w'\], float32\[8, 8\], holds NaNs\n"):
            params, _ = step(params, x, np.float32(-1))
    assert isinstance(step.plan, PipelinePlan)
    assert len(step.plan.stages) == 2


@pytest.mark.dear
def test_the_environment_turns_it_on_for_the_client_and_reaches_no_server() -> None:
    code = (
        "import numpy as np, jax.numpy as jnp, shardwright as sw\n"
        "with sw.connect(devices=2) as session:\n"
        "    handle = session.parallelize(lambda x: x)(np.ones(4, np.float32))\n"
        "    try: session.parallelize(lambda x: (x, jnp.log(-x)))(handle)\n"
        "    except FloatingPointError as error: print(np.asarray(error.result[1]), error)\n"
    )
    environment = {**os.environ, "JAX_DEBUG_NANS": "1", "JAX_DISABLE_JIT": "1", "PYTHONWARNINGS": "ignore"}
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert child.stdout.startswith("[nan nan nan nan] <lambda>: result[1], float32[4], holds NaNs")


# ---- settings that change what is traced, or nothing -----------------------------------


@pytest.mark.dear
def test_settings_that_change_numbers_trace_anew(session: sw.Session) -> None:
    step = session.parallelize(lambda a: (a @ a, jnp.ones(2) * 2, jax.random.normal(jax.random.key(0), (2,))))
    a = np.ones((4, 4), np.float32)

    def outcome() -> tuple[Any, ...]:
        text, (_, ones, noise) = step.lower(a).hlo_text, step(a)
        return "highest" in text, str(ones.dtype), np.asarray(noise, np.float32).tolist()

    plain = outcome()
    with jax.default_matmul_precision("highest"):
        assert outcome() == (True, *plain[1:])
    with jax.enable_x64(True):
        assert outcome()[1] == "float64"
    with jax.default_prng_impl("rbg"):
        assert outcome()[2] == jax.random.normal(jax.random.key(0), (2,)).tolist() != plain[2]
    assert outcome() == plain


@pytest.mark.parametrize(
    "setting", [lambda: jax.numpy_rank_promotion("raise"), lambda: jax.numpy_dtype_promotion("strict")]
)
def test_settings_that_forbid_promotion_hold_for_a_function_traced_before(session: sw.Session, setting: Any) -> None:
    step = session.parallelize(lambda a: a + jnp.arange(4))
    a = np.ones((4, 4), np.float32)
    step(a)
    with setting(), pytest.raises(ValueError, match="promotion"):
        step(a)
    step(a)


def test_what_has_no_effect_is_told_of_once() -> None:
    with sw.connect(devices=1) as session:  # of its own: others may have been told already
        _check_that_each_is_told_of_once(session)


def _check_that_each_is_told_of_once(session: sw.Session) -> None:
    step = session.parallelize(lambda x: jax.lax.scan(lambda c, r: (c + r, c), 0.0, x)[0])
    x = np.ones(4, np.float32)
    settings = {
        "jax_disable_jit": lambda: jax.disable_jit(True),
        "jax_transfer_guard": lambda: jax.transfer_guard("disallow"),
        "jax_log_compiles": lambda: jax.log_compiles(True),
        "jax_explain_cache_misses": lambda: jax.explain_cache_misses(True),
        "jax_debug_key_reuse": lambda: jax.debug_key_reuse(True),
        "jax_default_device": lambda: jax.default_device(jax.devices()[0]),
    }
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for _ in range(2):
            for setting in settings.values():
                with setting():
                    assert float(step(x)) == 4
    told = [each for each in warned if each.category is SettingWarning]
    assert [str(each.message).split()[0] for each in told] == list(settings)
    assert {each.filename for each in told} == {__file__}
