"""The commands as a user runs them: output, files, and exit codes."""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shardwright
from shardwright import connect
from shardwright.cli import main
from shardwright.cli.app import build_parser
from shardwright.cli.doctor import Finding, _satisfies, _split_requirement
from shardwright.client.embedded import EmbeddedServer
from shardwright.xla import canonical_hlo

MODULE = """
import jax, jax.numpy as jnp

def step(w, x):
    loss, g = jax.value_and_grad(lambda w: jnp.square(x @ w).mean())(w)
    return w - 0.1 * g, loss

def arguments():
    return jax.ShapeDtypeStruct((16, 8), "float32"), jax.ShapeDtypeStruct((64, 16), "float32")

def not_a_tuple():
    return [1]

def moved(x, mode):
    return x - 1 if mode == "down" else x + 1

def downward():
    return jax.ShapeDtypeStruct((4,), "float32"), "down"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a user's module, as current folder."""
    monkeypatch.chdir(tmp_path)
    sys.modules.pop("usermodel", None)
    (tmp_path / "usermodel.py").write_text(MODULE)
    folders = [*sys.path]
    yield tmp_path
    sys.path[:] = folders  # a command adds its own


@pytest.fixture
def step_hlo(project: Path) -> Path:
    assert (
        main(["lower", "usermodel:step", "--args", "f32[16,8] f32[64,16]", "--donate", "0", "--out", "step.hlo"]) == 0
    )
    return project / "step.hlo"


