"""What the commands do with the plan of a pipeline."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from shardwright.cli import main
from shardwright.clusters.cluster import Cluster
from shardwright.hlo import parse
from shardwright.options.plan_options import PlanOptions
from shardwright.planner.pipeline import PipelineSpec, StageGroup, make_pipeline
from shardwright.plans.pipeline_plan import PipelinePlan
from shardwright.plans.plan_text import plan_to_json
from shardwright.plans.shardings import Mesh


@pytest.fixture(scope="module")
def plan() -> PipelinePlan:
    """Two layers on two stages of two devices, two micro-batches."""

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for number, w in enumerate(params):
            with jax.named_scope(f"chunk{number}"):
                x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, x)
        return [w - 0.1 * g for w, g in zip(params, gradients, strict=True)], value

    shapes = [jax.ShapeDtypeStruct((8, 8), jnp.float32)] * 2
    lowered = jax.jit(step, keep_unused=True).lower(shapes, jax.ShapeDtypeStruct((4, 8), jnp.float32))
    text = lowered.as_text("hlo", debug_info=True)
    module = parse(text)
    chunk_of = {each.name: int("chunk1" in each.op_name) for each in module.entry if "chunk" in each.op_name}
    choice = PipelineSpec(
        module=module,
        groups=(StageGroup(first_device=0, mesh=Mesh.of({"x": 2})), StageGroup(first_device=2, mesh=Mesh.of({"x": 2}))),
        chunk_of=chunk_of,
        micro_batches=2,
        schedule="1f1b",
    )
    return make_pipeline(text, Cluster.local(4), PlanOptions(), choice)


@pytest.fixture
def file(plan: PipelinePlan, tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(plan))
    return str(path)


@pytest.mark.dear
def test_verify_holds_every_program_against_xlas(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", file, "--json"]) == 0
    proofs = json.loads(capsys.readouterr().out)
    names = [each["name"] for each in json.loads(Path(file).read_text())["programs"]]
    assert proofs["holds"]
    assert list(proofs["programs"]) == names
    pipeline = json.loads(Path(file).read_text())
    foreseen = {
        "kind": "all-reduce", "axes": ["x"], "instruction": "a", "cause": "", "payload_bytes": 1024, "wire_bytes": 1024,
        "count": 1, "time_s": 0.0,
    }  # fmt: skip
    pipeline["programs"][-1]["plan"]["collectives"].append(foreseen)
    Path(file).write_text(json.dumps(pipeline))
    assert main(["verify", file]) == 3
    text = capsys.readouterr().out
    assert f"{names[0]}: XLA's program of" in text
    assert "not in the program" in text.partition(f"{names[-1]}: ")[2]


def test_verify_needs_the_text_of_one_program(
    plan: PipelinePlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "program.json"
    path.write_text(plan_to_json(replace(plan.programs[0].plan, hlo_text=None)))
    assert main(["verify", str(path)]) == 1
    assert "--hlo" in capsys.readouterr().err


def test_explain_shows_the_schedule(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", file]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line.strip().startswith("stage ")]
    assert [row[:2] for row in rows if row[1] in "01"] == [["stage", "0"], ["stage", "1"]]


def test_trace_has_a_track_for_every_device(file: str, plan: PipelinePlan, tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    assert main(["explain", file, "--trace", str(out)]) == 0
    trace = json.loads(out.read_text())
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert {f"device {device} (stage {device // 2})" for device in range(4)} <= names
    assert "stage 0 → stage 1" in names
    done = {event["name"] for event in trace["traceEvents"] if event["ph"] == "X"}
    assert {f"{program.name} of micro-batch 1" for program in plan.programs if program.kind == "backward"} <= done
    assert trace["otherData"]["predicted_step_s"] == pytest.approx(plan.step_s)


def test_emit_writes_every_program_and_the_task_graph(file: str, plan: PipelinePlan, tmp_path: Path) -> None:
    out = tmp_path / "stages"
    assert main(["explain", file, "--emit", str(out)]) == 0
    assert {path.stem for path in out.glob("*.mlir")} == {program.name for program in plan.programs}
    assert all("sdy.mesh" in path.read_text() for path in out.glob("*.mlir"))
    assert (out / "tasks.dot").read_text() == plan.tasks.to_dot()


def test_a_file_in_the_place_of_the_folder_is_refused(file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", file, "--emit", file]) == 1
    assert "cannot be made a folder" in capsys.readouterr().err


def test_a_plan_of_one_program_has_a_trace_too(tmp_path: Path) -> None:
    text = jax.jit(lambda x: jnp.tanh(x) * 2).lower(jax.ShapeDtypeStruct((8, 8), jnp.float32)).as_text("hlo")
    (tmp_path / "step.hlo").write_text(text)
    out = tmp_path / "trace.json"
    assert main(["plan", str(tmp_path / "step.hlo"), "--cluster", "2", "--trace", str(out)]) == 0
    trace = json.loads(out.read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [event["tid"] for event in spans] == [0, 1]
    assert spans[0]["dur"] == pytest.approx(trace["otherData"]["predicted_step_s"] * 1e6, abs=1e-3)
