"""`shardwright tune`: measures on servers, prints a table, and steps begin with the fastest plan afterwards."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardwright.cli import main

MODULE = """
import jax, jax.numpy as jnp

def step(activation, params, x, key):
    def loss_of(params):
        noise = 0.01 * jax.random.normal(key, x.shape)
        return jnp.square(getattr(jnp, activation)((x + noise) @ params["w"]) @ params["v"]).mean()
    loss, gradients = jax.value_and_grad(loss_of)(params)
    params = jax.tree.map(lambda value, gradient: value - 0.1 * gradient, params, gradients)
    return params, jax.random.split(key)[0], loss

def arguments():
    types = {"w": jax.ShapeDtypeStruct((64, 128), "float32"), "v": jax.ShapeDtypeStruct((128, 64), "float32")}
    key = jax.eval_shape(lambda: jax.random.key(0))
    return "tanh", types, jax.ShapeDtypeStruct((32, 64), "float32"), key

def fails(x):
    return x + undefined
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a user's module, as current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path / "cache"))
    sys.modules.pop("tunedmodel", None)
    (tmp_path / "tunedmodel.py").write_text(MODULE)
    folders = [*sys.path]
    yield tmp_path
    sys.path[:] = folders
    sys.modules.pop("tunedmodel", None)


@pytest.mark.dear
def test_the_fastest_plan_is_measured_and_remembered(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # "x" is given away, but no result takes its place: each call gets another.
    kinds = ["--static", "activation", "--donate", "params,x,key"]
    command = ["tune", "tunedmodel:step", "--example", "tunedmodel:arguments", *kinds, "--devices", "4"]
    assert main(command) == 0
    output = capsys.readouterr()
    lines = output.out.splitlines()
    assert lines[0].split() == ["measured", "predicted", "plan"]
    times = [float(line.split()[0]) for line in lines[1:-1]]
    assert times == sorted(times)
    assert lines[-1].startswith("predicted over measured: ")
    assert "runner-up at" in output.err
    assert len(list((project / "cache" / "tuned").glob("step-*.csv"))) == 1

    assert main([*command, "--json"]) == 0
    changes = json.loads(capsys.readouterr().out)
    assert [change["kind"] for change in changes] == ["remembered"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["tunedmodel:step", "--args", "", "--effort", "best"], "leave the option out"),
        (["tunedmodel:step", "--args", "", "--limit", "0"], "give the seconds"),
        (["tunedmodel:nothing", "--args", ""], "has no 'nothing'"),
    ],
)
def test_wrong_options_are_named(
    options: list[str], message: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tune", *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.dear
def test_errors_of_the_function_name_its_line(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "tunedmodel:fails", "--args", "f32[4]", "--devices", "1"]) == 1
    error = capsys.readouterr().err
    assert "NameError" in error
    assert "tunedmodel.py:18" in error
