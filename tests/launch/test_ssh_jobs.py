"""`shardwright run` over ssh, to a server on loopback: the same as on this machine, and nothing secret in `ps`."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.jobs import STUBBORN, launched, run_job
from tests.launch.programs import JOIN, ONE_DEVICE
from tests.launch.sshd import SshServer, needs_sshd, ssh_server

pytestmark = [needs_sshd, pytest.mark.cluster]

#: Two hosts; neither name is this machine's.
HOSTS = ("-np", "4", "-H", "far-a:2,far-b:2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    with ssh_server(tmp_path_factory.mktemp("sshd")) as running:
        yield running


def test_ranks_of_two_hosts(server: SshServer, tmp_path: Path) -> None:
    script = (
        'echo $SHARDWRIGHT_RANK $SHARDWRIGHT_LOCAL_RANK $SHARDWRIGHT_CROSS_RANK/$SHARDWRIGHT_CROSS_SIZE "$WORD" $PWD '
        "$MINE ${SHARDWRIGHT_COORDINATOR%:*}; echo $SSH_CONNECTION | wc -w >&2"
    )
    code, out, err = run_job(
        *HOSTS, *server.flags, "--env", "WORD=it's 1 \"word\"", "--output-dir", "logs", "bash", "-c", script,
        folder=tmp_path, environment={"MINE": "mine"},
    )  # fmt: skip
    assert code == 0, err
    said = f'it\'s 1 "word" {tmp_path} mine 127.0.0.1'
    assert sorted(out.splitlines()) == [
        f"[0]<stdout>:0 0 0/2 {said}", f"[1]<stdout>:1 1 0/2 {said}",
        f"[2]<stdout>:2 0 1/2 {said}", f"[3]<stdout>:3 1 1/2 {said}",
    ]  # fmt: skip
    assert sorted(err.splitlines()) == [f"[{rank}]<stderr>:4" for rank in range(4)]
    assert (tmp_path / "logs" / "rank.3.stderr").read_text() == "4\n"


def test_the_first_failure_ends_the_other_host(server: SshServer) -> None:
    script = f'if [ $SHARDWRIGHT_RANK = 3 ]; then sleep 0.5; echo failing; exec sh -c "exit 255"; fi; {STUBBORN}'
    with launched(*HOSTS, *server.flags, "bash", "-c", script) as job:
        job.wait_for_line("failing")
        failed_s = time.monotonic()
        code, _, err = job.result()
        assert time.monotonic() - failed_s < 3.0
        job.gone_after_s(0.5)
    assert code == 255
    assert "error: far-b: rank 3 ended with exit code 255" in err


def test_a_killed_launcher_leaves_nothing_on_other_hosts(server: SshServer) -> None:
    with launched(*HOSTS, *server.flags, "bash", "-c", f"setsid sleep 300 & echo ready; {STUBBORN}") as job:
        for _ in range(4):
            job.wait_for_line("ready")
        job.wait_for_processes(2 * 2 + 4 * 3)  # ssh and agent of each host; each rank and its children
        job.process.kill()
        job.gone_after_s(3.0)


def test_a_signal_reaches_other_hosts(server: SshServer) -> None:
    script = "trap 'echo got; exit 0' TERM; echo ready; while :; do sleep 0.05; done"
    with launched(*HOSTS, *server.flags, "bash", "-c", script) as job:
        for _ in range(4):
            job.wait_for_line("ready")
        job.process.send_signal(signal.SIGTERM)
        code, out, _ = job.result()
        job.gone_after_s(0.5)
    assert (code, out.count(">:got")) == (143, 4)


def test_a_connection_that_breaks_ends_the_job(server: SshServer) -> None:
    with launched(*HOSTS, *server.flags, "bash", "-c", f"echo ready; {STUBBORN}") as job:
        for _ in range(4):
            job.wait_for_line("ready")
        clients = [process for process in job.processes() if process.name() == "ssh"]
        assert len(clients) == 2
        clients[0].kill()
        code, _, err = job.result(10.0)
        job.gone_after_s(3.0)
    assert code == 1
    assert "ssh ended with SIGKILL; the other 2 were ended" in err


def test_nothing_of_the_job_is_in_the_process_list(server: SshServer) -> None:
    with launched(
        *HOSTS, *server.flags, "bash", "-c", "echo ready; sleep 60", environment={"WANDB_API_KEY": "hunter2"}
    ) as job:
        for _ in range(4):
            job.wait_for_line("ready")
        shown = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
        variables = list(job.environments().values())
    ranks = [
        each["SHARDWRIGHT_RANK"]
        for each in variables
        if each.get("WANDB_API_KEY") == "hunter2" and "SHARDWRIGHT_RANK" in each
    ]
    assert set(ranks) == {"0", "1", "2", "3"}
    assert "hunter2" not in shown
    assert "SHARDWRIGHT_RANK" not in shown


def test_a_wrong_port_gives_sshs_own_words(server: SshServer) -> None:
    flags = ["1" if word == str(server.port) else word for word in server.flags]
    code, out, err = run_job("-np", "1", "-H", "far", *flags, "echo", "never")
    assert (code, out) == (1, "")
    assert "error: far: ssh ended with exit code 255: ssh: connect to host 127.0.0.1 port 1: Connection refused" in err


def test_an_unknown_host_key_is_refused(server: SshServer, tmp_path: Path) -> None:
    flags = [word.replace(str(server.folder / "known_hosts"), str(tmp_path / "none")) for word in server.flags]
    code, _, err = run_job("-np", "1", "-H", "far", *flags, "echo", "never")
    assert code == 1
    assert "Host key verification failed" in err
    assert "remedy: log in once by hand, and compare the key: ssh far" in err


def test_a_key_that_is_not_accepted_asks_for_no_password(server: SshServer, tmp_path: Path) -> None:
    other = tmp_path / "other"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(other)], check=True)
    flags = [word.replace(str(server.folder / "user_key"), str(other)) for word in server.flags]
    code, _, err = run_job("-np", "1", "-H", "far", *flags, "echo", "never")
    assert (code, "Permission denied (publickey" in err, "--ssh-identity" in err) == (1, True, True)


def test_a_host_that_does_not_answer_is_given_up(server: SshServer, tmp_path: Path) -> None:
    start = time.monotonic()
    flags = [*server.flags, "--ssh-option", "ProxyCommand=sleep 60"]
    code, _, err = run_job("-np", "1", "-H", "far", *flags, "--start-timeout", "1.5", "echo", "never")
    assert (code, "far: no answer within 1.5 s" in err or "timed out" in err) == (1, True), err
    assert time.monotonic() - start < 15


def test_a_chatty_login_shell_does_no_harm(server: SshServer) -> None:
    startup = server.folder / ".bashrc"
    startup.write_text("echo welcome; echo '{}'; echo motd >&2; touch ~/sourced\n")
    try:
        code, out, _ = run_job("-np", "1", "-H", "far", *server.flags, "echo", "hello")
    finally:
        startup.unlink()
    if not (server.folder / "sourced").exists():
        pytest.skip("the login shell reads no .bashrc")
    assert (code, out) == (0, "[0]<stdout>:hello\n")


def test_a_launcher_killed_at_any_moment_leaves_nothing(server: SshServer) -> None:
    moments = random.Random(0)
    for _ in range(10):
        with launched(
            "-np", "3", "-H", "localhost,far-a,far-b", *server.flags, "bash", "-c", f"setsid sleep 300 & {STUBBORN}"
        ) as job:
            time.sleep(moments.uniform(0.2, 2.0))
            job.process.kill()
            job.gone_after_s(5.0)


def test_check_runs_the_doctor_on_every_host(server: SshServer) -> None:
    code, out, _ = run_job("-H", "far-a:2,far-b:2", *server.flags, "--check")
    assert code in (0, 3)
    for host in ("far-a", "far-b"):
        assert f"[{host}]<stdout>:ok       python" in out


def test_ranks_here_and_there(server: SshServer) -> None:
    code, out, _ = run_job(
        "-np", "2", "-H", "localhost:1,far:1", *server.flags, "python", "-c", "import sys; print(sys.executable)"
    )
    assert (code, sorted(out.splitlines())) == (0, [f"[{rank}]<stdout>:{sys.executable}" for rank in range(2)])


def test_jax_on_two_hosts(server: SshServer, tmp_path: Path) -> None:
    (tmp_path / "join.py").write_text(JOIN)
    code, out, err = run_job(
        "-np", "2", "-H", "far-a,far-b", *server.flags, "python", "join.py", folder=tmp_path, environment=ONE_DEVICE
    )
    assert (code, out.count("sum 3.0")) == (0, 2), err
