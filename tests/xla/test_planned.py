"""The planner's plans through the compile child: XLA inserts what was predicted, to the byte or nearly so."""

from __future__ import annotations

import pytest

from shardwright.cluster import Cluster
from shardwright.config import PlanOptions
from shardwright.planner import plan
from shardwright.xla import CompileService, compare_collectives
from tests.planner.programs import PROGRAMS, lower


@pytest.fixture(scope="module")
def service():
    with CompileService(8) as service:
        yield service


@pytest.mark.parametrize(("program", "force"), [("gpt2", "data"), ("gpt2", "fsdp"), ("cnn", "data"), ("scan", "data")])
def test_predicted_collectives_are_what_xla_inserts(service, program, force):
    text = lower(PROGRAMS[program]())
    planned = plan(text, Cluster.local(8), PlanOptions(force=force))
    observed = service.compile(text, planned, inspect="partition-pass").collectives
    rows = compare_collectives(planned, observed)
    predicted, seen = (sum(getattr(row, f"{side}_wire_bytes") for row in rows) for side in ("predicted", "observed"))
    assert predicted > 0
    assert seen == pytest.approx(predicted, rel=0.05), rows
    assert all(row.agrees for row in rows), rows


def test_arguments_take_the_memory_that_was_predicted(service):
    text = lower(PROGRAMS["mlp"]())
    planned = plan(text, Cluster.local(8), PlanOptions(force="fsdp"))
    memory = service.compile(text, planned, want_executable=False).memory
    assert memory.argument_bytes == planned.memory.arguments_bytes
