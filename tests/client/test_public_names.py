"""What `import shardwright` offers, what it loads, and which options it takes."""

from __future__ import annotations

import inspect
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

import shardwright as sw
from shardwright.options.user_options import OPTION_HELP, plan_options


def test_the_import_loads_neither_jax_nor_a_solver_nor_grpc() -> None:
    code = (
        "import sys, shardwright; heavy = {'jax', 'jaxlib', 'pulp', 'highspy', 'grpc', 'numpy'} & set(sys.modules); "
        "print(sorted(heavy)); assert not heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_client_loads_neither_planner_nor_server() -> None:
    code = (
        "import sys, shardwright.client.session, shardwright.client.step; "
        "loaded = [m for m in sys.modules if m.startswith(('shardwright.planner', 'shardwright.server', 'pulp'))]; "
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", sw.__all__)
def test_every_public_name_is_there(name: str) -> None:
    assert getattr(sw, name) is not None
    assert name in dir(sw)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'parallelise'"):
        _ = sw.parallelise


def test_errors_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(sw.PlanError("no", where="x", remedy="do y")))
    assert (type(error), str(error)) == (sw.PlanError, "x: no\n  remedy: do y")


@pytest.mark.parametrize(
    ("mesh", "sizes"),
    [
        ("2x4", {"data": 2, "model": 4}),
        ("8", {"data": 8}),
        ((2, 4), {"data": 2, "model": 4}),
        ({"rows": 2}, {"rows": 2}),
        (None, None),
    ],
)
def test_meshes_are_read(mesh, sizes) -> None:
    assert plan_options(mesh=mesh).mesh == sizes


@pytest.mark.parametrize("mesh", ["2by4", (2, 2, 2, 1), {"a b": 2}, {"a": 0}, (), "", {"a": True}])
def test_wrong_meshes_are_named(mesh) -> None:
    with pytest.raises(sw.OptionError, match="mesh"):
        plan_options(mesh=mesh)


def test_strategies_are_checked() -> None:
    assert plan_options(force="fsdp").force == "fsdp"
    assert plan_options(force={"params*": {0: "model"}}).force == {"params*": {0: "model"}}
    with pytest.raises(sw.OptionError, match="one of data, tensor"):
        plan_options(force="magic")
    with pytest.raises(sw.OptionError, match="force"):
        plan_options(force={"params*": "model"})


@pytest.mark.parametrize(
    ("budget", "expected"),
    [(123, (123, None)), ("40GB", (40 * 10**9, None)), ("36 GiB", (36 << 30, None)), ("1.5kib", (1536, None)),
     (0.5, (None, 0.5)), ("25%", (None, 0.25)), (None, (None, None))],
)  # fmt: skip
def test_memory_budgets(budget, expected) -> None:
    options = plan_options(memory_budget=budget)
    assert (options.memory_budget, options.memory_fraction) == expected


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("memory_budget", value) for value in (0, -5, 1.5, 0.0, "40 parsecs", "120%", True)),
        *(("deadline", value) for value in (0, -1.0, "5", float("inf"), float("nan"))),
        ("effort", "much"),
        ("mode", "guess"),
        ("rewrites", "some"),
        ("fused_attention", "flash"),
        ("simple", "no"),
        *(("stages", value) for value in (0, -1, 2.0, True, "2")),
        *(("schedule", value) for value in ("", "fast", "1f2b")),
        *(("micro_batches", value) for value in (0, -1, 2.0, True, "2")),
    ],
)
def test_limits_that_mean_nothing_are_named(option: str, value) -> None:
    with pytest.raises(sw.OptionError) as caught:
        plan_options(**{option: value})
    assert caught.value.where == option


def test_propagating_annotations_and_a_strategy_exclude_each_other() -> None:
    assert plan_options(mode="propagate", force={"w": {0: "data"}}).mode == "propagate"
    with pytest.raises(sw.OptionError, match="force='data' is a strategy"):
        plan_options(mode="propagate", force="data")


@pytest.mark.parametrize("function", [sw.plan, sw.Session.parallelize, sw.Session.program])
def test_signature_and_help_show_every_option(function: Callable[..., Any]) -> None:
    parameters = inspect.signature(function).parameters
    for name, text in OPTION_HELP.items():
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert f"{name}: {text.split()[0]}" in (function.__doc__ or "")
    assert parameters["micro_batch_inexact"].default is False
    assert parameters["progress"].default is None


def test_unknown_options_are_refused_with_the_nearest_name() -> None:
    with pytest.raises(TypeError, match=r"plan\(\) got an unexpected keyword argument 'meshs'; did you mean 'mesh'\?"):
        sw.plan("", 2, meshs="2x1")
    with pytest.raises(TypeError, match="'donate_argnum'; did you mean 'donate_argnums'"):
        sw.Session.parallelize(None, len, donate_argnum=0)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
        plan_options(zzz=1)
