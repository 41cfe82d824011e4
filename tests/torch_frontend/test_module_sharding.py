"""A plan's layouts in a process group of gloo, beside eager PyTorch; see `check_sharding`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import shardwright as sw
import shardwright.torch as swt
from shardwright.errors import ArgumentError, PlanError
from shardwright.plans.shardings import TensorSharding
from tests.torch_frontend.check_sharding import CASES, FORCED, adam, make, plan_of, train
from tests.torch_frontend.comparison import relative

ROOT = Path(__file__).parents[2]


def run_ranks(count: int, *command: str) -> str:
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*run, *command], env=environment, capture_output=True, text=True, check=False, timeout=900, cwd=ROOT
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


@pytest.mark.cluster
def test_sharded_modules_train_as_eager_ones_and_go_on_from_checkpoints(tmp_path: Path) -> None:
    with sw.connect(devices=1) as session:
        for name in CASES.keys() - {"mixed"}:
            model, loss_fn, batches = make(name)
            text = swt.parallelize(session, model, adam(model), loss_fn).lower(*batches[0]).hlo_text
            for ranks, forced in FORCED.items():
                for force in forced:
                    plan = sw.plan(text, ranks, force=force, rewrites="none")
                    (tmp_path / f"{name}_{force}_{ranks}.json").write_text(plan.to_json())
    run_ranks(2, "tests/torch_frontend/check_sharding.py", str(tmp_path), "")
    for name in CASES:  # both have saved under other axes
        (tmp_path / f"{name}_megatron_2").symlink_to(tmp_path / f"{name}_tensor_2")
    run_ranks(4, "tests/torch_frontend/check_sharding.py", str(tmp_path), "2")
    for name in CASES:
        model, loss_fn, batches = make(name)
        optimizer = adam(model)
        expected = train(model, optimizer, loss_fn, batches[:5])
        sixth = train(model, optimizer, loss_fn, batches[5:])
        for ranks, forced in FORCED.items():
            for force in forced:
                results = json.loads((tmp_path / f"results_{ranks}").read_text())[f"{name} {force}"]
                difference = relative(results["losses"], expected)
                print(name, force, ranks, difference, results["share"])
                assert difference < 1e-5
                assert results["share"] < (0.75 if ranks == 2 or force == "megatron" else 0.4)
                for of_sixth in [value for key, value in results.items() if key.startswith("sixth")]:
                    assert relative(of_sixth, sixth) < 1e-4


@pytest.mark.cluster
def test_a_job_of_torchrun_goes_by_a_plan_and_on_under_other_ranks(tmp_path: Path) -> None:
    example, losses = str(ROOT / "examples" / "torch" / "sharded.py"), {}
    for ranks, force, state in ((4, "fsdp", "--save"), (2, "tensor", "--load")):
        plan = str(tmp_path / f"{ranks}.json")
        command = [sys.executable, example, plan, "--plan-for", str(ranks), "--force", force]
        subprocess.run(command, check=True, timeout=300, env=os.environ | {"PYTHONPATH": str(ROOT)})
        output = run_ranks(ranks, example, plan, state, str(tmp_path / "checkpoint"))
        losses[ranks] = [float(loss) for loss in re.findall(r"loss (\S+)", output)]
    assert len(losses[4]) == len(losses[2]) == 5
    assert losses[2][0] < losses[4][0] - 0.5


# ---- what a plan holds that DTensor does not -----------------------------------------------------


@pytest.fixture
def one_rank() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


BOTH = {"data": 2, "model": 2}


@pytest.mark.parametrize(
    ("layouts", "batch", "message"),
    [
        (
            {"0.weight": ((), ("data", "model")), "1.weight": (("model", "data"), ())},
            (("data",), ()),
            r"model\.0\.weight by data then model; model\.1\.weight by model then data",
        ),
        ({"0.weight": (("data",), ()), "views": ["0.weight"]}, (("data",), ()), r"0\.weight: split as \[6, 16\]"),
        ({"0.bias": (("data", "model"),)}, (("data",), ()), r"0\.bias: \[6\] split unevenly over two axes"),
        ({}, ((), ("data",)), r"splits x by \[-, data\]"),
    ],
)
def test_what_dtensors_cannot_hold_is_refused_by_name(layouts: Any, batch: Any, message: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 6), torch.nn.Linear(6, 16))
    with pytest.raises(PlanError, match=message) as error:
        swt.shard(model, plan_of(model, BOTH, layouts, batch))
    assert "force=" in error.value.remedy
    assert not any(hasattr(parameter, "placements") for parameter in model.parameters())


def test_labels_are_divided_as_the_inputs_are() -> None:
    from shardwright.client.frontends.torch.sharding.layouts import read_layouts

    model = torch.nn.Linear(16, 6)
    plan = plan_of(model, BOTH, {})
    x, y = (variable for variable in plan.parameters if variable.name in "xy")
    whole = replace(y, sharding=TensorSharding(((), ())))
    layouts = read_layouts(model, replace(plan, parameters=(*plan.parameters[:-2], x, whole)))
    assert layouts.batch_axes == ("data",)
    assert [(each.name, each.is_split) for each in layouts.batch] == [("x", True), ("y", True)]


def test_a_job_of_another_size_is_refused(one_rank: None) -> None:
    model = torch.nn.Linear(16, 6)
    with pytest.raises(PlanError, match="4 devices, the process group has 1 ranks"):
        swt.shard(model, plan_of(model, BOTH, {}))
    mesh = dist.device_mesh.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    with pytest.raises(PlanError, match=r"dimensions \{'dp': 1\}, the plan \{'data': 1\}"):
        swt.shard(model, plan_of(model, {"data": 1}, {}), mesh=mesh)


def test_parameters_of_children_are_read_where_their_class_is_named(one_rank: None) -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(16, 4)

        def forward(self, x: Any) -> Any:
            return self.table(x) @ self.table.weight.T

    model, x = Tied(), torch.arange(8)
    expected = model(x)
    plan = plan_of(model, {"data": 1}, {"table.weight": (("data",), ())})
    sharded = swt.shard(model, plan, device_type="cpu")
    with pytest.raises(sw.errors.UnsupportedProgramError, match=r"part only.*\n.*units=\(Class,\)"):
        model(x)
    model = Tied()
    model.load_state_dict({"table.weight": sharded.module.table.weight.full_tensor()})
    swt.shard(model, plan, device_type="cpu", units=(Tied,))
    assert torch.equal(model(x), expected)
    with pytest.raises(ArgumentError, match="in 1 parts"):
        sharded.place(x)


def test_a_checkpoint_is_read_without_a_process_group(one_rank: None, tmp_path: Path) -> None:
    model = torch.nn.Linear(16, 6)
    swt.shard(model, plan_of(model, {"data": 1}, {"weight": (("data",), ())}), device_type="cpu")
    dcp.save({"model": model.state_dict()}, checkpoint_id=str(tmp_path))
    plain = torch.nn.Linear(16, 6)
    state = {"model": plain.state_dict()}
    dcp.load(state, checkpoint_id=str(tmp_path), no_dist=True)
    assert torch.equal(plain.weight, model.weight.full_tensor())