def output(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_lower_takes_names_of_arguments(project: Path) -> None:
    example = ["--example", "usermodel:downward", "--static", "mode", "--donate", "x", "--out", "moved.hlo"]
    assert main(["lower", "usermodel:moved", *example]) == 0
    text = Path("moved.hlo").read_text()
    assert "subtract" in text
    assert "input_output_alias" in text.splitlines()[0]


def test_lower_writes_hlo_that_xla_reads(step_hlo: Path) -> None:
    text = step_hlo.read_text()
    assert "input_output_alias={ {0}: (0" in text
    assert "usermodel.py" in text  # source lines, for messages
    assert canonical_hlo(text)


def test_lower_by_example_for_another_platform(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "lower",
        "usermodel:step",
        "--example",
        "usermodel:arguments",
        "--platform",
        "cuda",
        "--hardware",
        "a100",
        "--json",
    ]
    assert main(command) == 0
    summary = output(capsys)
    assert [argument["name"] for argument in summary["arguments"]] == ["w", "x"]
    assert summary["outputs"][0] == {"name": "result[0]", "type": "f32", "shape": [16, 8]}
    assert summary["platform"] == "cuda"


def test_lower_refuses_an_example_that_is_no_tuple(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lower", "usermodel:step", "--example", "usermodel:not_a_tuple"]) == 1
    assert "returned list, not a tuple" in capsys.readouterr().err


def test_checkpoints_lists_a_directory_and_one_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path) as manager:
        for step in (2, 10):
            manager.save(step, args=ocp.args.StandardSave({"params": {"w": np.ones((300, 20), np.float32)}, "n": 3}))
    assert main(["checkpoints", str(tmp_path), "--json"]) == 0
    facts = output(capsys)
    assert [entry["step"] for entry in facts] == [2, 10]
    assert facts[0]["array_count"] == 2
    assert main(["checkpoints", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["step", "saved", "arrays", "size"]
    assert lines[-1].split()[0] == "10"
    assert main(["checkpoints", str(tmp_path), "--step", "10"]) == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.split() == ["params.w", "f32[300,", "20]", "23.4", "KiB"]
    assert main(["checkpoints", str(tmp_path / "nowhere")]) == 1
    assert "no complete checkpoint" in capsys.readouterr().err


def test_plan_writes_plan_and_stablehlo(step_hlo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "step.hlo", "--cluster", "8", "--mesh", "2x4", "--out", "plan.json", "--emit", "step.mlir"]
    assert main(command) == 0
    assert capsys.readouterr().out == ""
    plan = json.loads(Path("plan.json").read_text())
    assert [axis["size"] for axis in plan["mesh"]] == [2, 4]
    assert "sdy.mesh" in Path("step.mlir").read_text()


def test_plan_json_is_the_plan_file(step_hlo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "step.hlo", "--cluster", "8", "--force", "data", "--out", "plan.json", "--json"]) == 0
    printed = output(capsys)
    assert printed == json.loads(Path("plan.json").read_text())
    assert main(["explain", "plan.json", "--json"]) == 0
    assert output(capsys) == printed


def test_plan_explains_by_default(step_hlo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["plan", "step.hlo", "--cluster", "8", "--mesh", "data=8", "--force", "data"]
    assert main(command) == 0
    explained = capsys.readouterr().out
    for words in ("data=8", "forced: data", "Collectives", "memory per device"):
        assert words in explained
    assert main([*command, "--out", "p.json", "--explain"]) == 0
    explained = capsys.readouterr().out
    assert main(["explain", "p.json"]) == 0
    assert capsys.readouterr().out == explained


def test_explain_refuses_another_program(step_hlo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "step.hlo", "--cluster", "8", "--out", "plan.json"]) == 0
    assert main(["explain", "plan.json", "--hlo", "step.hlo", "--emit", "-"]) == 0
    assert "sdy.mesh" in capsys.readouterr().out
    Path("other.hlo").write_text(step_hlo.read_text().replace("0.1", "0.2"))
    assert main(["explain", "plan.json", "--hlo", "other.hlo"]) == 1
    assert "not the program" in capsys.readouterr().err
    Path("cut.hlo").write_text(step_hlo.read_text().rstrip().rstrip("}"))
    for command in (["explain", "plan.json", "--hlo", "cut.hlo"], ["verify", "plan.json", "--hlo", "cut.hlo"]):
        assert main(command) == 1
        assert re.search(r"cut.hlo:\d+:1: the text ends here: expected an instruction", capsys.readouterr().err)
    assert main(["explain", "plan.json", "--emit", "out.mlir"]) == 0, "a plan brings its program along"
    plan = json.loads(Path("plan.json").read_text())
    del plan["hlo_gzip_base64"]
    Path("bare.json").write_text(json.dumps(plan))
    assert main(["explain", "bare.json", "--emit", "out.mlir"]) == 1
    assert "--hlo FILE" in capsys.readouterr().err


def test_verify_holds_a_plan_against_xlas_program(step_hlo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "step.hlo", "--cluster", "8", "--force", "data", "--out", "plan.json"]) == 0
    command = ["verify", "plan.json", "--hlo", "step.hlo"]
    assert main(command) == 0
    text = capsys.readouterr().out
    assert "has the predicted collectives" in text
    assert "gradient of w" in text
    plan = json.loads(Path("plan.json").read_text())
    plan["collectives"] = [each for each in plan["collectives"] if "gradient" not in each["cause"]]
    Path("plan.json").write_text(json.dumps(plan))
    assert main([*command, "--json"]) == 3
    proof = output(capsys)
    (extra,) = [line for line in proof["lines"] if line["status"] != "agrees"]
    assert (extra["kind"], extra["status"], extra["observed_count"]) == ("all-reduce", "not in the plan", 1)
    assert extra["where"].startswith("usermodel.py:")
    assert main([*command, "--tolerance", "-1"]) == 1
    assert "--tolerance" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["plan", "none.hlo", "--cluster", "8"], ("none.hlo", "cannot be read")),
        (["plan", "usermodel.py", "--cluster", "8"], ("usermodel.py:2:1",)),
        (["plan", "step.hlo", "--cluster", "none.json"], ("none.json", "does not exist")),
        (["plan", "step.hlo", "--cluster", "8", "--mesh", "3x2"], ("mesh", "8")),
        (["plan", "step.hlo", "--cluster", "8", "--force", "nosuch=0:data"], ("nosuch",)),
        (["plan", "step.hlo", "--cluster", "8", "--out", "no/such/folder"], ("no/such/folder", "cannot be written")),
        (["explain", "step.hlo"], ("JSON",)),
        (["serve", "--devices", "8", "--port", "0"], ("--port", "out of range")),
    ],
)
def test_failures_are_one_block_and_exit_code_1(
    step_hlo: Path, capsys: pytest.CaptureFixture[str], command: list[str], words: tuple[str, ...]
) -> None:
    assert main(command) == 1
    message = capsys.readouterr().err.split("HLO text: step.hlo\n")[-1]
    assert message.startswith("error: ")
    assert "Traceback" not in message
    for word in words:
        assert word in message


