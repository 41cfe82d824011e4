"""In which form executors get a program: compiled once, or as text where some of them are other machines."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from shardwright.plans.plan import Plan
from shardwright.proto.v1 import worker_pb2
from shardwright.server.limits import Limits
from shardwright.server.master import commands as do
from shardwright.server.master.content_store import PlanRecord
from shardwright.server.master.executables import compile_program, load_messages
from shardwright.server.master.formation import Formation
from shardwright.server.master.nodes import Identity, Member
from shardwright.xla import CompileService
from shardwright.xla.machine_code import machine_code_target
from tests.server.hand_plans import pipeline_plan
from tests.xla.hand import lower, plan

HERE = machine_code_target()
HLO = lower(lambda x: x * 2.0, np.ones((8, 4), np.float32))
PLAN = plan(HLO, {"x": 8}, {0: ("x", None)}, {}, [])


def formation_of(*targets: str) -> Formation:
    """Nodes of eight devices in all, with executors of these machines."""
    members = tuple(Member(index=node, address="", device_count=8 // len(targets)) for node in range(len(targets)))
    identity = Identity(cluster_hash="", shardwright_version="", jax_version="")
    formation = Formation(members, identity, Limits(), wait_s=1.0, now_s=0.0)
    for node, target in enumerate(targets):
        formation.nodes[node].machine_code = target
    return formation


@pytest.fixture(scope="module")
def compiler() -> Iterator[CompileService]:
    with CompileService(8) as service:
        yield service


def messages(
    planned: Plan, formation: Formation, compiler: CompileService
) -> tuple[list[bytes], worker_pb2.ExecutorCommand]:
    """The payloads' first chunks, and the order."""
    record = PlanRecord(plan=planned, json_gzip=b"")
    program = compile_program("plan", record, compiler, formation.nodes_of)
    *chunks, load = load_messages(do.LoadOnWorkers(sequence=1, session_id="s", program=program), formation)
    return [chunk.message.chunk.chunk for chunk in chunks], load.message


@pytest.mark.parametrize(
    ("targets", "is_serialized"),
    [((HERE,), True), ((HERE, HERE), True), ((HERE, "another"), False), (("another",), False)],
)
def test_machines_like_the_masters_get_machine_code_others_the_text(
    targets: tuple[str, ...], is_serialized: bool, compiler: CompileService
) -> None:
    (payload,), order = messages(PLAN, formation_of(*targets), compiler)
    assert order.load.is_serialized == is_serialized
    assert (b"func.func" not in payload) == is_serialized


def test_a_pipeline_has_machine_code_for_the_stages_of_such_machines(compiler: CompileService) -> None:
    _, order = messages(pipeline_plan(4, "1f1b"), formation_of(HERE, "another", HERE, HERE), compiler)
    assert {(program.stage, program.is_serialized) for program in order.load_pipeline.programs} == {
        (0, False),
        (1, True),
    }
