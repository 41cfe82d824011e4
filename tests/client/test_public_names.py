"""What `import shardwright` offers, what it loads, and which options it takes."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest

import shardwright as sw
from shardwright.options import plan_options


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


@pytest.mark.parametrize("mesh", ["2by4", (2, 2, 2), {"a b": 2}, {"a": 0}, (), "", {"a": True}])
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


@pytest.mark.parametrize("option", ["memory_budget", "stages", "micro_batches", "schedule", "effort", "deadline"])
def test_options_that_are_not_there_yet_are_refused_by_name(option: str) -> None:
    with pytest.raises(sw.OptionError, match=f"'{option}' is not supported by this version"):
        plan_options(**{option: 1})
    assert plan_options(**{option: None}).mesh is None
