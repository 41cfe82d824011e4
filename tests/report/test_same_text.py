"""Reports are the same text in a script, a notebook, a pipe, and whatever the environment says of terminals."""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
from rich.text import Text

import shardwright as sw
from shardwright.client.step_report import report_program
from shardwright.proto.v1 import master_pb2
from shardwright.report.collectives import explain_proof
from shardwright.report.differences import explain_differences
from shardwright.report.memory import explain_memory
from shardwright.report.proof import prove
from shardwright.report.tables import plain_table, plain_text
from shardwright.user_plans import to_user_plan
from tests.planner.pipeline import cases
from tests.planner.pipeline.planned import lower_text
from tests.report.test_differences import ROWS
from tests.report.test_text import plan


@cache
def pipeline() -> sw.Plan | sw.PipelinePlan:
    return sw.plan(lower_text(cases.mlp(4))[0], 4, stages=2, micro_batches=4, schedule="gpipe", mesh="2", cache=False)


def table() -> str:
    view = plain_table([("name", "left"), ("size", "right")], fold=("name",))
    view.add_row(Text("params['w'] :smile: [bold]"), "1 of 2")
    return plain_text(view, 80)


def differences() -> str:
    moved = tuple(replace(each, sharding=ROWS) if each.number < 3 else each for each in plan().parameters)
    return explain_differences(plan(), plan(parameters=moved))


TEXTS: dict[str, Callable[[], str]] = {
    "plan.explain": lambda: to_user_plan(plan()).explain(),
    "pipeline.explain": lambda: pipeline().explain(),
    "step.report": lambda: report_program(to_user_plan(plan()), master_pb2.LoadResult()),
    "proof": lambda: explain_proof(prove(plan(), ()), everything=True),
    "diff": differences,
    "memory": lambda: explain_memory(
        plan(), arguments_bytes=1, outputs_bytes=2, aliased_bytes=1, temporaries_bytes=3
    ),
    "table": table,
}  # fmt: skip


class ZMQInteractiveShell:
    """The name of a notebook's shell, by which rich knows one."""


@pytest.mark.parametrize("name", TEXTS)
def test_a_report_is_the_same_text_everywhere(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = TEXTS[name]()
    assert len(text.splitlines()) > 2
    assert "\x1b" not in text
    for variable, value in (
        ("COLUMNS", "40"), ("LINES", "5"), ("NO_COLOR", "1"), ("FORCE_COLOR", "1"), ("TERM", "dumb"),
        ("TTY_COMPATIBLE", "1"), ("TTY_INTERACTIVE", "1"), ("JUPYTER_COLUMNS", "30"),
    ):  # fmt: skip
        with monkeypatch.context() as environment:
            environment.setenv(variable, value)
            assert TEXTS[name]() == text, variable
    monkeypatch.setattr(builtins, "get_ipython", ZMQInteractiveShell, raising=False)
    assert TEXTS[name]() == text, "in a notebook"
    assert capsys.readouterr().out == "", "nothing is shown beside it"
