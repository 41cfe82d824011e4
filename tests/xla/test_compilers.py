"""Proofs by the compilers of devices that are not here: which, where they are looked for, and for how many devices."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.cli.app import main
from shardwright.clusters.cluster import Cluster
from shardwright.user_plans import PipelinePlan
from shardwright.xla.compilers import COMPILERS, GPU_PACKAGES, TPU_PACKAGES, Packages, find_compiler

PLATFORMS = {"a100": "cuda", "h100": "cuda", "tpu-v5e": "tpu"}


def install(packages: Packages, folder: Path, version: str) -> str:
    """A folder as pip leaves it, with an empty compiler."""
    library = folder / packages.library
    library.parent.mkdir(parents=True)
    library.touch()
    (folder / f"{packages.distribution.replace('-', '_')}-{version}.dist-info").mkdir()
    return str(folder)


def version_of(packages: Packages) -> str:
    """The version that the jax that is here goes with."""
    return packages.requirements()[0].partition("==")[2].replace("*", "1")


def plan_step(hardware: str, devices: int = 8, **options: Any) -> sw.Plan | PipelinePlan:
    """A layer's training step, planned for devices with this hardware."""
    platform = PLATFORMS.get(hardware, "cpu")
    cluster = Cluster(name="c", platform=platform, hardware=hardware, nodes=Cluster.local(devices).nodes)

    def step(weights: Any, x: Any) -> Any:
        loss, gradient = jax.value_and_grad(lambda w: (jnp.tanh(jnp.tanh(x @ w) @ w) ** 2).mean())(weights)
        return weights - 0.1 * gradient, loss

    shapes = jax.ShapeDtypeStruct((256, 256), "float32"), jax.ShapeDtypeStruct((64, 256), "float32")
    text = sw.lower(step, *shapes, donate_argnums=0, platform=platform).hlo_text
    return sw.plan(text, cluster, cache=False, **options)