@pytest.mark.parametrize("command", [[], ["plan"], ["plan", "x"], ["nosuch"], ["serve"], ["serve", "c.json"]])
def test_wrong_usage_exits_2(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(command)
    assert exit_.value.code == 2
    assert "usage: shardwright" in capsys.readouterr().err


def test_a_function_is_no_program_file(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "usermodel:step", "--cluster", "4"]) == 1
    assert "lower the function first: shardwright lower usermodel:step --args" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "lower", "explain", "verify", "serve", "doctor"])
def test_help_has_examples_and_exit_codes(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, "--help"])
    assert exit_.value.code == 0
    text = capsys.readouterr().out
    assert f"examples:\n  shardwright {command}" in text
    assert "exit codes:" in text


def doctor(capsys: pytest.CaptureFixture[str], cluster: str) -> tuple[int, dict[str, Any]]:
    """Exit code and findings by name."""
    code = main(["doctor", "--cluster", cluster, "--json"])
    report = output(capsys)
    assert code == (0 if report["ok"] else 3)
    return code, {finding["name"]: finding for finding in report["findings"]}


@pytest.mark.dear
def test_doctor_reports_versions_devices_and_free_ports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, findings = doctor(capsys, "1")
    assert findings["jax"]["ok"]
    assert findings["jaxlib internals"]["ok"]
    assert "cpu" in findings["devices"]["detail"].lower()


@pytest.mark.dear
def test_doctor_knows_the_requirements_of_sources_that_run_in_place(tmp_path: Path) -> None:
    """As `launch_worker.sh` runs them: their packages are installed, they themselves are not."""
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if "shardwright" not in entry.name:
            (tmp_path / entry.name).symlink_to(entry)
    sources = Path(shardwright.__file__).parents[1]

    def run(*arguments: str) -> str:
        command = [sys.executable, "-S", "-m", "shardwright", *arguments]
        environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{sources}"}
        return subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False).stdout

    assert run("--version") == f"shardwright {shardwright.__version__}\n"
    names = {finding["name"] for finding in json.loads(run("doctor", "--json"))["findings"]}
    assert {"jax", "grpcio", "extra [torch]"} <= names


