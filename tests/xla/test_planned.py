"""The planner's plans through the compile child: XLA inserts what was predicted, to the byte or nearly so."""

from __future__ import annotations

import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.report.proof import prove
from shardwright.xla import CompileService
from tests.planner.programs import PROGRAMS, lower


@pytest.fixture(scope="module")
def service():
    with CompileService(8) as service:
        yield service


@pytest.mark.dear
@pytest.mark.parametrize(("program", "force"), [("gpt2", "data"), ("gpt2", "fsdp"), ("cnn", "data"), ("scan", "data")])
def test_predicted_collectives_are_what_xla_inserts(service, program, force):
    text = lower(PROGRAMS[program]())
    planned = plan(text, Cluster.local(8), PlanOptions(force=force))
    proof = prove(planned, service.compile(planned.require_hlo(), planned, inspect="partition-pass").collectives)
    assert proof.predicted_wire_bytes > 0
    assert proof.holds, proof.explain()
    assert not proof.differences, proof.explain()


def test_arguments_take_the_memory_that_was_predicted(service):
    text = lower(PROGRAMS["mlp"]())
    planned = plan(text, Cluster.local(8), PlanOptions(force="fsdp"))
    memory = service.compile(planned.require_hlo(), planned, want_executable=False).memory
    assert memory.argument_bytes == planned.memory.arguments_bytes
