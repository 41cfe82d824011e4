"""`shardwright run` on this machine, with real processes: output, exit codes, signals, and that nothing is left."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardwright.cli import main
from tests.launch.jobs import STUBBORN, launched, run_job

VARIABLES = ("SIZE", "RANK", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "GENERATION")


@pytest.mark.cluster
def test_ranks_know_their_place_and_lines_their_rank(tmp_path: Path) -> None:
    program = tmp_path / "show.py"
    program.write_text(
        "import json, os, sys\n"
        "print(json.dumps({k[12:]: v for k, v in os.environ.items() if k.startswith('SHARDWRIGHT_')}))\n"
        "print(sys.argv[1:], os.getcwd(), sys.executable, os.environ['GREETING'], file=sys.stderr)\n"
    )
    code, out, err = run_job(
        "-np", "3", "--env", "GREETING=hello you", "--output-dir", "logs", "--", "python", "show.py", "--", "--np", "9",
        folder=tmp_path,
    )  # fmt: skip
    assert code == 0, err
    shown = {line.split("<")[0]: json.loads(line.partition(":")[2]) for line in out.splitlines()}
    assert {rank: [data[name] for name in VARIABLES] for rank, data in shown.items()} == {
        f"[{rank}]": ["3", str(rank), str(rank), "3", "0", "1", "0"] for rank in range(3)
    }
    assert len({data["COORDINATOR"] for data in shown.values()}) == 1
    expected = f"['--', '--np', '9'] {tmp_path} {sys.executable} hello you"
    assert sorted(err.splitlines()) == [f"[{rank}]<stderr>:{expected}" for rank in range(3)]
    assert (tmp_path / "logs" / "rank.2.stderr").read_text() == expected + "\n"
    assert json.loads((tmp_path / "logs" / "rank.1.stdout").read_text())["RANK"] == "1"


@pytest.mark.cluster
def test_the_first_failure_ends_all_with_its_code() -> None:
    start = time.monotonic()
    script = f'if [ $SHARDWRIGHT_RANK = 1 ]; then echo failing; exec sh -c "exit 7"; fi; {STUBBORN}'
    with launched("-np", "3", "bash", "-c", script) as job:
        job.wait_for_line("failing")
        failed_s = time.monotonic()
        code, _, err = job.result()
        ended_s = time.monotonic()
        assert job.processes() == []
    assert code == 7
    assert ended_s - failed_s < 2.0, (ended_s - failed_s, failed_s - start)
    assert "localhost: rank 1 ended with exit code 7 after" in err
    assert "the other 2 were ended" in err


@pytest.mark.cluster
def test_a_rank_that_is_killed_gives_128_and_the_signal() -> None:
    code, _, err = run_job("-np", "2", "bash", "-c", "[ $SHARDWRIGHT_RANK = 0 ] && kill -KILL $$; sleep 60")
    assert code == 137
    assert "rank 0 ended with SIGKILL" in err


@pytest.mark.cluster
def test_the_last_lines_of_a_failing_rank_are_read() -> None:
    code, out, _ = run_job("-np", "2", "python", "-c", "import os; print('x' * 300_000, end=''); os._exit(3)")
    assert code == 3
    assert sorted(map(len, out.splitlines()))[-1] == 300_000 + len("[0]<stdout>:")


@pytest.mark.cluster
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_are_handed_on(number: signal.Signals) -> None:
    script = f"trap 'echo got; exit 0' {number.name[3:]}; echo ready; while :; do sleep 0.05; done"
    with launched("-np", "2", "bash", "-c", script) as job:
        job.wait_for_line("ready")
        job.wait_for_line("ready")
        job.process.send_signal(number)
        code, out, _ = job.result()
        assert job.processes() == []
    assert code == 128 + number
    assert sorted(out.splitlines()) == ["[0]<stdout>:got", "[1]<stdout>:got"]


@pytest.mark.cluster
def test_the_second_interrupt_kills() -> None:
    with launched("-np", "2", "--grace", "60", "bash", "-c", f"echo ready; {STUBBORN}") as job:
        job.wait_for_line("ready")
        job.wait_for_line("ready")
        job.process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            job.process.wait(0.5)
        job.process.send_signal(signal.SIGINT)
        assert job.result(5.0)[0] == 130
        assert job.processes() == []


@pytest.mark.cluster
def test_sigusr1_is_handed_on_and_ends_nothing() -> None:
    script = "trap 'count=1$count; echo got $count' USR1; echo ready; until [ \"$count\" = 11 ]; do sleep 0.05; done"
    with launched("-np", "1", "bash", "-c", script) as job:
        job.wait_for_line("ready")
        job.process.send_signal(signal.SIGUSR1)
        job.wait_for_line("got 1")
        job.process.send_signal(signal.SIGUSR1)
        assert job.result()[:2] == (0, "[0]<stdout>:got 11\n")


@pytest.mark.cluster
def test_a_killed_launcher_leaves_nothing_behind() -> None:
    with launched("-np", "3", "bash", "-c", f"setsid sleep 300 & echo ready; {STUBBORN}") as job:
        for _ in range(3):
            job.wait_for_line("ready")
        job.wait_for_processes(1 + 3 * 3)  # the agent; each rank, its child, and one in a session of its own
        job.process.kill()
        job.gone_after_s(3.0)


@pytest.mark.cluster
def test_a_killed_agent_leaves_no_rank_behind() -> None:
    with launched("-np", "2", "bash", "-c", "trap '' TERM; echo ready; while :; do sleep 0.1; done") as job:
        for _ in range(2):
            job.wait_for_line("ready")
        (agent,) = [process for process, names in job.environments().items() if "SHARDWRIGHT_RANK" not in names]
        agent.kill()
        code, _, err = job.result(10.0)
        job.gone_after_s(3.0)
    assert code == 1
    assert "localhost: python" in err
    assert "ended with SIGKILL" in err


@pytest.mark.cluster
def test_what_ranks_leave_running_ends_with_the_job() -> None:
    start = time.monotonic()
    code, out, _ = run_job("-np", "2", "bash", "-c", "setsid sleep 300 & sleep 300 & echo done")
    assert (code, sorted(out.splitlines())) == (0, ["[0]<stdout>:done", "[1]<stdout>:done"])
    assert time.monotonic() - start < 30


@pytest.mark.cluster
def test_a_reader_that_stops_ends_the_job() -> None:
    with launched("-np", "2", "bash", "-c", "while echo line; do :; done; sleep 300") as job:
        job.wait_for_line("line")
        assert job.process.stdout is not None
        job.process.stdout.close()
        assert job.process.wait(20) == 141
        job.gone_after_s(3.0)


@pytest.mark.cluster
def test_a_reader_that_stalls_does_not_keep_the_job_alive() -> None:
    """Standard output is full, as of a stopped terminal: exit codes come late, signals do not."""
    with launched("-np", "2", "--grace", "0.5", "bash", "-c", "while echo line; do :; done") as job:
        job.wait_for_line("line")
        time.sleep(1.0)
        job.process.send_signal(signal.SIGINT)
        assert job.process.wait(20) == 130
        job.gone_after_s(1.0)


@pytest.mark.cluster
def test_a_program_that_cannot_start_is_named(tmp_path: Path) -> None:
    program = tmp_path / "broken"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    code, _, err = run_job("-np", "2", str(program))
    assert (code, "rank 0 cannot be started" in err or "rank 1 cannot be started" in err) == (127, True)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("-np", "0", "true"), "error: -np: '0' is not a whole number"),
        (("true",), "error: -np: how many ranks?"),
        (("-np", "4", "-H", "a:1,b:2", "true"), "error: -np: 4 processes do not fit the 3 slots of a:1, b:2"),
        (("-np", "2"), "error: COMMAND: what shall run?"),
        (("-np", "2", "no-such-program"), "error: shardwright run: there is no program 'no-such-program'"),
    ],
)
def test_bad_values_name_their_flag(arguments: tuple[str, ...], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", *arguments]) == 1
    assert capsys.readouterr().err.startswith(named)


@pytest.mark.cluster
def test_a_config_file_is_enough(tmp_path: Path) -> None:
    (tmp_path / "run.yml").write_text("np: 2\nenv: {WORD: hello}\ncommand: [bash, -c, 'echo $WORD']\n")
    code, out, _ = run_job("--config", "run.yml", folder=tmp_path)
    assert (code, sorted(out.splitlines())) == (0, ["[0]<stdout>:hello", "[1]<stdout>:hello"])
    code, out, _ = run_job("--config", "run.yml", "-np", "1", "-x", "WORD=bye", folder=tmp_path)
    assert (code, out) == (0, "[0]<stdout>:bye\n")


def test_a_dry_run_shows_commands_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "hunter2")
    monkeypatch.setenv("XLA_FLAGS", "--xla_x")
    arguments = ["-np", "3", "-H", "localhost:1,far.invalid:2", "--coordinator-address", "10.0.0.1", "--dry-run"]
    variables = ["--env", "API_TOKEN=hunter2", "--env", "STORE=https://me:hunter2@store/x"]
    assert main(["run", *arguments, *variables, "python", "train.py"]) == 0
    out = capsys.readouterr().out
    assert "hunter2" not in out
    assert "host far.invalid: ssh " in out
    assert f"  rank 2: {sys.executable} train.py" in out.splitlines()
    for line in (
        "SHARDWRIGHT_COORDINATOR=10.0.0.1:PORT", "SHARDWRIGHT_LOCAL_RANK=1", "API_TOKEN='***'",
        "STORE='https://***@store/x'", "WANDB_API_KEY='***'  (as here)", "XLA_FLAGS=--xla_x  (as here)",
    ):  # fmt: skip
        assert f"    {line}" in out.splitlines()


@pytest.mark.cluster
def test_check_runs_the_doctor() -> None:
    code, out, _ = run_job("-H", "localhost", "--check")
    assert "[localhost]<stdout>:ok       python" in out
    assert code in (0, 3)  # of the doctor: this machine may lack memory
