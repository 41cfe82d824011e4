"""What a host cannot start is said in words; jobs made by hand, without the command line."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from shardwright.launch.hosts import Host
from shardwright.launch.job import Job, ProcessSpec
from shardwright.launch.launcher import RunOptions, failure_of, run_job
from shardwright.launch.supervision import Finish, NodeLost, ProcessEnded


def run(command: tuple[str, ...], directory: Path) -> tuple[Finish, str, list[bytes]]:
    """The outcome of one process here, the words about its failure, and what it wrote."""
    taken: list[bytes] = []
    process = ProcessSpec(number=0, kind="rank", label="0", host=Host(name="localhost"), command=command)
    job = Job(processes=(process,), directory=str(directory))
    outcome = run_job(job, RunOptions(sinks={"stdout": taken.append, "stderr": taken.append}))
    return outcome, str(failure_of(job, outcome) or ""), taken


def test_a_folder_that_the_host_lacks_is_named(tmp_path: Path) -> None:
    outcome, words, taken = run(("true",), tmp_path / "gone")
    assert (outcome.exit_code, taken) == (127, [])
    assert f"rank 0 cannot be started: [Errno 2] No such file or directory: '{tmp_path / 'gone'}'" in words


def test_a_program_that_the_host_lacks_is_named(tmp_path: Path) -> None:
    outcome, words, _ = run((str(tmp_path / "python"),), tmp_path)
    assert outcome.exit_code == 127
    assert str(tmp_path / "python") in words
    assert "remedy: program and folder have to be on every host, at the same paths" in words


def test_a_file_that_is_no_program_is_named(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    outcome, words, _ = run((str(tmp_path / "text"),), tmp_path)
    assert outcome.exit_code == 126
    assert "Permission denied" in words


def test_descriptors_of_the_launcher_are_not_inherited(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.set_inheritable(writer, True)
    outcome, _, taken = run((sys.executable, "-c", "import os; print(sorted(os.listdir('/dev/fd'))[:-1])"), tmp_path)
    os.close(reader)
    os.close(writer)
    assert (outcome, taken) == (Finish(exit_code=0), [b"[0]<stdout>:['0', '1', '2']\n"])


def test_a_job_that_ended_well_has_no_failure(tmp_path: Path) -> None:
    assert run(("/bin/sh", "-c", "exit 0"), tmp_path)[:2] == (Finish(exit_code=0), "")


def test_a_negative_code_is_a_signal(tmp_path: Path) -> None:
    outcome, words, _ = run(("/bin/sh", "-c", "kill -SEGV $$"), tmp_path)
    assert (outcome.exit_code, outcome.failure) == (139, ProcessEnded(0, -11))
    assert "rank 0 ended with SIGSEGV after" in words


def test_the_first_to_end_is_the_first_to_be_named(tmp_path: Path) -> None:
    """Rank 0 fails first, but what it left behind holds its output open."""
    host = Host(name="localhost")
    scripts = ("setsid sleep 60 & exit 3", "sleep 0.15; exit 4")
    processes = [
        ProcessSpec(number=number, kind="rank", label=str(number), host=host, command=("/bin/bash", "-c", script))
        for number, script in enumerate(scripts)
    ]
    sinks = {"stdout": lambda data: None, "stderr": lambda data: None}
    outcome = run_job(Job(processes=tuple(processes), directory=str(tmp_path)), RunOptions(sinks=sinks))
    assert outcome.failure == ProcessEnded(0, 3)


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("ssh ended with exit code 127: bash: /x/python: No such file", f"{sys.executable} has to be on every host"),
        ("ssh ended with exit code 255: Host key verification failed.", "compare the key: ssh far"),
        ("ssh ended with exit code 255: me@far: Permission denied (publickey).", "--ssh-identity"),
        ("no answer within 30 s", "try: ssh -o BatchMode=yes far true"),
    ],
)
def test_a_lost_host_gets_a_remedy(reason: str, remedy: str) -> None:
    job = Job(processes=(), directory="/")
    failure = failure_of(job, Finish(exit_code=1, failure=NodeLost("far", reason)))
    assert failure is not None
    assert (failure.where, failure.message) == ("far", reason)
    assert remedy in failure.remedy
