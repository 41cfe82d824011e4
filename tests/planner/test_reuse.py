"""A plan found before, run again: as it is for the same program, carried over to a changed one, or refused in words."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import shardwright as sw
from shardwright.clusters.cluster import Cluster
from shardwright.options.user_options import OPTION_HELP
from shardwright.plans.plan import TAKEN_OVER
from shardwright.user_plans import PipelinePlan
from tests.planner.pipeline import cases
from tests.planner.pipeline.planned import lower_text

DEVICES = 4


@cache
def lower(
    function: Callable[[jax.Array], jax.Array] = jnp.tanh,
    *,
    batch: int = 64,
    width: int = 32,
    name: str = "step",
    scale: float = 0.0,
) -> str:
    """A training step of three layers, with what a user changes in it."""

    def loss_of(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        for number, weight in enumerate(weights):
            x = function(x @ weight)
            x = x * scale if scale and number == 1 else x
        return jnp.square(x).mean()

    def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(weights, x)
        return [weight - 0.1 * gradient for weight, gradient in zip(weights, gradients, strict=True)], loss

    step.__name__ = name
    weights = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * 3
    types = weights, jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return jax.jit(step, donate_argnums=0).lower(*types).as_text("hlo", debug_info=True)


@cache
def earlier_plan() -> sw.Plan:
    plan = sw.plan(lower(), DEVICES, effort="fast", cache=False)
    assert isinstance(plan, sw.Plan)
    return plan


def run_again(text: str, plan: Any = None, devices: Any = DEVICES, **options: Any) -> Any:
    return sw.plan(text, devices, plan=plan or earlier_plan(), cache=False, **options)


def decisions(plan: sw.Plan) -> list[Any]:
    """What a plan decides, by the order of instructions rather than by name."""
    return [(entry.opcode, entry.operands, entry.result, entry.partial) for entry in plan.instructions]


def taken_over(plan: Any) -> str:
    (note,) = [note for note in plan.notes if note.startswith(TAKEN_OVER)]
    return str(note)


# ---- the same program ------------------------------------------------------------------


def test_the_same_program_runs_the_plan_as_it_is_without_a_search() -> None:
    phases: set[str] = set()
    plan = run_again(lower(), progress=lambda report: phases.add(report.phase))
    assert json.loads(plan.to_json()) | {"planning_s": 0} == json.loads(earlier_plan().to_json()) | {"planning_s": 0}
    assert not phases & {"rules", "search"}
    assert "sdy.mesh" in plan.emit()


def test_names_and_source_lines_make_no_other_program() -> None:
    plan = run_again(lower(name="training", scale=0.0))
    assert decisions(plan) == decisions(earlier_plan())
    assert plan.cost == earlier_plan().cost
    assert plan.module_name == "jit_training" or plan.original_sha256
    assert not any(note.startswith(TAKEN_OVER) for note in plan.notes)
    assert "sdy.mesh" in plan.emit()


@pytest.mark.parametrize("kind", ["plan", "path", "name", "text", "data", "older"])
def test_a_plan_comes_in_any_form(kind: str, tmp_path: Path) -> None:
    plan, path = earlier_plan(), tmp_path / "plan.json"
    path.write_text(plan.to_json(indent=1))
    data = plan.as_dict()
    older = {name: value for name, value in data.items() if name not in ("hlo_gzip_base64", "program_sha256")}
    sources: dict[str, Any] = {
        "plan": plan, "path": path, "name": str(path), "text": plan.to_json(), "data": data,
        "older": older | {"format": "1.7"},
    }  # fmt: skip
    assert decisions(run_again(lower(), sources[kind])) == decisions(plan)


def test_the_command_line_runs_a_plan_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from shardwright.cli import main

    (tmp_path / "step.hlo").write_text(lower(jnp.sin))
    (tmp_path / "plan.json").write_text(earlier_plan().to_json())
    command = ["plan", f"{tmp_path}/step.hlo", "--cluster", str(DEVICES), "--from", f"{tmp_path}/plan.json"]
    assert main([*command, "--out", f"{tmp_path}/new.json", "--no-cache"]) == 0
    said = capsys.readouterr().err
    assert TAKEN_OVER in said
    assert "sine" in said
    assert main([*command, "--mesh", "4"]) == 1
    assert "plan=" in capsys.readouterr().err


# ---- a changed program -----------------------------------------------------------------


def test_one_more_instruction_leaves_all_others_as_they_were() -> None:
    plan = run_again(lower(scale=1.5))
    assert re.search(r"decides of (\d+) of (\d+) instructions", taken_over(plan))
    assert "multiply" in taken_over(plan)
    assert "dot" not in taken_over(plan)
    dots = [entry for entry in plan.instructions if entry.opcode == "dot"]
    before = [entry for entry in earlier_plan().instructions if entry.opcode == "dot"]
    assert [(entry.operands, entry.result) for entry in dots] == [(entry.operands, entry.result) for entry in before]
    assert "no other was searched" in plan.cost.bound_scope


def test_another_function_is_named_and_what_is_gone_too() -> None:
    said = taken_over(run_again(lower(jnp.sin)))
    assert "sine" in said
    assert re.search(r"gone: .*tanh", said)


def test_another_batch_keeps_what_each_instruction_does() -> None:
    plan = run_again(lower(batch=256))
    assert "x.1, f32[256,32]" in taken_over(plan)
    assert decisions(plan) == decisions(earlier_plan())
    assert plan.memory.arguments_bytes > earlier_plan().memory.arguments_bytes


def test_what_an_axis_does_not_divide_any_more_is_searched() -> None:
    plan = run_again(lower(batch=6, width=3))
    assert "the others were searched" in taken_over(plan) or decisions(plan) == decisions(earlier_plan())
    assert plan.mesh == earlier_plan().mesh


def test_another_program_is_refused() -> None:
    other = jax.jit(lambda x: jnp.fft.fft(jnp.sort(jnp.cumsum(x, 0), 1)).real @ x)
    text = other.lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).as_text("hlo")
    with pytest.raises(sw.PlanError, match=r"of another program, jit_step: it says something of \d of \d+"):
        run_again(text)


# ---- another place -----------------------------------------------------------------------


def test_other_devices_are_refused_and_other_hardware_is_said() -> None:
    with pytest.raises(sw.PlanError, match=r"for 4 devices, over .*; there are 8"):
        run_again(lower(), devices=8)
    elsewhere = Cluster.from_json(
        '{"master": {"ip": "127.0.0.1", "port": 1, "gpu_ids": [0, 1, 2, 3], "hardware": "a100"}}'
    )
    plan = run_again(lower(), devices=elsewhere)
    assert "it was made for 'cpu'" in taken_over(plan)
    assert plan.hardware == "a100"
    assert decisions(plan) == decisions(earlier_plan())


def test_a_plan_that_needs_more_than_there_is_is_refused() -> None:
    with pytest.raises(sw.MemoryBudgetError, match=r"needs .* a device and may take 10"):
        run_again(lower(), memory_budget=10 << 10)


# ---- what is no plan, or says it twice ---------------------------------------------------


def test_a_damaged_plan_is_refused() -> None:
    data = earlier_plan().as_dict()
    (axis,) = {axis["name"] for axis in data["mesh"]} - {"no"} if len(data["mesh"]) == 1 else {data["mesh"][0]["name"]}
    wrong = json.loads(json.dumps(data))
    wrong["shardings"] = [
        {"dims": [[axis] if n == 0 else [] for n, _ in enumerate(each["dims"])]} for each in wrong["shardings"]
    ]
    with pytest.raises(sw.PlanError):
        run_again(lower(), wrong)
    with pytest.raises(sw.PlanError, match="do not set xla_dump_to"):
        run_again(lower(), data | {"compile_options": {"xla_dump_to": "/tmp/elsewhere"}})
    with pytest.raises(sw.PlanError, match=r"plan\.mesh"):
        run_again(lower(), data | {"mesh": 3})


OTHER_CHOICES: dict[str, Any] = {
    "mesh": "4", "force": "data", "rest": "replicated", "bucket": "25MB", "effort": "best", "rewrites": "none",
    "remat": "none", "fused_attention": "off", "offload": "none", "mode": "propagate", "simple": False, "stages": 2,
    "micro_batches": 2,
    "micro_batch_inexact": True, "schedule": "1f1b", "imbalance": 0.1, "background": True,
}  # fmt: skip


def test_every_other_choice_beside_a_plan_is_refused_by_name() -> None:
    assert OPTION_HELP.keys() == OTHER_CHOICES.keys() | {
        "plan",
        "memory_budget",
        "deadline",
        "constraints",
        "expert_capacity",
    }
    for name, value in OTHER_CHOICES.items():
        with pytest.raises(sw.OptionError, match=f"^{name}: .*plan=|^force: .*plan="):
            run_again(lower(), **{name: value})


def test_a_plan_given_as_force_is_told_of_plan_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(earlier_plan().to_json())
    for force in (earlier_plan(), path, str(path), earlier_plan().to_json(), earlier_plan().as_dict()):
        with pytest.raises(sw.OptionError, match="plan=") as caught:
            sw.plan(lower(), DEVICES, force=force, cache=False)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 160
    with pytest.raises(sw.OptionError, match="plan=") as caught:
        sw.strategies.load(path)
    assert "\n" not in str(caught.value)
    with pytest.raises(sw.OptionError, match="int is no plan"):
        run_again(lower(), 3)
    with pytest.raises(sw.OptionError, match="cannot be read: No such file"):
        run_again(lower(), "gone.json")


# ---- pipelines -----------------------------------------------------------------------------


def test_a_pipeline_runs_again_and_keeps_its_shape_for_a_changed_program() -> None:
    text = lower_text(cases.mlp(4))[0]
    plan = sw.plan(text, 4, stages=2, micro_batches=4, schedule="gpipe", mesh="2", cache=False)
    assert isinstance(plan, PipelinePlan)
    again = run_again(text, plan)
    assert json.loads(again.to_json()) | {"planning_s": 0} == json.loads(plan.to_json()) | {"planning_s": 0}
    changed = text.replace("tanh(", "sine(")
    assert changed != text
    other = run_again(changed, plan)
    assert isinstance(other, PipelinePlan)
    assert (len(other.stages), other.micro_batches, other.schedule) == (2, 4, "gpipe")
    assert "sine" in taken_over(other)
    with pytest.raises(sw.PlanError, match="for 4 devices, in 2 stages"):
        run_again(text, plan, devices=2)
