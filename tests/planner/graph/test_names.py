"""What arguments are called where the program says too little: each by a name of its own that pins can take."""

from __future__ import annotations

import pytest

from shardwright.clusters.cluster import Cluster
from shardwright.errors import AnnotationError, OptionError
from shardwright.hlo import parse
from shardwright.hlo.entry import parameter_names
from shardwright.options.plan_options import PlanOptions
from shardwright.planner import plan
from shardwright.report.text import explain_plan

TYPES = ("f32[16,8]", "f32[8,4]", "f32[16,4]")


def step(*metadata: str, names: tuple[str, ...] = ("p0.1", "p1.2", "p2.3")) -> str:
    parameters = "\n  ".join(
        f"{name} = {kind} parameter({i}), metadata={{{said}}}"
        for i, (name, kind, said) in enumerate(zip(names, TYPES, metadata, strict=True))
    )
    ops = '/venv/lib/python3.11/site-packages/tensorflow/python/framework/ops.py" source_line=1221'
    return f"""HloModule step

add {{
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT c = f32[] add(a, b)
}}

ENTRY main {{
  {parameters}
  h = f32[16,4] dot({names[0]}, {names[1]}), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}},
    metadata={{op_type="MatMul" op_name="net/dense/MatMul" source_file="{ops}}}
  e = f32[16,4] subtract(h, {names[2]})
  zero = f32[] constant(0)
  ROOT loss = f32[] reduce(e, zero), dimensions={{0,1}}, to_apply=add,
    metadata={{op_name="net/loss/Sum" source_file="{ops}}}
}}
"""


SHARED = {
    "XLA_Args": ('op_name="XLA_Args"',) * 3,
    "xla__device_data": ('op_type="xla__device_data" op_name="xla__device_data"',) * 3,
}


@pytest.mark.parametrize("metadata", SHARED.values(), ids=SHARED)
def test_arguments_that_share_a_name_are_called_by_their_parameters(metadata: tuple[str, ...]) -> None:
    text = step(*metadata)
    options = PlanOptions(mesh={"data": 2}, force={"p1.2": {0: "data"}}, constraints="drop")
    step_plan = plan(text, Cluster.local(2), options)
    assert [each.name for each in step_plan.parameters] == ["p0.1", "p1.2", "p2.3"]
    assert step_plan.parameters[1].sharding.dims[0] == ("data",)
    assert "XLA_Args" not in explain_plan(step_plan)
    with pytest.raises(OptionError, match=r"no argument is named 'XLA_Args'") as caught:
        plan(text, Cluster.local(2), PlanOptions(force={"XLA_Args": {0: "data"}}))
    assert "p0.1" in str(caught.value)
    with pytest.raises(AnnotationError, match=r"p1\.2 f32\[8,4\]"):
        plan(text, Cluster.local(3), PlanOptions(mesh={"data": 3}, force={"p1.2": {5: "data"}}))


def test_each_name_is_one() -> None:
    def names(text: str) -> tuple[str, ...]:
        return parameter_names(parse(text))

    assert names(step('op_name="x"', 'op_name="w"', 'op_name="x"')) == ("p0.1", "w", "p2.3")
    assert names(step('op_name="XLA_Args/x"', 'op_name="XLA_Args/y"', 'op_name="XLA_Args"'))[:2] == (
        "XLA_Args/x",
        "XLA_Args/y",
    )
    clash = names(step('op_name="b1"', 'op_name="same"', 'op_name="same"', names=("a1", "b1", "c1")))
    assert clash == ("b1", "b1#1", "c1")
    one = names(step('op_type="xla__device_data" op_name="xla__device_data"', 'op_name="w"', 'op_name="y"'))
    assert one == ("p0.1", "w", "y")
    tuples = "HloModule t\n\nENTRY e { ROOT p = (f32[2], (f32[3], s32[])) parameter(0) }\n"
    assert names(tuples) == ("p[0]", "p[1]", "p[2]")


def test_what_a_library_wrote_is_called_by_its_op_name() -> None:
    step_plan = plan(step(*SHARED["XLA_Args"]), Cluster.local(2), PlanOptions(mesh={"data": 2}, force="data"))
    text = explain_plan(step_plan, width=160)
    assert "ops.py" not in text
    assert "net/loss/Sum" in text
