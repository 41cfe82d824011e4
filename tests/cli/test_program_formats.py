"""`shardwright plan` on programs in other formats, with names beside them; what `doctor` says of frameworks."""

from __future__ import annotations

import io
import json
import tomllib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export

from shardwright.cli import main
from shardwright.cli.doctor import check_extras

pytestmark = pytest.mark.dear

ROOT = Path(__file__).resolve().parent.parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program in three formats."""
    folder = tmp_path_factory.mktemp("programs")
    step = jax.jit(lambda w, x: w - 0.1 * (x.T @ jnp.tanh(x @ w)), donate_argnums=0)
    types = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((64, 64), (256, 64))]
    lowered = step.lower(*types)
    (folder / "step.pb").write_bytes(lowered.compiler_ir("hlo").as_serialized_hlo_module_proto())
    (folder / "step.mlir").write_text(lowered.as_text())
    (folder / "step.mlirbc").write_bytes(export.export(step)(*types).mlir_module_serialized)
    return folder


def planned_names(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    capsys.readouterr()
    assert main(["plan", *arguments, "--cluster", "8", "--mesh", "8", "--no-cache", "--json"]) == 0
    return [variable["name"] for variable in json.loads(capsys.readouterr().out)["parameters"]]


@pytest.mark.parametrize("name", ["step.pb", "step.mlir", "step.mlirbc"])
def test_programs_are_told_apart_by_content(folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    names = planned_names(capsys, str(folder / name))
    assert names == (["Arg_0.1", "Arg_1.1"] if name == "step.mlir" else ["w", "x"])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("weights\nbatch\n", ["weights", "batch"]),
        ('["weights", "batch"]', ["weights", "batch"]),
        ('{"1": "batch"}', ["w", "batch"]),
        ('{"w": "weights"}', ["weights", "x"]),
    ],
)
def test_names_beside_a_program(
    folder: Path, text: str, names: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "names").write_text(text)
    where = ["--names", str(tmp_path / "names"), "--force", f"{names[0]}=1:data"]
    assert planned_names(capsys, str(folder / "step.pb"), *where) == names


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("weights\n", "1 names, but the program has 2 arguments"),
        ("[1, 2]", "1 is no name of argument 0"),
        ("{", "it is no JSON"),
        ('{"y": "z"}', "no argument 'y'"),
        (None, "cannot be read"),
    ],
)
def test_wrong_names_are_refused(
    folder: Path, text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if text is not None:
        (tmp_path / "names").write_text(text)
    assert main(["plan", str(folder / "step.pb"), "--names", str(tmp_path / "names"), "--cluster", "8"]) == 1
    assert message in capsys.readouterr().err


def test_a_program_comes_by_standard_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Input:
        buffer = io.BytesIO((folder / "step.pb").read_bytes())

    monkeypatch.setattr("sys.stdin", Input())
    assert planned_names(capsys, "-") == ["w", "x"]


def test_damaged_programs_are_named(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("step.pb", "step.mlirbc"):
        path = tmp_path / name
        path.write_bytes((folder / name).read_bytes()[:-40])
        assert main(["plan", str(path), "--cluster", "8"]) == 1
        message = capsys.readouterr().err
        assert message.startswith(f"error: {path}: ")
        assert "remedy: " in message


def test_plans_are_explained_and_verified_with_their_program(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "plan.json")
    program = str(folder / "step.mlirbc")
    assert main(["plan", program, "--cluster", "8", "--mesh", "8", "--out", plan]) == 0
    assert main(["verify", plan, "--hlo", program]) == 0
    assert main(["verify", plan, "--hlo", str(folder / "step.mlir")]) == 1
    assert "is not the program this plan was made for" in capsys.readouterr().err


# ---- doctor ------------------------------------------------------------------------------


def findings(*requirements: str) -> dict[str, Any]:
    return {finding.name: finding for finding in check_extras(requirements)}


def test_extras_that_are_not_installed_are_not_missing() -> None:
    found = findings("no-such-framework<2,>=1; extra == 'torch'")["extra [torch]"]
    assert found.ok
    assert found.detail == "not installed; PyTorch users: pip install 'no-such-framework<2,>=1'"


def test_versions_of_extras_are_held_against_the_tested_range() -> None:
    tested = findings("numpy>=1; extra == 'keras'")["extra [keras]"]
    assert tested.detail.startswith("numpy ")
    assert (tested.ok, tested.remedy) == (True, "")
    other = findings('numpy<1.5,>=1; extra == "keras"')["extra [keras]"]
    assert other.detail.endswith("outside the tested range >=1,<1.5")
    assert other.remedy == "pip install 'numpy<1.5,>=1'"
    half = findings("numpy>=1; extra == 'tensorflow'", "no-such-framework>=1; extra == 'tensorflow'")
    assert half["extra [tensorflow]"].detail.endswith(", no-such-framework is not installed")


def test_a_module_under_another_package_name_counts() -> None:
    import yaml  # of PyYAML

    assert findings("yaml>=1; extra == 'torch'")["extra [torch]"].detail == f"yaml {yaml.__version__}"


def test_every_framework_has_an_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    requirements = [f"{item}; extra == '{extra}'" for extra, items in extras.items() for item in items]
    for name, finding in findings(*requirements).items():
        assert name.removeprefix("extra [").removesuffix("]") in extras
        assert finding.ok
    assert all("<" in item for extra in ("keras", "tensorflow", "torch") for item in extras[extra])
