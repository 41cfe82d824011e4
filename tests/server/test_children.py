"""Planner, compiler and executor are children that may die: the session gets a typed error, the server lives on."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from shardwright.errors import CompilationAbortedError, InternalError, PlanError, ShardwrightError
from shardwright.options.plan_options import PlanOptions
from shardwright.server.worker.child import ExecutorChild
from shardwright.server.worker.state import ChildExited, StartRequested
from tests.server.programs import training_step
from tests.server.raw_client import RawClient, Server, command_of, embedded, wait_until


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Server, RawClient]]:
    yield from embedded(2)


def children(server: Server, module: str) -> list[psutil.Process]:
    return [child for child in server.family() if module in command_of(child)]


def errors_when_killed(child: psutil.Process, ask: Callable[[], object]) -> list[ShardwrightError]:
    """What `ask` raises where `child` dies before it can answer."""
    errors: list[ShardwrightError] = []

    def work() -> None:
        try:
            ask()
        except ShardwrightError as error:
            errors.append(error)

    child.suspend()
    asking = threading.Thread(target=work)
    asking.start()
    asking.join(0.5)
    child.kill()
    asking.join(20)
    return errors


def errors_when_all_are_killed(server: Server, module: str, ask: Callable[[], object]) -> list[ShardwrightError]:
    """What `ask` raises where every child of this kind is killed as soon as it is there."""
    errors: list[ShardwrightError] = []
    is_done = threading.Event()

    def work() -> None:
        try:
            ask()
        except ShardwrightError as error:
            errors.append(error)
        is_done.set()

    for child in children(server, module):
        child.suspend()
    asking = threading.Thread(target=work)
    asking.start()
    while not is_done.wait(0.05):
        for child in children(server, module):
            child.kill()
    asking.join()
    return errors


@pytest.mark.cluster
def test_a_planner_that_is_killed_once_is_asked_again(running: tuple[Server, RawClient]) -> None:
    server, client = running
    program = client.upload(training_step())
    wait_until(lambda: children(server, "planner_child"))
    (planner,) = children(server, "planner_child")
    assert not errors_when_killed(planner, lambda: client.plan(program, PlanOptions(mesh={"twice": 2})))


@pytest.mark.cluster
def test_a_planner_that_is_killed_again_is_an_error_that_speaks_of_memory(running: tuple[Server, RawClient]) -> None:
    server, client = running
    program = client.upload(training_step())
    (error,) = errors_when_all_are_killed(server, "planner_child", lambda: client.plan(program, PlanOptions(stages=1)))
    assert isinstance(error, PlanError)
    assert not isinstance(error, InternalError)
    assert "SIGKILL" in error.message
    assert "memory" in error.remedy
    client.plan(program)


@pytest.mark.cluster
def test_a_session_does_not_expire_while_it_waits_for_a_plan() -> None:
    text = training_step()  # takes longer than the grace
    for server, client in embedded(2, "--grace", "1"):
        program = client.upload(text)
        wait_until(lambda server=server: children(server, "planner_child"))
        (planner,) = children(server, "planner_child")
        planner.suspend()
        wake = threading.Timer(3.0, planner.resume)
        wake.start()
        assert client.plan(program)[0]
        wake.join()


@pytest.mark.cluster
def test_a_compiler_that_is_killed_once_is_asked_again(running: tuple[Server, RawClient]) -> None:
    server, client = running
    program = client.upload(training_step())
    client.load(client.plan(program, PlanOptions(mesh={"data": 2}))[0])
    plan_id, _ = client.plan(program, PlanOptions(mesh={"other": 2}))
    (compiler,) = children(server, "compile_child")
    assert not errors_when_killed(compiler, lambda: client.load(plan_id))


@pytest.mark.cluster
def test_a_compiler_that_is_killed_again_is_an_error_that_speaks_of_memory(running: tuple[Server, RawClient]) -> None:
    server, client = running
    program = client.upload(training_step())
    plan_id, _ = client.plan(program, PlanOptions(mesh={"third": 2}))
    (error,) = errors_when_all_are_killed(server, "compile_child", lambda: client.load(plan_id))
    assert type(error) is CompilationAbortedError
    assert "SIGKILL" in error.message
    assert "memory" in error.message
    assert client.load(plan_id).executable_id == plan_id


def test_an_executor_that_prints_very_long_lines_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; print('x' * 300_000, file=sys.stderr)")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    start = StartRequested(generation=7, coordinator_address="", process_count=1, process_id=0, data_port=0)
    ends: list[ChildExited] = []
    asyncio.run(ExecutorChild(start, ends.append).run(environment, {}))  # the configuration lacks everything
    assert [(end.generation, end.exit_code) for end in ends] == [(7, 1)]
    first, *_, last = ends[0].last_lines.splitlines()
    assert set(first) == {"x"}
    assert "KeyError" in last
