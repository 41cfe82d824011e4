"""Progress of planning reaches the client as it happens, and a client that goes away ends the planning."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import psutil
import pytest

from shardwright.options.plan_options import PlanOptions
from shardwright.proto.v1 import master_pb2
from shardwright.protocol import plan_messages, wire
from tests.server.programs import training_step
from tests.server.raw_client import RawClient, Server, embedded, wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Server, RawClient]]:
    yield from embedded(2)


def request(client: RawClient, program: str, options: PlanOptions) -> master_pb2.PlanProgramRequest:
    return plan_messages.plan_request(options, session_id=client.session_id, program_id=program)


def test_progress_comes_before_the_plan_and_ends_with_its_figures(running: tuple[Server, RawClient]) -> None:
    _, client = running
    asked = request(client, client.upload(training_step()), PlanOptions())
    replies = list(client.master.PlanProgram(asked, metadata=client.metadata, timeout=60))
    kinds = [reply.WhichOneof("kind") for reply in replies]
    assert kinds == sorted(kinds, key=["progress", "result", "plan_chunk"].index)
    last = [reply.progress for reply in replies if reply.WhichOneof("kind") == "progress"][-1]
    unpacker = wire.TextUnpacker("plan", 1 << 30)
    for reply in replies:
        unpacker.feed(reply.plan_chunk)
    assert last.incumbent_s > 0
    assert f'"{last.phase}"' in '"search" "check"'
    assert last.elapsed_s > 0


def test_a_client_that_goes_away_ends_its_planner_and_others_go_on(running: tuple[Server, RawClient]) -> None:
    server, client = running
    program = client.upload(training_step())
    wait_until(server.planners)
    (planner,) = server.planners()
    planner.suspend()  # it never finishes by itself
    asked = request(client, program, PlanOptions(mesh={"gone": 2}))
    call = client.master.PlanProgram(asked, metadata=client.metadata, timeout=60)
    waiting = threading.Thread(target=lambda: list(_until_cancelled(call)))
    waiting.start()
    wait_until(call.is_active)
    threading.Event().wait(0.5)  # the master has handed it on by then; if not, it never will
    call.cancel()
    waiting.join(10)
    wait_until(lambda: not _is_there(planner))
    assert client.plan(program, PlanOptions(mesh={"next": 2}))[1].mesh.sizes == {"next": 2}


def _until_cancelled(call: object) -> Iterator[object]:
    try:
        yield from call  # type: ignore[attr-defined]
    except Exception:  # the call ends as cancelled
        return


def _is_there(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