@pytest.mark.dear
def test_doctor_names_a_stranger_on_the_port(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.json"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        nodes = {"master": {"ip": "127.0.0.1", "port": port}, "workers": [{"ip": "127.0.0.2", "port": port}]}
        path.write_text(json.dumps(nodes))
        code, findings = doctor(capsys, str(path))
    assert code == 3
    assert "something listens, but not as the file says" in findings[f"task 0 127.0.0.1:{port}"]["detail"]
    assert "port free" in findings[f"task 1 127.0.0.2:{port}"]["detail"]
    _, findings = doctor(capsys, str(path))
    assert "port free" in findings[f"task 0 127.0.0.1:{port}"]["detail"]


@pytest.mark.cluster
def test_doctor_asks_the_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = EmbeddedServer(1)
    try:
        host, port = server.address.rsplit(":", 1)
        path = tmp_path / "c.json"
        path.write_text(json.dumps({"master": {"ip": host, "port": int(port)}, "security": {"token": server.token}}))
        path.chmod(0o600)
        with connect(server.address, token=server.token):  # answered once the executors are there
            _, findings = doctor(capsys, str(path))
    finally:
        server.close()
    assert "ready (task 0 ready), 1 sessions" in findings[f"task 0 {host}:{port}"]["detail"]


def test_doctor_reads_requirements() -> None:
    assert _split_requirement("pulp<4,>=3.0") == ("pulp", [("<", "4"), (">=", "3.0")])
    assert _satisfies("3.3.2", "<", "4")
    assert not _satisfies("4.0", "<", "4")
    assert not _satisfies("0.9.9", ">=", "0.10.2")
    assert Finding(name="x", ok=True, detail="y").remedy == ""


def test_a_closed_pipe_is_no_traceback(project: Path) -> None:
    script = f"{sys.executable} -m shardwright.cli lower usermodel:step --example usermodel:arguments | head -1"
    child = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert child.stdout.startswith("HloModule")
    assert child.stderr == ""


@pytest.mark.cluster
def test_serve_runs_a_server_without_a_cluster_file() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "shardwright.cli", "serve", "--devices", "2", "--port", str(port)]
    command += ["--grace", "17", "--session-memory", "1GB"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = next(line for line in server.stderr if "cluster ready" in line)
        assert "1 × 2 devices" in line
        with connect(f"127.0.0.1:{port}") as session:
            assert session.info.device_count == 2
            assert session.info.grace_s == 17
        server.terminate()
    assert server.returncode == 0


WRONG = [
    (["plan", "cut.hlo", "--cluster", "8"], "cut.hlo:", "give the whole text of a module, as XLA prints it"),
    (["plan", "step.hlo", "--cluster", "-1"], "-1 is no number of devices", "give a whole number from 1"),
    (["plan", "step.hlo", "--cluster", "8", "--mesh", "0x8"], "has size 0", "give integers from 1"),
    (["explain", "list.json"], "list.json: plan: expected an object", "`shardwright plan --out` wrote"),
    (["verify", "step.hlo", "--hlo", "step.hlo"], "step.hlo: plan: not JSON", "`shardwright plan --out` wrote"),
    (["verify", "list.json", "--tolerance", "nan"], "nan is no part", "such as 0.02"),
    (["verify", "list.json", "--deadline", "0"], "a deadline of 0.0", "more than 0"),
    (["lower", "usermodel:step", "--args", "f32[2]"], "usermodel:step raised TypeError", "--debug"),
    (["lower", "usermodel:step", "--args", "f32[2,3] f32[4,5]"], "usermodel.py:5: usermodel:step raised", "--debug"),
    (["lower", "usermodel:step", "--example", "usermodel:step"], "usermodel:step raised TypeError", "--debug"),
    (["lower", "usermodel:step", "--args", "f64[8,8] f32[8,8]"], "would compute f64 as f32", "JAX_ENABLE_X64"),
    (["lower", "usermodel:step", "--args", "f32[8,8] f32[8,8]", "--donate", "2"], "so 2 names none", "from 0 to 1"),
]


@pytest.mark.parametrize(("command", "what", "remedy"), WRONG, ids=[" ".join(command) for command, _, _ in WRONG])
def test_wrong_input_is_told_what_where_and_what_to_do(
    step_hlo: Path, capsys: pytest.CaptureFixture[str], command: list[str], what: str, remedy: str
) -> None:
    Path("cut.hlo").write_text(step_hlo.read_text()[:700])
    Path("list.json").write_text("[]")
    capsys.readouterr()
    assert main(command) == 1
    message, _, remedies = capsys.readouterr().err.partition("\n  remedy: ")
    assert what in message
    assert remedy in remedies


@pytest.mark.parametrize(
    ("command", "problem", "meant"),
    [
        (["pln", "x"], "'pln' is not one of plan, lower", "'plan'"),
        (["plan", "x", "--clutser", "8"], "unknown option --clutser", "'--cluster'"),
        (["plan", "x", "--cluster", "8", "--effort", "fst"], "'fst' is not one of fast, default, best", "'fast'"),
        (["status", "--jsn"], "unknown option --jsn", "'--json'"),
        (["run", "-np", "2", "--grrace", "3", "--", "true"], "unknown option --grrace", "'--grace'"),
        (["--verison"], "unknown option --verison", "'--version'"),
        (["serve", "--grce", "3"], "unknown option --grce", "'--grace'"),
    ],
)
def test_mistakes_of_spelling_are_named(
    command: list[str], problem: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(command)
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert problem in said
    assert f"did you mean {meant}?" in said


def test_a_strategy_that_is_not_there_is_named(step_hlo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(step_hlo), "--cluster", "8", "--force", "Paralax"]) == 1
    assert "did you mean 'Parallax'?" in capsys.readouterr().err


def list_typed_options() -> list[tuple[str, str]]:
    """(command, option) of everything that reads its value."""
    (commands,) = [action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)]
    return [
        (name, action.option_strings[-1])
        for name, parser in commands.choices.items()
        for action in parser._actions
        if action.type is not None and action.option_strings
    ]


@pytest.mark.parametrize(("command", "option"), list_typed_options())
def test_wrong_values_are_refused_without_names_of_functions(
    command: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        build_parser().parse_args([command, option, "no value://"])
    assert exit_.value.code == 2
    said = capsys.readouterr().err
    assert option in said
    assert not re.search(r"invalid|\b_[a-z]|what it takes", said), said