@pytest.mark.parametrize("packages", [GPU_PACKAGES, TPU_PACKAGES], ids=["gpu", "tpu"])
def test_a_compiler_is_found_in_the_given_folder_and_the_variables(
    packages: Packages, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = version_of(packages)
    folder = install(packages, tmp_path / "some", version)
    monkeypatch.delenv(packages.variable, raising=False)
    assert packages.find(folder) == folder
    monkeypatch.setenv(packages.variable, folder)
    assert packages.find() == folder
    monkeypatch.delenv(packages.variable)
    install(packages, tmp_path / "build" / packages.make, version)
    monkeypatch.chdir(tmp_path)
    assert packages.find() == str(tmp_path / "build" / packages.make)


@pytest.mark.parametrize("packages", [GPU_PACKAGES, TPU_PACKAGES], ids=["gpu", "tpu"])
def test_a_missing_or_foreign_compiler_is_an_error_with_the_command_that_installs_it(
    packages: Packages, tmp_path: Path
) -> None:
    with pytest.raises(sw.PlatformError, match="no compiler") as missing:
        packages.find(str(tmp_path))
    with pytest.raises(sw.PlatformError, match=r"0\.0\.1.*goes with") as foreign:
        packages.find(install(packages, tmp_path / "old", "0.0.1"))
    for error in (missing.value, foreign.value):
        assert f"make {packages.make}" in error.remedy
        assert f"pip install --no-deps --target FOLDER '{packages.requirements()[0]}'" in error.remedy
        assert "==" in packages.requirements()[0]


@pytest.mark.parametrize(
    ("on", "devices"), [("tpu-v5e", 2), ("tpu-v5e", 6), ("tpu-v5e", 512), ("a100", 12), ("h100", 9)]
)
def test_devices_that_no_machine_has_are_refused(on: str, devices: int) -> None:
    with pytest.raises(sw.OptionError, match=f"{devices} devices") as refusal:
        find_compiler(on, devices)
    assert refusal.value.where == on


@pytest.mark.parametrize(("on", "devices"), [("tpu-v5e", 1), ("tpu-v5e", 256), ("a100", 3), ("h100", 1024)])
def test_devices_of_real_machines_are_not(on: str, devices: int) -> None:
    COMPILERS[on].require_slice(devices)


def test_an_unknown_compiler_is_named_with_the_nearest() -> None:
    with pytest.raises(sw.OptionError) as refusal:
        find_compiler("a10", 8)
    assert "a100" in refusal.value.remedy


@pytest.mark.parametrize(("hardware", "on"), [("cpu", "a100"), ("a100", "tpu-v5e"), ("tpu-v5e", "h100")])
def test_a_plan_for_another_platform_is_refused(hardware: str, on: str, tmp_path: Path) -> None:
    planned = plan_step(hardware, force="data", mesh="8")
    assert isinstance(planned, sw.Plan)
    packages = COMPILERS[on].packages
    folder = install(packages, tmp_path, version_of(packages))
    with pytest.raises(sw.PlanError, match=f"takes programs for {PLATFORMS[on]}") as refusal:
        planned.prove(on=on, packages=folder)
    assert f"lower the step for {PLATFORMS[on]}" in refusal.value.remedy


def test_the_command_line_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned = plan_step("a100", force="data", mesh="8")
    assert isinstance(planned, sw.Plan)
    (tmp_path / "plan.json").write_text(planned.to_json())
    (tmp_path / "step.hlo").write_text(planned.require_hlo())
    command = ["verify", str(tmp_path / "plan.json"), "--hlo", str(tmp_path / "step.hlo")]
    assert main([*command, "--on", "a100", "--packages", str(tmp_path)]) == 1
    assert "pip install --no-deps" in capsys.readouterr().err
    assert main([*command, "--packages", str(tmp_path)]) == 1
    assert "is for --on" in capsys.readouterr().err


def require_compiler(on: str) -> None:
    """Skip where the compiler is not installed."""
    try:
        COMPILERS[on].packages.find()
    except sw.PlatformError as error:
        pytest.skip(str(error))


@pytest.mark.dear
@pytest.mark.parametrize("on", PLATFORMS)
def test_a_plan_is_proven_by_the_compiler_of_its_devices(on: str) -> None:
    require_compiler(on)
    planned = plan_step(on, force="data", mesh="8")
    assert isinstance(planned, sw.Plan)
    before = dict(os.environ)
    proof = planned.prove(on=on)
    assert proof.holds
    assert [line.kind for line in proof.lines if not line.is_small] == ["all-reduce"]
    assert proof.memory is not None
    assert proof.memory.compiled_arguments_bytes >= planned.memory.arguments_bytes
    assert f"on {on} has the predicted collectives" in proof.explain()
    assert "memory of a device" in proof.explain()
    assert dict(os.environ) == before


@pytest.mark.dear
def test_calls_of_cudas_libraries_compile() -> None:
    """The compiler asks for a handler of each, whose library is not here, and takes the batch of each apart."""
    require_compiler("a100")
    cluster = Cluster(name="c", platform="cuda", hardware="a100", nodes=Cluster.local(8).nodes)
    matrices = jax.ShapeDtypeStruct((16, 32, 32), "float32")
    text = sw.lower(lambda a: jnp.linalg.cholesky(a).sum() + jnp.linalg.eigh(a)[0].sum(), matrices, platform="cuda")
    planned = sw.plan(text.hlo_text, cluster, cache=False, force={"a": {0: "data"}}, mesh={"data": 8})
    assert isinstance(planned, sw.Plan)
    assert planned.prove(on="a100").holds


@pytest.mark.dear
@pytest.mark.parametrize("on", ["a100"])
def test_every_program_of_a_pipeline_is_proven(on: str) -> None:
    require_compiler(on)
    planned = plan_step(on, stages=2, micro_batches=2)
    assert isinstance(planned, PipelinePlan)
    proofs = planned.prove(on=on)
    assert list(proofs) == [program.name for program in planned.programs]
    assert all(proof.on == on and proof.memory is not None for proof in proofs.values())
